# SPDX-License-Identifier: Apache-2.0
"""BlockPool, BlockTable and BlockList: every id in one place, blocks evicted as a whole."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from vllm.v1.core.hybrid._core import BlockList, BlockTable
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

FULL, WINDOW = 0, 1
BLOCK_SIZE = 16
SETTINGS = CacheSettings(64, 64, BLOCK_SIZE, BLOCK_SIZE, True, None, False)


def make_pool(num_blocks: int = 13) -> BlockPool:
    """One full-attention group and three sliding-window groups."""
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return BlockPool(
        num_blocks,
        (
            AttentionType(FullAttentionSpec(**shape), (0,)),
            AttentionType(SlidingWindowSpec(**shape, sliding_window=32), (1, 2, 3)),
        ),
        SETTINGS,
    )


def hashes(prompt: str, num_blocks: int) -> list[bytes]:
    """One hash per block of a prompt."""
    return [f"{prompt}{i}".encode() for i in range(num_blocks)]


def allocate(pool: BlockPool, type_id: int, num_blocks: int) -> BlockTable:
    """A request's table with new blocks."""
    table = pool.new_table(type_id)
    assert pool.allocate((table,), ((num_blocks, num_blocks),)) is not None
    return table


def allocate_cached(pool: BlockPool, type_id: int, prompt: str, num_blocks: int = 1) -> BlockTable:
    table = allocate(pool, type_id, num_blocks)
    table.cache(0, num_blocks, hashes(prompt, num_blocks))
    return table


def ids(table: BlockTable) -> list[tuple[int, ...]]:
    return ids_of(table.blocks())


def ids_of(blocks: BlockList) -> list[tuple[int, ...]]:
    return [block.block_ids for block in blocks]


def test_a_logical_block_takes_one_id_per_group():
    pool = make_pool()
    full, window = allocate(pool, FULL, 1), allocate(pool, WINDOW, 2)
    assert ids(full) == [(1,)]
    assert ids(window) == [(2, 3, 4), (5, 6, 7)]
    assert window.blocks().block_ids() == [[2, 5], [3, 6], [4, 7]]
    assert pool.get_num_free_blocks() == 5
    assert pool.get_usage() == pytest.approx(7 / 12)
    pool.check_integrity([full, window])


def test_all_types_are_allocated_for_or_none():
    pool = make_pool(num_blocks=5)
    tables = pool.new_table(FULL), pool.new_table(WINDOW)
    hits = pool.new_list(FULL), pool.new_list(WINDOW)
    two_each = (2, 2), (2, 2)
    assert pool.num_missing_ids(tables, two_each, hits, (0, 0)) == 8
    assert pool.num_missing_ids(tables, two_each, hits, (0, 1)) == 2 + 3
    assert pool.num_missing_ids(tables, ((2, 2), (1, 1)), hits, (0, 0)) == 2 + 3
    assert pool.allocate(tables, two_each) is None
    assert pool.allocate(tables, ((1, 1), (1, 1)), num_kept_free=1) is None
    assert (len(tables[0]), len(tables[1]), pool.get_num_free_blocks()) == (0, 0, 4)
    new = pool.allocate(tables, ((1, 1), (1, 1)))
    assert new is not None
    assert [len(blocks) for blocks in new] == [1, 1]
    assert [len(table) for table in tables] == [1, 1]
    for targets in (((1, 1), (1, 1)), ((0, 5), (1, 0))):
        assert [len(blocks) for blocks in pool.allocate(tables, targets) or ()] == [0, 0]
    pool.check_integrity(tables)


