# SPDX-License-Identifier: Apache-2.0
"""The native core (sources in ``csrc/``). Its documentation is here; the bindings have none."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, type_check_only

from vllm.v1.core.kv_cache_utils import BlockHash

@type_check_only
class _NanobindType(type):
    """Stands for the metaclass of nanobind's classes."""

class GroupedKVCacheBlock(metaclass=_NanobindType):
    """One logical block: the physical blocks of all groups of an attention type for the same
    tokens. They are allocated, cached, freed and evicted together.

    This is a view and holds no reference. Once the block was freed or evicted, all attributes
    except ``type_id`` and ``is_null`` raise ValueError.
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
        """References to the block: those of block tables, and the detached ones."""

    @property
    def num_detached(self) -> int:
        """Detached references, which callers own (see `BlockTable.detach`)."""

    @property
    def block_hash(self) -> bytes | None:
        """The prefix-cache hash; None while the block is not in its type's prefix index."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...

class BlockList(metaclass=_NanobindType):
    """A snapshot of blocks of one attention type. Holds no references."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> GroupedKVCacheBlock: ...
    def __iter__(self) -> Iterator[GroupedKVCacheBlock]: ...
    def __add__(self, other: BlockList) -> BlockList:
        """Concatenate; ValueError for blocks of another pool or attention type."""

    def truncated(self, num_blocks: int) -> BlockList:
        """The first blocks, at most ``num_blocks``."""

    def block_ids(self) -> list[list[int]]:
        """Physical ids: one list per group of the type, each with one id per block.

        ValueError if a block was freed or evicted since the snapshot.
        """

class BlockTable(metaclass=_NanobindType):
    """A request's logical blocks of one attention type, in token order.

    |  released  |  cached, or left out of the cache  |  undecided  |
    0      num_released                         num_decided   len(table)

    The null block stands for blocks that the request does not hold: released, skipped by a hit or
    a load, or between two states. A table that is
    deleted releases its blocks.
    """

    def __len__(self) -> int: ...
    @property
    def type_id(self) -> int: ...
    @property
    def num_released(self) -> int: ...
    @property
    def num_decided(self) -> int:
        """Leading blocks for which caching is decided: each is cached or left out."""

    @num_decided.setter
    def num_decided(self, end: int) -> None: ...
    def release_before(self, end: int) -> int:
        """Release the blocks before index ``end``. The last of them is reused first.

        The null block replaces them. An ``end`` beyond the table releases all. Returns
        ``num_released``.
        """

    def cache(self, begin: int, end: int, block_hashes: Sequence[bytes]) -> None:
        """Enter the blocks in ``[begin, end)`` in the prefix cache, except null blocks.

        ``num_decided`` is at least ``end`` afterwards.

        Args:
            block_hashes: a list, with one hash per hash block of the whole prefix.

        Raises:
            ValueError: with nothing changed, for a range outside of the table or of the hashes,
                or a block that is cached already.
        """

    def free(self) -> None:
        """Release all blocks. The last block of the sequence is reused first."""

    def detach(self) -> BlockList:
        """Empty the table. The caller then owns its references (`BlockPool.release_detached`)."""

    def blocks(self, begin: int = 0) -> BlockList:
        """The blocks from index ``begin`` on."""

    def num_cached_tokens(self) -> int:
        """Length in tokens of the longest prefix that ends with a cached block."""

class BlockPool(metaclass=_NanobindType):
    """The physical KV cache blocks, and the grouped blocks made of them.

    Args:
        num_blocks: physical blocks, the null block included.
        types: per attention type, its number of groups, its block size in tokens, and how many
            block hashes a block spans.
        records_evictions: whether to record evictions for `take_evictions`.
    """

    def __init__(
        self,
        num_blocks: int,
        types: Sequence[tuple[int, int, int]],
        records_evictions: bool = False,
    ) -> None: ...
    @property
    def num_evictable_ids(self) -> int:
        """Physical ids in cached blocks without references."""

    @property
    def num_evicted_ids(self) -> int:
        """Physical ids evicted from the prefix cache since start-up."""

    def type_counts(self) -> tuple[tuple[int, int, int], ...]:
        """Per attention type: how many of its physical ids are referenced, how many are evictable,
        and how many were evicted from the prefix cache since start-up.
        """

    def new_table(self, type_id: int) -> BlockTable:
        """An empty block table for one attention type."""

    def new_tables(self) -> tuple[BlockTable, ...]:
        """Empty block tables for a request, one per attention type."""

    def new_list(self, type_id: int) -> BlockList:
        """An empty list of an attention type."""

    def get_num_free_blocks(self) -> int:
        """Physical ids that can be allocated: the blank and the evictable ones."""

    def count_evictable_ids(self, hits: tuple[BlockList, ...], num_skipped: Sequence[int]) -> int:
        """Physical ids of a prefix hit that count as free until it is adopted.

        The first ``num_skipped`` blocks of each type are not needed and do not count.
        """

    def num_missing_ids(
        self,
        tables: tuple[BlockTable, ...],
        targets: Sequence[tuple[int, int]],
        hits: tuple[BlockList, ...],
        num_skipped: Sequence[int],
    ) -> int:
        """Physical ids that `allocate` takes for the targets after the hits were adopted.

        The first ``num_skipped`` blocks of each hit are not needed. Pass an empty list for a type
        without a hit.
        """

    def adopt(
        self,
        tables: tuple[BlockTable, ...],
        hits: tuple[BlockList, ...],
        num_skipped: Sequence[int],
    ) -> None:
        """Start a request's tables with a prefix hit, and reference its blocks.

        Each table gets ``num_skipped`` null blocks, then the rest of the hit. With a load,
        ``num_skipped`` can exceed the hit, which may be empty.

        Raises:
            ValueError: with nothing changed, if a table is not empty, or a block of the hit was
                evicted since the lookup.
        """

    def allocate(
        self,
        tables: tuple[BlockTable, ...],
        targets: Sequence[tuple[int, int]],
        num_kept_free: int = 0,
    ) -> tuple[BlockList, ...] | None:
        """Append the missing blocks to the tables of one request, each with one reference.

        Args:
            tables: in ascending order of ``type_id``.
            targets: one pair ``(num_blocks, num_written)`` per table. ``num_blocks`` is the
                table's length afterwards. A table that is long enough already gets no blocks. The
                last ``num_written`` of the new blocks are real, and the others are null blocks.
                If ``num_written`` exceeds the number of new blocks, all are real.
            num_kept_free: physical ids that must stay free.

        Returns:
            The new blocks, one list per table. None, with nothing changed, if fewer than
            ``num_kept_free`` physical ids would stay free.

        Raises:
            ValueError: with nothing changed, unless there is one target per table, num_blocks is
                from 0 to 2**32 - 1, and num_written and num_kept_free are at least 0.
        """

    def find_prefix(
        self,
        type_id: int,
        block_hashes: Sequence[bytes],
        max_blocks: int,
        alignment: int = 1,
        begin: int = 0,
    ) -> BlockList:
        """The blocks of the longest prefix whose blocks from index ``begin`` on are all cached.

        The blocks before ``begin`` are null blocks. The prefix has at most ``max_blocks`` blocks, a
        multiple of ``alignment``. ``block_hashes`` is a list, as in `BlockTable.cache`.
        """

    def find_last_run(
        self,
        type_id: int,
        block_hashes: Sequence[bytes],
        max_blocks: int,
        length: int,
        alignment: int,
    ) -> BlockList:
        """The longest prefix whose last ``length`` blocks (or all, if it is shorter) are cached.

        The blocks before those are null blocks. The prefix has at most ``max_blocks`` blocks, a
        multiple of ``alignment``. ``block_hashes`` is a list, as in `BlockTable.cache`.
        """

    def release_detached(self, block: GroupedKVCacheBlock) -> None:
        """Drop one reference that `BlockTable.detach` gave to the caller.

        ValueError, with nothing changed, if the block has no detached reference.
        """

    def evict(self, block_ids: Sequence[int]) -> None:
        """Remove the blocks that hold one of the physical ids from the prefix cache.

        Referenced blocks stay with their requests. ValueError, with nothing changed, for an id
        that is not the pool's.
        """

    def clear_cache(self) -> None:
        """Empty the prefix cache."""

    def take_evictions(self) -> list[tuple[int, bytes]]:
        """Type and hash of each block evicted since the last call, if evictions are recorded."""

    def find(self, type_id: int, block_hash: bytes) -> GroupedKVCacheBlock | None:
        """The cached block with a hash: the oldest, if there are several."""

    def cached_blocks(self, type_id: int) -> list[GroupedKVCacheBlock]:
        """All blocks in a type's prefix index, for checks."""

    def probe_lengths(self, type_id: int) -> list[int]:
        """How many slots of a type's prefix index a lookup reads, for each hash in it, for checks.

        The order is that of the slots, which depends on a secret of the process.
        """

    def live_blocks(self) -> list[GroupedKVCacheBlock]:
        """All blocks that own physical ids, for checks."""

    def evictable_blocks(self) -> list[GroupedKVCacheBlock]:
        """The evictable blocks in the order of their eviction, for checks."""

    def blank_ids(self) -> list[int]:
        """The ids that hold nothing reusable, in the order in which they are taken, for checks."""

