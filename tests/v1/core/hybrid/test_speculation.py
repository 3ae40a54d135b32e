# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in managers, coordinators and KVCacheManager, by hand."""

from dataclasses import replace

import pytest

from support.by_hand import GEMMA, cache, hit_pattern, prefill, request
from support.by_hand import make_coordinator as make_any_coordinator
from support.kv_configs import AttentionKind, KVSetup, full, sliding
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.hybrid.attention_type import get_attention_types
from vllm.v1.core.hybrid.coordinators import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager


def make_coordinator(*kinds: AttentionKind, **changes: object) -> KVCacheCoordinator:
    return make_any_coordinator(*kinds, use_eagle=True, **changes)


# ------------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("drafts", "use_eagle", "expected"),
    [
        ((False, False), False, [False, False]),
        # No group is flagged, so any group may be the drafter's.
        ((False, False), True, [True, True]),
        ((False, True), True, [False, True]),
        ((False, True), False, [False, True]),
    ],
)
def test_which_types_have_draft_layers(drafts, use_eagle, expected):
    kinds = tuple(replace(kind, draft=d) for kind, d in zip(GEMMA, drafts, strict=True))
    config = KVSetup(kinds, 100).kv_cache_config()
    types = get_attention_types(config, use_eagle)
    assert [t.is_eagle for t in types] == expected
    coordinator = KVSetup(kinds, 100, use_eagle=use_eagle).build(KVCacheManager).coordinator
    groups = [[0], [1, 2, 3, 4, 5]]
    eagle = [g for ids, is_eagle in zip(groups, expected, strict=True) if is_eagle for g in ids]
    assert sorted(coordinator.eagle_group_ids) == eagle


def test_a_draft_group_is_of_the_type_with_its_spec():
    """As in base's lookup, the type of the draft layers includes the other layers with its spec."""
    kinds = (full(16), full(16, draft=True), sliding(33, 16))
    (both, window) = get_attention_types(KVSetup(kinds, 100).kv_cache_config(), use_eagle=True)
    assert (both.group_ids, both.is_eagle) == ((0, 1), True)
    assert (window.group_ids, window.is_eagle) == ((2,), False)


# ------------------------------------------------------------------------------------- hits


def test_full_attention_drops_the_last_block_that_matches():
    coordinator = make_coordinator(full(16, 2))
    cache(coordinator, 0, 0, 1, 2, 4)
    assert hit_pattern(coordinator, 1000) == (32, ["xx"])
    # The dropped block may hold tokens beyond those that may be hit.
    assert hit_pattern(coordinator, 47) == (32, ["xx"])
    assert hit_pattern(coordinator, 31) == (16, ["x"])
    assert hit_pattern(coordinator, 15) == (0, [""])


def test_one_group_drops_the_last_block_of_those_that_may_be_hit():
    coordinator = make_coordinator(full(16))
    cache(coordinator, 0, 0, 1, 2)
    assert hit_pattern(coordinator, 1000) == (32, ["xx"])
    assert hit_pattern(coordinator, 47) == (16, ["x"])
    assert hit_pattern(coordinator, 31) == (0, [""])


@pytest.mark.parametrize(
    ("window", "cached", "max_tokens", "expected"),
    [
        # Two blocks before the boundary, and one after it.
        (33, (1, 2, 3), 79, (48, [".xx"])),
        (33, (2, 3), 79, (0, [""])),
        (33, (0, 1, 3), 79, (16, ["x"])),
        (33, (1, 2, 3, 4), 63, (48, [".xx"])),
        (33, (0,), 79, (0, [""])),
        # A window within a block, and one longer than the prompt.
        (4, (2, 3), 79, (48, ["..x"])),
        (1, (3,), 79, (48, ["..."])),
        (1000, (0, 1, 2), 79, (32, ["xx"])),
    ],
)
def test_sliding_windows_need_one_block_more(window, cached, max_tokens, expected):
    coordinator = make_coordinator(sliding(window, 16, 2))
    cache(coordinator, 0, *cached)
    assert hit_pattern(coordinator, max_tokens) == expected


def test_only_the_types_of_the_drafter_drop_a_block():
    coordinator = make_coordinator(full(16), sliding(33, 16, draft=True))
    cache(coordinator, 0, 0, 1, 2, 3)
    cache(coordinator, 1, 0, 1, 2)
    assert hit_pattern(coordinator, 100) == (32, ["xx", "xx"])
    cache(coordinator, 1, 3, 4)
    # Full attention does not need a block after the fourth.
    assert hit_pattern(coordinator, 100) == (64, ["xxxx", "..xx"])


