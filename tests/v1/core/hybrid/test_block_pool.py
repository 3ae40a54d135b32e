# SPDX-License-Identifier: Apache-2.0
"""BlockPool and PrefixIndex: every id in one place, blocks evicted as a whole."""

from collections import Counter

import pytest
import torch

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock
from vllm.v1.core.hybrid.prefix_index import PrefixIndex
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

FULL, WINDOW = 0, 1


def make_pool(num_blocks: int = 13) -> BlockPool:
    """One full-attention group and three sliding-window groups."""
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return BlockPool(
        num_blocks,
        (
            AttentionType(FullAttentionSpec(**shape), (0,)),
            AttentionType(SlidingWindowSpec(**shape, sliding_window=32), (1, 2, 3)),
        ),
    )


def held(*blocks: GroupedKVCacheBlock) -> Counter[GroupedKVCacheBlock]:
    return Counter(blocks)


def test_a_logical_block_takes_one_id_per_group():
    pool = make_pool()
    (full,) = pool.allocate(FULL, 1)
    windows = pool.allocate(WINDOW, 2)
    assert full.block_ids == (1,)
    assert [block.block_ids for block in windows] == [(2, 3, 4), (5, 6, 7)]
    assert pool.get_num_free_blocks() == 5
    assert pool.get_usage() == pytest.approx(7 / 12)
    pool.check_integrity(held(full, *windows))


def test_released_blank_ids_are_reused_first():
    pool = make_pool()
    blocks = pool.allocate(FULL, 3)
    pool.release(reversed(blocks))
    assert [block.block_ids for block in pool.allocate(FULL, 2)] == [(3,), (2,)]


def test_blank_ids_go_before_cached_blocks_and_those_in_release_order():
    pool = make_pool(num_blocks=5)
    a, b, c = pool.allocate(FULL, 3)
    pool.cache(a, b"a", 16)
    pool.cache(b, b"b", 32)
    pool.release((b, a, c))
    assert pool.get_num_free_blocks() == 4
    assert {block.block_ids for block in pool.allocate(FULL, 2)} == {(3,), (4,)}
    assert pool.num_evicted_ids == 0
    assert pool.allocate(FULL, 1)[0].block_ids == (2,)
    assert pool.prefix_indexes[FULL].get(b"b") is None
    assert pool.prefix_indexes[FULL].get(b"a") is a
    assert pool.num_evicted_ids == 1


def test_a_grouped_block_is_evicted_as_a_whole():
    pool = make_pool(num_blocks=4)
    (window,) = pool.allocate(WINDOW, 1)
    pool.cache(window, b"w", 16)
    pool.release((window,))
    (full,) = pool.allocate(FULL, 1)
    assert pool.prefix_indexes[WINDOW].get(b"w") is None
    assert window.block_hash is None
    assert pool.get_num_free_blocks() == 2
    pool.check_integrity(held(full))


def test_touch_takes_a_block_out_of_eviction():
    pool = make_pool(num_blocks=3)
    (a,) = pool.allocate(FULL, 1)
    pool.cache(a, b"a", 16)
    pool.release((a,))
    pool.touch((a,))
    assert (a.ref_cnt, pool.get_num_free_blocks()) == (1, 1)
    (b,) = pool.allocate(FULL, 1)
    assert b.block_ids != a.block_ids
    pool.check_integrity(held(a, b))


def test_too_large_an_allocation_takes_nothing():
    pool = make_pool(num_blocks=4)
    (a,) = pool.allocate(FULL, 1)
    pool.cache(a, b"a", 16)
    pool.release((a,))
    with pytest.raises(ValueError, match="cannot allocate 6 KV cache blocks: 3 of 4 are free"):
        pool.allocate(WINDOW, 2)
    assert pool.prefix_indexes[FULL].get(b"a") is a
    pool.check_integrity(held())


def test_wrong_use_raises():
    pool = make_pool()
    (a,) = pool.allocate(FULL, 1)
    pool.release((a,))
    with pytest.raises(ValueError, match="released more often"):
        pool.release((a,))
    with pytest.raises(ValueError, match="not referenced"):
        pool.cache(a, b"a", 16)
    (b,) = pool.allocate(FULL, 1)
    with pytest.raises(ValueError, match="was not handed out"):
        pool.free_blocks((b,))
    pool.cache(b, b"b", 16)
    with pytest.raises(ValueError, match="null or cached"):
        pool.cache(b, b"c", 16)
    with pytest.raises(ValueError, match="holds 13; the pool has ids 0 to 12"):
        pool.evict_blocks({1, 13})
    assert pool.prefix_indexes[FULL].get(b"b") is b


def test_detached_blocks_stay_referenced_until_freed():
    pool = make_pool()
    blocks = pool.allocate(FULL, 2)
    pool.detach(blocks)
    pool.check_integrity(held())
    assert pool.get_num_free_blocks() == 10
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 12
    pool.check_integrity(held())


def test_evict_blocks_by_id_takes_whole_blocks_and_spares_requests():
    pool = make_pool()
    used, unused = pool.allocate(WINDOW, 2)
    pool.cache(used, b"used", 16)
    pool.cache(unused, b"unused", 32)
    pool.release((unused,))
    pool.evict_blocks({used.block_ids[1], unused.block_ids[2]})
    assert len(pool.prefix_indexes[WINDOW]) == 0
    assert pool.get_num_free_blocks() == 9
    pool.check_integrity(held(used))


def test_reset_needs_an_idle_pool():
    pool = make_pool()
    (a,) = pool.allocate(FULL, 1)
    pool.cache(a, b"a", 16)
    assert not pool.reset_prefix_cache()
    assert pool.prefix_indexes[FULL].get(b"a") is a
    pool.release((a,))
    assert pool.reset_prefix_cache()
    assert pool.prefix_indexes[FULL].get(b"a") is None
    assert pool.get_usage() == 0
    pool.check_integrity(held())


def test_duplicates_of_a_hash_take_over_in_order():
    index = PrefixIndex()
    a, b, c = (GroupedKVCacheBlock(0, (i,)) for i in (1, 2, 3))
    for block in (a, b, c):
        index.insert(block, b"same", 16)
    assert index.get(b"same") is a
    assert len(index) == 3
    index.remove(b)
    index.check_integrity()
    index.remove(a)
    assert index.get(b"same") is c
    index.remove(c)
    assert index.get(b"same") is None
    assert len(index) == 0
    with pytest.raises(ValueError, match="not in the prefix cache"):
        index.remove(c)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, block: pool._blank.take(1), "ids in no place"),
        (lambda pool, block: setattr(block, "ref_cnt", 2), "is held 1 times"),
        (lambda pool, block: setattr(block, "block_hash", b"x"), "under another hash"),
        (lambda pool, block: setattr(block, "block_ids", (2,)), "ids in two places"),
        (lambda pool, block: setattr(pool, "_num_evictable_ids", 1), "are counted"),
    ],
)
def test_check_integrity_finds_damage(damage, message):
    pool = make_pool()
    (block,) = pool.allocate(FULL, 1)
    pool.cache(block, b"a", 16)
    pool.check_integrity(held(block))
    damage(pool, block)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(held(block))
