# SPDX-License-Identifier: Apache-2.0
"""KV connectors under the content oracle: loads that succeed or fail, and blocks that are sent.

The scheduler creates the simulated connector (`support.oracle.connector`). It can load any prefix,
within the step that continues from the prefix or beside in-flight steps. As long as nothing is
evicted, the runs of both managers must be identical.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from support.kv_configs import full, sliding
from support.oracle import OracleEngine, OracleFault, OracleSettings, ReadFault
from support.oracle.connector import ConnectorSettings
from support.oracle.connector_cases import MODELS, PIPELINES
from support.oracle.planted_faults import plant
from support.oracle.planted_feature_faults import (
    CachesAFailedLoad,
    CachesWhatIsStillLoaded,
    FreesARequestThatLoads,
    GivesALoadTheSlotsBeforeIt,
    ReleasesWhatIsSent,
    ZeroesWhatIsStillLoaded,
)
from support.oracle.workload import Add, Case, Operation, Reset, Run, random_operations, run_case
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.hybrid import load_failures
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

ROOMY = 1000
MAX_MODEL_LEN = 240


def operations(seed: int, count: int = 90) -> tuple[Operation, ...]:
    # Base refuses to reset the cache during a transfer.
    mix = random_operations(random.Random(seed), count, MAX_MODEL_LEN)
    return tuple(op for op in mix if not isinstance(op, Reset))


def case(kinds: Any, pipeline: str, seed: int, extra_blocks: int = 0, **connector: Any) -> Case:
    return Case(
        kinds=kinds,
        operations=operations(seed),
        extra_blocks=extra_blocks,
        settings=OracleSettings(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=(64, 24)[seed % 2],
            policy=("fcfs", "priority")[seed // 2 % 2],
            vocab_size=64,
            connector=ConnectorSettings(seed=seed, **connector),
            **PIPELINES[pipeline],
        ),
    )


def models_and_pipelines() -> Iterator[Any]:
    """Each model with each pipeline. Loads beside the steps and within steps take turns."""
    for i, (model, kinds) in enumerate(MODELS.items()):
        for j, pipeline in enumerate(PIPELINES):
            yield pytest.param(
                kinds, pipeline, (i + j) % 4 > 0, 5 * i + j, id=f"{model}-{pipeline}"
            )


each_combination = pytest.mark.parametrize(
    ("kinds", "pipeline", "asynchronous", "seed"), [*models_and_pipelines()]
)


def connector_of(engine: OracleEngine) -> Any:
    assert engine.connector is not None
    return engine.connector


@each_combination
def test_the_same_as_base_in_a_large_pool(
    kinds: Any, pipeline: str, asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With loads, failed loads and sent requests, both runs are identical, step by step."""
    # Base repeats a load that fails for ever.
    monkeypatch.setattr(load_failures, "MOST_FAILED_LOADS", 1000)
    one = case(
        kinds,
        pipeline,
        seed,
        ROOMY,
        asynchronous=asynchronous,
        fails=3 * asynchronous,
        whole_prompts=False,
    )
    runs = [run_case(manager_cls, one) for manager_cls in (BaseManager, HybridManager)]
    seen = [
        (
            run.num_schedules,
            run.reads["kv"],
            run.tokens_from_cache,
            run.num_preemptions,
            connector_of(run).num_tokens_loaded,
            connector_of(run).num_failed,
            connector_of(run).num_sends,
        )
        for run in runs
    ]
    assert seen[0] == seen[1]
    # This also covers the window before the last token of a prompt that was just computed.
    sent = [run.worker.connector.num_reads if run.worker.connector else 0 for run in runs]
    assert sent[0] <= sent[1]
    assert connector_of(runs[1]).num_tokens_loaded > 100
    assert connector_of(runs[1]).num_sends > 2
    assert not asynchronous or connector_of(runs[1]).num_failed > 0


@pytest.mark.parametrize(
    ("kinds", "pipeline", "asynchronous", "seed"), [*models_and_pipelines()][::2]
)
def test_small_pools(kinds: Any, pipeline: str, asynchronous: bool, seed: int) -> None:
    """The pool has room for one longest request: transfers hold blocks, others are preempted."""
    one = case(kinds, pipeline, seed, 2, asynchronous=asynchronous)
    run = run_case(HybridManager, one)
    assert connector_of(run).num_tokens_loaded > 20
    assert connector_of(run).num_sends > 2


@pytest.mark.parametrize("pipeline", ["plain", "async", "pipeline parallel"])
def test_blocks_that_failed_to_load_are_computed(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one full-attention group, base goes on from the first block that failed to load."""
    monkeypatch.setattr(load_failures, "MOST_FAILED_LOADS", 1000)
    for seed in range(4):
        one = case((full(16),), pipeline, seed, ROOMY, fails=2, names_blocks=True)
        base, ours = (run_case(cls, one) for cls in (BaseManager, HybridManager))
        assert ours.num_schedules == base.num_schedules
        assert ours.tokens_from_cache == base.tokens_from_cache
        assert connector_of(ours).num_failed == connector_of(base).num_failed > 0


#: Requests with prompts around the lengths where a block leaves the window of the last token.
WHOLE_PROMPTS = tuple(
    operation
    for length in range(50, 60)
    for operation in (Add(tail=length, max_tokens=3), Run(steps=4))
)


def test_the_window_of_the_last_token_of_a_whole_prompt() -> None:
    """It is computed again after the load, and so reads one token more than the next one."""
    one = Case(
        kinds=(full(16), sliding(40, 16, 2)),
        operations=WHOLE_PROMPTS,
        extra_blocks=ROOMY,
        settings=OracleSettings(connector=ConnectorSettings(sends=False)),
    )
    run = run_case(HybridManager, one)
    assert connector_of(run).num_tokens_loaded > 100
    with pytest.raises(ReadFault, match="from block 0, which is the null block"):
        run_case(BaseManager, one)


@pytest.mark.parametrize(
    ("fault", "kinds", "connector"),
    [
        (CachesWhatIsStillLoaded, MODELS["Gemma"], {}),
        (ZeroesWhatIsStillLoaded, MODELS["three types, zeroed blocks"], {}),
        (FreesARequestThatLoads, MODELS["Gemma"], {}),
        (GivesALoadTheSlotsBeforeIt, MODELS["Gemma"], {"asynchronous": False}),
        (CachesAFailedLoad, MODELS["full attention"], {"fails": 2, "names_blocks": True}),
        (ReleasesWhatIsSent, MODELS["Gemma"], {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_faults_are_found(
    manager_cls: Any, fault: type, kinds: Any, connector: dict[str, Any]
) -> None:
    """With either manager, these faults would give wrong answers in a server."""
    for seed in range(12):
        one = case(kinds, "plain", seed, ROOMY, whole_prompts=False, **connector)
        run_case(manager_cls, one)
        try:
            run_case(plant(fault, manager_cls), one, check_integrity=False)
        except (OracleFault, AssertionError, KeyError, ValueError):
            return
    pytest.fail(f"{fault.__name__} was not found")
