# SPDX-License-Identifier: Apache-2.0
"""What a scheduler does to a KV cache, one feature at a time, under the content oracle.

Every test runs base's manager too, which shows that the oracle raises no false alarm.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from support.identity import MultiModalItem, PrefixIdentity
from support.kv_configs import chunked, full, make_kv_cache_config, sliding, smallest_pool
from support.oracle import OracleEngine, OracleSettings

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

GEMMA = (sliding(40, 16, 5), full(16))

#: How steps are scheduled and their outputs come back.
PIPELINES = {
    "plain": OracleSettings(),
    "async": OracleSettings(async_scheduling=True, steps_in_flight=1),
    "async, two in flight": OracleSettings(async_scheduling=True, steps_in_flight=2),
    "pipeline parallel": OracleSettings(steps_in_flight=1),
    "runner v2": OracleSettings(model_runner_v2=True),
    "async, runner v2": OracleSettings(
        async_scheduling=True, steps_in_flight=1, model_runner_v2=True
    ),
}


@pytest.fixture(params=list(PIPELINES.values()), ids=list(PIPELINES))
def pipeline(request: pytest.FixtureRequest) -> OracleSettings:
    return request.param


def make_engine(
    manager_cls: Any,
    settings: OracleSettings = PIPELINES["plain"],
    kinds: tuple = GEMMA,
    extra_blocks: int = 1000,
    retention_interval: int | None = None,
    layout: int | None = 0,
    **changes: Any,
) -> OracleEngine:
    """An engine with a pool that holds everything, unless told otherwise."""
    settings = replace(settings, **changes)
    num_blocks = extra_blocks + smallest_pool(
        kinds, settings.max_model_len, settings.max_in_flight_tokens
    )
    config = make_kv_cache_config(kinds, num_blocks, retention_interval, layout=layout)
    return OracleEngine(manager_cls, config, settings)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(30000) for _ in range(count)]


def test_prefix_hit(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline)
    engine.add_request(tokens(100), max_tokens=5)
    engine.run_until_done()
    assert engine.tokens_from_cache == 0
    # 99 tokens may be hit, since one must be computed: 6 blocks.
    engine.add_request(tokens(100), max_tokens=5)
    engine.run_until_done()
    assert engine.tokens_from_cache == 96
    # Prompt and answer of the first turn (104 computed), and then something new.
    engine.add_request(tokens(100) + engine.submissions["r0"].outputs + tokens(30, seed=1), 5)
    engine.run_until_done()
    assert engine.tokens_from_cache == 96 + 96
    # A prefix that ends in the middle of a block.
    engine.add_request(tokens(100)[:50] + tokens(30, seed=2), max_tokens=5)
    engine.run_until_done()
    assert engine.tokens_from_cache == 96 + 96 + 48


def test_chunked_prefill(manager_cls: Any, pipeline: OracleSettings) -> None:
    # Chunks of 7 tokens: their ends fall on all positions of a block.
    engine = make_engine(manager_cls, pipeline, max_num_batched_tokens=7, max_num_seqs=4)
    for i in range(3):
        engine.add_request(tokens(120, seed=i), max_tokens=4)
    engine.add_request(tokens(60, seed=0) + tokens(40, seed=9), max_tokens=4)
    engine.run_until_done()
    assert engine.num_schedules > 3 * 120 / 7


def test_long_prefill_is_capped_beside_others(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline, long_prefill_token_threshold=5)
    for i in range(6):
        engine.add_request(tokens(70, seed=i % 2), max_tokens=10)
    engine.run_until_done()


def test_preemption_and_resumption(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline, extra_blocks=6)
    for i in range(8):
        engine.add_request(tokens(20 + 3 * i, seed=i), max_tokens=120)
    engine.run_until_done()
    assert engine.num_preemptions > 0


def test_priority_preempts_the_least_urgent(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline, extra_blocks=6, policy="priority")
    for i in range(6):
        engine.add_request(tokens(20 + 3 * i, seed=i), max_tokens=100, priority=i % 3)
        engine.step()
    engine.run_until_done()
    preempted = {s.req_id: s.request.num_preemptions for s in engine.submissions.values()}
    assert sum(preempted.values()) > 0
    assert preempted["r0"] == 0


def test_answers_end_while_steps_are_in_flight(manager_cls: Any, pipeline: OracleSettings) -> None:
    # A stop token comes unforeseen: the request is in the next steps already.
    engine = make_engine(manager_cls, pipeline, extra_blocks=20, vocab_size=64)
    for i in range(24):
        engine.add_request(tokens(10 + i, seed=i // 2), max_tokens=60, stop_tokens=range(6))
    engine.run_until_done()
    lengths = [len(s.outputs) for s in engine.submissions.values()]
    assert min(lengths) < 10 < max(lengths)


@pytest.mark.parametrize("during_step", [False, True], ids=["between steps", "during a step"])
def test_abort_at_every_point(
    manager_cls: Any, pipeline: OracleSettings, during_step: bool
) -> None:
    kinds = (sliding(20, 8, 2), full(8))
    for point in range(14):
        engine = make_engine(
            manager_cls,
            pipeline,
            kinds,
            extra_blocks=4,
            max_num_batched_tokens=20,
            max_model_len=80,
        )
        for i in range(4):
            engine.add_request(tokens(30, seed=i // 2), max_tokens=6)
        for _ in range(point):
            engine.step()
        victim = f"r{point % 4}"
        if during_step:
            engine.step(abort_before_output=[victim])
        else:
            engine.abort(victim)
        engine.add_request(tokens(30, seed=1), max_tokens=6)
        engine.run_until_done()


def test_abort_before_the_first_step(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline)
    engine.add_request(tokens(30))
    engine.add_request(tokens(30))
    engine.abort("r0")
    engine.run_until_done()
    engine.abort("r0", "r1")
    assert engine.submissions["r0"].outputs == []
    assert len(engine.submissions["r1"].outputs) == 8


def test_reset_of_the_prefix_cache(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline)
    engine.add_request(tokens(100))
    engine.run_until_done()
    assert engine.reset_prefix_cache()
    engine.add_request(tokens(100))
    engine.run_until_done()
    assert engine.tokens_from_cache == 0


def test_reset_is_refused_while_requests_run(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline)
    engine.add_request(tokens(100))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.run_until_done()
    engine.add_request(tokens(100))
    engine.run_until_done()
    assert engine.tokens_from_cache == 96


def test_reset_that_preempts_running_requests(manager_cls: Any, pipeline: OracleSettings) -> None:
    for point in range(1, 16):
        engine = make_engine(manager_cls, pipeline, max_num_batched_tokens=40)
        for i in range(3):
            engine.add_request(tokens(70, seed=i // 2), max_tokens=20)
        for _ in range(point):
            engine.step()
        assert engine.reset_prefix_cache(reset_running=True)
        engine.add_request(tokens(70), max_tokens=12)
        engine.run_until_done()
        assert engine.num_preemptions > 0


def test_duplicates_in_one_step(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline, max_num_batched_tokens=200)
    for _ in range(5):
        engine.add_request(tokens(50), max_tokens=20)
    engine.step()
    # The first computes 50 tokens, the others share its 3 full blocks in the same step.
    assert engine.tokens_from_cache == 4 * 48
    engine.run_until_done()
    answers = [s.outputs for s in engine.submissions.values()]
    assert answers == [answers[0]] * 5


@pytest.mark.parametrize(
    "difference",
    [
        PrefixIdentity(cache_salt="a"),
        PrefixIdentity(cache_salt="b"),
        PrefixIdentity(lora_name="adapter-1"),
        PrefixIdentity(lora_name="b"),
    ],
    ids=str,
)
def test_salts_and_adapters_do_not_share(
    manager_cls: Any, pipeline: OracleSettings, difference: PrefixIdentity
) -> None:
    engine = make_engine(manager_cls, pipeline)
    # Running side by side, and again from the cache.
    others = PrefixIdentity(), PrefixIdentity(cache_salt="c"), PrefixIdentity(lora_name="adapter-2")
    for other in others:
        engine.add_request(tokens(50), 20, other)
    engine.add_request(tokens(50), 20, difference)
    engine.run_until_done()
    assert engine.tokens_from_cache == 0
    engine.add_request(tokens(50), 20, difference)
    engine.run_until_done()
    assert engine.tokens_from_cache == 48
    assert engine.submissions["r3"].outputs == engine.submissions["r4"].outputs
    assert engine.submissions["r0"].outputs != engine.submissions["r4"].outputs


def test_images_do_not_share(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline)
    prompt = tokens(20) + [7] * 40 + tokens(20, seed=1)
    for name in ("cat", "dog", "cat", "dog"):
        image = MultiModalItem(name, offset=20, length=40)
        engine.add_request(prompt, identity=PrefixIdentity(mm_items=(image,)))
        engine.run_until_done()
    # The second image shares the block before it; the others repeat one of the two.
    assert engine.tokens_from_cache == 16 + 64 + 64
    # The same image, one position later.
    identity = PrefixIdentity(mm_items=(MultiModalItem("cat", 21, 40),))
    engine.add_request(tokens(21) + [7] * 40 + tokens(20, seed=1), identity=identity)
    engine.run_until_done()
    assert engine.tokens_from_cache == 16 + 64 + 64 + 16


@pytest.mark.parametrize("retention_interval", [None, 0, 64])
def test_retention_with_shared_prefixes(
    manager_cls: Any, pipeline: OracleSettings, retention_interval: int | None
) -> None:
    engine = make_engine(manager_cls, pipeline, retention_interval=retention_interval)
    for shared, seed in ((130, 1), (130, 2), (130, 3), (70, 4), (70, 5)):
        engine.add_request(tokens(shared) + tokens(40, seed=seed), max_tokens=20)
        engine.run_until_done()
    # The second request finds nothing under sparse retention, but pins the junction.
    assert engine.tokens_from_cache >= 128
    before = engine.tokens_from_cache
    engine.add_request(tokens(130) + tokens(40, seed=1), max_tokens=20)
    engine.run_until_done()
    # The replay of a whole prompt is kept by every policy.
    assert engine.tokens_from_cache == before + 160


@pytest.mark.parametrize("watermark", [0.05, 0.3])
def test_watermark(manager_cls: Any, pipeline: OracleSettings, watermark: float) -> None:
    engine = make_engine(manager_cls, pipeline, extra_blocks=30, watermark=watermark)
    for i in range(8):
        engine.add_request(tokens(60, seed=i % 3), max_tokens=60)
    engine.run_until_done()


def test_admission_without_the_full_sequence(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(
        manager_cls,
        pipeline,
        extra_blocks=3,
        reserve_full_sequence=False,
        max_num_batched_tokens=24,
    )
    for i in range(6):
        engine.add_request(tokens(150, seed=i // 2), max_tokens=50)
    engine.run_until_done()
    assert engine.num_preemptions > 0


def test_caching_off(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline, enable_prefix_caching=False, extra_blocks=10)
    for _ in range(8):
        engine.add_request(tokens(60), max_tokens=100)
    engine.run_until_done()
    assert engine.tokens_from_cache == 0
    assert engine.num_preemptions > 0


def test_requests_that_do_not_read_the_cache(manager_cls: Any, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline)
    for skip in (False, True, False):
        engine.add_request(tokens(50), skip_reading=skip)
        engine.run_until_done()
    assert engine.tokens_from_cache == 48


def test_an_id_is_used_again_after_an_abort(manager_cls: Any) -> None:
    # Only without steps in flight: else old output would reach the new request, in base too.
    engine = make_engine(manager_cls)
    engine.add_request(tokens(50), max_tokens=30, req_id="again")
    for _ in range(4):
        engine.step()
    engine.abort("again")
    engine.add_request(tokens(40, seed=1), max_tokens=30, req_id="again")
    engine.run_until_done()
    assert len(engine.submissions["again"].outputs) == 30


@pytest.mark.parametrize("num_lookahead_tokens", [0, 3])
@pytest.mark.parametrize("name", [n for n in PIPELINES if n != "pipeline parallel"])
def test_speculative_decoding(manager_cls: Any, name: str, num_lookahead_tokens: int) -> None:
    """Drafts from nothing but tokens; `test_oracle_speculation` has drafters with layers."""
    pipeline = PIPELINES[name]
    engine = make_engine(
        manager_cls,
        pipeline,
        extra_blocks=12,
        num_spec_tokens=3,
        num_lookahead_tokens=num_lookahead_tokens,
    )
    for i in range(8):
        engine.add_request(tokens(30, seed=i), max_tokens=100)
    engine.run_until_done()
    num_sampled = sum(len(s.outputs) for s in engine.submissions.values())
    assert engine.num_preemptions > 0
    # Some drafts were accepted and some rejected.
    assert engine.worker.num_drafts_accepted > num_sampled / 4
    assert engine.worker.num_drafts_rejected > num_sampled / 4


def test_chunked_local_attention(manager_cls: type, pipeline: OracleSettings) -> None:
    engine = make_engine(manager_cls, pipeline, (full(16), chunked(48, 16, 3)), extra_blocks=20)
    for i in range(8):
        engine.add_request(tokens(70, seed=i % 3), max_tokens=90)
    engine.run_until_done()
    assert engine.tokens_from_cache > 0
