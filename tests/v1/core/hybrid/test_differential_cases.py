# SPDX-License-Identifier: Apache-2.0
"""Sequences of operations with values worked out by hand, for base's manager and ours.

That base passes shows that the values are base's behaviour; that ours does, that it is the
same. Blocks hold 16 tokens unless said otherwise. A prompt of 100 tokens then has 6 full blocks
and one begun; resent, it can be hit up to token 96, since its last token is computed anew.
"""

from typing import Any

import pytest

from support.identity import MultiModalItem
from support.kv_configs import AttentionKind, KVSetup, full, mla, sliding
from support.manager_driver import ManagerDriver, Observation
from support.requests import RequestPlan
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

Path = tuple[tuple[int, int], ...]


@pytest.fixture(params=[BaseKVCacheManager, KVCacheManager], ids=["base", "ours"])
def manager_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def drive(
    manager_class: Any, kinds: tuple[AttentionKind, ...], *plans: RequestPlan | Path, **setup: Any
) -> ManagerDriver:
    """A driver with a pool of 999 usable blocks, in chunks of up to 512 tokens."""
    settings = dict(num_blocks=1000, max_chunk=512, max_model_len=1000) | setup
    chosen = [plan if isinstance(plan, RequestPlan) else RequestPlan(plan) for plan in plans]
    return ManagerDriver(manager_class, KVSetup(kinds, **settings), chosen)


def serve(driver: ManagerDriver, plan: int, num_tokens: int = 0) -> Observation:
    """Serve a request of the plan; what its admission showed."""
    return driver.apply(("serve", plan, num_tokens))["steps"][0]


def look_up(driver: ManagerDriver, plan: int) -> tuple[int, int, list[list[int]]]:
    """Hit length, junction and nulls per group for a request that is then aborted."""
    driver.apply(("add", plan))
    seen = driver.apply(("look_up", len(driver.waiting) - 1, 0))
    driver.apply(("finish", len(driver.live) - 1))
    return seen["hit"], seen["boundary"], seen["hit_nulls"]


GEMMA = (full(16), sliding(33, 16, num_groups=5))


def test_gemma_like(manager_class: Any) -> None:
    driver = drive(manager_class, GEMMA, ((0, 100),))
    driver.apply(("add", 0))
    seen = driver.apply(("start", 0, 512))
    assert (seen["hit"], seen["boundary"]) == (0, 0)
    assert seen["new_blocks"] == [7] * 6
    assert seen["free"] == 999 - 7 * 6
    assert driver.apply(("process", 0))["cached"] == 96
    # The query at 100 reads back to token 68: blocks 0 to 3 of the five window groups go.
    seen = driver.apply(("run", 0, 1))
    assert seen["nulls"] == [[]] + [[0, 1, 2, 3]] * 5
    assert seen["new_blocks"] == [0] * 6
    assert seen["free"] == 957 + 5 * 4
    # A second request resumes at 96 and reads back to 64: blocks 4 and 5 are shared.
    driver.apply(("add", 0))
    seen = driver.apply(("start", 0, 512))
    assert (seen["hit"], seen["boundary"], seen["scheduled"]) == (96, 0, 4)
    assert seen["new_blocks"] == [1] * 6
    assert seen["free"] == 977 - 6
    assert seen["blocks"][6][:6] == seen["blocks"][0][:6]
    assert seen["blocks"][7][:6] == [0, 0, 0, 0, *seen["blocks"][1][4:6]]


def test_sliding_window_only(manager_class: Any) -> None:
    # A window of 20 reads at most two blocks below a boundary; all blocks can serve.
    driver = drive(manager_class, (sliding(20, 16),), ((0, 50),), ((0, 32), (1, 8)))
    serve(driver, 0)
    assert look_up(driver, 0) == (48, 0, [[0]])
    assert look_up(driver, 1) == (32, 0, [[]])
    # Retention 0 keeps what a resend needs before token 48, and nothing for others.
    driver = drive(manager_class, (sliding(20, 16),), ((0, 50),), ((0, 32), (1, 8)), retention=0)
    serve(driver, 0)
    assert look_up(driver, 0) == (48, 0, [[0]])
    assert look_up(driver, 1) == (0, 0, [[]])


