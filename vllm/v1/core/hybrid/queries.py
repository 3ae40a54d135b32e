# SPDX-License-Identifier: Apache-2.0
"""What base's scheduler and connectors ask of the manager beside the calls that move a request."""

from vllm.distributed.kv_events import KVCacheEvent
from vllm.utils.math_utils import cdiv
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators import KVCacheCoordinator
from vllm.v1.core.hybrid.kv_cache_blocks import (
    BlocksByType,
    GroupLayout,
    KVCacheBlocks,
    KVCacheBlocksByGroup,
)
from vllm.v1.core.hybrid.left_to_base import LeftToBase
from vllm.v1.core.hybrid.residency import ResidencyMetrics
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request


class KVCacheQueries(LeftToBase):
    """Block ids, statistics, events, and the prefix cache as a whole.

    No request gains or loses a block here.
    """

    block_pool: BlockPool
    coordinator: KVCacheCoordinator
    empty_kv_cache_blocks: KVCacheBlocks
    enable_caching: bool
    verify_every_step: bool
    num_kv_cache_groups: int
    prefix_cache_stats: PrefixCacheStats | None
    serves_connector: bool
    _group_layout: GroupLayout
    _next_event: dict[str, int]
    _residency: ResidencyMetrics | None

    # Blocks

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request, as KV connectors see them if there is one; maybe none."""
        blocks = self.coordinator.get_blocks(request_id)
        if self.serves_connector:
            return KVCacheBlocksByGroup(blocks, self._group_layout)
        return self._kv_cache_blocks(blocks)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids of a request's blocks, one list per KV cache group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """`get_block_ids`, cut to the blocks that hold the first ``num_computed_tokens``.

        Of an encoder all blocks: they are full from the first step on.
        """
        managers = self.coordinator.single_type_managers
        return tuple(
            ids if m.holds_encoder else ids[: cdiv(num_computed_tokens, m.block_size)]
            for ids, m in zip(self.get_block_ids(request_id), managers, strict=True)
        )

    def create_kv_cache_blocks(self, blocks: BlocksByType) -> KVCacheBlocks:
        """Wrap blocks per attention type for the scheduler."""
        return self._kv_cache_blocks(blocks)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Always 0 per group: as in base, whose cascade attention is gone."""
        return [0] * self.num_kv_cache_groups

    def take_new_block_ids(self) -> list[int]:
        """Physical ids that the worker must zero, allocated since the last call."""
        return [i for manager in self.coordinator.managers for i in manager.take_new_block_ids()]

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Have a request's blocks from ``start_token`` on zeroed again."""
        tables = self.coordinator.blocks_of(request_id).tables
        for manager, table in zip(self.coordinator.managers, tables, strict=True):
            manager.record_for_zeroing(table, start_token)

    def truncate_computed_blocks(
        self, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        """The part of a lookup's blocks that covers the first ``num_computed_tokens``.

        Raises:
            ValueError: if the count ends inside a block or beyond the lookup's hit.
        """
        cut = []
        for manager, type_blocks in zip(self.coordinator.managers, blocks.by_type, strict=True):
            num_blocks, rest = divmod(num_computed_tokens, manager.block_size)
            if rest or num_blocks > len(type_blocks):
                raise ValueError(
                    f"num_computed_tokens is {num_computed_tokens}; accepted are multiples of "
                    f"{manager.block_size} up to {len(type_blocks) * manager.block_size}"
                )
            cut.append(type_blocks.truncated(num_blocks))
        return self._kv_cache_blocks(tuple(cut))

    # The prefix cache

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while any request holds blocks."""
        if not self.coordinator.reset_prefix_cache():
            return False
        if self._residency is not None:
            self._residency.reset()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove the blocks that hold the given physical ids from the prefix cache."""
        self.block_pool.evict_blocks(block_ids)
        if self._residency is not None:
            self._residency.evicted(block_ids)

    # Statistics and events

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether the prefix cache may be looked up for a request."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of a request that are in the prefix cache of every attention type."""
        blocks = self.coordinator.blocks_of(request.request_id)
        return min((table.num_cached_tokens() for table in blocks.tables), default=0)

    @property
    def usage(self) -> float:
        """Share of the KV cache that requests hold, 0.0 to 1.0."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None if they are off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count an admitted request with a hit of ``num_hits`` tokens."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )

    def take_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call; empty when they are off."""
        return self.block_pool.take_events()

    # The step

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        self.coordinator.new_step_starts()
        if self.verify_every_step:
            self.check_integrity()

    def check_integrity(self) -> None:
        """Verify everything that bookkeeping shows.

        Raises:
            AssertionError: with the first difference.
        """
        self.coordinator.check_integrity()
        for request_id, event in self._next_event.items():
            actual = self.coordinator.requests[request_id].next_event()
            assert event <= actual, (
                f"request {request_id} sleeps until {event} tokens, has work at {actual}"
            )

    def _kv_cache_blocks(self, blocks: BlocksByType) -> KVCacheBlocks:
        if not any(map(len, blocks)):
            return self.empty_kv_cache_blocks
        return KVCacheBlocks(blocks, self._group_layout)
