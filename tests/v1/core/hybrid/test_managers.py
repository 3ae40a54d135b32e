# SPDX-License-Identifier: Apache-2.0
"""Managers and coordinators on their own: hits, releases and caching, by hand."""

import pytest

from support.by_hand import (
    HASHES,
    cache,
    hit_pattern,
    make_coordinator,
    request,
    step_to,
)
from support.kv_configs import KVSetup, chunked, full, mamba, mla, sliding
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.hybrid.attention_type import get_attention_types
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    create_coordinator,
)
from vllm.v1.core.hybrid.settings import CacheSettings


@pytest.mark.parametrize("kind", [full(16), mla(16)])
def test_full_attention_hits_up_to_the_first_miss(kind):
    coordinator = make_coordinator(kind)
    assert isinstance(coordinator, UnitaryKVCacheCoordinator)
    cache(coordinator, 0, 0, 1, 3)
    assert hit_pattern(coordinator, 1000) == (32, ["xx"])
    assert hit_pattern(coordinator, 31) == (16, ["x"])
    assert hit_pattern(coordinator, 15) == (0, [""])


@pytest.mark.parametrize(
    ("window", "cached", "max_tokens", "expected"),
    [
        # The window reaches 32 tokens back: two blocks before the boundary.
        (33, (0, 1, 2, 3), 79, (64, ["..xx"])),
        (33, (0, 2, 3), 79, (64, ["..xx"])),
        (33, (0, 1, 3), 79, (32, ["xx"])),
        # At the beginning of the sequence, only the existing blocks are needed.
        (33, (0, 3), 79, (16, ["x"])),
        (33, (1, 3), 79, (0, [""])),
        # One token more reaches into a third block.
        (34, (0, 1, 2, 3), 79, (64, [".xxx"])),
        (34, (0, 2, 3), 79, (16, ["x"])),
        # A window within a block.
        (4, (2,), 79, (48, ["..x"])),
        (4, (2,), 47, (0, [""])),
        # A window longer than the prompt.
        (1000, (0, 1, 2), 79, (48, ["xxx"])),
    ],
)
def test_sliding_window_hits_need_the_window_before_the_boundary(
    window, cached, max_tokens, expected
):
    coordinator = make_coordinator(sliding(window, 16))
    cache(coordinator, 0, *cached)
    assert hit_pattern(coordinator, max_tokens) == expected


@pytest.mark.parametrize(
    ("chunk", "cached", "max_tokens", "expected"),
    [
        # Chunks of four blocks: a hit needs the blocks of its own chunk up to the boundary.
        (64, (4, 5), 100, (96, ["....xx"])),
        (64, (4, 6), 120, (80, ["....x"])),
        # Where a chunk begins, no block is needed.
        (64, (0, 1, 5), 100, (64, ["...."])),
        (64, (), 64, (64, ["...."])),
        (64, (0, 1, 3), 63, (32, ["xx"])),
        (64, (1, 2), 63, (0, [""])),
        # A chunk that begins inside of a block needs the whole block.
        (40, (2, 3), 79, (64, ["..xx"])),
        (40, (0, 1, 3), 79, (32, ["xx"])),
        (40, (3,), 79, (0, [""])),
        (40, (), 100, (80, ["....."])),
        # A chunk smaller than a block, and one larger than the prompt.
        (8, (), 79, (64, ["...."])),
        (1000, (0, 1, 3), 79, (32, ["xx"])),
    ],
)
def test_chunked_local_hits_need_the_chunk_before_the_boundary(chunk, cached, max_tokens, expected):
    coordinator = make_coordinator(chunked(chunk, 16))
    if cached:
        cache(coordinator, 0, *cached)
    assert hit_pattern(coordinator, max_tokens) == expected


def test_a_state_is_hit_where_it_is():
    coordinator = make_coordinator(mamba(16, 3))
    cache(coordinator, 0, 1, 4)
    assert hit_pattern(coordinator, 100) == (80, ["....x"])
    assert hit_pattern(coordinator, 79) == (32, [".x"])
    assert hit_pattern(coordinator, 31) == (0, [""])