def gate_allocate_slots(
    owner: object,
    method: Callable[..., object],
    step: Callable[..., object],
    next_events: dict[str, int],
    idle_answer: object,
) -> Callable[..., Any]:
    """A gate before ``owner.allocate_slots``, for plain steps of requests with a next event.

    Below the event it returns ``idle_answer``, and no Python runs. From the event on it calls
    ``step(owner, request, num_new_tokens, num_lookahead_tokens)``. All other calls go to
    ``method``. The gate holds the owner weakly, and raises ReferenceError once the owner no longer
    exists.
    """

def gate_cache_blocks(
    owner: object, method: Callable[..., object], next_events: dict[str, int]
) -> Callable[..., Any]:
    """A gate before ``owner.cache_blocks``: returns None for fewer tokens than the next event.

    All other calls go to ``method``. The gate holds the owner weakly, as above.
    """

class BlockHasher(metaclass=_NanobindType):
    """Base's chained hashes of full blocks of tokens.

    Each is the hash of a serialized tuple (parent, tokens, keys).

    Args:
        algorithm: sha256, sha256_cbor, xxhash or xxhash_cbor; ValueError for others.
        block_size: tokens per block; ValueError unless it is from 1 to 8192.
    """

    def __init__(self, algorithm: str, block_size: int) -> None: ...
    def hash_blocks(
        self, parent: bytes, tokens: list[int], start: int, rest: bytes
    ) -> list[BlockHash]:
        """Hash the full blocks of ``tokens[start:]``.

        Releases the interpreter lock for 4,096 tokens or more.

        Args:
            parent: the hash of the block before the first, 1 to 255 bytes.
            rest: what follows the tokens of each block in the serialized tuple, 1 to 16,384
                bytes.

        Raises:
            ValueError: for a start outside of the list, or a parent or rest of another size.
            TypeError: for tokens that are not ints.
            OverflowError: for tokens that do not fit in 32 bits.
        """

def sha256_portable(message: bytes) -> bytes:
    """SHA-256 without the processor's SHA instructions, for tests."""
