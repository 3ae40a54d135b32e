# SPDX-License-Identifier: Apache-2.0
"""Mamba states under the content oracle, and faults that it finds.

Base has two cache modes: "align" with prefix caching, and "none" without. Until a cached block is
evicted, the runs of both managers must be identical.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.base_with_states import BaseWithStates as BaseManager
from support.identity import PrefixIdentity
from support.kv_configs import full, kind_of, make_kv_cache_config, mamba, sliding
from support.oracle import (
    InFlightFault,
    OracleEngine,
    OracleFault,
    OracleSettings,
    ProtocolFault,
    ReadFault,
    WriteFault,
)
from support.oracle.attention import Attention
from support.oracle.block_tables import BlockTables
from support.oracle.planted_faults import (
    ForgetsStepsInFlight,
    FreesARequestAStepEarly,
    FreesWindowBlocksAStepEarly,
    HashesBlocksWithoutPrefix,
    MixesUpTwoGroups,
    NeverFrees,
    ResetKeepsTheCache,
    SharesAcrossAdapters,
    SharesAcrossImages,
    SharesAcrossSalts,
    plant,
)
from support.oracle.planted_feature_faults import (
    STATE_FAULTS,
    GivesOutTheStateBlockOfAnotherRequest,
    HitsStatesOfTheSameStep,
    HitsTheStateOfAnEarlierBoundary,
)
from support.oracle.sequences import Sequences
from support.oracle.step import RequestState, Step
from support.oracle.workload import Abort, Add, Case, Reset, Run, make_engine, random_operations
from support.oracle.workload import run_case as run_any_case
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

CACHING = OracleSettings()
NOT_CACHING = OracleSettings(enable_prefix_caching=False)
ASYNC = {"async_scheduling": True, "steps_in_flight": 1}
ROOMY = 1000

PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": ASYNC,
    "async, run early": {**ASYNC, "run_early": True},
    "async, two in flight": {"async_scheduling": True, "steps_in_flight": 2},
    "pipeline parallel": {"steps_in_flight": 1},
    "runner v2": {"model_runner_v2": True},
    "async, runner v2": {**ASYNC, "model_runner_v2": True},
}

#: Models with prefix caching; all types have the block size that base gives them.
ALIGN = {
    "Mamba only": (mamba(16),),
    "full": (full(16), mamba(16)),
    "sliding": (sliding(20, 16, 2), mamba(16, 2)),
    "full and sliding": (mamba(16, 3), full(16), sliding(33, 16, 2)),
    "blocks larger than chunks": (full(64), mamba(64, 2)),
    "checkpoints in steps": (full(16), mamba(16, 3, checkpoint_alignment=1), sliding(33, 16)),
}

#: The same models without prefix caching. One state block serves the longest sequence.
NONE = {
    "Mamba only": (mamba(256, mode="none"),),
    "full": (full(16), mamba(256, mode="none")),
    "sliding": (mamba(256, 2, mode="none"), sliding(20, 16, 2)),
    "full and sliding": (full(8), mamba(512, 3, mode="none"), sliding(33, 16, 2)),
}

MODELS = [pytest.param(kinds, CACHING, id=f"align, {name}") for name, kinds in ALIGN.items()]
MODELS += [pytest.param(kinds, NOT_CACHING, id=f"none, {name}") for name, kinds in NONE.items()]


#: Those that differ most, for what runs with all models.
SOME_PIPELINES = ("async, two in flight", "runner v2")


@pytest.fixture(params=list(PIPELINES.values()), ids=list(PIPELINES))
def pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def run_case(manager_cls: Any, case: Case, check_integrity: bool = True) -> OracleEngine:
    """Run a case to its end. A case that checks no state shows nothing and fails."""
    engine = run_any_case(manager_cls, case, check_integrity)
    assert engine.reads["states"] > 0
    if manager_cls is BaseManager:
        ours: Any = run_any_case(HybridManager, case, check_integrity)
        assert ours.reads["states"] > 0
        # After the first eviction, the two managers may keep different blocks.
        if not ours.manager.block_pool.num_evicted_ids:
            assert ours.reads["states"] == engine.reads["states"]
            assert ours.tokens_from_cache == engine.tokens_from_cache
            assert ours.num_preemptions == engine.num_preemptions
    return engine


# One feature at a time


def test_prefix_hit(pipeline: dict[str, Any]) -> None:
    """Hits end where a chunk ended, because only those positions have a state."""
    case = Case(ALIGN["full"], settings=replace(CACHING, **pipeline), extra_blocks=ROOMY)
    engine = make_engine(BaseManager, case)

    def run(prompt: list[int]) -> tuple[int, int]:
        before = engine.tokens_from_cache, engine.reads["states"]
        engine.add_request(prompt, max_tokens=3)
        engine.run_until_done()
        return engine.tokens_from_cache - before[0], engine.reads["states"] - before[1]

    prompt = list(range(100))
    # A third in-flight step is scheduled before the end is known.
    extra = case.settings.steps_in_flight == 2
    # Chunks of 64, 32 (to the last full block) and 4 tokens; then two decoded tokens.
    assert run(prompt) == (0, 4 + extra)
    assert run(prompt) == (96, 3 + extra)
    # Full attention has 80 of its tokens, but there is no state after 80.
    assert run([*prompt[:90], 29999]) == (64, 4 + extra)
    assert run([*prompt[:63], 7]) == (0, 3 + extra)


def test_a_state_in_the_middle_of_a_step(pipeline: dict[str, Any]) -> None:
    """The prompt is computed at once, and can still be hit at its last boundary."""
    settings = replace(CACHING, **pipeline, max_num_batched_tokens=128)
    case = Case(ALIGN["checkpoints in steps"], settings=settings, extra_blocks=ROOMY)
    prompt = list(range(100))
    for manager_cls in (BaseManager, HybridManager):
        engine = make_engine(manager_cls, case)
        for _ in range(2):
            engine.add_request(prompt, max_tokens=3)
            engine.run_until_done()
        assert engine.tokens_from_cache == 96
        assert engine.worker.attention.checkpoints_written == 3  # one in each group


def test_a_state_that_is_not_written_is_found() -> None:
    """The manager allocates blocks for states in the middle of a step; the worker writes none."""
    kinds = ALIGN["checkpoints in steps"]
    case = Case(kinds, settings=replace(CACHING, max_num_batched_tokens=128), extra_blocks=ROOMY)
    for manager_cls in (BaseManager, HybridManager):
        engine = make_engine(manager_cls, case)
        for tables in engine.worker.tables.types:
            if tables.kind.holds_states:
                tables.kind = mamba(16)
        engine.add_request(list(range(100)), max_tokens=3)
        engine.run_until_done()
        engine.add_request(list(range(100)), max_tokens=3)
        with pytest.raises(ReadFault, match=r"starts from the state in block \d+, which holds"):
            engine.run_until_done()


def test_chunked_prefill(pipeline: dict[str, Any]) -> None:
    operations = (Add(tail=100), Run(20), Add(tail=100))
    few = {**pipeline, "max_num_batched_tokens": 24}
    # Chunks of 24 end at block boundaries: six of 16, and the rest.
    case = Case((full(16), mamba(16, 2)), operations, replace(CACHING, **few), ROOMY)
    assert run_case(BaseManager, case).reads["states"] == 2 * 2 * 6
    # Four of 24 and the rest.
    case = Case(NONE["sliding"], operations, replace(NOT_CACHING, **few), ROOMY)
    assert run_case(BaseManager, case).reads["states"] == 2 * 2 * 4
    # Blocks are larger than a chunk, so chunk ends and block ends alternate: 24, 24, 16; 24, 12.
    case = Case(ALIGN["blocks larger than chunks"], operations, replace(CACHING, **few), ROOMY)
    assert run_case(BaseManager, case).reads["states"] == 2 * 2 * 4


def test_no_state_is_read_at_the_start() -> None:
    case = Case(NONE["full"], (Add(tail=30),), NOT_CACHING, ROOMY)
    engine = run_any_case(BaseManager, case)
    assert engine.reads["states"] == 0
    assert engine.worker.attention.states_written == 1
    assert run_case(BaseManager, replace(case, operations=(Add(30, max_tokens=2),)))


@pytest.mark.parametrize("pipeline_name", SOME_PIPELINES)
@pytest.mark.parametrize(("kinds", "settings"), MODELS)
def test_preemption(kinds: tuple, settings: OracleSettings, pipeline_name: str) -> None:
    """Long requests in a pool with room for little more than one."""
    settings = replace(settings, **PIPELINES[pipeline_name], max_num_batched_tokens=96)
    operations = (Add(tail=60, max_tokens=150),) * 6
    engine = run_case(BaseManager, Case(kinds, operations, settings))
    # In mode "none" without growing attention, a request has all its blocks when it starts.
    if any(kind.kind == "full" for kind in kinds):
        assert engine.num_preemptions > 0


def test_a_preempted_request_resumes_from_its_state() -> None:
    """It was preempted just after a boundary, and runs again soon."""
    settings = replace(CACHING, max_num_batched_tokens=32)
    operations = (Add(tail=60, max_tokens=60), Add(tail=90, max_tokens=120))
    engine = run_case(BaseManager, Case(ALIGN["full"], operations, settings))
    assert engine.num_preemptions == 1
    # The prompts share nothing, so the hit tokens are the request's own, and exceed its prompt.
    assert engine.tokens_from_cache == 144


@pytest.mark.parametrize("pipeline_name", SOME_PIPELINES)
@pytest.mark.parametrize(("kinds", "settings"), MODELS)
def test_aborts(kinds: tuple, settings: OracleSettings, pipeline_name: str) -> None:
    """At every stage of a request, with others that take its blocks over at once."""
    settings = replace(settings, **PIPELINES[pipeline_name])
    operations: list[Any] = []
    for steps in range(1, 7):
        operations += [
            Add(tail=80, max_tokens=20),
            Add(tail=50, max_tokens=4),
            Run(steps, abort=len(operations) // 5 * 2),
            Add(tail=5, parent=0, shared=70, max_tokens=5),
            Abort(len(operations) // 2),
        ]
    engine = run_case(BaseManager, Case(kinds, tuple(operations), settings, extra_blocks=12))
    assert any(submission.aborted for submission in engine.submissions.values())
    assert any(submission.finished for submission in engine.submissions.values())


def test_reset(pipeline: dict[str, Any]) -> None:
    operations = (
        Add(tail=100, max_tokens=9),
        Run(4),
        Reset(running=True),
        Run(3),
        Add(tail=9, parent=0, shared=90, max_tokens=9),
    )
    case = Case(ALIGN["full and sliding"], operations, replace(CACHING, **pipeline), ROOMY)
    assert run_case(BaseManager, case).num_preemptions > 0


@pytest.mark.parametrize("interval", [0, 64])
def test_sparse_retention(interval: int) -> None:
    """Most states are not cached. The remaining hits must be right."""
    operations = [Add(tail=150, max_tokens=3), Run(9)]
    operations += [Add(tail=9, parent=0, shared=shared) for shared in (150, 140, 100, 70, 40)]
    settings = replace(CACHING, max_num_batched_tokens=32)
    case = Case(ALIGN["full"], tuple(operations), settings, ROOMY, retention_interval=interval)
    engine = run_case(BaseManager, case)
    assert engine.tokens_from_cache >= 144
    dense = run_case(BaseManager, replace(case, retention_interval=None))
    assert dense.tokens_from_cache > engine.tokens_from_cache


@pytest.mark.parametrize("pipeline_name", ["plain", "async"])
@pytest.mark.parametrize(("kinds", "settings"), MODELS)
def test_random(kinds: tuple, settings: OracleSettings, pipeline_name: str) -> None:
    for seed in range(2):
        rng = random.Random(f"{kinds} {pipeline_name} {seed}")
        changes = {"max_num_batched_tokens": rng.choice((24, 64, 200)), "vocab_size": 256}
        case = Case(
            kinds,
            tuple(random_operations(rng, 40, settings.max_model_len)),
            replace(settings, **PIPELINES[pipeline_name], **changes),
            extra_blocks=(0, 40)[seed],
            shuffle_groups=seed,
        )
        run_case(BaseManager, case)


# Planted faults


def exposing_case(seed: int, settings: OracleSettings) -> Case:
    rng = random.Random(seed)
    kinds = ALIGN["full and sliding"] if settings.enable_prefix_caching else NONE["full"]
    if rng.random() < 0.5:
        settings = replace(settings, **ASYNC)
    settings = replace(settings, vocab_size=256, max_num_batched_tokens=rng.choice((40, 200)))
    operations = tuple(random_operations(rng, 60, settings.max_model_len))
    return Case(kinds, operations, settings, extra_blocks=rng.choice((0, 20, 200)))


def assert_found(fault: type, settings: OracleSettings) -> None:
    """Block tables are not checked here: the fault must show in reads and writes."""
    for seed in range(30):
        try:
            run_any_case(plant(fault, BaseManager), exposing_case(seed, settings), False)
        except OracleFault:
            # Without the fault, the case passes.
            run_case(BaseManager, exposing_case(seed, settings), False)
            return
        except Exception:
            continue
    pytest.fail(f"{fault.__doc__} The oracle does not notice.")


@pytest.mark.parametrize(
    "fault",
    [
        *STATE_FAULTS,
        ForgetsStepsInFlight,
        FreesARequestAStepEarly,
        FreesWindowBlocksAStepEarly,
        HashesBlocksWithoutPrefix,
        MixesUpTwoGroups,
        NeverFrees,
        ResetKeepsTheCache,
        SharesAcrossAdapters,
        SharesAcrossImages,
        SharesAcrossSalts,
    ],
    ids=lambda fault: fault.__name__,
)
def test_planted_fault_is_found(fault: type) -> None:
    assert_found(fault, CACHING)


@pytest.mark.parametrize(
    "fault",
    [
        GivesOutTheStateBlockOfAnotherRequest,
        FreesARequestAStepEarly,
    ],
    ids=lambda fault: fault.__name__,
)
def test_planted_fault_is_found_without_caching(fault: type) -> None:
    assert_found(fault, NOT_CACHING)


def fails(
    fault: type,
    case: Case,
    error: type,
    message: str,
    check_integrity: bool = False,
) -> None:
    """Assert that a case passes with base's manager, and that a fault is found for this reason."""
    run_case(BaseManager, case)
    with pytest.raises(error, match=message):
        run_any_case(plant(fault, BaseManager), case, check_integrity)


