# SPDX-License-Identifier: Apache-2.0
"""The native core (sources in ``csrc/``)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash

class GroupedKVCacheBlock:
    """One logical block: the physical blocks of all groups of an attention type
    for the same tokens. They are allocated, cached, freed and evicted together.

    A view, which holds no reference: once the block was given to others, what it knows of it
    (all but its type, and whether it is null) raises ValueError.
    """

    @property
    def type_id(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_ids(self) -> tuple[int, ...]:
        """``block_ids[k]`` is the physical block id for the type's ``k``-th group."""

    @property
    def ref_cnt(self) -> int:
        """How many block tables (or detached lists) hold the block."""

    @property
    def num_detached(self) -> int:
        """How many of those references callers hold, after `BlockTable.detach`."""

    @property
    def block_hash(self) -> bytes | None:
        """Prefix-cache hash while the block is in its type's prefix index."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

class BlockList:
    """Blocks of one attention type as they were at one time; holds no references."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> GroupedKVCacheBlock: ...
    def __iter__(self) -> Iterator[GroupedKVCacheBlock]: ...
    def __add__(self, other: BlockList) -> BlockList: ...
    def truncated(self, num_blocks: int) -> BlockList:
        """The first blocks, at most so many."""

    def num_evictable(self, start: int) -> int:
        """How many of the blocks from index ``start`` on nobody references."""

    def block_ids(self) -> list[list[int]]:
        """Physical ids: one list per group of the type, each with one id per block."""

class BlockTable:
    """A request's logical blocks of one attention type, in token order.

    |  released  |  cached or left out of the cache  |  not final yet  |
    0      num_released                          num_cached        len(table)

    Released blocks have left the window: the null block stands in their place. A table that
    is dropped releases what it holds.
    """

    def __len__(self) -> int: ...
    @property
    def type_id(self) -> int: ...
    @property
    def num_released(self) -> int: ...
    @property
    def num_cached(self) -> int:
        """Blocks for which the decision to cache them has been taken."""

    @num_cached.setter
    def num_cached(self, end: int) -> None: ...
    def adopt(self, hit: BlockList, num_skipped: int) -> None:
        """Start the table with a prefix hit; its first ``num_skipped`` blocks are not needed.

        ValueError, with nothing changed, if the table is not empty, or if a block of
        the hit was evicted since the lookup.
        """

    def release_before(self, end: int) -> int:
        """Release the blocks before index ``end``, so that the last is reused first.

        The null block takes their place. Returns how many leading blocks are released now.
        """

    def cache(self, begin: int, end: int, block_hashes: Sequence[bytes]) -> None:
        """Enter the blocks ``begin`` to before ``end`` in the prefix cache, without null blocks.

        ``num_cached`` is at least ``end`` afterwards.
        ``block_hashes``, a list, has one hash per hash block of the whole prefix.
        """

    def free(self) -> None:
        """Release all blocks, so that the tail of the sequence is reused first."""

    def detach(self) -> BlockList:
        """Empty the table; its references are the caller's, for `BlockPool.release_detached`."""

    def blocks(self, begin: int = 0) -> BlockList:
        """The blocks from index ``begin`` on."""

    def num_cached_tokens(self) -> int:
        """Length in tokens of the longest prefix that ends at a cached block."""

