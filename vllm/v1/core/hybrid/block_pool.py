# SPDX-License-Identifier: Apache-2.0
"""The pool of physical KV cache blocks that all attention types share."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.hybrid._core import BlankBlockIds
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock
from vllm.v1.core.hybrid.kv_cache_events import KVCacheEventLog
from vllm.v1.core.hybrid.prefix_index import PrefixIndex

logger = init_logger(__name__)


class BlockPool:
    """Owns the physical block ids ``1 .. num_gpu_blocks - 1``; id 0 is the null block.

    Every id is in exactly one place: *blank* (holds nothing reusable), in an
    *evictable* block (cached, not referenced), or in a *referenced* block.
    Blank ids are handed out first; then evictable blocks are evicted, each as
    a whole, the least recently freed first.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        attention_types: Sequence[AttentionType],
        event_log: KVCacheEventLog | None = None,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.attention_types = tuple(attention_types)
        self.event_log = event_log
        self.prefix_indexes = tuple(PrefixIndex() for _ in attention_types)
        #: One null block per type: stands in a block table where nothing is held.
        self.null_blocks = tuple(
            GroupedKVCacheBlock(type_id, (0,) * attention_type.num_groups, is_null=True)
            for type_id, attention_type in enumerate(attention_types)
        )
        #: The null block of a single group, under the name that base's callers use.
        self.null_block = GroupedKVCacheBlock(0, (0,), is_null=True)
        #: Physical ids evicted from the prefix cache since start-up.
        self.num_evicted_ids = 0
        self._blank = BlankBlockIds(num_gpu_blocks)
        self._evictable: OrderedDict[GroupedKVCacheBlock, None] = OrderedDict()
        self._num_evictable_ids = 0
        # References handed to the scheduler, which returns them with free_blocks().
        self._detached: Counter[GroupedKVCacheBlock] = Counter()

    def get_num_free_blocks(self) -> int:
        """Number of physical ids that can be allocated: blank and evictable ones."""
        return len(self._blank) + self._num_evictable_ids

    def get_usage(self) -> float:
        """Share of the pool that is referenced, 0.0 to 1.0."""
        num_usable = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / num_usable if num_usable else 0.0

    def allocate(self, type_id: int, num_blocks: int) -> list[GroupedKVCacheBlock]:
        """Take ``num_blocks`` logical blocks of a type, each with one reference.

        Raises:
            ValueError: if fewer physical ids are free; nothing is taken then.
        """
        num_groups = self.attention_types[type_id].num_groups
        num_ids = num_blocks * num_groups
        if num_ids > self.get_num_free_blocks():
            raise ValueError(
                f"cannot allocate {num_ids} KV cache blocks: "
                f"{self.get_num_free_blocks()} of {self.num_gpu_blocks} are free"
            )
        while len(self._blank) < num_ids:
            block, _ = self._evictable.popitem(last=False)
            self._num_evictable_ids -= len(block.block_ids)
            self._uncache(block)
            self._blank.give_back(block.block_ids)
        ids = self._blank.take(num_ids)
        return [
            GroupedKVCacheBlock(type_id, tuple(ids[start : start + num_groups]))
            for start in range(0, num_ids, num_groups)
        ]

    def touch(self, blocks: Iterable[GroupedKVCacheBlock]) -> None:
        """Add a reference to each block; an evictable one is no longer evictable."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                del self._evictable[block]
                self._num_evictable_ids -= len(block.block_ids)
            block.ref_cnt += 1

    def release(self, blocks: Iterable[GroupedKVCacheBlock]) -> None:
        """Drop one reference to each block, in the order in which they should be reused."""
        blank_ids: list[int] = []
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= 0:
                raise ValueError(f"{block} is released more often than it was referenced")
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if block.block_hash is None:
                blank_ids.extend(block.block_ids)
            else:
                self._evictable[block] = None
                self._num_evictable_ids += len(block.block_ids)
        if blank_ids:
            self._blank.give_back(blank_ids)

    def detach(self, blocks: Iterable[GroupedKVCacheBlock]) -> None:
        """Note that the caller now owns a reference to each block (see `free_blocks`)."""
        self._detached.update(block for block in blocks if not block.is_null)

    def free_blocks(self, ordered_blocks: Iterable[GroupedKVCacheBlock]) -> None:
        """Return blocks that `KVCacheManager.pop_blocks_for_free` handed out.

        Raises:
            ValueError: for a block that was not handed out; the blocks before it are freed.
        """
        for block in ordered_blocks:
            if block.is_null:
                continue
            if self._detached[block] <= 0:
                raise ValueError(f"{block} was not handed out by pop_blocks_for_free")
            self._detached[block] -= 1
            if self._detached[block] == 0:
                del self._detached[block]
            self.release((block,))

    def cache(self, block: GroupedKVCacheBlock, block_hash: bytes, num_tokens: int) -> None:
        """Enter a referenced block in its type's prefix index."""
        if block.ref_cnt <= 0:
            raise ValueError(f"{block} is not referenced, so it cannot be cached")
        self.prefix_indexes[block.type_id].insert(block, block_hash, num_tokens)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove from the prefix cache every block that holds one of the physical ids.

        A grouped block goes as a whole. Referenced blocks stay with their requests.

        Raises:
            ValueError: if an id is not one of the pool's.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self.num_gpu_blocks:
                raise ValueError(
                    f"block_ids holds {block_id}; the pool has ids 0 to {self.num_gpu_blocks - 1}"
                )
        # A scan, because no id-to-block map is kept: this serves rare failed transfers.
        for index in self.prefix_indexes:
            for block in [b for b in index if not block_ids.isdisjoint(b.block_ids)]:
                self._uncache(block)
                if block.ref_cnt == 0:
                    del self._evictable[block]
                    self._num_evictable_ids -= len(block.block_ids)
                    self._blank.give_back(block.block_ids)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while any block is referenced."""
        num_used = self.num_gpu_blocks - 1 - self.get_num_free_blocks()
        if num_used:
            logger.warning("Cannot reset the prefix cache: %d blocks are in use", num_used)
            return False
        for index in self.prefix_indexes:
            index.clear()
        for block in reversed(self._evictable):
            self._blank.give_back(block.block_ids)
        self._evictable.clear()
        self._num_evictable_ids = 0
        if self.event_log is not None:
            self.event_log.cleared()
        logger.info("Reset the prefix cache")
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call; empty when they are off."""
        return self.event_log.take() if self.event_log is not None else []

    def _uncache(self, block: GroupedKVCacheBlock) -> None:
        if self.event_log is not None:
            self.event_log.removed(block)
        self.prefix_indexes[block.type_id].remove(block)
        self.num_evicted_ids += len(block.block_ids)

    def check_integrity(self, references: Counter[GroupedKVCacheBlock]) -> None:
        """Verify the pool against the references that the block tables hold.

        Raises:
            AssertionError: with the first difference.
        """
        expected = references + self._detached
        for block, count in expected.items():
            assert block.ref_cnt == count, f"{block} is held {count} times"
        for index in self.prefix_indexes:
            index.check_integrity()
        for block in self._evictable:
            assert block.ref_cnt == 0, f"{block} is evictable and referenced"
            assert block.block_hash is not None, f"{block} is evictable but not cached"
        for type_id, index in enumerate(self.prefix_indexes):
            for block in index:
                assert block.type_id == type_id, f"{block} is in the index of type {type_id}"
                assert block in self._evictable or block in expected, (
                    f"{block} is cached but neither evictable nor referenced"
                )
        num_evictable = sum(len(block.block_ids) for block in self._evictable)
        assert num_evictable == self._num_evictable_ids, (
            f"{num_evictable} ids are evictable, {self._num_evictable_ids} are counted"
        )
        places = Counter(self._blank.to_list())
        for block in (*self._evictable, *expected):
            num_groups = self.attention_types[block.type_id].num_groups
            assert len(block.block_ids) == num_groups, f"{block} has not one id per group"
            places.update(block.block_ids)
        if len(places) != self.num_gpu_blocks - 1 or places.total() != self.num_gpu_blocks - 1:
            twice = [block_id for block_id, count in places.items() if count > 1]
            lost = [i for i in range(1, self.num_gpu_blocks) if i not in places]
            raise AssertionError(f"ids in two places: {twice[:8]}; ids in no place: {lost[:8]}")
        assert 0 not in places, "the null block is in use"
