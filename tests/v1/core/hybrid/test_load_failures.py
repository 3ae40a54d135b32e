# SPDX-License-Identifier: Apache-2.0
"""Asynchronous loads in small pools, and loads that fail: all requests end, with right answers.

Base hangs, reads what was never loaded, or ends the engine. Each test shows this first.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from support.kv_configs import full, make_kv_cache_config, sliding
from support.oracle import OracleEngine, OracleSettings, OutcomeFault, ReadFault
from support.oracle.connector import ConnectorSettings
from support.oracle.connector_cases import MODELS, random_case
from support.oracle.workload import run_case
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.hybrid import load_failures
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager
from vllm.v1.request import RequestStatus

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

GEMMA = (full(16), sliding(40, 16, 5))


def make_engine(
    manager_cls: Any, kinds: Any, num_blocks: int, connector: ConnectorSettings, **settings: Any
) -> OracleEngine:
    settings = {"max_model_len": 200, "max_num_batched_tokens": 64} | settings
    return OracleEngine(
        manager_cls,
        make_kv_cache_config(kinds, num_blocks),
        OracleSettings(connector=connector, **settings),
    )


def load_up_to(engine: OracleEngine, ends: dict[str, int]) -> None:
    """Let the connector have the first tokens of some requests, by id, and nothing of others."""
    connector = engine.connector
    assert connector is not None

    def match(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        connector._starts[request.request_id] = num_computed_tokens
        length = max(ends.get(request.request_id, 0) - num_computed_tokens, 0)
        return length, length > 0

    connector.get_num_new_matched_tokens = match  # type: ignore[method-assign]


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


# Loads that wait for each other


def serve_two_loads(manager_cls: Any, num_loaded: tuple[int, int], num_blocks: int) -> None:
    """Two requests of which a part is loaded, and one that is computed."""
    connector = ConnectorSettings(sends=False, most_steps=0)
    engine = make_engine(manager_cls, GEMMA, num_blocks, connector, max_num_batched_tokens=16)
    load_up_to(engine, {"r0": num_loaded[0], "r1": num_loaded[1]})
    engine.add_request(tokens(1, 199), 1)
    engine.add_request(tokens(1001, num_loaded[1] + 1), 1)
    engine.add_request(tokens(2001, 40), 1)
    engine.run_until_done()


@pytest.mark.parametrize(
    ("num_loaded", "num_blocks"),
    [((180, 2), 41), ((150, 2), 42), ((170, 20), 44), ((180, 20), 46)],
)
def test_loads_do_not_wait_for_each_other(num_loaded: tuple[int, int], num_blocks: int) -> None:
    """Null blocks of a table are not blocks that the request has already."""
    with pytest.raises(OutcomeFault, match="stuck"):
        serve_two_loads(BaseManager, num_loaded, num_blocks)
    serve_two_loads(HybridManager, num_loaded, num_blocks)


@pytest.mark.parametrize(("kinds", "num_blocks"), [((full(16),), 19), (GEMMA, 70)])
def test_a_lone_request_whose_load_failed(kinds: Any, num_blocks: int) -> None:
    """No blocks are kept free for the request from itself."""
    stuck: Counter[Any] = Counter()
    for seed in range(40):
        connector = ConnectorSettings(seed, whole_prompts=False, sends=False, fails=2)
        for manager_cls in (BaseManager, HybridManager):
            engine = make_engine(manager_cls, kinds, num_blocks, connector)
            engine.add_request(tokens(1, 190), 4)
            kept_free = spy_on_reservations(engine)
            try:
                engine.run_until_done()
            except OutcomeFault:
                stuck[manager_cls] += 1
            assert manager_cls is BaseManager or not any(kept_free)
    assert stuck[BaseManager] > 0
    assert stuck[HybridManager] == 0


def spy_on_reservations(engine: OracleEngine) -> list[int]:
    """What the scheduler will keep free for requests in flight, each time that a load begins."""
    reserved: list[int] = []
    real = engine.scheduler._inflight_prefill_reserved_blocks

    def spy() -> int:
        reserved.append(real())
        return reserved[-1]

    engine.scheduler._inflight_prefill_reserved_blocks = spy  # type: ignore[method-assign]
    return reserved


# Failed loads that name their blocks


def serve_named_failures(manager_cls: Any, kinds: Any, seed: int, **connector: Any) -> OracleEngine:
    one = ConnectorSettings(
        seed, whole_prompts=False, sends=False, fails=2, names_blocks=True, **connector
    )
    engine = make_engine(manager_cls, kinds, 100, one)
    for first in range(0, 6000, 1000):
        engine.add_request(tokens(first, 150), 4)
    engine.run_until_done()
    return engine


def test_a_window_that_was_never_loaded_is_not_read() -> None:
    """Base goes on from the first failed block, whatever is before it."""
    with pytest.raises(ReadFault, match="null block"):
        for seed in range(12):
            serve_named_failures(BaseManager, (sliding(40, 16),), seed)
    num_failed = 0
    for seed in range(12):
        connector = serve_named_failures(HybridManager, (sliding(40, 16),), seed).connector
        assert connector is not None
        num_failed += connector.num_failed
    assert num_failed > 12


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kinds", [GEMMA, MODELS["unequal block sizes"]])
def test_blocks_of_several_types(
    kinds: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on from a boundary that all types still hold, or from their beginning."""
    with pytest.raises(RuntimeError, match="multiple KV cache groups"):
        for seed in range(12):
            serve_named_failures(BaseManager, kinds, seed, asynchronous=asynchronous)
    resumed_at: list[int] = []
    recover = load_failures.recover

    def spy(scheduler: Any, invalid_block_ids: set[int]) -> set[str]:
        dropped = recover(scheduler, invalid_block_ids)
        resumed_at.extend(
            scheduler.requests[req_id].num_computed_tokens
            for req_id in dropped | scheduler.failed_recving_kv_req_ids
        )
        return dropped

    monkeypatch.setattr(load_failures, "recover", spy)
    for seed in range(12):
        serve_named_failures(HybridManager, kinds, seed, asynchronous=asynchronous)
    assert resumed_at.count(0) > 2
    # What was loaded within a step is cached already: the request is preempted, and hits it.
    assert any(resumed_at) == asynchronous


