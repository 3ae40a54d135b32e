# SPDX-License-Identifier: Apache-2.0
"""What the managers of all attention types share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashList, resolve_block_hashes
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.request import Request

#: No token count reaches it: nothing will happen.
NEVER = 1 << 62


@dataclass(slots=True)
class BlockTable:
    """A request's logical blocks of one attention type, in token order.

    |  released  |  cached or left out of the cache  |  not final yet  |
    0      num_released                          num_cached        len(blocks)

    Released blocks have left the window: the null block stands in their place.
    """

    blocks: list[GroupedKVCacheBlock] = field(default_factory=list)
    num_released: int = 0
    #: Blocks for which the decision to cache them has been taken.
    num_cached: int = 0


class SingleTypeKVCacheManager(ABC):
    """Block tables and prefix lookups of one attention type, for all its groups.

    Counts of blocks are of logical blocks unless a name says otherwise; each
    takes one physical block per group.
    """

    #: Whether every prefix of a hit is a hit too, so that a hit may simply be cut.
    downward_closed: ClassVar[bool] = False
    #: For base's callers: hits are never kept longer than what was asked for.
    retains_longer_hit: ClassVar[bool] = False

    def __init__(
        self,
        type_id: int,
        attention_type: AttentionType,
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        self.type_id = type_id
        self.attention_type = attention_type
        self.kv_cache_spec = attention_type.spec
        self.block_size: int = attention_type.spec.block_size
        self.num_groups = attention_type.num_groups
        self.block_pool = block_pool
        self.settings = settings
        self.null_block = block_pool.null_blocks[type_id]
        self.prefix_index = block_pool.prefix_indexes[type_id]
        self.tables: dict[str, BlockTable] = {}
        #: Most blocks that one request holds at a time; None where it keeps all.
        self.max_blocks_per_request: int | None = None
        self.records_new_block_ids = settings.needs_zeroing and isinstance(
            attention_type.spec, AttentionSpec
        )
        self._new_block_ids: list[int] = []

    # What differs between attention types.

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no query after ``num_computed_tokens`` attends to."""
        return 0

    @abstractmethod
    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[list[GroupedKVCacheBlock], int]:
        """The longest cached prefix of at most ``max_tokens`` that can be resumed from.

        ``block_hashes[i]`` is chained over the first ``(i + 1) * hash_block_size`` tokens.
        Returns the prefix's blocks, with the null block where none is needed, and its
        length in tokens, a multiple of the scheduler block size.
        """

    def cacheable_blocks(self, span: range, boundaries: Sequence[int]) -> Sequence[int]:
        """Which block indices of ``span`` can serve a hit; the others are not cached.

        ``boundaries`` are token positions where a later request can be expected to resume.
        """
        return span

    # What is the same for all.

    def num_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        hits: Sequence[GroupedKVCacheBlock],
        num_computed_tokens: int,
        recycled: bool = False,
    ) -> int:
        """Logical blocks that must be free to give a request ``num_tokens`` slots.

        Hits that are evictable count too: adopting them takes them out of the free
        blocks. With ``recycled``, a type that releases blocks on the way counts no more
        than it ever holds at once.
        """
        num_required = cdiv(num_tokens, self.block_size)
        if recycled and self.max_blocks_per_request is not None:
            num_required = min(num_required, self.max_blocks_per_request)
        table = self.tables.get(request_id)
        num_held = len(table.blocks) if table is not None else 0
        num_skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        num_new = max(num_required - max(num_skipped, num_held + len(hits)), 0)
        num_evictable = sum(
            block.ref_cnt == 0 and not block.is_null
            for block in hits[max(num_skipped - num_held, 0) :]
        )
        return num_new + num_evictable

    def adopt_hits(
        self, request_id: str, hits: Sequence[GroupedKVCacheBlock], num_computed_tokens: int
    ) -> None:
        """Start a request's block table with the blocks of its prefix hit.

        Raises:
            ValueError: if the request already has blocks.
        """
        table = self.tables.setdefault(request_id, BlockTable())
        if table.blocks:
            raise ValueError(f"request {request_id} already holds KV cache blocks")
        num_skipped = self.num_skipped_tokens(num_computed_tokens) // self.block_size
        hits = hits[num_skipped:]
        self.block_pool.touch(hits)
        table.blocks = [self.null_block] * num_skipped
        table.blocks.extend(hits)
        table.num_released = num_skipped
        table.num_cached = len(table.blocks)

    def allocate(self, request_id: str, num_tokens: int) -> list[GroupedKVCacheBlock]:
        """Append blocks until the request has ``num_tokens`` slots; returns the new ones."""
        table = self.tables.setdefault(request_id, BlockTable())
        num_new = cdiv(num_tokens, self.block_size) - len(table.blocks)
        if num_new <= 0:
            return []
        blocks = self.block_pool.allocate(self.type_id, num_new)
        table.blocks.extend(blocks)
        if self.records_new_block_ids:
            self._record(blocks)
        return blocks

    def release_skipped(self, request_id: str, num_processed_tokens: int) -> None:
        """Release the blocks that no query after ``num_processed_tokens`` attends to.

        The count must leave out tokens of steps in flight: those still read below it.
        """
        table = self.tables.get(request_id)
        if table is None:
            return
        num_skipped = self.num_skipped_tokens(num_processed_tokens) // self.block_size
        num_skipped = min(num_skipped, len(table.blocks))
        if num_skipped <= table.num_released:
            return
        left = table.blocks[table.num_released : num_skipped]
        table.blocks[table.num_released : num_skipped] = [self.null_block] * len(left)
        table.num_released = num_skipped
        self.block_pool.release(reversed(left))

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Enter the full blocks of the first ``num_tokens``, all final, in the prefix cache."""
        table = self.tables.get(request.request_id)
        if table is None:
            return
        span = range(table.num_cached, num_tokens // self.block_size)
        if not span:
            return
        block_hashes = self.block_hashes_of(request)
        indices = [
            i for i in self.cacheable_blocks(span, boundaries) if not table.blocks[i].is_null
        ]
        for i in indices:
            self.block_pool.cache(table.blocks[i], block_hashes[i], (i + 1) * self.block_size)
        table.num_cached = span.stop
        if self.block_pool.event_log is not None:
            self.block_pool.event_log.stored(request, self.type_id, block_hashes, span, indices)

    def block_hashes_of(self, request: Request) -> BlockHashList:
        """A request's hashes at the ends of this type's blocks.

        Hashes are chained over the whole prefix, so a type with larger blocks picks some.
        """
        return resolve_block_hashes(
            request.block_hashes, self.settings.hash_block_size, self.block_size
        )

    def next_event(self, request_id: str) -> int:
        """The smallest token count at which this type has anything to do for a request:
        a block is needed, one leaves the window, or one becomes cacheable.
        """
        table = self.tables.get(request_id)
        if table is None:
            return 0
        event = len(table.blocks) * self.block_size + 1
        if self.settings.enable_caching:
            next_full = (table.num_cached + 1) * self.block_size
            event = min(event, round_up(next_full, self.settings.scheduler_block_size))
        return min(event, self.next_release(table))

    def next_release(self, table: BlockTable) -> int:
        """The number of processed tokens at which the next block leaves the window."""
        return NEVER

    def pop(self, request_id: str) -> list[GroupedKVCacheBlock]:
        """Forget a request; the caller gets its references, in token order."""
        table = self.tables.pop(request_id, None)
        return table.blocks if table is not None else []

    def free(self, request_id: str) -> None:
        """Release a request's blocks, so that the tail of the sequence is reused first."""
        self.block_pool.release(reversed(self.pop(request_id)))

    def num_cached_tokens(self, request_id: str) -> int:
        """Length of the longest prefix of a request that ends at a cached block."""
        for block in reversed(self.get_blocks(request_id)):
            if block.block_hash is not None:
                return block.num_tokens
        return 0

    def get_blocks(self, request_id: str) -> list[GroupedKVCacheBlock]:
        """A request's blocks in token order; the manager's own list, not to be changed."""
        table = self.tables.get(request_id)
        return table.blocks if table is not None else []

    def take_new_block_ids(self) -> list[int]:
        """Physical ids to zero, allocated since the last call."""
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    def record_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Have the blocks from ``start_token`` on, a multiple of the block size, zeroed again."""
        if not self.records_new_block_ids:
            return
        if start_token % self.block_size != 0:
            raise ValueError(
                f"start_token is {start_token}; accepted are multiples of {self.block_size}"
            )
        self._record(self.get_blocks(request_id)[start_token // self.block_size :])

    def _record(self, blocks: Iterable[GroupedKVCacheBlock]) -> None:
        for block in blocks:
            self._new_block_ids.extend(block.block_ids)

    def check_integrity(self) -> None:
        """Raise AssertionError with the first block table that breaks an invariant."""
        for request_id, table in self.tables.items():
            where = f"request {request_id}, {self.attention_type}"
            assert 0 <= table.num_released <= len(table.blocks), f"{where}: released too many"
            for i, block in enumerate(table.blocks):
                if i < table.num_released:
                    assert block is self.null_block, f"{where}: block {i} was released: {block}"
                else:
                    assert block is not self.null_block, f"{where}: block {i} is missing"
                    assert block.type_id == self.type_id, f"{where}: block {i} is {block}"
                if block.block_hash is not None:
                    assert i < table.num_cached, f"{where}: block {i} was cached too early"
                    assert block.num_tokens == (i + 1) * self.block_size, (
                        f"{where}: block {i} is cached for {block.num_tokens} tokens"
                    )
