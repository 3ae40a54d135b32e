# SPDX-License-Identifier: Apache-2.0
"""The same random programs drive base's KV cache manager and the hybrid manager.

As long as nothing has been evicted, both must return exactly the same after every operation:
hits, junctions, null patterns, which blocks requests share, admissions, preemptions, free
blocks, usage, estimates, statistics and events. In pools so small that cached blocks are evicted,
the two may decide differently, because the hybrid manager evicts the blocks of a type's groups as
one. Then each follows its own decisions and is checked against the model of
`support.manager_model`.

The default run takes about two minutes and is the same every time. To run more and other
programs:

    HYBRID_KV_EXAMPLES=5000 pytest -s tests/v1/core/hybrid/test_differential.py
"""

from dataclasses import replace

import pytest
from hypothesis.internal.conjecture import providers

from support.base_with_states import BaseWithStates
from support.differential import Difference, Totals, explore, run_program
from support.kv_configs import KVSetup, full, mla, sliding
from support.oracle import ReadFault
from support.oracle.faults import Unsafe
from support.programs import Program, programs
from support.requests import RequestPlan
from support.strategies import attention_kinds
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

#: Under retention 0 the second request shares a prefix that only full attention still has.
JUNCTION = Program(
    KVSetup((full(16), sliding(33, 16, 5)), 1000, retention=0, events=True, max_chunk=512),
    tuple(RequestPlan(path) for path in (((0, 100),), ((0, 64), (1, 36)), ((0, 64), (2, 20)))),
    (("serve", 0, 2), ("serve", 1, 2), ("serve", 2, 2)),
)

#: All operations of the driver. Each must take effect in a run.
OPERATIONS = {
    "add",
    "decode",
    "finish",
    "finish_later",
    "look_up",
    "observe",
    "preempt",
    "process",
    "remove_skipped",
    "reset",
    "return_blocks",
    "run",
    "serve",
    "session",
    "start",
    "stats",
    "step",
    "wind_down",
}


def report(name: str, totals: Totals, operations: set[str] = OPERATIONS) -> None:
    print(f"\n{name}: {totals}")
    assert totals["ops"] >= 1000, "too few operations to prove anything"
    assert min(totals.both("hits")) > 0
    assert min(totals.both("slots_checked")) > 0
    assert all(totals[f"op {name}"] for name in operations)


def test_ample_pools() -> None:
    """Everything fits, so hardly anything is evicted, and all observations are equal."""
    totals = explore(programs(), lambda program: run_program(program, KVCacheManager), 160)
    # Random programs rarely reach a junction, so one program has a junction.
    totals.update(run_program(JUNCTION, KVCacheManager))
    report("ample pools", totals)
    assert min(totals.both("junctions")) > 0
    assert totals["compared"] > 0.95 * totals["ops"]


def test_tight_pools() -> None:
    """Pools for one to a few requests: both managers stay safe. Hit tokens are only printed."""
    totals = explore(
        programs(tight=True), lambda program: run_program(program, KVCacheManager), 250
    )
    report("tight pools", totals)
    assert min(totals.both("evictions")) > 0
    assert min(totals.both("preemptions")) > 0
    assert 0 < totals["compared"] < totals["ops"]


def test_types_of_one_group_evict_as_base_does() -> None:
    """If each type has one group, a grouped block is one block: the runs are equal to the end."""
    kinds = attention_kinds().map(
        lambda kinds: tuple(replace(kind, num_groups=1) for kind in kinds)
    )
    totals = explore(
        programs(tight=True, kinds=kinds),
        lambda program: run_program(program, KVCacheManager, exact=True),
        200,
    )
    report("types of one group", totals)
    assert min(totals.both("evictions")) > 0
    assert totals["compared"] == totals["ops"]


#: Too rare for a short run, or impossible with states.
SELDOM = {"return_blocks", "session"}


@pytest.mark.parametrize("tight", [False, True])
def test_states(tight: bool) -> None:
    """Mamba states with prefix caching (base's mode ``align``), alone and with attention."""
    totals = explore(
        programs(tight=tight, kinds=attention_kinds(max_kinds=3, states=True)),
        lambda program: run_program(program, KVCacheManager, BaseWithStates),
        80,
    )
    report(f"states, {'tight' if tight else 'ample'} pools", totals, OPERATIONS - SELDOM)
    if not tight:
        assert totals["compared"] > 0.95 * totals["ops"]