# The model has only Mamba layers, so that attention cannot find the fault first.


def test_two_requests_with_one_state_block() -> None:
    fault = GivesOutTheStateBlockOfAnotherRequest
    adds = (Add(tail=20, max_tokens=4), Add(tail=20, max_tokens=4))
    case = Case(NONE["Mamba only"], adds, NOT_CACHING, 9)
    fails(fault, case, WriteFault, "step 0: two owners write to block")
    # The second request takes the block over during a pause in the first one's prefill.
    settings = replace(NOT_CACHING, long_prefill_token_threshold=10, max_num_batched_tokens=20)
    case = Case(NONE["Mamba only"], (adds[0], Run(), adds[1]), settings, 9)
    fails(fault, case, WriteFault, "two owners write to block")


def test_a_state_of_another_boundary() -> None:
    operations = (Add(tail=100), Run(9), Add(tail=1, parent=0, shared=100, max_tokens=2))
    settings = replace(CACHING, max_num_batched_tokens=16)
    fails(
        HitsTheStateOfAnEarlierBoundary,
        Case(ALIGN["Mamba only"], operations, settings, ROOMY),
        ReadFault,
        r"r1, group 0, starts from the state in block \d+, which holds another state, last "
        "owner r0 in group 0; 1 wrong states in this step",
    )