def test_two_windows_without_full_attention(manager_class: Any) -> None:
    # They need one block and three blocks below a boundary.
    kinds = (sliding(17, 16), sliding(49, 16))
    driver = drive(manager_class, kinds, ((0, 100),), ((0, 70), (1, 9)))
    serve(driver, 0)
    assert look_up(driver, 0) == (96, 0, [[0, 1, 2, 3, 4], [0, 1, 2]])
    assert look_up(driver, 1) == (64, 0, [[0, 1, 2], [0]])
    # Query 100 reads back to 84 and to 52: blocks 0 to 4, and 0 to 2, are given up.
    driver.apply(("process", 0))
    seen = driver.apply(("run", 0, 1))
    assert seen["nulls"] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert seen["free"] == 999 - 2 - 4


def test_window_types_lower_the_hit_in_turn(manager_class: Any) -> None:
    # Under retention 0 the first request keeps block 5 of window 17 and blocks 3 to 5 of 49.
    # Window 49 comes first and finds block 3, but not the two blocks below it.
    kinds = (sliding(49, 16), sliding(17, 16))
    driver = drive(manager_class, kinds, ((0, 100),), ((0, 64), (1, 36)), retention=0)
    serve(driver, 0)
    assert look_up(driver, 0) == (96, 0, [[0, 1, 2], [0, 1, 2, 3, 4]])
    assert look_up(driver, 1) == (0, 0, [[], []])


def test_junction_of_a_shared_prefix_under_retention_0(manager_class: Any) -> None:
    plans = ((0, 100),), ((0, 64), (1, 36)), ((0, 64), (2, 20))
    driver = drive(manager_class, GEMMA, *plans, retention=0)
    assert serve(driver, 0)["boundary"] == 0
    # Full attention has tokens 0 to 64; the windows have only the end of the first prompt.
    seen = serve(driver, 1)
    assert (seen["hit"], seen["boundary"]) == (0, 64)
    # So the second request has kept its window before the junction, for the third.
    assert look_up(driver, 2) == (64, 0, [[]] + [[0, 1]] * 5)
    assert look_up(driver, 1) == (96, 0, [[]] + [[0, 1, 2, 3]] * 5)


def test_retention_interval(manager_class: Any) -> None:
    # Two window blocks before each multiple of 64 and before token 144 are kept:
    # 2, 3, 6, 7 and 7, 8.
    plans = ((0, 150),), ((0, 64), (1, 30)), ((0, 85), (1, 30)), ((0, 130), (1, 30))
    kinds = (full(16), sliding(33, 16))
    driver = drive(manager_class, kinds, *plans, retention=64)
    serve(driver, 0)
    assert look_up(driver, 0) == (144, 0, [[], [0, 1, 2, 3, 4, 5, 6]])
    assert look_up(driver, 1) == (64, 0, [[], [0, 1]])
    assert look_up(driver, 2) == (64, 80, [[], [0, 1]])
    assert look_up(driver, 3) == (128, 0, [[], [0, 1, 2, 3, 4, 5]])


def test_retention_needs_multiples_and_a_window(manager_class: Any) -> None:
    for kinds, retention in [(GEMMA, 24), (GEMMA, -16), ((full(16), mla(16)), 32)]:
        with pytest.raises(ValueError, match="retention_interval"):
            drive(manager_class, kinds, retention=retention)
    drive(manager_class, (full(16), mla(16)), retention=0)


def test_unequal_block_sizes(manager_class: Any) -> None:
    # Hits end at multiples of 32; the hashes are those of 16 tokens.
    for kinds in [(full(32), sliding(33, 16)), (sliding(33, 16), full(32))]:
        driver = drive(manager_class, kinds, ((0, 100),), ((0, 50),), ((0, 31), (1, 9)))
        serve(driver, 0)
        assert driver.manager.block_pool.get_num_free_blocks() == 999 - 4 - 7
        nulls = {32: [], 16: [0, 1, 2, 3]}
        assert look_up(driver, 0) == (96, 0, [nulls[kind.block_size] for kind in kinds])
        assert look_up(driver, 1) == (32, 0, [[], []])
        assert look_up(driver, 2) == (0, 0, [[], []])
    # 32 and 48: hits end at 96 only, and only blocks before 96 and 192 are kept of a window.
    driver = drive(manager_class, (sliding(20, 32), full(48)), ((0, 200),), ((0, 180),))
    serve(driver, 0)
    assert look_up(driver, 0) == (192, 0, [[0, 1, 2, 3, 4], []])
    assert look_up(driver, 1) == (96, 0, [[0, 1], []])
    # Of 7 window blocks the two before a multiple of 96 are cached, of 5 full ones 4.
    assert driver.manager.estimate_cached_tokens(driver.running[0].request) == 192


