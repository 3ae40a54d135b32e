# SPDX-License-Identifier: Apache-2.0
"""The same programs on base's and the hybrid manager under speculative decoding.

Drafts are accepted and rejected, and drafters need lookahead slots. Drafters that read hidden
states (EAGLE, MTP) drop the last block of a hit. As in `test_differential`, all observations must
be equal until something is evicted, and hits must be safe afterwards.
"""

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from support.differential import Totals, explore, run_program
from support.kv_configs import AttentionKind, KVSetup, full, sliding
from support.manager_driver import ManagerDriver
from support.programs import Program, programs
from support.requests import RequestPlan
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager


@st.composite
def speculating(draw: st.DrawFn, one_block_size: bool = False, **kwargs: object) -> Program:
    """Programs of `programs`, with a drafter."""
    program = draw(programs(**kwargs))  # type: ignore[arg-type]
    setup = replace(program.setup, hash_block_size=None)
    if one_block_size:
        assume(len({kind.block_size for kind in setup.kinds}) == 1)
    num_drafts = draw(st.integers(1, 4))
    drafter = draw(st.sampled_from(["eagle", "mtp", "ngram", "draft model"]))
    setup = replace(setup, num_drafts=num_drafts, num_lookahead=num_drafts)
    if drafter == "ngram":
        setup = replace(setup, num_lookahead=0)
    if drafter in ("eagle", "mtp"):
        # Base flags the drafter's groups if it can identify them, and otherwise all groups.
        num_kinds = len(setup.kinds)
        flagged = draw(st.sampled_from([set(), {num_kinds - 1}, set(range(0, num_kinds, 2))]))
        lookahead = 1 if drafter == "eagle" else min(num_drafts, setup.scheduler_block_size)
        kinds = tuple(
            replace(as_draft(kind, lookahead), draft=i in flagged)
            for i, kind in enumerate(setup.kinds)
        )
        setup = replace(setup, kinds=kinds, use_eagle=True, prefill_lookahead=lookahead)
    return replace(program, setup=setup)


def as_draft(kind: AttentionKind, lookahead: int) -> AttentionKind:
    if kind.kind == "chunked":  # base takes none with EAGLE
        kind = replace(kind, kind="sliding")
    if kind.kind == "sliding":
        # In its second lookup, base needs one block too many for a window of one token.
        kind = replace(kind, retained=lookahead - 1, window=max(kind.window or 0, 2))
    return kind


def run(program: Program) -> Totals:
    return run_program(program, KVCacheManager)


def test_drafts_are_accepted_and_rejected() -> None:
    setup = KVSetup((full(8), sliding(10, 8, 2)), 200, num_drafts=3, num_lookahead=3, max_steps=2)
    for manager_class in (BaseKVCacheManager, KVCacheManager):
        driver = ManagerDriver(manager_class, setup, [RequestPlan(((0, 40),))])
        driver.apply(("serve", 0, 60))
        driver.apply(("wind_down",))
        assert min(driver.counts["accepted"], driver.counts["rejected"]) > 10


#: Under retention 0 the second request shares a prefix that only full attention still has.
JUNCTION = Program(
    KVSetup((full(16), sliding(33, 16, 5)), 1000, retention=0, num_drafts=3, num_lookahead=3),
    tuple(RequestPlan(path) for path in (((0, 100),), ((0, 64), (1, 36)), ((0, 64), (2, 20)))),
    (("serve", 0, 2), ("serve", 1, 2), ("serve", 2, 2)),
)


def test_ample_pools() -> None:
    totals = explore(speculating(one_block_size=True), run, 80)
    # Random programs meet a junction so seldom that one is given.
    totals.update(run(JUNCTION))
    print(f"\nspeculation, ample pools: {totals}")
    assert totals["ops"] >= 1000
    assert totals["compared"] > 0.95 * totals["ops"]
    assert min(totals.both("hits")) > 0
    assert min(totals.both("junctions")) > 0


def test_tight_pools() -> None:
    totals = explore(speculating(one_block_size=True, tight=True), run, 80)
    print(f"\nspeculation, tight pools: {totals}")
    assert totals["ops"] >= 1000
    assert min(totals.both("evictions")) > 0
    assert min(totals.both("preemptions")) > 0
    assert 0 < totals["compared"] < totals["ops"]


def test_unequal_block_sizes_are_safe() -> None:
    """Base loses some hits here and caches parts of blocks, so nothing is compared."""
    totals = explore(
        speculating(), lambda program: run_program(program, KVCacheManager, compare=False), 40
    )
    print(f"\nspeculation, unequal block sizes: {totals}")
    assert totals["ops"] >= 500
    assert totals.both("hit_tokens")[1] >= totals.both("hit_tokens")[0] > 0
