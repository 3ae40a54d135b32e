# SPDX-License-Identifier: Apache-2.0
"""What all coordinators share."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockTable
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType, get_group_layout
from vllm.v1.core.hybrid.managers import SingleTypeKVCacheManager, manager_class
from vllm.v1.core.hybrid.step import NEVER, NO_LIMIT, Step, Target
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


@dataclass(slots=True)
class RequestBlocks:
    """A request's block tables, one per attention type, and when they next have work to do.

    Each ``*_at`` is a number of tokens below which no type has such work.
    """

    tables: tuple[BlockTable, ...]
    #: Managers of the types that may still cache blocks for the request.
    caching: Sequence[SingleTypeKVCacheManager]
    #: Slots are missing. Compared with the end of the step's slots.
    allocate_at: int = 0
    #: Blocks become cacheable. Compared with the end of the final tokens.
    cache_at: int = 0
    #: Blocks leave a window. Compared with the tokens that are processed: computed and not in
    #: flight.
    release_at: int = 0

    @property
    def is_new(self) -> bool:
        """Whether the request has no blocks: it is unknown until its first allocation."""
        return self.allocate_at == 0

    def next_event(self) -> int:
        """A lower bound of the next event, in tokens up to the end of a step's slots."""
        # The gate compares it with the end of the step's slots. That is at least one beyond the
        # tokens computed before the step, the most that `release_at` is compared with.
        event = self.release_at + 1
        if self.allocate_at < event:
            event = self.allocate_at
        return self.cache_at if self.cache_at < event else event