def test_attention_can_only_be_cut_to_where_a_state_is():
    coordinator = make_coordinator(full(16), mamba(16, 3), sliding(33, 16))
    cache(coordinator, 0, 0, 1, 2, 3)
    cache(coordinator, 1, 1, 2, 4)
    cache(coordinator, 2, 0, 1, 3)
    assert hit_pattern(coordinator, 100) == (32, ["xx", ".x", "xx"])
    assert coordinator.find_hit(HASHES, 100).junction == 64


def test_hybrid_hit_is_the_longest_that_all_types_accept():
    coordinator = make_coordinator(full(16), sliding(33, 16, 5))
    assert isinstance(coordinator, HybridKVCacheCoordinator)
    cache(coordinator, 0, 0, 1, 2, 3, 4)
    cache(coordinator, 1, 1, 2, 4)
    assert hit_pattern(coordinator, 100) == (48, ["xxx", ".xx"])
    assert coordinator.find_hit(HASHES, 100).junction == 80


def test_types_are_looked_up_again_when_a_later_one_shortens_the_hit():
    # Windows of two blocks and of one; no full attention.
    coordinator = make_coordinator(sliding(33, 16), sliding(17, 16))
    cache(coordinator, 0, 0, 1, 3, 4)
    cache(coordinator, 1, 1, 3)
    # The first type accepts 80, and the second 64. The first refuses 64, because it lacks block 2.
    assert hit_pattern(coordinator, 100) == (32, ["xx", ".x"])
    assert coordinator.find_hit(HASHES, 100).junction == 80


def test_unequal_block_sizes_hit_at_common_boundaries():
    coordinator = make_coordinator(full(32), sliding(17, 16, 2))
    assert coordinator.hash_block_size == 16
    cache(coordinator, 0, 0, 1)
    cache(coordinator, 1, 1, 2)
    # The window type could resume at 48, which is inside a block of the other.
    assert hit_pattern(coordinator, 100) == (32, ["x", ".x"])


@pytest.mark.parametrize(
    ("retention", "boundaries", "expected"),
    [
        # Window of two blocks of 16; hits end at multiples of 64.
        (None, [64], [2, 3, 6, 7]),
        (0, [64], [2, 3]),
        (0, [128, 64], [2, 3, 6, 7]),
        (128, [64], [2, 3, 6, 7]),
        (128, [0], [6, 7]),
    ],
)
def test_sliding_window_caches_what_can_serve_a_hit(retention, boundaries, expected):
    coordinator = make_coordinator(full(64), sliding(33, 16), retention=retention)
    window = coordinator.managers[1]
    for begin, end in ((0, 8), (3, 7)):
        runs = window.cacheable_blocks(begin, end, boundaries)
        cached = [i for run in runs for i in range(*run)]
        assert cached == [i for i in expected if begin <= i < end]


def test_blocks_are_released_when_no_later_query_reads_them():
    coordinator = make_coordinator(sliding(33, 16, 2))
    (manager,) = coordinator.managers
    blocks = coordinator.blocks_of("r")
    coordinator.allocate("r", blocks, step_to(96))
    (table,) = blocks.tables
    free = coordinator.block_pool.get_num_free_blocks()
    # With 47 tokens computed, the next query reads positions 15 and later.
    manager.release_skipped(table, 47)
    assert coordinator.block_pool.get_num_free_blocks() == free
    manager.release_skipped(table, 48)
    assert coordinator.block_pool.get_num_free_blocks() == free + 2
    assert [block.is_null for block in table.blocks()] == [True] + [False] * 5
    manager.release_skipped(table, 40)
    manager.release_skipped(table, 1000)
    assert all(block.is_null for block in table.blocks())
    coordinator.check_integrity()


@pytest.mark.parametrize(
    ("chunk", "releases"),
    [(64, {63: 0, 64: 4, 127: 4, 128: 8}), (40, {39: 0, 40: 2, 79: 2, 80: 5, 120: 7})],
)
def test_a_chunk_is_released_when_it_is_over(chunk, releases):
    coordinator = make_coordinator(chunked(chunk, 16, 2))
    (manager,) = coordinator.managers
    blocks = coordinator.blocks_of("r")
    coordinator.allocate("r", blocks, step_to(160))
    (table,) = blocks.tables
    for num_processed, num_released in releases.items():
        due = manager.release_skipped(table, num_processed)
        assert table.num_released == num_released
        later = [n for n, more in releases.items() if more > num_released]
        assert not later or due == later[0]
    coordinator.check_integrity()