@pytest.mark.parametrize(
    ("num_written", "pattern"), [(0, "..."), (1, "..x"), (2, ".xx"), (3, "xxx"), (1 << 80, "xxx")]
)
def test_the_last_new_blocks_are_real_and_the_new_blocks_before_them_are_null(num_written, pattern):
    pool = make_pool()
    table = allocate(pool, WINDOW, 1)
    hits, target = (pool.new_list(WINDOW),), ((4, num_written),)
    num_real = pattern.count("x")
    assert pool.num_missing_ids((table,), target, hits, (0,)) == 3 * num_real
    new = pool.allocate((table,), target)
    assert new is not None
    assert "".join("." if block.is_null else "x" for block in new[0]) == pattern
    assert ids(table) == [(1, 2, 3), *ids_of(new[0])]
    assert [block.ref_cnt for block in new[0] if not block.is_null] == [1] * num_real
    assert pool.get_num_free_blocks() == 9 - 3 * num_real
    assert pool.num_missing_ids((table,), target, hits, (0,)) == 0
    pool.check_integrity([table])


def test_only_the_blocks_after_a_hit_are_missing():
    pool = make_pool()
    allocate_cached(pool, WINDOW, "w", 2).free()
    table = pool.new_table(WINDOW)
    hits = (pool.find_prefix(WINDOW, hashes("w", 2), 2),)
    missing = {
        (num_blocks, num_written, num_skipped): pool.num_missing_ids(
            (table,), ((num_blocks, num_written),), hits, (num_skipped,)
        )
        for num_blocks in (1, 2, 5)
        for num_written in (1, 9)
        for num_skipped in (0, 2, 4)
    }
    assert {need: n for need, n in missing.items() if n} == {
        (5, 1, 0): 3,
        (5, 1, 2): 3,
        (5, 1, 4): 3,
        (5, 9, 0): 9,
        (5, 9, 2): 9,
        (5, 9, 4): 3,
    }
    pool.adopt((table,), hits, (2,))
    assert pool.num_missing_ids((table,), ((5, 9),), (pool.new_list(WINDOW),), (0,)) == 9


def test_numbers_of_ids_do_not_overflow():
    pool = make_pool()
    tables, hits = pool.new_tables(), (pool.new_list(FULL), pool.new_list(WINDOW))
    most = (1 << 32) - 1
    targets = ((most, most), (most, 1 << 63))
    assert pool.num_missing_ids(tables, targets, hits, (0, 0)) == 4 * most
    assert pool.allocate(tables, targets) is None
    assert pool.allocate(tables, ((1, 1), (1, 1)), num_kept_free=1 << 80) is None
    assert [len(table) for table in tables] == [0, 0]


class Garbage:
    """An unreachable cycle. A garbage collection that finds it calls ``finalize``."""

    def __init__(self, finalize: Callable[[], object]) -> None:
        self.cycle = self
        self.finalize = finalize

    def __del__(self) -> None:
        self.finalize()


@pytest.fixture
def collect_at_next_tuple() -> Iterator[Callable[[], None]]:
    """After a call, each new tuple of two starts a garbage collection, until the test ends."""
    threshold = gc.get_threshold()
    tuples: list[tuple[int, int]] = []

    def start() -> None:
        # Use up the tuples that Python keeps for reuse: reusing one starts no collection.
        tuples.extend([(i, i) for i in range(5000)])
        gc.set_threshold(1)
        gc.enable()

    gc.collect()
    gc.disable()
    yield start
    gc.set_threshold(*threshold)
    gc.enable()


def test_a_finalizer_cannot_take_blocks_that_an_allocation_has_counted(collect_at_next_tuple):
    """No garbage collection may run between counting the free blocks and using them."""
    pool = make_pool(num_blocks=5)
    tables, targets = pool.new_tables(), ((1, 1), (1, 1))
    other, taken = pool.new_table(FULL), []
    Garbage(lambda: taken.append(pool.allocate((other,), ((1, 1),))))
    collect_at_next_tuple()
    new = pool.allocate(tables, targets)
    assert new is not None
    assert [len(blocks) for blocks in new] == [1, 1]
    assert taken == [None], "the finalizer came second, and found no block"
    pool.check_integrity([*tables, other])