def test_a_state_of_the_same_step() -> None:
    """Two requests with one prefix are admitted together. They may share KV, but not a state."""
    operations = (Add(tail=40, max_tokens=2), Add(tail=5, parent=0, shared=40, max_tokens=2))
    fails(
        HitsStatesOfTheSameStep,
        Case(ALIGN["Mamba only"], operations, CACHING, ROOMY),
        ReadFault,
        r"step 0: r1, group 0, starts from the state in block \d+, which holds nothing",
    )


@pytest.mark.parametrize("fault", [FreesWindowBlocksAStepEarly, ForgetsStepsInFlight])
def test_a_state_freed_too_early(fault: type) -> None:
    """Found at once, in a pool where no request takes the block."""
    settings = replace(CACHING, **ASYNC, max_num_batched_tokens=16)
    case = Case(ALIGN["Mamba only"], (Add(tail=60, max_tokens=60),), settings, ROOMY)
    fails(fault, case, InFlightFault, "the manager holds", check_integrity=True)


def test_a_state_block_handed_out_while_a_step_in_flight_reads_it() -> None:
    class Faulty(BaseManager):
        """Gives the second request the block that the first one has just left."""

        def get_blocks(self, request_id: str) -> Any:
            if request_id == "r1":
                [ids] = self.get_block_ids("r0")
                blocks: Any = super().get_blocks("r1")
                blocks.blocks[0][-1] = self.block_pool.blocks[next(i for i in ids if i)]
                return blocks
            return super().get_blocks(request_id)

    settings = replace(CACHING, **ASYNC, max_num_batched_tokens=40)
    operations = (Add(tail=60, max_tokens=2), Run(2), Add(tail=8, max_tokens=2))
    fails(
        Faulty,
        Case(ALIGN["Mamba only"], operations, settings, ROOMY),
        InFlightFault,
        r"block \d+ was handed out, but step \d in flight reads it for r0",
    )