def shape(table) -> str:
    return "".join("." if block.is_null else "x" for block in table.blocks())


def test_a_step_takes_one_state_however_long_it_is():
    coordinator = make_coordinator(mamba(16, 3))
    pool = coordinator.block_pool
    free = pool.get_num_free_blocks()
    blocks = coordinator.blocks_of("r")
    (table,) = blocks.tables

    def num_missing(end: int) -> int:
        targets = coordinator.targets(step_to(end))
        return pool.num_missing_ids(blocks.tables, targets, coordinator.no_blocks, (0,))

    assert num_missing(100) == 3
    allocated = coordinator.allocate("r", blocks, step_to(40))
    assert allocated is not None
    (new,) = allocated
    assert (shape(table), [block.is_null for block in new]) == ("..x", [True, True, False])
    assert num_missing(48) == 0
    assert num_missing(100) == 3
    again = coordinator.allocate("r", blocks, step_to(48))
    assert again is not None and not len(again[0])
    coordinator.allocate("r", blocks, step_to(96))
    assert shape(table) == "..x..x"
    assert pool.get_num_free_blocks() == free - 6
    coordinator.check_integrity()
    # The next query reads the state after 48 tokens until those of the next step are processed.
    coordinator.release_skipped(blocks, 48)
    assert (shape(table), blocks.release_at) == ("..x..x", 49)
    coordinator.release_skipped(blocks, 96)
    assert (shape(table), blocks.release_at) == (".....x", 97)
    assert pool.get_num_free_blocks() == free - 3
    coordinator.check_integrity()
    coordinator.free("r")
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize(
    ("retention", "num_tokens", "start", "end", "expected"),
    [
        # The state after 32 tokens is written in the middle, and the state after 40 at the end.
        (0, 40, 0, 40, ".xx"),
        (0, 40, 16, 40, "xx"),
        # A step that ends at a boundary writes the state of the previous boundary.
        (0, 48, 0, 48, ".xx"),
        # A step without a boundary between its first block and its last.
        (0, 40, 32, 40, "x"),
        (0, 16, 0, 16, "x"),
        # A step that does not begin at a boundary cannot write it.
        (0, 40, 17, 40, "x"),
        # Only the end of a prefill gets such a state, unless all states are kept.
        (0, 100, 0, 64, "...x"),
        (None, 100, 0, 64, "..xx"),
    ],
)
def test_a_state_in_the_middle_of_a_step(retention, num_tokens, start, end, expected):
    manager = KVSetup(
        (mamba(16, checkpoint_alignment=1), full(16)), 100, retention=retention
    ).build(KVCacheManager)
    req = request("r", (1, num_tokens))
    if start:
        manager.allocate_slots(req, start)
        req.num_computed_tokens = start
    free = manager.block_pool.get_num_free_blocks()
    slots = manager.allocate_slots(req, end - start)
    states, attention = slots.get_block_ids()
    assert "".join("x" if block_id else "." for block_id in states) == expected
    num_new = expected.count("x") + len(attention)
    assert manager.block_pool.get_num_free_blocks() == free - num_new
    manager.check_integrity()


@pytest.mark.parametrize(
    ("retention", "boundaries", "expected"),
    [
        (None, [64], [0, 1, 2, 3, 4, 5]),
        (0, [64], [3]),
        (0, [32, 80], [1, 4]),
        (32, [16], [0, 1, 3, 5]),
    ],
)
def test_states_that_can_serve_a_hit(retention, boundaries, expected):
    coordinator = make_coordinator(full(16), mamba(16), retention=retention)
    states = coordinator.managers[1]
    assert states.caches_all == (retention is None)
    if retention is not None:
        runs = states.cacheable_blocks(0, 6, boundaries)
        assert [i for run in runs for i in range(*run)] == expected