def test_mla(manager_class: Any) -> None:
    for kinds in [(mla(16),), (mla(16), mla(16, variant=1), full(16))]:
        driver = drive(manager_class, kinds, ((0, 100),), ((0, 40), (1, 40)))
        serve(driver, 0)
        assert look_up(driver, 0) == (96, 0, [[]] * len(kinds))
        assert look_up(driver, 1) == (32, 0, [[]] * len(kinds))


def test_caching_off(manager_class: Any) -> None:
    driver = drive(manager_class, GEMMA, ((0, 100),), caching=False)
    serve(driver, 0, 1)
    assert look_up(driver, 0) == (0, 0, [[]] * 6)
    # Query 100 has been computed: blocks 0 to 3 of the windows are free again.
    seen = driver.apply(("decode", 0, 1))
    assert seen["nulls"] == [[]] + [[0, 1, 2, 3]] * 5
    assert seen["free"] == 999 - 7 - 5 * 3
    driver.apply(("finish", 0))
    assert driver.manager.usage == 0
    assert driver.manager.reset_prefix_cache()


def test_no_groups_at_all(manager_class: Any) -> None:
    driver = drive(manager_class, (), ((0, 100),), caching=False, num_blocks=1)
    seen = serve(driver, 0, 3)
    assert seen["admitted"] and seen["new_blocks"] == []
    assert driver.manager.usage == 0
    assert driver.manager.get_block_ids("r000") == ()
    driver.wind_down()


def test_salts_adapters_and_images_do_not_share(manager_class: Any) -> None:
    path = ((0, 70),)
    plans = [
        RequestPlan(path),
        RequestPlan(path, salt="a"),
        RequestPlan(path, salt="b"),
        RequestPlan(path, lora=1),
        RequestPlan(path, lora=2),
        RequestPlan(path, images=(MultiModalItem("cat", 35, 5),)),
        RequestPlan(path, images=(MultiModalItem("dog", 35, 9),)),
        RequestPlan(path, images=(MultiModalItem("cat", 36, 5),)),
        RequestPlan(path, skip_reading=True),
    ]
    driver = drive(manager_class, (full(16), sliding(17, 16)), *plans)
    hits = [serve(driver, plan)["hit"] for plan in range(len(plans))]
    # Images begin in block 2; what is before them is shared.
    assert hits == [0, 0, 0, 0, 0, 32, 32, 32, 0]
    hits = [serve(driver, plan)["hit"] for plan in range(len(plans))]
    assert hits == [64] * 8 + [0]


def test_duplicates_in_flight(manager_class: Any) -> None:
    driver = drive(manager_class, (full(16), sliding(100, 16, 2)), ((0, 64),), max_steps=2)
    for _ in range(2):
        driver.apply(("add", 0))
    # Neither has a full block when the other looks, so both compute, and cache, all four.
    assert driver.apply(("start", 0, 8))["hit"] == 0
    assert driver.apply(("start", 0, 8))["hit"] == 0
    driver.apply(("run", 0, 512))
    assert driver.apply(("run", 0, 512))["free"] == 999 - 2 * 3 * 4
    driver.apply(("finish", 0))
    # A third hits the first one's blocks: they were free, so nine less are, and three new.
    driver.apply(("add", 0))
    seen = driver.apply(("start", 0, 512))
    assert (seen["hit"], seen["free"]) == (48, 999 - 12 - 12)
    # When it shares with the second one instead, only its last block costs any.
    driver.apply(("reset", 1))
    assert serve(driver, 0)["hit"] == 0
    free = driver.manager.block_pool.get_num_free_blocks()
    assert serve(driver, 0)["hit"] == 48
    assert driver.manager.block_pool.get_num_free_blocks() == free - 3