def test_a_type_also_checks_the_block_after_a_shortened_hit():
    """Base does not: it checks the last block of each drafting type only once."""
    coordinator = make_coordinator(sliding(17, 16), sliding(33, 16))
    cache(coordinator, 0, 1, 3, 4)
    cache(coordinator, 1, 0, 1, 2)
    # The first type accepts 64, and the second 32. The first lacks the block after 32 tokens.
    assert hit_pattern(coordinator, 100) == (0, ["", ""])


def test_unequal_block_sizes():
    coordinator = make_coordinator(full(32), sliding(17, 16, 2))
    cache(coordinator, 0, 0, 1, 2)
    cache(coordinator, 1, 0, 1, 2, 3)
    # Windows resume at 32: 48 is inside of a block, and no block is cached after 64.
    assert hit_pattern(coordinator, 200) == (32, ["x", ".x"])
    cache(coordinator, 1, 4)
    assert hit_pattern(coordinator, 200) == (64, ["xx", "...x"])


def test_a_short_prefix_with_unequal_block_sizes_is_hit():
    """Base misses this hit: it rounds down both before and after it drops the last block."""
    coordinator = make_coordinator(full(32), sliding(1000, 16))
    cache(coordinator, 0, 0, 1)
    cache(coordinator, 1, 0, 1, 2)
    assert hit_pattern(coordinator, 100) == (32, ["x", "xx"])


# --------------------------------------------------------------------------- what is cached


@pytest.mark.parametrize(
    ("kinds", "lookahead", "expected"),
    [
        # Per type: the number of blocks that this many tokens make cacheable.
        (GEMMA, 1, [{15: 0, 16: 1, 47: 2, 48: 3}] * 2),
        # Some of the last three tokens will be computed again.
        (GEMMA, 4, [{18: 0, 19: 1, 50: 2, 51: 3}] * 2),
        # Up to a multiple of 32, and the block after that.
        ((full(32), sliding(33, 16)), 1, [{31: 0, 32: 1, 64: 2}, {31: 0, 32: 2, 48: 3, 63: 3}]),
        ((full(32), sliding(33, 16)), 3, [{33: 0, 34: 1}, {31: 0, 32: 1, 34: 2, 49: 2, 50: 3}]),
    ],
)
def test_cacheable_blocks(kinds, lookahead, expected):
    coordinator = make_coordinator(*kinds, prefill_lookahead=lookahead)
    for manager, counts in zip(coordinator.managers, expected, strict=True):
        assert {n: manager.num_cacheable_blocks(n) for n in counts} == counts
        for num_tokens in range(200):
            now = manager.num_cacheable_blocks(num_tokens)
            due = manager.next_cacheable(now)
            assert manager.num_cacheable_blocks(due - 1) == now < manager.num_cacheable_blocks(due)


def test_target_types_are_final_while_the_drafter_computes_again():
    kinds = (full(16), sliding(33, 16, draft=True))
    target, draft = make_coordinator(*kinds, prefill_lookahead=4).managers
    assert (target.num_cacheable_blocks(48), draft.num_cacheable_blocks(48)) == (3, 2)


@pytest.mark.parametrize(
    ("retention", "boundaries", "expected"),
    [
        # Two blocks of 16 before a multiple of 64, and one after it.
        (None, [64], [2, 3, 4, 6, 7, 8]),
        (0, [64], [2, 3, 4]),
        (0, [0], [0]),
        (128, [64], [2, 3, 4, 6, 7, 8]),
        (128, [0], [0, 6, 7, 8]),
    ],
)
def test_sliding_windows_cache_the_block_after_a_hit_too(retention, boundaries, expected):
    window = make_coordinator(full(64), sliding(33, 16), retention=retention).managers[1]
    for begin, end in ((0, 9), (3, 7), (4, 9), (5, 9)):
        runs = window.cacheable_blocks(begin, end, boundaries)
        cached = [i for run in runs for i in range(*run)]
        assert cached == [i for i in expected if begin <= i < end]


# ------------------------------------------------------------------------------ the manager


def test_a_repeated_prompt_is_hit_up_to_the_block_before_the_last():
    for use_eagle, expected in ((False, 96), (True, 80)):
        manager = KVSetup(GEMMA, 1000, retention=0, use_eagle=use_eagle).build(KVCacheManager)
        prefill(manager, request("a", (1, 100)))
        assert manager.get_computed_blocks(request("b", (1, 100)))[1] == expected
        # A prompt that exactly fills its last block: once more, and with a continuation.
        prefill(manager, request("c", (2, 96)))
        assert manager.get_computed_blocks(request("d", (2, 96)))[1] == 80
        assert manager.get_computed_blocks(request("e", (2, 96), (3, 40)))[1] == 80
        if use_eagle:
            manager.evict_blocks({ids[-1] for ids in manager.get_block_ids("c")})
            assert manager.get_computed_blocks(request("f", (2, 96)))[1] == 64