def test_a_state_can_be_hit_from_the_step_after_the_one_that_writes_it():
    manager = KVSetup((full(16), mamba(16)), 100).build(KVCacheManager)
    requests = [request(f"r{i}", (1, 40), (i, 5)) for i in (2, 3)]
    manager.new_step_starts()
    assert manager.allocate_slots(requests[0], 32) is not None
    for in_time in (False, True):
        blocks, hit, _ = manager.get_computed_blocks(requests[1])
        assert hit == 32
        free = manager.block_pool.get_num_free_blocks()
        slots = manager.allocate_slots(requests[1], 8, hit, blocks)
        assert (slots is not None) == in_time
        assert (manager.block_pool.get_num_free_blocks() < free) == in_time
        manager.check_integrity()
        manager.new_step_starts()


def test_next_event_is_the_first_thing_that_can_happen():
    coordinator = make_coordinator(full(16), sliding(33, 16))
    blocks = coordinator.blocks_of("r")
    assert blocks.next_event() == 0
    req = request("r", (1, 100))
    coordinator.allocate("r", blocks, step_to(40))
    coordinator.release_skipped(blocks, 0)
    assert blocks.next_event() == 0  # nothing has been cached yet
    coordinator.cache_blocks(req, blocks, 40)
    assert (blocks.allocate_at, blocks.cache_at, blocks.release_at) == (49, 48, 48)
    assert blocks.next_event() == 48  # the third block is full
    coordinator.allocate("r", blocks, step_to(100))
    coordinator.cache_blocks(req, blocks, 63)
    # A step that begins with 48 tokens processed releases the first block, and ends with 49.
    assert (blocks.allocate_at, blocks.cache_at, blocks.next_event()) == (113, 64, 49)
    coordinator.release_skipped(blocks, 48)
    assert (blocks.release_at, blocks.next_event()) == (64, 64)
    coordinator.check_integrity()


@pytest.mark.parametrize("name", ["allocate_at", "cache_at", "release_at"])
def test_a_request_that_sleeps_too_long_is_found(name):
    coordinator = make_coordinator(full(16), sliding(33, 16))
    blocks = coordinator.blocks_of("r")
    coordinator.allocate("r", blocks, step_to(40))
    coordinator.check_integrity()
    setattr(blocks, name, 50)
    with pytest.raises(AssertionError, match="request r sleeps until 50"):
        coordinator.check_integrity()


def test_coordinators_refuse_what_they_cannot_do():
    kinds = (full(16), sliding(33, 16))
    config = KVSetup(kinds=kinds, num_blocks=10).kv_cache_config()
    types = get_attention_types(config)
    settings = CacheSettings(64, 64, 16, 16, True, None, False)
    off = CacheSettings(64, 64, 16, 16, False, None, False)
    with pytest.raises(ValueError, match="attention types must be 1, got 2"):
        UnitaryKVCacheCoordinator(BlockPool(10, types, settings))
    with pytest.raises(ValueError, match="attention types must be 2 or more, got 1"):
        HybridKVCacheCoordinator(BlockPool(10, types[:1], settings))
    with pytest.raises(ValueError, match="enable_caching must be True, got False"):
        HybridKVCacheCoordinator(BlockPool(10, types, off))
    for pool in (BlockPool(10, types, off), BlockPool(10, (), settings)):
        assert isinstance(create_coordinator(pool), KVCacheCoordinatorNoPrefixCache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retention": 24}, "retention_interval must be 0 or a positive multiple of 16, got 24"),
        ({"retention": -16}, "must be 0 or a positive multiple of 16, got -16"),
        ({"kinds": (full(16),), "retention": 32}, "without sliding-window or Mamba layers, got 32"),
        ({"hash_block_size": 6}, "must be a multiple of hash_block_size"),
        ({"watermark": -0.5}, "watermark must be at least 0.0, got -0.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    setup = KVSetup(**{"kinds": (full(16), sliding(33, 16)), "num_blocks": 10} | changes)
    with pytest.raises(ValueError, match=message):
        setup.build(KVCacheManager)
