# SPDX-License-Identifier: Apache-2.0
"""What all coordinators share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockTable, GroupedKVCacheBlock
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType
from vllm.v1.core.hybrid.managers import (
    NEVER,
    MambaManager,
    SingleTypeKVCacheManager,
    create_manager,
)
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


@dataclass(slots=True)
class RequestBlocks:
    """A request's block tables, one per attention type, and when they next have work to do.

    Each ``next_*`` is the smallest token count at which any type has such work.
    """

    tables: tuple[BlockTable, ...]
    #: Managers of the types that still have blocks to cache for the request.
    caching: Sequence[SingleTypeKVCacheManager]
    #: The tables that grow with the request's own tokens: all but an encoder's.
    growing: tuple[BlockTable, ...]
    #: Slots are missing.
    next_slots: int = 0
    #: Blocks become cacheable.
    next_cached: int = 0
    #: Blocks leave a window; counted in processed tokens.
    next_released: int = 0

    def next_event(self) -> int:
        """The smallest number of tokens, those of the step included, at which there is work."""
        # A step computes a token at least, so those processed before it are fewer by one.
        event = self.next_released + 1
        if self.next_slots < event:
            event = self.next_slots
        return self.next_cached if self.next_cached < event else event


@dataclass(slots=True)
class Hit:
    """A prefix-cache hit that every attention type accepts. Lengths are in tokens."""

    blocks: BlocksByType
    num_tokens: int
    #: How much longer the hit would be if the types that cache sparsely had kept up.
    num_uncached_shared: int = 0


class KVCacheCoordinator(ABC):
    """Moves one request through the managers of all attention types."""

    # What base's scheduler and connectors ask of a coordinator, for a feature that the
    # fork leaves to base: hits within a block.
    enable_partial_hash_hits: ClassVar[bool] = False

    def __init__(
        self,
        attention_types: tuple[AttentionType, ...],
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        settings.validate(attention_types)
        self.settings = settings
        self.block_pool = block_pool
        self.managers = tuple(
            create_manager(type_id, attention_type, block_pool, settings)
            for type_id, attention_type in enumerate(attention_types)
        )
        of_group = {g: m for m in self.managers for g in m.attention_type.group_ids}
        #: For base's callers: one entry per KV cache group, in the config's order.
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            of_group[group_id] for group_id in range(len(of_group))
        )
        self.group_block_sizes = tuple(m.block_size for m in self.single_type_managers)
        self.scheduler_block_size = settings.scheduler_block_size
        self.hash_block_size = settings.hash_block_size
        self.retention_interval = settings.retention_interval
        self.num_reprefillable_tokens = settings.num_reprefillable_tokens
        #: The KV cache groups whose hits leave out the last block that matches.
        self.eagle_group_ids = frozenset(
            group_id for t in attention_types if t.is_eagle for group_id in t.group_ids
        )
        self.no_blocks: BlocksByType = tuple(manager.no_blocks for manager in self.managers)
        self.requests: dict[str, RequestBlocks] = {}
        self._growing = tuple(m for m in self.managers if not m.holds_encoder)
        self._blocks_per_token = sum(m.num_groups / m.block_size for m in self.managers)
        self._slots_unit = math.gcd(*(m.block_size for m in self._growing)) or NEVER
        self._most_blocks = tuple(m.max_blocks_per_request for m in self.managers)
        self._caching = self.managers if settings.enable_caching else ()
        self._none_skipped = (0,) * len(self.managers)
        self._releasing = tuple(m for m in self.managers if m.releases)
        self._with_states = tuple(m for m in self.managers if isinstance(m, MambaManager))
        #: Whether the model needs new blocks zeroed.
        self.records_new_blocks = any(m.records_new_block_ids for m in self.managers)

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """The longest prefix of at most ``max_tokens`` that every type can resume from."""

    def is_usable(self, hits: BlocksByType) -> bool:
        """Whether this step can start from a hit, or only the next one."""
        return all(m.is_usable(hits[m.type_id]) for m in self._with_states)

    def num_states(self, start: int, end: int, request: Request) -> int:
        """States that a step leaves behind which computes the tokens from ``start`` to ``end``."""
        if not self._with_states:
            return 1
        return self._num_states(start, end, max(request.num_prompt_tokens, request.num_tokens - 1))

    def _num_states(self, start: int, end: int, prefill_end: int) -> int:
        # All types with states have the same answer (see coverage.py).
        return self._with_states[0].num_states(start, end, prefill_end) if self._with_states else 1

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        for manager in self._with_states:
            manager.new_step_starts()

    def blocks_of(self, request_id: str) -> RequestBlocks:
        """A request's blocks; for an unknown one new tables, which nobody else knows."""
        known = self.requests.get(request_id)
        if known is not None:
            return known
        tables = self.block_pool.new_tables()
        return RequestBlocks(tables, self._caching, tables)

    def take_up_caching(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Cache of all types again: a longer prompt has boundaries that were not there before.

        As in base, blocks of the first ``num_tokens`` that were left out of the cache stay so.
        """
        for manager in self._caching:
            if manager not in blocks.caching:
                table = blocks.tables[manager.type_id]
                num_decided = manager.num_cacheable_blocks(num_tokens)
                table.num_cached = max(table.num_cached, num_decided)
        blocks.caching, blocks.next_cached = self._caching, 0

    def num_physical_blocks_needed(
        self,
        blocks: RequestBlocks,
        num_tokens: int,
        hits: BlocksByType,
        num_skipped: Sequence[int],
        recycled: bool = False,
        num_states: int = 1,
        num_encoder_tokens: int = 0,
    ) -> int:
        """Physical blocks to allocate, after adopting ``hits``, for ``num_tokens`` slots.

        With ``recycled``, a type that releases blocks on the way counts no more than it
        ever holds at once. Slots for ``num_encoder_tokens`` are cross attention's; without
        it they take nothing.
        """
        most_blocks = self._most_blocks if recycled else None
        return self.block_pool.num_missing_ids(
            blocks.tables, num_tokens, hits, num_skipped, most_blocks, num_states
        )

    def max_physical_blocks(self, *num_tokens: int) -> int:
        """More physical blocks than the greatest number of tokens takes, in all types together."""
        return int(max(num_tokens) * self._blocks_per_token) + len(self.single_type_managers)

    def num_skipped_blocks(
        self, num_computed_tokens: int, num_hit_tokens: int | None = None
    ) -> Sequence[int]:
        """Per type, the leading blocks that no query after ``num_computed_tokens`` reads.

        Of the tokens after a hit of ``num_hit_tokens``, which a KV connector loads, what a drafter
        may read again is kept, as in base.
        """
        if not self._releasing:
            return self._none_skipped
        if num_hit_tokens is None or num_hit_tokens == num_computed_tokens:
            return [
                m.num_skipped_tokens(num_computed_tokens) // m.block_size for m in self.managers
            ]
        return [
            max(
                m.num_skipped_tokens(num_hit_tokens),
                m.num_skipped_tokens(num_computed_tokens - m.num_reread_tokens),
            )
            // m.block_size
            for m in self.managers
        ]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: BlocksByType,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Physical blocks that must be free, with the name and arguments of base's callers."""
        num_skipped = self.num_skipped_blocks(total_computed_tokens)
        return self.block_pool.count_evictable_ids(
            new_computed_blocks, num_skipped
        ) + self.num_physical_blocks_needed(
            self.blocks_of(request_id),
            num_tokens,
            new_computed_blocks,
            num_skipped,
            recycled=apply_admission_cap,
            num_states=self._num_states(total_computed_tokens, num_tokens_main_model, prefill_end),
            num_encoder_tokens=num_encoder_tokens,
        )

    def allocate(
        self,
        request_id: str,
        blocks: RequestBlocks,
        num_tokens: int,
        num_kept: int = 0,
        num_states: int = 1,
        num_encoder_tokens: int = 0,
    ) -> BlocksByType | None:
        """Give a request ``num_tokens`` slots in every type; returns the new blocks.

        None, and no change, if fewer than ``num_kept`` blocks would stay free. From here on
        the request is known: one that is refused leaves nothing behind. Of new states only the
        last ``num_states`` take blocks.
        """
        new_blocks = self.block_pool.allocate(blocks.growing, num_tokens, num_kept, num_states)
        if new_blocks is None:
            return None
        self.requests[request_id] = blocks
        # Or sooner, if block sizes do not divide each other; then there is nothing to do yet.
        blocks.next_slots = -(-num_tokens // self._slots_unit) * self._slots_unit + 1
        return new_blocks

    def record_new(self, new_blocks: BlocksByType, skip_group_ids: Sequence[int] = ()) -> None:
        """Have new blocks zeroed, but for those of some KV cache groups."""
        for manager, new in zip(self.managers, new_blocks, strict=True):
            manager.record_new(new, skip_group_ids)

    def release_skipped(self, blocks: RequestBlocks, num_processed_tokens: int) -> None:
        """Release what no query after ``num_processed_tokens`` attends to."""
        next_released = NEVER
        for manager in self._releasing:
            table = blocks.tables[manager.type_id]
            next_release = manager.release_skipped(table, num_processed_tokens)
            if next_release < next_released:
                next_released = next_release
        blocks.next_released = next_released

    def cache_blocks(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        """Enter the blocks of the first ``num_tokens`` tokens, all final, in the prefix cache.

        Hits end at multiples of the scheduler block size, so blocks after the last one
        are of no use yet, except for the one that EAGLE needs to see there.
        """
        boundaries = self._resume_boundaries(request)
        caching, next_cached = [], NEVER
        for manager in blocks.caching:
            table = blocks.tables[manager.type_id]
            if manager.cache_blocks(request, table, num_tokens, boundaries):
                caching.append(manager)
                next_cacheable = manager.next_cacheable(table.num_cached)
                if next_cacheable < next_cached:
                    next_cached = next_cacheable
        blocks.caching, blocks.next_cached = caching, next_cached

    def _resume_boundaries(self, request: Request) -> Sequence[int]:
        """Where a later request can be expected to resume, in multiples of a hit's alignment."""
        # One with the same prompt leaves a token to compute, so it resumes at or before the
        # last token; one with the same prefix where the lookup saw it end.
        alignment = self.scheduler_block_size
        boundaries = [(request.num_prompt_tokens - 1) // alignment * alignment]
        if self.eagle_group_ids:
            # The block after the hit must be full: in a prompt that just fills its last block
            # a longer one finds it, the same one does not.
            longer = request.num_prompt_tokens // alignment * alignment
            boundaries = [max(end - alignment, 0) for end in {boundaries[0], longer}]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary // alignment * alignment)
        return boundaries

    def pop_blocks_for_free(self, request_id: str) -> list[GroupedKVCacheBlock]:
        """Forget a request; its blocks are the caller's until `BlockPool.free_blocks`."""
        known = self.requests.pop(request_id, None)
        return self.block_pool.detach(known.tables) if known is not None else []

    def free(self, request_id: str) -> None:
        """Release all blocks of a request, so that the tail of its tokens is reused first."""
        known = self.requests.pop(request_id, None)
        if known is not None:
            for table in known.tables:
                table.free()

    def get_blocks(self, request_id: str) -> BlocksByType:
        """A request's blocks per type; none for an unknown request."""
        known = self.requests.get(request_id)
        if known is None:
            return self.no_blocks
        return tuple([table.blocks() for table in known.tables])

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while any block is referenced."""
        return self.block_pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError with the first broken invariant of tables, index and pool."""
        for request_id, blocks in self.requests.items():
            for manager, table in zip(self.managers, blocks.tables, strict=True):
                manager.check_integrity(request_id, table)
            self._check_sleep(request_id, blocks)
        self.block_pool.check_integrity(
            table for blocks in self.requests.values() for table in blocks.tables
        )

    def _check_sleep(self, request_id: str, blocks: RequestBlocks) -> None:
        """No request sleeps past the next thing that there is to do for it."""
        where = f"request {request_id} sleeps until"
        next_slots = self.block_pool.num_slots(blocks.growing) + 1
        assert not blocks.growing or blocks.next_slots <= next_slots, (
            f"{where} {blocks.next_slots} without slots"
        )
        for manager, table in zip(self.managers, blocks.tables, strict=True):
            if manager in blocks.caching:
                next_full = manager.next_cacheable(table.num_cached)
                assert blocks.next_cached <= next_full, (
                    f"{where} {blocks.next_cached}, but can cache at {next_full} tokens"
                )
            next_release = manager.next_release(table.num_released)
            assert blocks.next_released <= next_release, (
                f"{where} {blocks.next_released}, but can release at {next_release}"
            )