def test_more_state_blocks_than_base_looks_at() -> None:
    """In mode "none" base's runner has a block table of one column."""

    class Faulty(BaseManager):
        def get_blocks(self, request_id: str) -> Any:
            blocks: Any = super().get_blocks(request_id)
            return type(blocks)(tuple(ids * 2 for ids in blocks.blocks))

    case = Case(NONE["Mamba only"], (Add(tail=20, max_tokens=2),), NOT_CACHING, 9)
    fails(Faulty, case, ProtocolFault, "2 blocks for a request in groups")


# Parts


def test_columns() -> None:
    starts, ends = np.array([0, 5, 16, 17, 40]), np.array([5, 16, 17, 40, 41])
    align = mamba(16)
    assert align.state_column(starts).tolist() == [-1, 0, 0, 1, 2]
    assert align.state_column(ends).tolist() == [0, 0, 1, 2, 2]
    assert align.first_column(np.array([0, 17]), np.array([40, 64])).tolist() == [2, 1]
    none = mamba(16, mode="none")
    assert none.state_column(starts).tolist() == [-1, 0, 0, 0, 0]
    assert none.state_column(ends).tolist() == [0, 0, 0, 0, 0]
    assert none.first_column(starts, ends).tolist() == [0, 0, 0, 0, 0]