def test_a_finalizer_that_frees_blocks_does_not_change_an_allocation(collect_at_next_tuple):
    pool = make_pool(num_blocks=8)
    holder = allocate_cached(pool, WINDOW, "w")
    tables, targets = pool.new_tables(), ((1, 1), (2, 2))
    hits = pool.new_list(FULL), pool.find_prefix(WINDOW, hashes("w", 1), 1)
    pool.adopt(tables, hits, (0, 0))
    # The holder keeps the block. Without the hit, the table needs more blocks than are free.
    Garbage(tables[1].free)
    collect_at_next_tuple()
    new = pool.allocate(tables, targets)
    assert new is not None
    assert [len(blocks) for blocks in new] == [1, 1]
    assert [len(table) for table in tables] == [1, 0], "freed after the allocation"
    pool.check_integrity([*tables, holder])


def test_released_blank_ids_are_reused_first():
    pool = make_pool()
    allocate(pool, FULL, 3).free()
    assert ids(allocate(pool, FULL, 2)) == [(3,), (2,)]


def test_blank_ids_are_taken_before_cached_blocks_are_evicted_in_release_order():
    pool = make_pool(num_blocks=5)
    table = allocate(pool, FULL, 3)
    table.cache(0, 2, hashes("p", 2))
    # The tail goes first: block 2, which is not cached, then block 1.
    table.free()
    assert pool.get_num_free_blocks() == 4
    first = allocate(pool, FULL, 2)
    assert set(ids(first)) == {(3,), (4,)}
    assert pool.num_evicted_ids == 0
    second = allocate(pool, FULL, 1)
    assert ids(second) == [(2,)]
    assert pool.find(FULL, b"p1") is None
    assert pool.find(FULL, b"p0") is not None
    assert pool.num_evicted_ids == 1


def test_a_grouped_block_is_evicted_as_a_whole():
    pool = make_pool(num_blocks=4)
    table = allocate_cached(pool, WINDOW, "w")
    (window,) = table.blocks()
    table.free()
    full = allocate(pool, FULL, 1)
    assert pool.find(WINDOW, b"w0") is None
    with pytest.raises(ValueError, match="freed or evicted"):
        window.block_hash  # noqa: B018
    assert "freed or evicted" in repr(window)
    assert pool.get_num_free_blocks() == 2
    pool.check_integrity([full])


def test_adopting_a_hit_takes_its_blocks_out_of_eviction():
    pool = make_pool(num_blocks=3)
    allocate_cached(pool, FULL, "p").free()
    hit = pool.find_prefix(FULL, hashes("p", 4), 4)
    assert len(hit) == 1
    assert [pool.count_evictable_ids((hit,), (skipped,)) for skipped in (0, 1)] == [1, 0]
    table = pool.new_table(FULL)
    pool.adopt((table,), (hit,), (0,))
    assert (hit[0].ref_cnt, pool.get_num_free_blocks()) == (1, 1)
    assert pool.count_evictable_ids((hit,), (0,)) == 0
    other = allocate(pool, FULL, 1)
    assert set(ids(other)).isdisjoint(ids(table))
    pool.check_integrity([table, other])


def test_only_the_needed_part_of_a_hit_is_referenced():
    pool = make_pool()
    allocate_cached(pool, FULL, "p", 3).free()
    hit = pool.find_prefix(FULL, hashes("p", 3), 3)
    table = pool.new_table(FULL)
    pool.adopt((table,), (hit,), (2,))
    assert [block.is_null for block in table.blocks()] == [True, True, False]
    assert [block.ref_cnt for block in hit] == [0, 0, 1]
    assert (table.num_released, table.num_decided) == (2, 3)
    pool.check_integrity([table])


def test_a_hit_that_was_evicted_meanwhile_is_not_adopted():
    pool = make_pool(num_blocks=3)
    allocate_cached(pool, FULL, "p", 2).free()
    hit = pool.find_prefix(FULL, hashes("p", 2), 2)
    other = allocate(pool, FULL, 1)
    table = pool.new_table(FULL)
    with pytest.raises(ValueError, match="freed or evicted"):
        pool.adopt((table,), (hit,), (0,))
    assert (len(table), pool.get_num_free_blocks()) == (0, 1)
    with pytest.raises(ValueError, match="freed or evicted"):
        hit.block_ids()
    pool.check_integrity([other])


