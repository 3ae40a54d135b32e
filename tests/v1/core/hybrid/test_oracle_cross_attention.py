# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models, and models without any KV cache, under the content oracle.

A request's encoder states are written in its first step, and all of them read in each of its
steps. Nothing is ever cached, so both managers must come to the very same run.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.kv_configs import cross, full, make_kv_cache_config, mamba, sliding
from support.oracle import (
    InFlightFault,
    OracleEngine,
    OracleFault,
    OracleSettings,
    ReadFault,
    WriteFault,
)
from support.oracle.planted_faults import (
    AllocatesASlotTooFew,
    FreesARequestAStepEarly,
    GivesOutABlockOfAnotherRequest,
    NeverFrees,
    plant,
)
from support.oracle.planted_feature_faults import (
    ENCODER_FAULTS,
    AllocatesAnEncoderSlotTooFew,
    AllocatesTheEncodersBlocksByDecoderTokens,
    FreesTheEncodersBlocksAfterTheFirstStep,
    GivesOutTheEncoderBlocksOfAnotherRequest,
    KeepsEncoderBlocksAfterPreemption,
)
from support.oracle.workload import (
    Abort,
    Add,
    Case,
    Run,
    apply,
    make_engine,
    random_operations,
)
from support.oracle.workload import run_case as run_any_case
from support.plugin_state import plugin_state_restored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.hybrid.plugin import activate
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

#: Base cuts no prompt of such models into chunks, so a step takes the longest.
SETTINGS = OracleSettings(enable_prefix_caching=False, max_num_batched_tokens=512)
ASYNC = {"async_scheduling": True, "steps_in_flight": 1}
ROOMY = 1000

PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": ASYNC,
    "async, two in flight": {"async_scheduling": True, "steps_in_flight": 2},
    "pipeline parallel": {"steps_in_flight": 1},
    "runner v2": {"model_runner_v2": True},
}

MODELS = {
    "Whisper": (full(), cross()),
    "several groups": (cross(num_groups=3), full(num_groups=2)),
    "sliding windows": (sliding(20, 8, 2), cross(8), full(8)),
    "larger encoder blocks": (full(8), cross(32, 2)),
    "block sizes that do not divide": (cross(6), full(4, 2)),
    "two precisions, zeroed blocks": (full(), cross(dtype="float32")),
    "Mamba": (mamba(256, mode="none"), cross(), full()),
}


#: Those that differ most, for what runs with all models.
SOME_PIPELINES = {name: PIPELINES[name] for name in ("async, two in flight", "runner v2")}


@pytest.fixture(params=list(PIPELINES.values()), ids=list(PIPELINES))
def pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(params=list(SOME_PIPELINES.values()), ids=list(SOME_PIPELINES))
def some_pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def kinds(request: pytest.FixtureRequest) -> tuple:
    return request.param


def run_case(case: Case, check_integrity: bool = True) -> OracleEngine:
    """Run a case with both managers; one that reads nothing of an encoder tells nothing."""
    base = run_any_case(BaseManager, case, check_integrity)
    ours = run_any_case(HybridManager, case, check_integrity)
    assert ours.reads["encoder"] == base.reads["encoder"] > 0
    assert ours.reads["kv"] == base.reads["kv"]
    assert ours.num_preemptions == base.num_preemptions
    assert ours.num_schedules == base.num_schedules
    assert ours.tokens_from_cache == base.tokens_from_cache == 0
    return ours


def test_every_step_reads_all_of_the_encoder(pipeline: dict[str, Any]) -> None:
    """One of 50 encoder tokens, and 5 steps; a later one of 100, and 3; one without."""
    operations = (
        Add(tail=10, max_tokens=5, encoder=50),
        Run(9),
        Add(tail=30, max_tokens=3, encoder=100),
        Add(tail=20, max_tokens=9),
    )
    settings = replace(SETTINGS, **pipeline)
    engine = run_case(Case((full(), cross(num_groups=2)), operations, settings, ROOMY))
    # A third step in flight is scheduled before the end is known.
    extra = settings.steps_in_flight == 2
    assert engine.reads["encoder"] == 2 * ((5 + extra) * 50 + (3 + extra) * 100)


def test_preemption(kinds: tuple, some_pipeline: dict[str, Any]) -> None:
    """Long requests in a pool for hardly more than one."""
    operations = [Add(tail=60, max_tokens=90, encoder=60 + 8 * i) for i in range(5)]
    engine = run_case(Case(kinds, tuple(operations), replace(SETTINGS, **some_pipeline)))
    assert engine.num_preemptions > 0