class BlockPool:
    """The physical KV cache blocks, and the grouped blocks made of them.

    ``types`` describes each attention type by its number of groups, its block size in
    tokens, and how many block hashes a block spans.
    """

    def __init__(
        self,
        num_blocks: int,
        types: Sequence[tuple[int, int, int]],
        records_evictions: bool = False,
    ) -> None: ...
    @property
    def num_evictable_ids(self) -> int: ...
    @property
    def num_evicted_ids(self) -> int:
        """Physical ids evicted from the prefix cache since start-up."""

    def new_table(self, type_id: int) -> BlockTable: ...
    def new_tables(self) -> tuple[BlockTable, ...]:
        """Empty block tables for a request, one per attention type."""
    def new_list(self, type_id: int) -> BlockList: ...
    def get_num_free_blocks(self) -> int:
        """Number of physical ids that can be allocated: blank and evictable ones."""

    def count_evictable_ids(self, hits: tuple[BlockList, ...], num_skipped: Sequence[int]) -> int:
        """Physical ids of a hit that count as free until it is adopted.

        Without the first ``num_skipped`` blocks of each type, which are not needed.
        """

    def num_missing_ids(
        self,
        tables: tuple[BlockTable, ...],
        targets: Sequence[tuple[int, int]],
        hits: tuple[BlockList, ...],
        num_skipped: Sequence[int],
    ) -> int:
        """Physical ids that a request still needs to reach its targets, as in `allocate`.

        ``hits`` are still to be adopted; the first ``num_skipped`` blocks of each are not needed.
        """

    def adopt(
        self,
        tables: tuple[BlockTable, ...],
        hits: tuple[BlockList, ...],
        num_skipped: Sequence[int],
    ) -> None:
        """Start a request's tables with a prefix hit, and reference its blocks.

        The first ``num_skipped`` blocks of each type are not needed: null blocks take their
        place.

        Raises:
            ValueError: with nothing changed, if a table is not empty, or a block of the hit
                was evicted since the lookup.
        """

    def allocate(
        self,
        tables: tuple[BlockTable, ...],
        targets: Sequence[tuple[int, int]],
        num_kept: int = 0,
    ) -> tuple[BlockList, ...] | None:
        """Append the blocks that are missing, each with one reference; returns the new ones.

        Each target is a pair: ``num_blocks``, the length of its table afterwards, and
        ``num_written``. The last ``num_written`` of a table's new blocks are real, and null
        blocks stand for the new ones before them; any number that is larger means all. A table
        that is long enough already gets nothing.

        Returns:
            One list per table, in the order of ``tables``. None, with nothing changed, if fewer
            than ``num_kept`` physical ids would stay free.

        Raises:
            ValueError: with nothing changed, unless there is one target per table, num_blocks is
                from 0 to 2**32 - 1, and num_written and num_kept are at least 0.
        """

    def find_prefix(
        self,
        type_id: int,
        block_hashes: Sequence[bytes],
        max_blocks: int,
        alignment: int = 1,
        begin: int = 0,
    ) -> BlockList:
        """The blocks of the longest prefix that are all cached from index ``begin`` on.

        Null blocks stand for those before. Of at most ``max_blocks``, and of a multiple of
        ``alignment``. ``block_hashes`` is a list, as in `BlockTable.cache`.
        """

    def find_last_run(
        self,
        type_id: int,
        block_hashes: Sequence[bytes],
        max_blocks: int,
        length: int,
        alignment: int,
    ) -> BlockList:
        """The longest prefix, of at most ``max_blocks`` and a multiple of ``alignment``, whose
        last ``length`` blocks are cached; null blocks stand for those before.
        """

    def release_detached(self, block: GroupedKVCacheBlock) -> None:
        """Drop one reference, which `BlockTable.detach` handed out.

        ValueError, with nothing changed, if it handed out none that is still there.
        """

    def evict(self, block_ids: Sequence[int]) -> None:
        """Take the blocks that hold one of the physical ids out of the prefix cache."""

    def clear_cache(self) -> None:
        """Empty the prefix cache."""

    def take_evictions(self) -> list[tuple[int, bytes]]:
        """Type and hash of each block evicted since the last call, if they are recorded."""

    def find(self, type_id: int, block_hash: bytes) -> GroupedKVCacheBlock | None:
        """The cached block with a hash: the oldest, if there are several."""

    def cached_blocks(self, type_id: int) -> list[GroupedKVCacheBlock]:
        """All blocks in a type's prefix index, for checks."""

    def live_blocks(self) -> list[GroupedKVCacheBlock]:
        """All blocks that own physical ids, for checks."""

    def evictable_blocks(self) -> list[GroupedKVCacheBlock]:
        """The evictable blocks, the next to be evicted first, for checks."""

    def blank_ids(self) -> list[int]:
        """The ids that hold nothing reusable, the next to be taken first, for checks."""

def gate_allocate_slots(
    owner: object,
    method: Callable[..., object],
    step: Callable[..., object],
    next_events: dict[str, int],
    idle_answer: object,
) -> Callable[..., Any]:
    """The owner's ``method``, but for a plain step of a request that has a next event.

    Below the event no Python runs, and ``idle_answer`` is returned; at or above it, the
    owner's ``step`` is called with the request, its new tokens and its lookahead tokens.
    """

def gate_cache_blocks(
    owner: object, method: Callable[..., object], next_events: dict[str, int]
) -> Callable[..., Any]:
    """The owner's ``method``, but for fewer tokens than the request's next event: then None."""

class BlockHasher:
    """Chained hashes of full blocks of tokens: base's, of a serialized (parent, tokens, keys).

    ``algorithm`` is sha256, sha256_cbor, xxhash or xxhash_cbor. ValueError for another, or
    unless 1 <= block_size <= 8192.
    """

    def __init__(self, algorithm: str, block_size: int) -> None: ...
    def hash_blocks(
        self, parent: bytes, tokens: list[int], start: int, rest: bytes
    ) -> list[BlockHash]:
        """Hash the full blocks of ``tokens[start:]``; for many, the interpreter lock is released.

        ``parent`` is the hash before the first block, and ``rest`` what follows the tokens of
        every block when the tuple is serialized. ValueError for a start outside of the list, a
        parent that is empty or longer than 255 bytes or a rest that is empty or longer than
        16,384, TypeError for tokens that are no ints, OverflowError for those that do not fit
        in 32 bits.
        """

def sha256_portable(message: bytes) -> bytes:
    """SHA-256 without the processor's SHA instructions, for tests."""