def test_a_hit_is_adopted_in_all_types_or_in_none():
    pool = make_pool()
    allocate_cached(pool, FULL, "p").free()
    allocate_cached(pool, WINDOW, "w").free()
    hits = pool.find_prefix(FULL, hashes("p", 1), 1), pool.find_prefix(WINDOW, hashes("w", 1), 1)
    assert pool.count_evictable_ids(hits, (0, 0)) == 4
    pool.evict([block_id for block in hits[1] for block_id in block.block_ids])
    tables = pool.new_tables()
    with pytest.raises(ValueError, match="freed or evicted"):
        pool.adopt(tables, hits, (0, 0))
    assert [len(table) for table in tables] == [0, 0]
    assert hits[0][0].ref_cnt == 0
    pool.check_integrity(tables)


@pytest.mark.parametrize("alignment", [1, 2, 3])
@pytest.mark.parametrize("missing", [None, 0, 7, 20, 38, 39])
def test_searches_agree_with_a_plain_one(alignment, missing):
    """Longer than the prefetch distance, in both directions, around a gap."""
    pool = make_pool(num_blocks=100)
    prompt = hashes("p", 40)
    table = allocate(pool, FULL, 40)
    for i in range(40):
        if i != missing:
            table.cache(i, i + 1, prompt)
    for max_blocks in (0, 1, 19, 39, 40, 50):
        n = min(max_blocks, 40)
        cached = [i != missing for i in range(n)]
        end = cached.index(False) if False in cached else n
        found = pool.find_prefix(FULL, prompt, max_blocks, alignment)
        assert ids_of(found) == ids(table)[: end // alignment * alignment]
        for length in (1, 5, 19):
            ends = range(n // alignment * alignment, 0, -alignment)
            end = next((e for e in ends if all(cached[max(e - length, 0) : e])), 0)
            run = pool.find_last_run(FULL, prompt, max_blocks, length, alignment)
            first = max(end - length, 0)
            assert ids_of(run) == [(0,)] * first + ids(table)[first:end]


def test_too_large_an_allocation_takes_nothing():
    pool = make_pool(num_blocks=4)
    allocate_cached(pool, FULL, "p").free()
    table = pool.new_table(WINDOW)
    assert pool.allocate((table,), ((2, 2),)) is None
    assert len(table) == 0
    assert pool.find(FULL, b"p0") is not None
    pool.check_integrity()


def test_a_shared_block_is_released_when_its_last_holder_goes():
    pool = make_pool()
    first = allocate_cached(pool, FULL, "p")
    second = pool.new_table(FULL)
    pool.adopt((second,), (pool.find_prefix(FULL, hashes("p", 1), 1),), (0,))
    assert first.blocks()[0].ref_cnt == 2
    first.free()
    assert pool.get_num_free_blocks() == 11
    second.free()
    assert pool.get_num_free_blocks() == 12
    pool.check_integrity()


def test_detached_blocks_stay_referenced_until_freed():
    pool = make_pool()
    blocks = pool.detach([allocate(pool, FULL, 2)])
    pool.check_integrity()
    assert pool.get_num_free_blocks() == 10
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 12
    pool.check_integrity()
    with pytest.raises(ValueError, match="freed or evicted"):
        pool.free_blocks(blocks)


def test_evict_blocks_by_id_takes_whole_blocks_and_spares_requests():
    pool = make_pool()
    used, unused = allocate_cached(pool, WINDOW, "used"), allocate_cached(pool, WINDOW, "unused")
    ((_, used_id, _),), ((_, _, unused_id),) = ids(used), ids(unused)
    unused.free()
    with pytest.raises(ValueError, match="block_ids must be from 0 to 12, got 13"):
        pool.evict_blocks({used_id, 13})
    assert len(pool.cached_blocks(WINDOW)) == 2
    pool.evict_blocks({used_id, unused_id})
    assert pool.cached_blocks(WINDOW) == []
    assert pool.get_num_free_blocks() == 9
    pool.check_integrity([used])


def test_reset_needs_an_idle_pool():
    pool = make_pool()
    table = allocate_cached(pool, FULL, "p")
    assert not pool.reset_prefix_cache()
    assert pool.find(FULL, b"p0") is not None
    table.free()
    assert pool.reset_prefix_cache()
    assert pool.find(FULL, b"p0") is None
    assert pool.get_usage() == 0
    pool.check_integrity()


def test_duplicates_of_a_hash_take_over_in_order():
    pool = make_pool(num_blocks=4)
    tables = [allocate_cached(pool, FULL, "same") for _ in range(3)]
    first, _, third = (table.blocks()[0] for table in tables)
    assert pool.find(FULL, b"same0") == first
    assert len(pool.cached_blocks(FULL)) == 3
    tables[1].free()
    other = allocate(pool, FULL, 1)  # evicts the second
    assert pool.find(FULL, b"same0") == first
    pool.check_integrity([tables[0], tables[2], other])
    pool.evict_blocks({first.block_ids[0]})
    assert pool.find(FULL, b"same0") == third
    pool.evict_blocks({third.block_ids[0]})
    assert pool.find(FULL, b"same0") is None
    pool.check_integrity([tables[0], tables[2], other])


def test_the_last_run_is_the_longest_that_is_whole_and_aligned():
    pool = make_pool(num_blocks=20)
    table = allocate(pool, FULL, 8)
    prompt = hashes("p", 8)
    for i in (0, 2, 3, 5, 6, 7):
        table.cache(i, i + 1, prompt)

    def pattern(max_blocks: int, length: int, alignment: int = 1) -> str:
        run = pool.find_last_run(FULL, prompt, max_blocks, length, alignment)
        return "".join("." if block.is_null else "x" for block in run)

    assert pattern(8, 3) == ".....xxx"
    assert pattern(7, 3) == "x", "a prefix that is shorter needs all that there is"
    assert pattern(7, 2) == ".....xx"
    assert pattern(6, 2) == "..xx"
    assert pattern(99, 3, 3) == ""
    assert pattern(99, 2, 4) == "......xx"
    assert pattern(7, 2, 4) == "..xx"
    assert pattern(1, 5) == "x"


def test_evictions_are_recorded_on_request():
    pool = make_pool(num_blocks=4)
    assert pool.take_evictions() == []
    allocate_cached(pool, WINDOW, "w").free()
    allocate(pool, FULL, 1)
    assert pool.take_evictions() == [], "evictions are not recorded by default"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda pool, table: table.cache(0, 2, hashes("p", 2)), "within 0 to 1, got 0 to 2"),
        (lambda pool, table: table.cache(-1, 1, hashes("p", 2)), "within 0 to 1, got -1 to 1"),
        (
            lambda pool, table: table.cache(0, 1, []),
            "block_hashes must cover 1 blocks, got hashes for 0",
        ),
        (lambda pool, table: table.cache(0, 1, [b""]), "must have 1 to 32 bytes, got 0"),
        (lambda pool, table: table.cache(0, 1, [b"x" * 33]), "must have 1 to 32 bytes, got 33"),
        (lambda pool, table: table.release_before(-1), "within 0 to 1, got 0 to -1"),
        (lambda pool, table: setattr(table, "num_decided", 9), "within 0 to 1, got 0 to 9"),
        (
            lambda pool, table: pool.adopt((table,), (pool.new_list(FULL),), (0,)),
            "must be empty to adopt a hit, got one with 1 blocks",
        ),
        (
            lambda pool, table: pool.adopt((pool.new_table(0),), (pool.new_list(0),), (-1,)),
            "num_skipped must be from 0 to 4294967295, got -1",
        ),
        (
            lambda pool, table: pool.adopt((pool.new_table(0),), (pool.new_list(0),), (1 << 40,)),
            "num_skipped must be from 0 to 4294967295, got 1099511627776",
        ),
        (lambda pool, table: pool.new_table(2), "type_id must be at least 0 and below 2, got 2"),
        (lambda pool, table: pool.new_table(-1), "type_id must be at least 0 and below 2, got -1"),
        (lambda pool, table: pool.find_prefix(0, [], -1), "max_blocks must be at least 0, got -1"),
        (
            lambda pool, table: pool.find_last_run(0, [], 1, 0, 1),
            "length must be at least 1, got 0",
        ),
        (
            lambda pool, table: make_pool().allocate((table,), ((9, 9),)),
            "tables must be block tables of this pool, got one of another pool",
        ),
        (lambda pool, table: pool.allocate((table, table), ((9, 9),) * 2), "got 0 before 0"),
        (lambda pool, table: pool.allocate((table,), ()), "got 0 for 1 tables"),
        (lambda pool, table: pool.allocate((table,), [(2, 2), (2, 2)]), "got 2 for 1 tables"),
        (lambda pool, table: pool.allocate((table,), ((2, 2, 2),)), "num_written\\), got 3 items"),
        (
            lambda pool, table: pool.allocate((table,), ((-1, 1),)),
            "num_blocks must be from 0 to 4294967295, got -1",
        ),
        (
            lambda pool, table: pool.allocate((table,), ((1 << 32, 1),)),
            "num_blocks must be from 0 to 4294967295, got 4294967296",
        ),
        (
            lambda pool, table: pool.allocate((table,), ((2, -1),)),
            "num_written must be at least 0, got -1",
        ),
        (
            lambda pool, table: pool.allocate((table,), ((2, 2),), -1),
            "num_kept_free must be at least 0, got -1",
        ),
        (lambda pool, table: pool.find_prefix(0, [], 1, 0), "alignment must be at least 1, got 0"),
        (
            lambda pool, table: pool.num_missing_ids((table,), ((9, 9),), (), (0,)),
            "num_skipped must hold one count per hit, got 1 for 0 hits",
        ),
        (
            lambda pool, table: pool.num_missing_ids(
                (table,), ((9, 9),), (pool.new_list(0),), (0, 0)
            ),
            "num_skipped must hold one count per hit, got 2 for 1 hits",
        ),
        (
            lambda pool, table: pool.num_missing_ids(
                (table,), ((9, 9), (1, 1)), (pool.new_list(0),), (0,)
            ),
            "targets must hold one pair per block table, got 2 for 1 tables",
        ),
        (
            lambda pool, table: pool.num_missing_ids(
                (table,), ((9, 9),), (pool.new_list(WINDOW),), (0,)
            ),
            "must have the types of the tables in the same order",
        ),
        (
            lambda pool, table: make_pool().count_evictable_ids((table.blocks(),), (0,)),
            "hits must be block lists of this pool, got one of another pool",
        ),
        (
            lambda pool, table: pool.adopt((pool.new_table(1),), (table.blocks(),), (0,)),
            "must have the types of the tables in the same order",
        ),
        (lambda pool, table: pool.new_list(0) + make_pool().new_list(0), "same pool"),
        (lambda pool, table: pool.new_list(0) + pool.new_list(1), "must be of type 0, got type 1"),
    ],
)
def test_wrong_use_raises_and_changes_nothing(use, message):
    pool = make_pool()
    table = allocate(pool, FULL, 1)
    with pytest.raises(ValueError, match=message):
        use(pool, table)
    assert (len(table), pool.get_num_free_blocks()) == (1, 11)
    pool.check_integrity([table])