def test_a_load_that_reports_failed_blocks_twice() -> None:
    """The later report of a later block does not bring back what failed before."""
    connector = ConnectorSettings(whole_prompts=False, sends=False)
    engine = make_engine(HybridManager, GEMMA, 200, connector)
    load_up_to(engine, {"r0": 48})
    req_id = engine.add_request(tokens(1, 190), 4)
    engine.schedule()
    scheduler = engine.scheduler
    full_attention = engine.manager.get_block_ids(req_id)[0]
    request = scheduler.requests[req_id]
    for block, num_computed in ((2, 32), (0, 0), (1, 0)):
        scheduler._handle_invalid_blocks({full_attention[block]}, {})
        assert request.num_computed_tokens == num_computed
    engine.receive()
    engine.run_until_done()


def test_requests_that_share_what_was_computed_from_a_failed_block() -> None:
    """The block that failed is out of the second request's window, but its hit depends on it."""
    connector = ConnectorSettings(asynchronous=False, sends=False)
    engine = make_engine(
        HybridManager, GEMMA, 200, connector, max_num_batched_tokens=200, steps_in_flight=1
    )
    load_up_to(engine, {})
    first = engine.add_request(tokens(1, 160), 8)
    engine.schedule()
    second = engine.add_request([*tokens(1, 160), 7, 8, 9], 8)
    engine.schedule()
    scheduler, manager = engine.scheduler, engine.manager
    of_first, of_second = (manager.get_block_ids(req_id) for req_id in (first, second))
    lost = of_first[1][2]
    assert lost not in {i for group in of_second for i in group}
    assert of_first[0][:10] == of_second[0][:10]

    assert scheduler._handle_invalid_blocks({lost}, {}) == {first, second}
    assert [request.request_id for request in scheduler.waiting] == [first, second]
    # Full attention still has two blocks, but no window before their end.
    assert manager.get_computed_blocks(scheduler.requests[second])[1] == 32
    engine.receive()
    engine.receive()
    engine.run_until_done()


def test_requests_end_with_an_error_if_that_is_the_policy() -> None:
    engine = make_engine(HybridManager, GEMMA, 200, ConnectorSettings(sends=False))
    load_up_to(engine, {})
    req_id = engine.add_request(tokens(1, 60), 8)
    engine.schedule()
    engine.scheduler.recompute_kv_load_failures = False
    lost = engine.manager.get_block_ids(req_id)[0][1]
    assert engine.scheduler._handle_invalid_blocks({lost}, {}) == {req_id}
    assert engine.scheduler.requests[req_id].status == RequestStatus.RUNNING
    assert engine.scheduler._handle_invalid_blocks({199}, {}) == set()


@pytest.mark.parametrize("names_blocks", [False, True])
def test_a_connector_that_always_fails(names_blocks: bool) -> None:
    """After some attempts the request is computed. With base it is loaded for ever."""
    connector = ConnectorSettings(1, sends=False, fails=1, most_steps=0, names_blocks=names_blocks)
    engine = make_engine(HybridManager, GEMMA, 200, connector)
    load_up_to(engine, {"r0": 5})  # less than a block, so that nothing is left of it
    engine.add_request(tokens(1, 60), 4)
    engine.run_until_done()
    assert engine.connector is not None
    assert engine.connector.num_failed == load_failures.MOST_FAILED_LOADS


# Random cases


def test_some_request_always_makes_progress() -> None:
    """All requests end, and nothing wrong is read."""
    totals: Counter[str] = Counter()
    for seed in range(200):
        engine = run_case(HybridManager, random_case(seed), check_integrity=seed % 4 == 0)
        assert engine.connector is not None
        totals.update(
            loaded=engine.connector.num_tokens_loaded,
            failed=engine.connector.num_failed,
            preempted=engine.num_preemptions,
        )
    assert totals["loaded"] > 10_000
    assert min(totals["failed"], totals["preempted"]) > 100


def test_base_gets_stuck_in_such_cases() -> None:
    """So the cases above are hard enough."""
    for seed in range(40):
        one = random_case(seed)
        connector = one.settings.connector
        assert connector is not None
        if not connector.asynchronous:
            continue
        # What else base does wrong would be found first.
        mild = replace(connector, names_blocks=False, whole_prompts=False)
        try:
            run_case(BaseManager, replace(one, settings=replace(one.settings, connector=mild)))
        except OutcomeFault:
            return
    pytest.fail("base ends all cases")
