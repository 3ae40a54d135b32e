# SPDX-License-Identifier: Apache-2.0
"""Base's KV cache manager and ours under speculative decoding, driven by the same programs.

Drafts are accepted and rejected, drafters look ahead, and those that read hidden states (EAGLE,
MTP) leave out the last block of a hit. As in `test_differential`, all that is shown must be
equal until something is evicted, and safe from then on.
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
        # Base flags the drafter's groups where it can tell them, and else all.
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
        # Base asks a window of one token for a block too many once it looks a second time.
        kind = replace(kind, retained=lookahead - 1, window=max(kind.window or 0, 2))
    return kind


def run(program: Program) -> Totals:
    return run_program(program, KVCacheManager)


def test_drafts_are_accepted_and_rejected() -> None:
    setup = KVSetup((full(8), sliding(10, 8, 2)), 200, num_drafts=3, num_lookahead=3, max_steps=2)
    for manager_class in (BaseKVCacheManager, KVCacheManager):
        driver = ManagerDriver(manager_class, setup, [RequestPlan(((0, 40),))])
        driver.apply(("serve", 0, 60))
        driver.wind_down()
        assert min(driver.counts["accepted"], driver.counts["rejected"]) > 10


def test_ample_pools() -> None:
    totals = explore(speculating(one_block_size=True), run, 50)
    print(f"\nspeculation, ample pools: {totals}")
    assert totals.counts["operations"] >= 1000
    assert totals.counts["compared"] > 0.95 * totals.counts["operations"]
    assert min(totals.of_both("hits")) > 0
    assert min(totals.of_both("junctions")) > 0


def test_tight_pools() -> None:
    totals = explore(speculating(one_block_size=True, tight=True), run, 50)
    print(f"\nspeculation, tight pools: {totals}")
    assert totals.counts["operations"] >= 1000
    assert min(totals.of_both("evictions")) > 0
    assert min(totals.of_both("preemptions")) > 0
    assert 0 < totals.counts["compared"] < totals.counts["operations"]


def test_unequal_block_sizes_are_safe() -> None:
    """Base loses some hits then, and caches parts of blocks: nothing is compared."""
    totals = explore(
        speculating(), lambda program: run_program(program, KVCacheManager, compare=False), 40
    )
    print(f"\nspeculation, unequal block sizes: {totals}")
    assert totals.counts["operations"] >= 500
    assert totals.sides[1]["hit tokens"] >= totals.sides[0]["hit tokens"] > 0