def test_programs_do_not_depend_on_the_loaded_modules() -> None:
    # This repository's modules are loaded by now. See `tests/conftest.py`.
    assert len(providers._get_local_constants()) == 0


def test_base_agrees_with_itself() -> None:
    """The driver is deterministic, and base passes its checks."""
    totals = explore(
        programs(tight=True),
        lambda program: run_program(program, BaseKVCacheManager, exact=True),
        60,
    )
    print(f"\nbase with itself: {totals}")
    assert totals["compared"] == totals["ops"] >= 1000
    assert totals.both("hit_tokens")[0] == totals.both("hit_tokens")[1]
    assert totals.both("evictions")[0] == totals.both("evictions")[1] > 0


# If the checks did not find faults, passing them would mean nothing.

PLANS = (RequestPlan(((0, 40),)), RequestPlan(((0, 24), (1, 30))))
OPS = (
    ("serve", 0, 20),
    ("serve", 1, 3),
    ("finish", 0),
    ("serve", 0, 30),
    ("preempt", 0),
    ("step", 64),
    ("serve", 1, 2),
)
FAULTY = Program(KVSetup((full(8), sliding(10, 8, 2)), 200, events=True), PLANS, OPS)


def test_the_faultless_program_passes() -> None:
    totals = run_program(FAULTY, KVCacheManager)
    assert totals["compared"] == totals["ops"] == len(OPS) + 1
    assert totals.both("hits")[0] > 0


def test_a_block_given_up_too_early_is_found() -> None:
    class Early(BaseKVCacheManager):
        def allocate_slots(self, request, *args, **kwargs):
            self.coordinator.remove_skipped_blocks(
                request.request_id, request.num_computed_tokens + 1
            )
            return super().allocate_slots(request, *args, **kwargs)

    with pytest.raises(ReadFault, match="which is the null block"):
        run_program(FAULTY, Early)


def test_a_block_given_up_too_late_is_found() -> None:
    class Late(BaseKVCacheManager):
        def allocate_slots(self, request, *args, **kwargs):
            request.num_in_flight_tokens += 8
            blocks = super().allocate_slots(request, *args, **kwargs)
            request.num_in_flight_tokens -= 8
            return blocks

    with pytest.raises(Difference, match="free"):
        run_program(FAULTY, Late)


def test_a_hit_on_another_prefix_is_found() -> None:
    class Confused(BaseKVCacheManager):
        def get_computed_blocks(self, request):
            request.block_hashes[-1] = self.first = getattr(self, "first", request.block_hashes[-1])
            return super().get_computed_blocks(request)

    setup = KVSetup((mla(8),), 200)
    ops = (("serve", 0, 1), ("finish", 0), ("serve", 1, 0))
    plans = (RequestPlan(((0, 8), (1, 9))), RequestPlan(((0, 8), (2, 9))))
    with pytest.raises(ReadFault, match="holds a wrong prefix"):
        run_program(Program(setup, plans, ops), Confused, Confused)


def test_a_lost_block_is_found() -> None:
    class Leaky(BaseKVCacheManager):
        def free(self, request):
            self.coordinator.single_type_managers[1].req_to_blocks[request.request_id].pop()
            super().free(request)

    with pytest.raises(Unsafe, match="are in use"):
        run_program(FAULTY, Leaky)


def test_a_missed_hit_is_found() -> None:
    class Forgetful(BaseKVCacheManager):
        def cache_blocks(self, request, num_computed_tokens):
            pass

        def prefix_cache_lookup_enabled(self, request):
            return request.num_preemptions == 0

    with pytest.raises(Difference, match="'hit'"):
        run_program(FAULTY, Forgetful)


def test_a_missing_event_is_found() -> None:
    class Silent(BaseKVCacheManager):
        def take_events(self):
            return super().take_events()[:-1]

    with pytest.raises(Difference, match="events"):
        run_program(FAULTY, Silent)