def test_a_block_is_cached_once_and_released_once():
    pool = make_pool()
    table = allocate_cached(pool, FULL, "p")
    with pytest.raises(ValueError, match="must not be cached yet, got block 0"):
        table.cache(0, 1, hashes("other", 1))
    (block,) = table.blocks()
    assert block.block_hash == b"p0"
    with pytest.raises(ValueError, match="must have a detached reference"):
        pool.release_detached(block)
    pool.check_integrity([table])
    (detached,) = table.detach()
    pool.release_detached(detached)
    with pytest.raises(ValueError, match="must have a detached reference"):
        pool.release_detached(detached)
    pool.check_integrity()


def test_caching_is_all_or_nothing():
    pool = make_pool()
    table = allocate(pool, FULL, 2)
    with pytest.raises(TypeError, match="a block hash must be bytes, got int"):
        table.cache(0, 2, [b"p0", 5])  # type: ignore[list-item]
    assert (table.num_decided, pool.cached_blocks(FULL)) == (0, [])
    table.cache(0, 2, hashes("p", 2))
    assert table.num_decided == 2
    pool.check_integrity([table])


def test_a_table_that_is_dropped_releases_its_blocks():
    pool = make_pool()
    table = allocate_cached(pool, WINDOW, "w", 2)
    assert pool.get_num_free_blocks() == 6
    del table
    assert pool.get_num_free_blocks() == 12
    pool.check_integrity()