def test_admission(manager_class: Any) -> None:
    def admitted(plan: int, chunk: int, **setup: Any) -> list[bool]:
        """With 100 of 160 tokens taken, whether ``plan`` is admitted; and alone."""
        paths = ((0, 100),), ((1, 40),), ((1, 60),)
        driver = drive(manager_class, (full(16),), *paths, num_blocks=11, **setup)
        serve(driver, 0)
        driver.apply(("add", plan))
        answers = [driver.apply(("start", 0, chunk))["admitted"]]
        driver.apply(("finish", 0))
        if not answers[0]:
            answers.append(driver.apply(("start", 0, chunk))["admitted"])
        return answers

    # Three blocks are left.
    assert admitted(1, 40) == [True]
    assert admitted(2, 16) == [False, True]
    assert admitted(2, 16, full_sequence_must_fit=False) == [True]
    # The watermark keeps one of 11 blocks free, but not from a request that is alone.
    assert admitted(1, 40, watermark=0.1) == [False, True]
    assert admitted(1, 32, watermark=0.1, full_sequence_must_fit=False) == [True]


def test_admission_counts_no_more_than_a_window_recycles(manager_class: Any) -> None:
    # Window 33 and chunks of 32: 64 tokens, 4 blocks, and one since windows begin inside
    # of a block. So a prompt of 300 tokens passes through five blocks.
    settings: dict[str, Any] = dict(max_chunk=32, max_model_len=400)
    driver = drive(manager_class, (sliding(33, 16),), ((0, 300),), num_blocks=6, **settings)
    assert serve(driver, 0, 5)["admitted"]
    assert driver.counts["preemptions"] == 0
    driver = drive(manager_class, (sliding(33, 16),), ((0, 300),), num_blocks=5, **settings)
    assert not serve(driver, 0)["admitted"]


def test_steps_in_flight_hold_their_window(manager_class: Any) -> None:
    def nulls(max_steps: int) -> list[int]:
        """Window blocks given up when the third chunk of 16 is scheduled."""
        driver = drive(manager_class, (sliding(17, 16),), ((0, 90),), max_steps=max_steps)
        driver.apply(("add", 0))
        driver.apply(("start", 0, 16))
        for _ in range(2):
            if max_steps == 1 or len(driver.running[0].steps) == max_steps:
                driver.apply(("process", 0))
            seen = driver.apply(("run", 0, 16))
        return seen["nulls"][0]

    # Query 32 reads back to 16. With the chunk at 16 in flight, token 0 is still read.
    assert nulls(1) == [0]
    assert nulls(2) == []


def test_a_step_must_have_something_to_do(manager_class: Any) -> None:
    driver = drive(manager_class, GEMMA, ((0, 100),))
    serve(driver, 0, 1)
    with pytest.raises(ValueError, match="num_new_tokens"):
        driver.manager.allocate_slots(driver.running[0].request, 0)


def test_events(manager_class: Any) -> None:
    kinds = (full(4), sliding(5, 4, 2))
    plan = RequestPlan(((0, 10),), salt="s", lora=3)
    reporting = RequestPlan(((0, 10),), report_full=True)
    driver = drive(manager_class, kinds, plan, reporting, events=True)
    seen = driver.apply(("serve", 0, 2))
    for group, window in enumerate([None, 5, 5]):
        ((kind, first),) = seen["events"][group]
        assert kind == "BlockStored"
        assert first["group_idx"] == group
        assert first["kv_cache_spec_sliding_window"] == window
        assert first["parent_block_hash"] is None
        assert first["token_ids"] == list(range(8))
        assert first["block_size"] == 4
        assert first["lora_name"] == "lora-3" and first["session_id"] == "session-r000"
        assert first["extra_keys"] == [("lora-3", "s"), ("lora-3",)]
    # Token 11 is computed by the second step; the third computes 12 and completes block 2.
    first_hashes = first["block_hashes"]
    seen = driver.apply(("decode", 0, 1))
    assert [len(events) for events in seen["events"]] == [1, 1, 1]
    ((_, third),) = seen["events"][2]
    assert third["parent_block_hash"] == first_hashes[-1]
    assert len(set(third["block_hashes"]) | set(first_hashes)) == 3
    assert seen["events"][0][0][1]["block_hashes"] == third["block_hashes"]
    # A request that asks for full reports has its hits told again.
    serve(driver, 1)
    seen = driver.apply(("serve", 1, 0))
    assert seen["steps"][0]["hit"] == 8
    ((kind, told),) = seen["events"][0]
    assert (kind, told["token_ids"]) == ("BlockStored", list(range(8)))
    assert len(told["block_hashes"]) == 2
    seen = driver.apply(("reset", 1))
    assert seen["reset"] and seen["events"] == (("cleared",),) * 3


