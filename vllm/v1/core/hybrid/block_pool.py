# SPDX-License-Identifier: Apache-2.0
"""The pool of physical KV cache blocks that all attention types share."""

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.hybrid import _core
from vllm.v1.core.hybrid._core import BlockTable, GroupedKVCacheBlock
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.kv_cache_events import KVCacheEventLog
from vllm.v1.core.hybrid.metrics.counters import Counters
from vllm.v1.core.hybrid.settings import CacheSettings

logger = init_logger(__name__)


class BlockPool(_core.BlockPool):
    """Owns the physical block ids ``1 .. num_gpu_blocks - 1``; id 0 is the null block.

    Every id is in exactly one place: *blank* (holds nothing reusable), in an *evictable* block
    (cached, not referenced), or in a *referenced* block. Blank ids are allocated first. Then
    evictable blocks are evicted in LRU order, each as a whole. The ids, the blocks and the prefix
    index of each type are native; this class adds what base's callers use.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        attention_types: Sequence[AttentionType],
        settings: CacheSettings,
        event_log: KVCacheEventLog | None = None,
    ) -> None:
        super().__init__(
            num_gpu_blocks,
            [
                (t.num_groups, t.spec.block_size, settings.hashes_per_block(t.spec.block_size))
                for t in attention_types
            ],
            records_evictions=event_log is not None,
        )
        self.num_gpu_blocks = num_gpu_blocks
        self.attention_types = tuple(attention_types)
        self.settings = settings
        self.event_log = event_log
        #: Counts events for the metrics.
        self.counters = Counters(attention_types)

    def get_usage(self) -> float:
        """Share of the pool that is referenced, 0.0 to 1.0."""
        num_usable = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / num_usable if num_usable else 0.0

    def detach(self, tables: Iterable[BlockTable]) -> list[GroupedKVCacheBlock]:
        """Empty the tables. The caller then owns their references (see `free_blocks`)."""
        return [block for table in tables for block in table.detach()]

    def free_blocks(self, ordered_blocks: Iterable[GroupedKVCacheBlock]) -> None:
        """Free blocks that `KVCacheManager.pop_blocks_for_free` returned.

        Raises:
            ValueError: for any other block. The blocks before it are freed nevertheless.
        """
        for block in ordered_blocks:
            self.release_detached(block)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove every block that holds one of the physical ids from the prefix cache.

        A grouped block is removed as a whole. Referenced blocks stay with their requests.

        Raises:
            ValueError: if an id is not one of the pool's.
        """
        self.evict(sorted(block_ids))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. While any block is referenced, change nothing, return False."""
        num_used = self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        if num_used:
            logger.warning("Cannot reset the prefix cache: %d blocks are in use", num_used)
            return False
        self.clear_cache()
        if self.event_log is not None:
            self.report_evictions()
            self.event_log.cleared()
        logger.info("Reset the prefix cache")
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call; empty when they are off."""
        if self.event_log is None:
            return []
        self.report_evictions()
        return self.event_log.take()

    def report_evictions(self) -> None:
        """Report evictions since the last call to the event log, which must be on.

        Call it before logging another event, to keep the order.
        """
        assert self.event_log is not None
        for type_id, block_hash in self.take_evictions():
            self.event_log.removed(type_id, block_hash)

    def check_integrity(self, tables: Iterable[BlockTable] = ()) -> None:
        """Verify the pool against the references that the block tables hold.

        Raises:
            AssertionError: with the first difference.
        """
        live = self.live_blocks()
        expected = Counter({block: block.num_detached for block in live if block.num_detached})
        for table in tables:
            expected.update(block for block in table.blocks() if not block.is_null)
        evictable = self.evictable_blocks()
        for block, count in expected.items():
            assert block.ref_cnt == count, f"{block} is held {count} times"
        for block in evictable:
            assert block.ref_cnt == 0, f"{block} is evictable and referenced"
            assert block.block_hash is not None, f"{block} is evictable but not cached"
        known = {*evictable, *expected}
        assert len(evictable) + len(expected) == len(known) == len(live), (
            f"{len(evictable)} blocks are evictable and {len(expected)} referenced; "
            f"{len(live)} own ids"
        )
        num_evictable = sum(len(block.block_ids) for block in evictable)
        assert num_evictable == self.num_evictable_ids, (
            f"{num_evictable} ids are evictable, {self.num_evictable_ids} are counted"
        )
        for type_id, (num_referenced, num_cached, _) in enumerate(self.type_counts()):
            of_type = [block for block in live if block.type_id == type_id]
            owned: Counter[bool] = Counter()
            for block in of_type:
                owned[block.ref_cnt > 0] += len(block.block_ids)
            assert (num_referenced, num_cached) == (owned[True], owned[False]), (
                f"{owned[True]} ids of type {type_id} are referenced and {owned[False]} evictable, "
                f"{num_referenced} and {num_cached} are counted"
            )
        self._check_indexes(live)
        places = Counter(self.blank_ids())
        for block in live:
            assert block in known, f"{block} is neither evictable nor referenced"
            places.update(block.block_ids)
        if len(places) != self.num_gpu_blocks - 1 or places.total() != self.num_gpu_blocks - 1:
            twice = [block_id for block_id, count in places.items() if count > 1]
            lost = [i for i in range(1, self.num_gpu_blocks) if i not in places]
            raise AssertionError(f"ids in two places: {twice[:8]}; ids in no place: {lost[:8]}")
        assert 0 not in places, "id 0, the null block, is in use"

    def _check_indexes(self, live: Sequence[GroupedKVCacheBlock]) -> None:
        carry_hash = {block for block in live if block.block_hash is not None}
        for type_id in range(len(self.attention_types)):
            for block in self.cached_blocks(type_id):
                assert block.type_id == type_id, f"{block} is in the index of type {type_id}"
                assert block in carry_hash, f"{block} is in the index but carries no hash"
                assert block.block_hash is not None
                found = self.find(type_id, block.block_hash)
                assert found is not None, f"{block} is not found under its hash"
                assert found.block_hash == block.block_hash, f"{found} answers for another hash"
                carry_hash.discard(block)
        assert not carry_hash, f"cached, but not in the index: {sorted(map(str, carry_hash))[:4]}"