def test_lookahead_slots_are_allocated_and_end_at_the_longest_sequence():
    manager = KVSetup(GEMMA, 1000, max_model_len=64).build(KVCacheManager)
    req = request("r", (1, 44))
    prefill(manager, req, num_lookahead_tokens=4)
    assert [len(ids) for ids in manager.get_block_ids("r")] == [3] * 6
    req.append_output_token_ids(7)
    # Four drafts and four lookahead slots: 53 slots in all.
    assert manager.allocate_slots(req, 5, num_lookahead_tokens=4) is not None
    assert [len(ids) for ids in manager.get_block_ids("r")] == [4] * 6
    req.num_computed_tokens = 62
    manager.allocate_slots(req, 1, num_lookahead_tokens=4)
    assert [len(ids) for ids in manager.get_block_ids("r")] == [4] * 6


def test_rejected_drafts_neither_enter_the_cache_nor_move_the_window():
    manager = KVSetup(GEMMA, 1000).build(KVCacheManager)
    req = request("r", (1, 46))
    prefill(manager, req)
    cached, released = [], []
    for _ in range(3):  # All four drafts are rejected: one token a step.
        req.append_output_token_ids(7)
        assert manager.allocate_slots(req, 5) is not None
        manager.check_integrity()
        cached.append(manager.estimate_cached_tokens(req))
        released.append([ids[0] == 0 for ids in manager.get_block_ids("r")])
        req.num_computed_tokens += 5
        req.num_computed_tokens -= 4
    # The steps begin at 46, 47 and 48, and with drafts they end beyond 48 each time.
    assert cached == [32, 48, 48]
    # The query at 48 is the first that reads from 16 on.
    assert released == [[False] * 6, [False] * 6, [False] + [True] * 5]


@pytest.mark.parametrize("num_in_flight", [0, 5])
def test_drafts_in_flight_hold_the_window(num_in_flight):
    manager = KVSetup(GEMMA, 1000).build(KVCacheManager)
    req = request("r", (1, 44))
    prefill(manager, req)
    req.append_output_token_ids(7)
    manager.allocate_slots(req, 5)
    # 49 tokens are computed if the in-flight drafts are accepted, and 45 if they are rejected.
    req.num_computed_tokens += 5
    req.num_in_flight_tokens = num_in_flight
    manager.allocate_slots(req, 5)
    released = [ids[0] == 0 for ids in manager.get_block_ids("r")]
    assert released == [False] + [not num_in_flight] * 5


def test_tokens_that_a_drafter_reads_again_stay_before_the_window():
    kinds = (full(16), sliding(33, 16, 5, retained=3))
    manager = KVSetup(kinds, 1000, prefill_lookahead=4, use_eagle=True).build(KVCacheManager)
    req = request("r", (1, 48))
    prefill(manager, req)
    first_released = []
    for _ in range(6):
        req.append_output_token_ids(7)
        manager.allocate_slots(req, 1)
        first_released.append(manager.get_block_ids("r")[1][0] == 0)
        manager.check_integrity()
        req.num_computed_tokens += 1
    # Without these tokens, the release is at 48 computed tokens. Now it is at 51.
    assert first_released == [False] * 3 + [True] * 3


def test_hits_of_windows_with_retained_tokens_are_adopted():
    kinds = (full(16), sliding(33, 16, 5, retained=3))
    setup = KVSetup(kinds, 1000, prefill_lookahead=4, use_eagle=True)
    nulls = []
    for manager_class in (BaseKVCacheManager, KVCacheManager):
        manager = setup.build(manager_class)
        req = request("a", (1, 120))
        manager.allocate_slots(req, 120)
        again = request("b", (1, 120))
        blocks, num_hit, _ = manager.get_computed_blocks(again)
        assert num_hit == 96
        manager.allocate_slots(again, 24, num_hit, blocks)
        nulls.append(
            [[i for i, b in enumerate(ids) if not b] for ids in manager.get_block_ids("b")]
        )
    manager.check_integrity()
    assert nulls[0] == nulls[1] == [[]] + [[0, 1, 2, 3]] * 5


def test_more_modules_than_a_block_holds_are_refused():
    setup = KVSetup(GEMMA, 100, use_eagle=True, prefill_lookahead=17)
    with pytest.raises(
        ValueError, match=r"num_prefill_lookahead must be at most .* \(16\) .* got 17"
    ):
        setup.build(KVCacheManager)
    with pytest.raises(ValueError, match="17"):
        setup.build(BaseKVCacheManager)
    assert replace(setup, caching=False).build(KVCacheManager)
    assert replace(setup, use_eagle=False).build(KVCacheManager)