@pytest.mark.parametrize("tables", [3, [1], (None,), (1,)])
def test_anything_but_a_tuple_of_tables_is_refused(tables):
    pool = make_pool()
    for use in (
        lambda: pool.num_missing_ids(tables, (), (), ()),
        lambda: pool.adopt(tables, (), ()),
        lambda: pool.allocate(tables, ()),
    ):
        with pytest.raises(TypeError, match="tables must be a tuple"):
            use()


@pytest.mark.parametrize("targets", [3, (1,), [None], (5, 5)])
def test_anything_but_a_sequence_of_pairs_is_refused(targets):
    pool = make_pool()
    tables, hits = (pool.new_table(FULL),), (pool.new_list(FULL),)
    for use in (
        lambda: pool.num_missing_ids(tables, targets, hits, (0,)),
        lambda: pool.allocate(tables, targets),
    ):
        with pytest.raises(TypeError, match="targets must be a sequence of pairs"):
            use()


def test_an_index_method_that_changes_targets_and_tables_does_no_harm():
    pool = make_pool(num_blocks=5)
    table, other = pool.new_table(FULL), pool.new_table(FULL)
    target: list[object] = []
    targets: list[object] = []

    class Changing:
        def __index__(self) -> int:
            target.clear()
            targets.clear()
            pool.allocate((other,), ((2, 2),))
            return 3

    target[:] = [Changing(), 9]
    targets[:] = [target, (1, 1)]
    # The number is converted first, so the blocks that its __index__ takes are counted.
    assert pool.allocate((table,), targets) is None  # type: ignore[arg-type]
    assert (len(table), len(other), pool.get_num_free_blocks()) == (0, 2, 2)
    new = pool.allocate((table,), [[2, 2]])  # type: ignore[list-item]
    assert new is not None
    assert len(new[0]) == 2
    pool.check_integrity([table, other])