def test_streaming_session(manager_class: Any) -> None:
    # Two steps are in flight after the fourth output: those that compute tokens 63 and 64.
    driver = drive(manager_class, GEMMA, ((0, 60),), ((3, 30),), max_steps=3)
    serve(driver, 0, 4)
    live = driver.running[0]
    assert (live.request.num_tokens, live.request.num_computed_tokens) == (64, 65)
    # The first of them ends the turn with the fifth output.
    seen = driver.apply(("session", 0, 1))
    # The last output is dropped, the four before it become part of the prompt.
    assert (live.request.num_computed_tokens, seen["num_tokens"]) == (64, 94)
    assert seen["free"] == 999 - 5 * 6 + 5
    seen = driver.apply(("start", 0, 512))
    assert "hit" not in seen and seen["scheduled"] == 30
    # 94 tokens take six blocks. With one token in flight, queries from 63 on are counted
    # as still to come, and 63 reads back to token 31.
    assert seen["new_blocks"] == [1] * 6
    assert seen["nulls"] == [[]] + [[0]] * 5
    driver.apply(("finish", 0))
    # The next turn's prompt finds what the session has computed.
    driver.plans.append(RequestPlan(((0, 60), (99, 4), (3, 30))))
    assert look_up(driver, 2)[0] == 80


def test_each_turn_of_a_session_keeps_its_end(manager_class: Any) -> None:
    # Windows are cached before the end of a prompt only, and the prompt grows.
    driver = drive(manager_class, GEMMA, ((0, 60),), ((3, 60),), retention=0)
    serve(driver, 0, 20)
    assert driver.running[0].request.num_computed_tokens == 79
    driver.apply(("session", 0, 1))
    driver.apply(("start", 0, 512))
    driver.apply(("finish", 0))
    driver.plans.append(RequestPlan(((0, 60), (99, 20), (3, 60))))
    assert look_up(driver, 2)[:2] == (128, 0)


def test_preempted_requests_resume_from_their_own_blocks(manager_class: Any) -> None:
    driver = drive(manager_class, GEMMA, ((0, 100),), log_stats=True)
    serve(driver, 0, 20)
    driver.apply(("preempt", 0))
    assert driver.manager.usage == 0
    # 120 tokens; 119 were computed, so 112 are cached, by a window of two blocks.
    seen = driver.apply(("start", 0, 512))
    assert (seen["hit"], seen["scheduled"]) == (112, 8)
    stats = driver.apply(("stats",))["stats"]
    assert (stats["requests"], stats["queries"], stats["hits"]) == (1, 100, 0)
    assert (stats["preempted_requests"], stats["preempted_queries"]) == (1, 120)
    assert stats["preempted_hits"] == 112


def test_events_of_a_prompt_that_ends_inside_a_block_are_left_to_base() -> None:
    # Base registers the prompt's last hash boundary, token 48, when its block of 32 is full,
    # although a hit can only end at a multiple of 32.
    kinds = (full(32), sliding(33, 16))
    driver = drive(BaseKVCacheManager, kinds, ((0, 50),), events=True)
    assert driver.setup.publishes_parts_of_blocks
    driver.apply(("serve", 0, 0))
    driver.apply(("process", 0))
    seen = driver.apply(("decode", 0, 14))
    whole, tail = (event for _, event in seen["events"][0])
    assert (whole["block_size"], len(whole["token_ids"])) == (32, 32)
    assert (tail["block_size"], tail["token_ids"]) == (16, whole["token_ids"][:16])
    assert tail["parent_block_hash"] == whole["parent_block_hash"]
    assert look_up(driver, 0)[0] == 32
    with pytest.raises(ValueError, match="parts of blocks"):
        drive(KVCacheManager, kinds, events=True)
    # Without the larger full-attention block there are no parts.
    drive(KVCacheManager, (full(16), sliding(33, 32)), events=True)
