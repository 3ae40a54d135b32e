# SPDX-License-Identifier: Apache-2.0
"""What all coordinators share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockTable
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType, get_group_layout
from vllm.v1.core.hybrid.managers import SingleTypeKVCacheManager, manager_class
from vllm.v1.core.hybrid.step import NEVER, Step, Target
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


@dataclass(slots=True)
class RequestBlocks:
    """A request's block tables, one per attention type, and when they next have work to do.

    Each ``next_*`` is the smallest token count at which any type has such work.
    """

    tables: tuple[BlockTable, ...]
    #: Managers of the types that may still cache blocks for the request.
    caching: Sequence[SingleTypeKVCacheManager]
    #: A target grows: slots are missing.
    next_slots: int = 0
    #: Blocks become cacheable.
    next_cached: int = 0
    #: Blocks leave a window. Counts processed tokens.
    next_released: int = 0

    @property
    def is_new(self) -> bool:
        """Whether the request has no blocks: it is unknown until its first allocation."""
        return self.next_slots == 0

    def next_event(self) -> int:
        """A lower bound of the next event, in tokens up to the end of a step's slots."""
        # `next_released` counts the tokens before a step, and a step adds at least one.
        event = self.next_released + 1
        if self.next_slots < event:
            event = self.next_slots
        return self.next_cached if self.next_cached < event else event


@dataclass(slots=True)
class Hit:
    """A prefix-cache hit that every attention type accepts. Lengths are in tokens."""

    blocks: BlocksByType
    num_tokens: int
    #: How much longer the hit would be if the types that cache sparsely had kept their blocks.
    num_uncached_shared: int = 0