@pytest.mark.parametrize("position", [1, 2, 3])
def test_an_index_method_that_changes_the_list_of_hashes_does_no_harm(position):
    pool = make_pool(num_blocks=300)
    prompt = [bytes([i]) * 32 for i in range(200)]

    class Emptying:
        def __index__(self) -> int:
            prompt.clear()
            return 3

    numbers: list[object] = [150, 2, 1]
    numbers[position - 1] = Emptying()
    assert len(pool.find_last_run(FULL, prompt, *numbers)) == 0  # type: ignore[arg-type]
    prompt[:] = [bytes([i]) * 32 for i in range(200)]
    table = allocate(pool, FULL, 200)
    with pytest.raises(ValueError, match="block_hashes must cover 150 blocks, got hashes for 0"):
        table.cache(Emptying(), 150, prompt)  # type: ignore[arg-type]
    pool.check_integrity([table])


def test_many_duplicates_of_a_hash_come_and_go_in_any_order():
    pool = make_pool(num_blocks=200)
    tables = [allocate_cached(pool, FULL, "same") for _ in range(150)]
    for i in (0, 149, 75, 1, 148, 2):
        tables[i].free()
    allocate(pool, FULL, 55)  # evicts all six, the first among them
    first = tables[3].blocks()[0]
    assert pool.find(FULL, b"same0") == first
    held = [table for table in tables if len(table)]
    pool.check_integrity(held)
    assert len(pool.cached_blocks(FULL)) == len(held) == 144
    for table in held:
        table.free()
    assert pool.reset_prefix_cache()
    assert pool.find(FULL, b"same0") is None
    pool.check_integrity()