def test_aborts(kinds: tuple, some_pipeline: dict[str, Any]) -> None:
    """At every stage of a request, with others that take its blocks over at once."""
    operations: list[Any] = []
    for steps in range(1, 7):
        operations += [
            Add(tail=80, max_tokens=20, encoder=100),
            Add(tail=50, max_tokens=4, encoder=33),
            Run(steps, abort=len(operations) // 5 * 2),
            Add(tail=5, parent=0, shared=70, max_tokens=5, encoder=100),
            Abort(len(operations) // 2),
        ]
    settings = replace(SETTINGS, **some_pipeline)
    engine = run_case(Case(kinds, tuple(operations), settings, extra_blocks=12))
    assert any(submission.aborted for submission in engine.submissions.values())
    assert any(submission.finished for submission in engine.submissions.values())


@pytest.mark.parametrize("pipeline_name", ["plain", "async, two in flight"])
def test_random(kinds: tuple, pipeline_name: str) -> None:
    for seed in range(2):
        rng = random.Random(f"{kinds} {pipeline_name} {seed}")
        changes = {
            "vocab_size": 256,
            "policy": rng.choice(("fcfs", "priority")),
            "watermark": rng.choice((0.0, 0.1)),
            "reserve_full_sequence": rng.random() < 0.5,
        }
        case = Case(
            kinds,
            random_encoder_operations(rng, 30, SETTINGS.max_model_len),
            replace(SETTINGS, **PIPELINES[pipeline_name], **changes),
            extra_blocks=(0, 20)[seed],
            layout=seed,
        )
        run_case(case)


def random_encoder_operations(rng: random.Random, count: int, max_model_len: int) -> tuple:
    """With inputs of all lengths; rarely without any."""
    operations = random_operations(rng, count, max_model_len, vary_identity=False)
    lengths = (0, 1, 16, 64, 100, rng.randint(1, 100))
    return tuple(
        replace(op, encoder=rng.choice(lengths)) if isinstance(op, Add) else op for op in operations
    )


def test_the_longest_sequence_fills_the_smallest_pool() -> None:
    longest = SETTINGS.max_model_len
    operations = (Add(tail=longest // 2, max_tokens=longest, encoder=100),) * 2
    engine = run_case(Case(MODELS["Whisper"], operations, SETTINGS))
    outputs = [submission.outputs for submission in engine.submissions.values()]
    assert list(map(len, outputs)) == [longest // 2] * 2


@pytest.mark.parametrize("pipeline_name", ["plain", "async"])
def test_prefix_caching_asked_for(pipeline_name: str) -> None:
    """Equal decoder prompts, as of all transcriptions: nothing is hit. Base's lookup raises."""
    operations = (
        Add(tail=100, max_tokens=5, encoder=50),
        Run(9),
        Add(tail=0, parent=0, shared=100, max_tokens=5, encoder=50),
        Add(tail=9, parent=0, shared=90, max_tokens=5, encoder=70),
    )
    settings = replace(SETTINGS, **PIPELINES[pipeline_name])
    without = run_case(Case(MODELS["Whisper"], operations, settings, ROOMY))
    caching = replace(settings, enable_prefix_caching=True)
    case = Case(MODELS["Whisper"], operations, caching, ROOMY)
    engine = run_any_case(HybridManager, case)
    assert engine.reads["encoder"] == without.reads["encoder"]
    assert engine.tokens_from_cache == 0
    with pytest.raises(NotImplementedError, match="does not support caching"):
        run_any_case(BaseManager, case)


# Planted faults


def exposing_case(seed: int) -> Case:
    rng = random.Random(seed)
    settings = replace(SETTINGS, **rng.choice(({}, ASYNC)), vocab_size=256)
    operations = random_encoder_operations(rng, 50, settings.max_model_len)
    kinds = rng.choice((MODELS["Whisper"], MODELS["several groups"]))
    return Case(kinds, operations, settings, extra_blocks=rng.choice((0, 10, 60)))


@pytest.mark.parametrize(
    "fault",
    [
        *ENCODER_FAULTS,
        AllocatesASlotTooFew,
        FreesARequestAStepEarly,
        GivesOutABlockOfAnotherRequest,
        NeverFrees,
    ],
    ids=lambda fault: fault.__name__,
)
def test_planted_fault_is_found(manager_cls: Any, fault: type) -> None:
    """Without checks of block tables: what is read and written must give it away."""
    for seed in range(30):
        try:
            run_any_case(plant(fault, manager_cls), exposing_case(seed), False)
        except OracleFault:
            # The fault, and not the case, was the reason.
            run_case(exposing_case(seed), False)
            return
        except Exception:
            continue
    pytest.fail(f"{fault.__doc__} The oracle does not notice.")


def fails(
    manager_cls: Any,
    fault: type,
    case: Case,
    error: type,
    message: str,
    check_held: bool = False,
) -> None:
    """A case is fine, and a fault in it is found for this reason."""
    run_case(case)
    engine = make_engine(plant(fault, manager_cls), case, check_integrity=False)
    engine._check_held = check_held
    with pytest.raises(error, match=message):
        for operation in case.operations:
            apply(engine, operation)
        engine.run_until_done()


TWO = (Add(tail=20, max_tokens=9, encoder=64), Run(3), Add(tail=20, max_tokens=9, encoder=64))
PLAIN = Case(MODELS["Whisper"], TWO, SETTINGS, ROOMY)


def test_another_requests_encoder(manager_cls: Any) -> None:
    fails(
        manager_cls,
        GivesOutTheEncoderBlocksOfAnotherRequest,
        PLAIN,
        ReadFault,
        r"r0, group 1, reads encoder position 0 \(computing 22 to 22\) from block \d+, which "
        "holds a wrong prefix, last owner r1 in group 1; 64 wrong reads in this step",
    )


def test_encoder_slots_that_are_missing(manager_cls: Any) -> None:
    case = replace(PLAIN, operations=(Add(tail=20, max_tokens=2, encoder=65),))
    message = r"r0 needs 65 slots, its 4 blocks of groups \[1\] have 64"
    fails(manager_cls, AllocatesAnEncoderSlotTooFew, case, WriteFault, message)
    message = r"r0 needs 65 slots, its 2 blocks of groups \[1\] have 32"
    fails(manager_cls, AllocatesTheEncodersBlocksByDecoderTokens, case, WriteFault, message)


def test_encoder_blocks_freed_too_early(manager_cls: Any) -> None:
    """Found at once, in a pool where nobody takes the blocks; and where somebody does."""
    fault = FreesTheEncodersBlocksAfterTheFirstStep
    fails(manager_cls, fault, PLAIN, InFlightFault, "the manager holds", check_held=True)
    fails(manager_cls, fault, replace(PLAIN, extra_blocks=0), OracleFault, "r0")


def test_the_encoder_blocks_from_before_a_preemption(manager_cls: Any) -> None:
    operations = tuple(Add(tail=60, max_tokens=120, encoder=100) for _ in range(4))
    case = replace(PLAIN, operations=operations, extra_blocks=6)
    fails(manager_cls, KeepsEncoderBlocksAfterPreemption, case, OracleFault, "group")


# Models without KV cache: sentence encoders and the like, which compute a prompt at once.


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("pipeline_name", ["plain", "async"])
def test_a_model_without_kv_cache(pipeline_name: str, caching: bool) -> None:
    """The pool has the null block only, and all are served; base agrees on what to do when."""
    settings = replace(SETTINGS, **PIPELINES[pipeline_name], enable_prefix_caching=caching)
    settings = replace(settings, max_num_seqs=3)
    operations: list[Any] = []
    for i in range(8):
        operations += [Add(tail=40 + i, max_tokens=1 + i % 2), Run(1, abort=i if i == 3 else None)]
    case = Case((), (*operations, Abort(7)), settings)
    assert case.num_blocks == 1
    ours = run_any_case(HybridManager, case)
    assert ours.worker.num_steps > 8
    assert sum(s.finished for s in ours.submissions.values()) >= 6
    if caching:
        with pytest.raises(AssertionError, match="at least one cacheable group"):
            run_any_case(BaseManager, case)
    else:
        assert run_any_case(BaseManager, case).num_schedules == ours.num_schedules


@pytest.mark.parametrize("manager", [None, BaseManager], ids=["chosen by the plugin", "base"])
def test_an_attention_free_model(manager: Any) -> None:
    """As Prithvi asks: a token in place of an image of no tokens, and a tensor in return.

    Base's path for such models needs no more of its manager than that it gives no blocks; with
    the plugin it is the hybrid manager.
    """
    with plugin_state_restored():
        activate()
        engine = OracleEngine(manager, make_kv_cache_config((), 1), SETTINGS)
    assert (type(engine.manager) is HybridManager) == (manager is None)
    scheduler = engine.scheduler
    for i in range(3):
        image = MultiModalFeatureSpec(None, "image", f"image {i}", PlaceholderRange(0, 0))
        scheduler.add_request(
            Request(f"r{i}", [1], None, PoolingParams(task="plugin"), mm_features=[image])
        )
    scheduled = scheduler.schedule()
    assert [(r.req_id, r.block_ids) for r in scheduled.scheduled_new_reqs] == [
        (f"r{i}", ()) for i in range(3)
    ]
    req_ids = list(scheduled.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids,
        {req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[],
        pooler_output=[torch.full((2,), float(i)) for i in range(3)],
    )
    (outputs,) = scheduler.update_from_output(scheduled, output).values()
    assert [o.pooling_output.tolist() for o in outputs.outputs] == [[i, i] for i in range(3)]
    assert all(o.finish_reason is not None for o in outputs.outputs)
    assert not scheduler.has_unfinished_requests()
    assert engine.manager.usage == 0