class KVCacheCoordinator(ABC):
    """Moves one request through the managers of all attention types."""

    #: Read by base's callers. Always False: base's manager serves models with hits inside a block.
    enable_partial_hash_hits: ClassVar[bool] = False

    def __init__(self, block_pool: BlockPool) -> None:
        attention_types, settings = block_pool.attention_types, block_pool.settings
        settings.validate(attention_types)
        self.block_pool = block_pool
        self.managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            manager_class(attention_type)(type_id, block_pool)
            for type_id, attention_type in enumerate(attention_types)
        )
        #: Read by base's callers: one entry per KV cache group, in the config's order.
        self.single_type_managers = tuple(
            self.managers[type_id] for type_id, _ in get_group_layout(attention_types)
        )
        self.scheduler_block_size = settings.scheduler_block_size
        self.hash_block_size = settings.hash_block_size
        self.num_reprefillable_tokens = settings.num_reprefillable_tokens
        #: The KV cache groups whose hits exclude the last block that matches.
        self.eagle_group_ids = frozenset(
            group_id for t in attention_types if t.is_eagle for group_id in t.group_ids
        )
        self.no_blocks: BlocksByType = tuple(manager.no_blocks for manager in self.managers)
        self.requests: dict[str, RequestBlocks] = {}
        self._blocks_per_token = sum(m.num_groups / m.block_size for m in self.managers)
        # Targets change only at its multiples. gcd() ignores the 0 of types that do not grow.
        self._slots_unit = math.gcd(*(m.slots_per_block for m in self.managers)) or NEVER
        self._target_of = tuple(m.target for m in self.managers)
        self._caching: tuple[SingleTypeKVCacheManager, ...] = self.managers
        self._releasing = tuple(m for m in self.managers if m.releases)
        #: Whether the model needs new blocks zeroed.
        self.records_new_blocks = any(m.records_new_block_ids for m in self.managers)

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """The longest prefix of at most ``max_tokens`` that every type can resume from."""

    def is_usable(self, hits: BlocksByType) -> bool:
        """Whether this step can start from a hit; if not, the next step can."""
        return all(m.is_usable(hits[m.type_id]) for m in self.managers)

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        for manager in self.managers:
            manager.new_step_starts()

    def new_blocks(self) -> RequestBlocks:
        """Empty block tables. The request is recorded when it first allocates."""
        return RequestBlocks(self.block_pool.new_tables(), self._caching)

    def blocks_of(self, request_id: str) -> RequestBlocks:
        """A request's blocks; empty tables for an unknown request."""
        return self.requests.get(request_id) or self.new_blocks()

    def resume_caching(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Resume caching in all types: a longer prompt has new boundaries.

        As in base, blocks of the first ``num_tokens`` that were not cached stay uncached.
        """
        for manager in self._caching:
            if manager not in blocks.caching:
                table = blocks.tables[manager.type_id]
                num_decided = manager.num_cacheable_blocks(num_tokens)
                table.num_decided = max(table.num_decided, num_decided)
        blocks.caching, blocks.next_cached = self._caching, 0

    def targets(self, step: Step) -> list[Target]:
        """Per type, what a request's block table must hold after a step."""
        return [target(step) for target in self._target_of]

    def peak_targets(self, step: Step) -> list[Target]:
        """Per type, the target, capped at the most blocks that a request ever holds."""
        return [m.peak_target(step) for m in self.managers]

    def max_physical_blocks(self, num_tokens: int) -> int:
        """An upper bound of the physical blocks that all types need for ``num_tokens``."""
        return int(num_tokens * self._blocks_per_token) + len(self.single_type_managers)

    def num_skipped_blocks(self, hit_end: int, resume_at: int) -> Sequence[int]:
        """Per type, the leading blocks that no query from position ``resume_at`` on reads.

        A KV connector loads the tokens between ``hit_end`` and ``resume_at``. Of these tokens,
        those that a drafter may read again are kept, as in base.
        """
        return [
            max(
                m.num_skipped_tokens(hit_end),
                m.num_skipped_tokens(resume_at - m.num_reread_tokens),
            )
            // m.block_size
            for m in self.managers
        ]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[object]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Physical blocks that must be free, with the name and arguments of base's callers.

        Base's scheduler calls it for requests that wait for a load, without a new hit.

        Raises:
            ValueError: if ``new_computed_blocks`` are not empty.
        """
        if any(map(len, new_computed_blocks)):
            raise ValueError(f"new_computed_blocks must be empty, got {new_computed_blocks}")
        step = Step(
            hit_end=total_computed_tokens,
            computed_end=total_computed_tokens,
            step_end=num_tokens_main_model,
            final_end=num_tokens_main_model,
            slots_end=num_tokens,
            prefill_end=prefill_end,
            num_encoder_tokens=num_encoder_tokens,
        )
        return self.block_pool.num_missing_ids(
            self.blocks_of(request_id).tables,
            self.peak_targets(step) if apply_admission_cap else self.targets(step),
            self.no_blocks,
            self.num_skipped_blocks(total_computed_tokens, total_computed_tokens),
        )

    def allocate(self, request_id: str, blocks: RequestBlocks, step: Step) -> BlocksByType | None:
        """Allocate the blocks that a step needs; returns the new ones, per type.

        None, with nothing changed, if fewer than ``step.num_kept_free`` physical blocks would stay
        free. An allocation makes the request known, so a refused request leaves nothing behind.
        """
        targets = [target(step) for target in self._target_of]  # saves a call per event
        new_blocks = self.block_pool.allocate(blocks.tables, targets, step.num_kept_free)
        if new_blocks is None:
            return None
        self.requests[request_id] = blocks
        # Too early, which is harmless, if the block sizes are not multiples of each other.
        blocks.next_slots = -(-step.slots_end // self._slots_unit) * self._slots_unit + 1
        return new_blocks

    def record_new(self, new_blocks: BlocksByType, skip_group_ids: Sequence[int] = ()) -> None:
        """Record new blocks for zeroing, except for those of some KV cache groups."""
        for manager, new in zip(self.managers, new_blocks, strict=True):
            manager.record_new(new, skip_group_ids)

    def release_skipped(self, blocks: RequestBlocks, num_processed_tokens: int) -> None:
        """Release what no query after ``num_processed_tokens`` attends to, if anything.

        The count excludes tokens of steps in flight, which still read before their own position.
        """
        if num_processed_tokens < blocks.next_released:
            return
        next_released = NEVER
        for manager in self._releasing:
            table = blocks.tables[manager.type_id]
            next_release = manager.release_skipped(table, num_processed_tokens)
            if next_release < next_released:
                next_released = next_release
        blocks.next_released = next_released

    def release_processed(self, request: Request, blocks: RequestBlocks, computed_end: int) -> None:
        """Release what the step after ``computed_end`` and the steps in flight do not read."""
        num_processed = computed_end - request.num_in_flight_tokens
        if num_processed >= blocks.next_released:  # saves a call per event
            self.release_skipped(blocks, num_processed)

    def cache_blocks(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        """Enter the blocks of the first ``num_tokens`` tokens, all final, in the prefix cache.

        Hits end at multiples of the scheduler block size. Blocks after the last multiple cannot
        serve a hit yet, except for the block that EAGLE needs to find there.
        """
        boundaries = self._resume_boundaries(request)
        caching, next_cached = [], NEVER
        for manager in blocks.caching:
            table = blocks.tables[manager.type_id]
            if manager.cache_blocks(request, table, num_tokens, boundaries):
                caching.append(manager)
                next_cacheable = manager.next_cacheable(table.num_decided)
                if next_cacheable < next_cached:
                    next_cached = next_cacheable
        blocks.caching, blocks.next_cached = caching, next_cached

    def _resume_boundaries(self, request: Request) -> Sequence[int]:
        """Where a later request is expected to resume, in multiples of the scheduler block size."""
        # A request with the same prompt has one token left to compute, so it resumes at or before
        # the last token. A request with the same prefix resumes at the junction.
        alignment = self.scheduler_block_size
        boundaries = [(request.num_prompt_tokens - 1) // alignment * alignment]
        if self.eagle_group_ids:
            # The block after the hit must be full. If a prompt just fills its last block, a longer
            # prompt finds that block, and the same prompt does not.
            longer = request.num_prompt_tokens // alignment * alignment
            boundaries = [max(end - alignment, 0) for end in {boundaries[0], longer}]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary // alignment * alignment)
        return boundaries

    def forget(self, request_id: str) -> tuple[BlockTable, ...]:
        """Forget a request. The caller releases its tables; none for an unknown request."""
        known = self.requests.pop(request_id, None)
        return () if known is None else known.tables

    def free(self, request_id: str) -> None:
        """Release all blocks of a request, so that the tail of its tokens is reused first."""
        for table in self.forget(request_id):
            table.free()

    def get_blocks(self, request_id: str) -> BlocksByType:
        """A request's blocks per type; none for an unknown request."""
        known = self.requests.get(request_id)
        if known is None:
            return self.no_blocks
        return tuple([table.blocks() for table in known.tables])

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
        """No request sleeps past its next event."""
        where = f"request {request_id} sleeps until"
        for manager, table in zip(self.managers, blocks.tables, strict=True):
            assert blocks.next_slots <= manager.num_slots(table) + 1, (
                f"{where} {blocks.next_slots} without slots"
            )
            if manager in blocks.caching:
                next_full = manager.next_cacheable(table.num_decided)
                assert blocks.next_cached <= next_full, (
                    f"{where} {blocks.next_cached}, but can cache at {next_full} tokens"
                )
            next_release = manager.next_release(table.num_released)
            assert blocks.next_released <= next_release, (
                f"{where} {blocks.next_released}, but can release at {next_release}"
            )
