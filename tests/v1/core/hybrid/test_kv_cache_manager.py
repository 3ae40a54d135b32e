# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager as the scheduler uses it, with values worked out by hand.

Gemma-like unless said otherwise: one full-attention group and five groups of window 33
(two blocks of 16 before the query), so that a token position costs six physical blocks.
"""

import gc
import inspect
import weakref

import pytest

from support.by_hand import GEMMA, decode, held_pattern, make_manager, prefill, request
from support.kv_configs import KVSetup, full, mla, sliding
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.request import Request, RequestStatus


def free(manager: KVCacheManager, *requests: Request) -> None:
    for req in requests:
        manager.free(req)
        manager.check_integrity()


def test_it_has_the_public_methods_and_attributes_of_base():
    """Every public method and attribute of base's manager, with base's parameters."""
    ours, base = make_manager(), KVSetup(GEMMA, 1000).build(BaseKVCacheManager)
    for name in dir(base):
        if name.startswith("_"):
            continue
        assert hasattr(ours, name), name
        if inspect.isfunction(getattr(BaseKVCacheManager, name, None)):
            expected = inspect.signature(getattr(BaseKVCacheManager, name))
            actual = inspect.signature(getattr(KVCacheManager, name))
            assert [(p.name, p.default, p.kind) for p in actual.parameters.values()] == [
                (p.name, p.default, p.kind) for p in expected.parameters.values()
            ], name
    constructor = inspect.signature(BaseKVCacheManager.__init__).parameters.values()
    ours_takes = inspect.signature(KVCacheManager.__init__).parameters.values()
    assert [(p.name, p.default) for p in constructor] == [
        (p.name, p.default) for p in ours_takes if p.kind is not p.KEYWORD_ONLY
    ]
    # Two parameters exist only here.
    assert [(p.name, p.default) for p in ours_takes if p.kind is p.KEYWORD_ONLY] == [
        ("verify_every_step", False),
        ("is_covered", False),
    ]


def test_block_ids_come_per_group_in_config_order():
    manager = make_manager(kinds=(sliding(33), full(), sliding(33, num_groups=4)))
    req = request("r", (1, 40))
    assert prefill(manager, req) == 0
    ids = manager.get_block_ids("r")
    assert [len(group) for group in ids] == [3] * 6
    assert len({block_id for group in ids for block_id in group}) == 18
    full_type = manager.coordinator.managers[1]
    table = manager.coordinator.requests["r"].tables[full_type.type_id]
    assert ids[1] == [block.block_ids[0] for block in table.blocks()]
    assert manager.get_blocks("r").get_block_ids(group_ids=[1]) == (ids[1],)
    assert [m.block_size for m in manager.coordinator.single_type_managers] == [16] * 6
    assert manager.get_block_ids_for_computed_tokens("r", 17) == tuple(g[:2] for g in ids)
    assert manager.get_block_ids("unknown") == ([],) * 6
    assert manager.get_blocks("unknown").get_block_ids(allow_none=True) is None


def test_decode_allocates_at_block_boundaries_and_releases_what_leaves_the_window():
    manager = make_manager()
    req = request("r", (1, 30))
    prefill(manager, req)
    assert manager.block_pool.get_num_free_blocks() == 999 - 12
    assert [decode(manager, req) for _ in range(4)] == [[[n] * 6] for n in (0, 0, 1, 0)]
    # At 48 computed tokens the next query reads positions 16 and later.
    decode(manager, req, 14)
    assert req.num_computed_tokens == 48
    assert held_pattern(manager, req) == ["xxx"] * 6
    assert decode(manager, req) == [[1] * 6]
    assert held_pattern(manager, req) == ["xxxx"] + [".xxx"] * 5
    free(manager, req)
    assert manager.usage == 0


def test_tokens_in_flight_delay_the_release():
    manager = make_manager()
    req = request("r", (1, 48))
    prefill(manager, req)
    req.num_in_flight_tokens = 48
    decode(manager, req)
    assert held_pattern(manager, req) == ["xxxx"] * 6
    req.num_in_flight_tokens = 1
    decode(manager, req)
    assert held_pattern(manager, req) == ["xxxx"] + [".xxx"] * 5


def test_the_window_of_the_last_token_of_a_finished_prompt_is_kept_for_its_decoder():
    manager = make_manager()
    first = request("first", (1, 64))
    prefill(manager, first)

    # Token 64 reads from token 32 on; token 63, which a decoder computes again, from 31 on.
    manager.remove_skipped_blocks("first", 64, num_prompt_tokens=64)
    assert held_pattern(manager, first) == ["xxxx"] + [".xxx"] * 5
    manager.remove_skipped_blocks("first", 64)
    assert held_pattern(manager, first) == ["xxxx"] + ["..xx"] * 5
    manager.check_integrity()


def test_a_session_that_comes_back_makes_room_for_itself():
    """Blocks that left the window are released before the next input is counted."""
    manager = make_manager(15, kinds=(sliding(17, 16, 2),), max_chunk=64)
    req = request("session", (1, 128))
    assert manager.allocate_slots(req, 64, full_sequence_must_fit=True) is not None
    req.num_computed_tokens = 64
    assert manager.block_pool.get_num_free_blocks() == 6

    assert manager.allocate_slots(req, 64, full_sequence_must_fit=True) is not None
    assert held_pattern(manager, req) == ["...xxxxx"] * 2
    manager.check_integrity()


def test_a_repeated_prompt_hits_all_but_its_last_token():
    manager = make_manager(log_stats=True)
    first, second = request("a", (1, 80)), request("b", (1, 80))
    assert prefill(manager, first) == 0
    free(manager, first)
    num_free = manager.block_pool.get_num_free_blocks()
    assert num_free == 999
    assert prefill(manager, second) == 64
    assert held_pattern(manager, second) == ["xxxxx"] + ["..xxx"] * 5
    assert manager.block_pool.get_num_free_blocks() == 999 - 5 - 15
    manager.record_prefix_cache_stats(second, 64)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 80, 64)
    assert manager.make_prefix_cache_stats().requests == 0
    assert manager.estimate_cached_tokens(second) == 80


def test_requests_that_run_at_once_share_and_survive_each_other():
    manager = make_manager()
    a, b = request("a", (1, 80)), request("b", (1, 64), (2, 16))
    prefill(manager, a)
    assert prefill(manager, b) == 64
    pairs = zip(manager.get_block_ids("a"), manager.get_block_ids("b"), strict=True)
    assert [len((set(x) & set(y)) - {0}) for x, y in pairs] == [4] + [2] * 5
    free(manager, a)
    assert held_pattern(manager, b) == ["xxxxx"] + ["..xxx"] * 5
    free(manager, b)
    assert manager.usage == 0


@pytest.mark.parametrize("changes", [{"salt": "s"}, {"lora": 3}])
def test_salts_and_adapters_do_not_share(changes):
    manager = make_manager()
    a, b, c = request("a", (1, 80)), request("b", (1, 80), **changes), request("c", (1, 80))
    prefill(manager, a)
    assert prefill(manager, b) == 0
    assert prefill(manager, c) == 64


def test_sparse_retention_keeps_the_end_of_the_prompt_and_junctions():
    manager = make_manager(retention=0)
    first = request("a", (1, 160))
    prefill(manager, first)
    free(manager, first)
    # The window type has kept only the end of the first prompt, so 64 shared tokens miss, ...
    second = request("b", (1, 64), (2, 96))
    assert manager.get_computed_blocks(second)[1:] == (0, 64)
    assert prefill(manager, second) == 0
    free(manager, second)
    # ... but the second request has cached its window at the junction for the third.
    assert prefill(manager, request("c", (1, 64), (3, 96))) == 64
    assert prefill(manager, request("d", (1, 160))) == 144


def test_nothing_happens_when_blocks_do_not_suffice():
    manager = make_manager(num_blocks=1 + 6 * 5)
    a, b = request("a", (1, 40)), request("b", (2, 40))
    assert prefill(manager, a) == 0
    before = (manager.block_pool.get_num_free_blocks(), held_pattern(manager, a))
    assert prefill(manager, b) is None
    assert (manager.block_pool.get_num_free_blocks(), held_pattern(manager, a)) == before
    assert manager.get_block_ids("b") == ([],) * 6
    free(manager, a)
    assert prefill(manager, b) == 0


def test_a_refused_request_leaves_its_hit_evictable():
    manager = make_manager(num_blocks=1 + 6 * 6)
    a, b = request("a", (1, 48)), request("b", (2, 40))
    prefill(manager, a)
    free(manager, a)
    prefill(manager, b)
    # The 2 + 5 * 2 blocks of the hit do not count as free: 12 + 6 * 2 > 18.
    c = request("c", (1, 32), (3, 32))
    assert manager.get_computed_blocks(c)[1] == 32
    assert prefill(manager, c) is None
    free(manager, b)
    assert prefill(manager, c) == 32


def test_hits_of_all_types_are_adopted_before_any_type_allocates():
    # The pool has room for one request: the allocation evicts, but not the request's own hit.
    manager = make_manager(kinds=(sliding(33, 16), full(16)), num_blocks=1 + 8)
    a = request("a", (1, 64))
    prefill(manager, a)
    free(manager, a)
    b = request("b", (1, 48), (2, 16))
    hit_ids = manager.get_computed_blocks(b)[0].get_block_ids()
    assert prefill(manager, b) == 48
    assert tuple(ids[:3] for ids in manager.get_block_ids("b")) == hit_ids


def test_admission_counts_a_window_no_more_than_it_ever_holds():
    # A step computes 64 tokens at most: the window type holds (32 + 64) / 16 + 1 = 7 blocks.
    # The whole prompt takes 20 blocks of full attention and 7 of the window type.
    for num_blocks, admitted in ((1 + 27, True), (1 + 26, False)):
        manager = make_manager(kinds=(full(16), sliding(33, 16)), num_blocks=num_blocks)
        req = request("r", (1, 320))
        blocks, num_hit, _ = manager.get_computed_blocks(req)
        new = manager.allocate_slots(req, 64, num_hit, blocks, full_sequence_must_fit=True)
        assert (new is not None) is admitted


def test_watermark_holds_back_newcomers_only():
    manager = make_manager(num_blocks=40, watermark=0.25)  # 10 blocks stay free
    a, b = request("a", (1, 80)), request("b", (2, 16))
    assert prefill(manager, a) is None  # 30 of 39 blocks
    assert prefill(manager, a, has_scheduled_reqs=False) == 0
    assert prefill(manager, b) is None
    assert decode(manager, a) == [[1] * 6]


def test_preempted_requests_resume_from_their_own_blocks():
    manager = make_manager()
    req = request("r", (1, 40))
    prefill(manager, req)
    decode(manager, req, 30)
    free(manager, req)
    req.num_computed_tokens = 0
    req.status = RequestStatus.PREEMPTED
    req.num_preemptions += 1
    # 70 tokens, of which 64 were cached in full blocks of final tokens.
    assert prefill(manager, req) == 64


def test_reset_waits_for_running_requests():
    manager = make_manager(log_stats=True)
    a, b = request("a", (1, 80)), request("b", (1, 80))
    prefill(manager, a)
    assert manager.reset_prefix_cache() is False
    free(manager, a)
    assert manager.reset_prefix_cache() is True
    assert manager.make_prefix_cache_stats().reset
    assert prefill(manager, b) == 0


def test_popped_blocks_stay_until_the_scheduler_frees_them():
    manager = make_manager(num_blocks=1 + 6 * 5)
    a, b = request("a", (1, 80)), request("b", (2, 16))
    prefill(manager, a)
    blocks = manager.pop_blocks_for_free(a)
    manager.check_integrity()
    assert prefill(manager, b) is None
    manager.block_pool.free_blocks(reversed(blocks))
    manager.check_integrity()
    assert prefill(manager, b) == 0


def test_lookup_is_off_for_requests_that_skip_it_and_without_caching():
    manager = make_manager()
    a, b = request("a", (1, 80)), request("b", (1, 80), skip_reading=True)
    prefill(manager, a)
    assert prefill(manager, b) == 0
    off = make_manager(caching=False)
    for name in "ab":
        assert prefill(off, request(name, (1, 80))) == 0
    assert off.estimate_cached_tokens(a) == 0


def test_a_model_without_kv_cache():
    manager = make_manager(kinds=(), num_blocks=1, caching=False)
    req = request("r", (1, 80))
    assert prefill(manager, req) == 0
    assert manager.get_block_ids("r") == ()
    assert manager.usage == 0
    assert manager.estimate_cached_tokens(req) == 0
    free(manager, req)
    assert manager.reset_prefix_cache() is True


def test_truncating_a_lookup():
    manager = make_manager(kinds=(mla(16), sliding(33, 16)))
    prefill(manager, request("a", (1, 80)))
    blocks, num_hit, _ = manager.get_computed_blocks(request("b", (1, 80)))
    assert num_hit == 64
    cut = manager.truncate_computed_blocks(blocks, 32)
    assert [len(ids) for ids in cut.get_block_ids()] == [2, 2]
    assert [len(ids) for ids in blocks.get_block_ids()] == [4, 4]
    with pytest.raises(ValueError, match="must be a multiple of 16 up to 64, got 40"):
        manager.truncate_computed_blocks(blocks, 40)
    assert manager.truncate_computed_blocks(blocks, 0) is manager.empty_kv_cache_blocks


def test_mixed_precision_caches_have_their_new_blocks_zeroed():
    manager = make_manager(kinds=(full(16), sliding(33, 16, 2, dtype="float32")))
    req = request("r", (1, 32))
    prefill(manager, req)
    ids = manager.get_block_ids("r")
    assert sorted(manager.take_new_block_ids()) == sorted(i for group in ids for i in group)
    assert manager.take_new_block_ids() == []
    manager.record_blocks_for_zeroing("r", 16)
    assert sorted(manager.take_new_block_ids()) == sorted(group[1] for group in ids)
    with pytest.raises(ValueError, match="start_token must be a multiple of 16, got 8"):
        manager.record_blocks_for_zeroing("r", 8)


def test_a_call_with_nothing_to_do_raises_and_changes_nothing():
    manager = make_manager()
    with pytest.raises(ValueError, match=r"num_new_tokens must be at least 1 without .*, got 0"):
        manager.allocate_slots(request("r", (1, 80)), 0)
    manager.check_integrity()
    assert manager.usage == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"dcp_world_size": 2},
        {"pcp_world_size": 2},
    ],
)
def test_features_that_are_not_covered_are_refused(changes):
    with pytest.raises(ValueError, match="not covered"):
        KVSetup(GEMMA, 100).build(KVCacheManager, **changes)


def test_a_manager_is_deleted_with_its_last_reference():
    manager = make_manager()
    req = request("r", (1, 40))
    prefill(manager, req)
    allocate_slots, gone = manager.allocate_slots, weakref.ref(manager)
    gc.disable()
    try:
        del manager
        assert gone() is None, "a cycle would keep all block tables until a garbage collection"
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="the KV cache manager no longer exists"):
        allocate_slots(req, 100)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [((), {}), ((0,), {}), ((-1,), {}), (("1",), {}), ((1,), {"num_lookahead_tokens": None})],
)
def test_calls_that_the_gate_does_not_handle_reach_the_method(arguments, keywords):
    manager = make_manager()
    req = request("r", (1, 40))
    prefill(manager, req)
    with pytest.raises((TypeError, ValueError)):
        manager.allocate_slots(req, *arguments, **keywords)
    with pytest.raises(AttributeError):
        manager.allocate_slots(None, 1)
    manager.check_integrity()
    assert manager.allocate_slots(req, 1) is not None


def test_a_method_of_a_subclass_is_called_in_every_step():
    asked = []

    class Asked(KVCacheManager):
        def allocate_slots(self, request, num_new_tokens, *args, **kwargs):
            asked.append("allocate_slots")
            return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

        def cache_blocks(self, request, num_computed_tokens):
            asked.append("cache_blocks")
            super().cache_blocks(request, num_computed_tokens)

    manager = KVSetup(kinds=GEMMA, num_blocks=1000).build(Asked)
    req = request("r", (1, 40))
    prefill(manager, req)
    decode(manager, req, 3)
    manager.cache_blocks(req, 43)
    assert asked == ["allocate_slots"] * 4 + ["cache_blocks"]