@dataclass(slots=True)
class Hit:
    """A prefix-cache hit that every attention type accepts."""

    blocks: BlocksByType
    num_tokens: int
    #: Where the answer of the first type asked ended, if that is beyond the hit; otherwise 0.
    junction: int = 0
    #: Per type, the tokens by which it shortened the answer of the types asked before it. The first
    #: type asked shortens the longest hit that the request could have.
    cuts: Sequence[int] = ()


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
        self._physical_blocks_per_token = sum(m.num_groups / m.block_size for m in self.managers)
        # Targets change only at its multiples. gcd() ignores the 0 of types that do not grow.
        self._slots_unit = math.gcd(*(m.slots_per_block for m in self.managers)) or NO_LIMIT
        self._caching: tuple[SingleTypeKVCacheManager, ...] = self.managers
        self._releasing = tuple(m for m in self.managers if m.releases)
        self._delaying = tuple(m for m in self.managers if m.delays_hits)
        self._none_skipped = (0,) * len(self.managers)
        # Targets by number of slot units, if they depend on nothing else. Saves a call per type.
        common = SingleTypeKVCacheManager.target
        is_common = all(type(m).target is common for m in self.managers)
        self._common_targets: dict[int, Sequence[Target]] | None = {} if is_common else None
        self._zeroing = tuple(m for m in self.managers if m.records_new_block_ids)

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """The longest prefix of at most ``max_tokens`` that every type can resume from."""

    def is_usable(self, hits: BlocksByType) -> bool:
        """Whether this step can start from a hit; if not, the next step can."""
        return not self._delaying or all(m.is_usable(hits[m.type_id]) for m in self._delaying)

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        for manager in self.managers:
            manager.new_step_starts()

    def blocks_of(self, request_id: str) -> RequestBlocks:
        """A request's blocks; empty tables for an unknown request.

        The request is recorded when it first allocates.
        """
        known = self.requests.get(request_id)
        return known or RequestBlocks(self.block_pool.new_tables(), self._caching)

    def resume_caching(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Resume caching in all types: a longer prompt has new boundaries.

        As in base, blocks of the first ``num_tokens`` that were not cached stay uncached.
        """
        for manager in self._caching:
            if manager not in blocks.caching:
                table = blocks.tables[manager.type_id]
                num_decided = manager.num_cacheable_blocks(num_tokens)
                table.num_decided = max(table.num_decided, num_decided)
        blocks.caching, blocks.cache_at = self._caching, 0

    def targets(self, step: Step) -> Sequence[Target]:
        """Per type, what a request's block table must hold after a step."""
        if self._common_targets is None:
            return [m.target(step) for m in self.managers]
        num_units = -(-step.slots_end // self._slots_unit)
        targets = self._common_targets.get(num_units)
        if targets is None:
            targets = self._common_targets[num_units] = [m.target(step) for m in self.managers]
        return targets

    def peak_targets(
        self, step: Step, tables: Sequence[BlockTable], num_skipped: Sequence[int]
    ) -> list[Target]:
        """Per type, the target, capped at the most blocks that a request ever holds.

        ``num_skipped`` is what `num_skipped_blocks` returned, for tables that are still empty.
        """
        return [
            manager.peak_target(step, table.num_released if len(table) else skipped)
            for manager, table, skipped in zip(self.managers, tables, num_skipped, strict=True)
        ]

    def max_physical_blocks(self, num_tokens: int) -> int:
        """An upper bound of the physical blocks that all types need for ``num_tokens``."""
        # The last block of each group may be partly filled.
        return int(num_tokens * self._physical_blocks_per_token) + len(self.single_type_managers)

    def num_skipped_blocks(self, hit_end: int, resume_at: int) -> Sequence[int]:
        """Per type, the leading blocks that no query from position ``resume_at`` on reads.

        A KV connector loads the tokens between ``hit_end`` and ``resume_at``. Of these tokens,
        those that a drafter may read again are kept, as in base.
        """
        if not self._releasing or resume_at <= 0:
            return self._none_skipped
        if hit_end == resume_at:
            return [m.num_skipped_tokens(hit_end) // m.block_size for m in self.managers]
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

        Base's scheduler calls it for each request whose prefill is in flight, and has the sum of
        the answers kept free when it admits an asynchronous load.

        Raises:
            ValueError: if ``new_computed_blocks`` are not empty.
        """
        if any(map(len, new_computed_blocks)):
            raise ValueError(f"new_computed_blocks must be empty, got {new_computed_blocks}")
        end, step_end = total_computed_tokens, num_tokens_main_model
        # A prompt that ends where the prefill ends.
        step = Step(end, end, step_end, num_tokens, prefill_end, prefill_end, num_encoder_tokens)
        tables, num_skipped = self.blocks_of(request_id).tables, self.num_skipped_blocks(end, end)
        if apply_admission_cap:
            targets: Sequence[Target] = self.peak_targets(step, tables, num_skipped)
        else:
            targets = self.targets(step)
        return self.block_pool.num_missing_ids(tables, targets, self.no_blocks, num_skipped)

    def allocate(
        self,
        request_id: str,
        blocks: RequestBlocks,
        step: Step,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> BlocksByType | None:
        """Allocate the blocks that a step needs; returns the new ones, per type.

        None, with nothing changed, if fewer than ``step.num_kept_free`` physical blocks would stay
        free. An allocation makes the request known, so a refused request leaves nothing behind.
        """
        new_blocks = self.block_pool.allocate(blocks.tables, self.targets(step), step.num_kept_free)
        if new_blocks is None:
            return None
        self.requests[request_id] = blocks
        for manager in self._zeroing:
            manager.record_new(new_blocks[manager.type_id], skip_zeroing_group_ids)
        # Too early, which is harmless, if the block sizes are not multiples of each other.
        blocks.allocate_at = -(-step.slots_end // self._slots_unit) * self._slots_unit + 1
        return new_blocks

    def release_skipped(self, blocks: RequestBlocks, num_processed_tokens: int) -> None:
        """Release what no query after ``num_processed_tokens`` attends to, if anything.

        The count excludes tokens of steps in flight, which still read before their own position.
        """
        if num_processed_tokens < blocks.release_at:
            return
        release_at = NEVER
        for manager in self._releasing:
            table = blocks.tables[manager.type_id]
            position = manager.release_skipped(table, num_processed_tokens)
            if position < release_at:
                release_at = position
        blocks.release_at = release_at

    def release_unread(self, request: Request, blocks: RequestBlocks, computed_end: int) -> None:
        """`release_skipped` for the computed tokens minus those in flight."""
        self.release_skipped(blocks, computed_end - request.num_in_flight_tokens)

    def cache_blocks(self, request: Request, blocks: RequestBlocks, num_tokens: int) -> None:
        """Enter the blocks of the first ``num_tokens`` tokens, all final, in the prefix cache.

        Hits end at multiples of the scheduler block size. Blocks after the last multiple cannot
        serve a hit yet, except for the block that EAGLE needs to find there.
        """
        boundaries: Sequence[int] = ()
        caching, cache_at = [], NEVER
        for manager in blocks.caching:
            if not (boundaries or manager.caches_all):
                boundaries = self._resume_boundaries(request)
            table = blocks.tables[manager.type_id]
            position = manager.cache_blocks(request, table, num_tokens, boundaries)
            if position < NEVER:
                caching.append(manager)
                if position < cache_at:
                    cache_at = position
        blocks.caching, blocks.cache_at = caching, cache_at

    def _resume_boundaries(self, request: Request) -> Sequence[int]:
        """Where a later request is expected to resume, in multiples of the scheduler block size."""
        # A request with the same prompt has one token left to compute, so it resumes at or before
        # the last token. A request with the same prefix resumes at the junction.
        alignment = self.scheduler_block_size
        boundaries = [(request.num_prompt_tokens - 1) // alignment * alignment]
        if self.eagle_group_ids:
            # The block after a hit must be cached too, so hits end one alignment earlier. As in
            # base, both ends are kept for a prompt that just fills its last block: with a single
            # group, the same prompt resumes at the lower one only.
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
        known = self.requests.pop(request_id, None)
        if known is not None:
            for table in known.tables:
                table.free()

    def get_blocks(self, request_id: str) -> BlocksByType:
        """A request's blocks per type; none for an unknown request."""
        known = self.requests.get(request_id)
        return tuple([t.blocks() for t in known.tables]) if known is not None else self.no_blocks

    def first_position(self, request_id: str, block_ids: Collection[int]) -> int | None:
        """Where the first block of a request begins that has one of the physical ids, if any."""
        positions = []
        for manager, blocks in zip(self.managers, self.get_blocks(request_id), strict=True):
            for ids in blocks.block_ids():
                found = (i for i, block_id in enumerate(ids) if block_id in block_ids)
                positions += [manager.block_begin(i) for i in itertools.islice(found, 1)]
        return min(positions, default=None)

    def ids_from(self, request_id: str, position: int) -> set[int]:
        """Physical ids of a request's blocks from the ones that hold ``position`` on."""
        ids: set[int] = set()
        for manager, blocks in zip(self.managers, self.get_blocks(request_id), strict=True):
            begin = sum(manager.block_begin(i + 1) <= position for i in range(len(blocks)))
            for of_group in blocks.block_ids():
                ids.update(of_group[begin:])
        return ids - {0}

    def resume_position(self, request_id: str, max_tokens: int) -> int:
        """How many of a request's first ``max_tokens`` tokens need not be computed again.

        The blocks up to ``max_tokens`` that the request holds are valid, and none after them.
        Returns a multiple of the scheduler block size: the last if all types hold what a query
        there reads, otherwise 0.
        """
        end = max_tokens // self.scheduler_block_size * self.scheduler_block_size
        tables = self.blocks_of(request_id).tables
        # At an earlier end, windows hold no more.
        holds_all = all(m.can_resume(t, end) for m, t in zip(self.managers, tables, strict=True))
        return end if holds_all else 0

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
            assert blocks.allocate_at <= manager.num_slots(table) + 1, (
                f"{where} {blocks.allocate_at} without slots"
            )
            if manager in blocks.caching:
                next_full = manager.next_cacheable(table.num_decided)
                assert blocks.cache_at <= next_full, (
                    f"{where} {blocks.cache_at}, but can cache at {next_full} tokens"
                )
            next_release = manager.next_release(table.num_released)
            assert blocks.release_at <= next_release, (
                f"{where} {blocks.release_at}, but can release at {next_release}"
            )