def test_the_pool_outlives_its_python_object_while_tables_need_it():
    table = allocate(make_pool(), WINDOW, 2)
    assert ids(table) == [(1, 2, 3), (4, 5, 6)]
    table.free()
    assert len(table) == 0


def test_check_integrity_finds_lost_and_invented_references():
    pool = make_pool()
    table = allocate_cached(pool, FULL, "p")
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="0 blocks are evictable and 0 referenced; 1 own ids"):
        pool.check_integrity()
    with pytest.raises(AssertionError, match="is held 2 times"):
        pool.check_integrity([table, table])
    blocks = table.detach()
    pool.check_integrity()
    pool.release_detached(blocks[0])
    pool.check_integrity()


NUM_CRAFTED = 4000
#: The multiplier of an index without a secret, whose slots a client could compute.
OLD_FACTOR = 0x9E3779B97F4A7C15


def share_a_slot_without_a_secret(size: int) -> list[bytes]:
    """Digests whose slots were equal before slots depended on a secret."""
    inverse = pow(OLD_FACTOR, -1, 1 << 64)
    words = ((((0x5EED << 32) | n) * inverse - size) % (1 << 64) for n in range(NUM_CRAFTED))
    return [word.to_bytes(8, "little") + bytes(size - 8) for word in words]


def count_at(position: int, size: int = 32) -> list[bytes]:
    """Digests that differ only in two bytes."""
    counts = (n.to_bytes(2, "little") for n in range(NUM_CRAFTED))
    return [bytes(position) + count + bytes(size - position - 2) for count in counts]


CRAFTED = {
    "one slot of the old index": share_a_slot_without_a_secret(32),
    "one slot of the old index, 16 bytes": share_a_slot_without_a_secret(16),
    "first bytes differ": count_at(0),
    "second word differs": count_at(8),
    "last bytes differ": count_at(30),
    "last bytes of 16 differ": count_at(14, size=16),
    "two words differ by the same": [a[:8] + a[:8] + bytes(16) for a in count_at(0)],
    "two words differ by the opposite": [
        n.to_bytes(8, "little") + (2**64 - 1 - n).to_bytes(8, "little") + bytes(16)
        for n in range(NUM_CRAFTED)
    ],
}


@pytest.mark.parametrize("digests", CRAFTED.values(), ids=CRAFTED)
def test_crafted_hashes_do_not_share_slots(digests: list[bytes]):
    """A lookup reads few slots, whatever hashes a client chooses.

    The index is nearly half full. Then linear probing with random slots reads 1.5 slots on
    average (Knuth), and runs of more than 60 slots are very rare. With equal slots, the average
    would be 2,000.
    """
    pool = make_pool(num_blocks=NUM_CRAFTED + 97)
    table = allocate(pool, FULL, NUM_CRAFTED)
    table.cache(0, NUM_CRAFTED, digests)
    lengths = pool.probe_lengths(FULL)
    assert len(lengths) == len(set(digests)) == NUM_CRAFTED
    assert sum(lengths) / NUM_CRAFTED < 2
    assert max(lengths) < 200
    assert [pool.find(FULL, digest).block_ids for digest in digests[::97]] == ids(table)[::97]
    for digest in digests[:5]:
        assert len(pool.find_prefix(FULL, [digest], 1)) == 1


def test_the_slots_of_hashes_depend_on_a_secret():
    orders = []
    for _ in range(2):
        pool = make_pool(num_blocks=200)
        allocate_cached(pool, FULL, "prompt", 100)
        orders.append([block.block_hash for block in pool.cached_blocks(FULL)])
    assert set(orders[0]) == set(orders[1])
    assert orders[0] != orders[1]