def mamba_spec(**changes: Any) -> MambaSpec:
    return MambaSpec(
        **{"block_size": 16, "shapes": ((1, 1),), "dtypes": (torch.float32,), **changes}
    )


def test_rules_of_specs() -> None:
    assert kind_of(mamba_spec()) == mamba(16, mode="none")
    assert kind_of(mamba_spec(mamba_cache_mode="align")) == mamba(16)
    checkpoints = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 8}
    spec = mamba_spec(mamba_cache_mode="align", **checkpoints)
    assert kind_of(spec) == mamba(16, checkpoint_alignment=8)
    assert kind_of(spec).holds_states
    heads = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    assert not kind_of(heads).holds_states
    for unknown in (
        {"num_speculative_blocks": 2},
        {"mamba_cache_mode": "all"},
    ):
        with pytest.raises(NotImplementedError):
            kind_of(mamba_spec(**unknown))


@pytest.mark.parametrize(
    ("kinds", "settings", "error"),
    [
        ((mamba(16),), NOT_CACHING, ValueError),
        ((mamba(256, mode="none"),), CACHING, ValueError),
        ((mamba(128, mode="none"),), NOT_CACHING, ValueError),
        ((mamba(16), mamba(32)), CACHING, ValueError),
        ((mamba(16),), replace(CACHING, num_spec_tokens=2), NotImplementedError),
    ],
)
def test_what_base_does_not_do_is_refused(
    kinds: tuple, settings: OracleSettings, error: type
) -> None:
    with pytest.raises(error):
        OracleEngine(BaseManager, make_kv_cache_config(kinds, 100), settings)


def test_a_state_overwritten_while_it_is_read() -> None:
    config = make_kv_cache_config((mamba(4),), num_blocks=6)
    sequences, no_encoder = Sequences(2, 8, vocab_size=64), Sequences(2, 8, vocab_size=64)

    def step(sources: list[int], targets: list[int]) -> Attention:
        """Requests get to 8 tokens, from 4 if their states move to another block, else from 5."""
        tables = BlockTables(config, num_rows=2, max_model_len=8)
        attention = Attention(tables, sequences, no_encoder)
        requests = []
        for row, (req_id, *blocks) in enumerate(zip("ab", sources, targets, strict=True)):
            sequences.start(row, range(row, row + 8), PrefixIdentity())
            requests.append(RequestState(req_id, row, attention.memory.admit(req_id), [blocks]))
            tables.append(row, [blocks])
        starts = np.where(np.array(sources) == np.array(targets), 5, 4)
        step = Step(0, requests, starts, 8 - starts, tables)
        before = attention.states(step, tables.types[0], step.tables[0], starts)
        attention.memory.write(before, "before")
        attention.forward(step)
        return attention

    assert step([1, 2], [3, 4]).reads["states"] == 2
    assert step([1, 2], [1, 4]).states_written == 2
    with pytest.raises(WriteFault, match=r"step 0: overwritten while it is read: a, group 0"):
        step([1, 2], [3, 1])
    with pytest.raises(WriteFault, match="two owners write to block 3"):
        step([1, 2], [3, 3])
    with pytest.raises(WriteFault, match="writes to the null block"):
        step([1, 2], [3, 0])
