# SPDX-License-Identifier: Apache-2.0
"""Runs one program on two managers and compares all that they show."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.manager_driver import ManagerDriver
from support.manager_model import Observation
from support.programs import Program
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

SIDES = ("reference", "candidate")


class Difference(AssertionError):
    """The two managers showed something different where they must agree."""


def count_evictions(manager: Any) -> Callable[[], int]:
    """A counter of cached physical blocks that ``manager`` gives to other uses from now on."""
    pool = manager.block_pool
    if hasattr(pool, "num_evicted_ids"):
        return lambda: pool.num_evicted_ids
    evict, results = pool._maybe_evict_cached_block, Counter[bool]()

    def counting(block: Any) -> bool:
        evicted = evict(block)
        results[evicted] += 1
        return evicted

    pool._maybe_evict_cached_block = counting
    return lambda: results[True]


class Totals(Counter[str]):
    """What a run, or many, went through.

    Counts of ``programs``, of ``ops``, of those ``compared``, and of each operation that had an
    effect ("op serve"); by `both`, what each `ManagerDriver` counted, and ``evictions``.
    """

    def both(self, name: str) -> list[int]:
        """The reference's count and the candidate's."""
        return [self[f"{side} {name}"] for side in SIDES]


def first_difference(reference: Any, candidate: Any, path: str = "") -> str:
    """Where two observations that differ do so first."""
    parts: Any = ()
    if isinstance(reference, dict) and isinstance(candidate, dict):
        parts = reference.items() if reference.keys() == candidate.keys() else ()
    elif isinstance(reference, list | tuple) and isinstance(candidate, list | tuple):
        parts = enumerate(reference) if len(reference) == len(candidate) else ()
    for key, part in parts:
        if part != candidate[key]:
            return first_difference(part, candidate[key], f"{path}[{key!r}]")
    return f"{path}: reference {reference!r}, candidate {candidate!r}"


def run_program(
    program: Program,
    candidate: Any,
    reference: Any = BaseKVCacheManager,
    *,
    exact: bool = False,
    compare: bool = True,
) -> Totals:
    """Apply the program's operations to both managers.

    Until a cached block has been evicted they must show the same after every operation;
    with ``exact`` also from then on, without ``compare`` never. Safety is checked for both
    at all times.

    Raises:
        Difference: with the operation, the first difference, and what led there.
        AssertionError: when a manager fails on its own, with notes of the same kind.
    """
    drivers = [ManagerDriver(cls, program.setup, program.plans) for cls in (reference, candidate)]
    evicted = [count_evictions(driver.manager) for driver in drivers]
    totals = Totals(programs=1)
    history: list[str] = []
    for number, op in enumerate((*program.ops, ("wind_down",))):
        seen: list[Observation] = []
        try:
            for driver in drivers:
                seen.append(driver.apply(op))
            started = [bool(count()) for count in evicted]
            if compare and not exact and any(started):
                compare = False
                if not all(started):
                    raise Difference(f"only one evicts: {started}")
            if compare and seen[0] != seen[1]:
                raise Difference(first_difference(*seen))
        except Exception as error:
            where = f"by the {SIDES[len(seen)]}" if len(seen) < 2 else "by both"
            error.add_note("\n".join([*history[-40:], f"operation {number} {op}, {where}"]))
            raise
        effect = "skipped" not in seen[1]
        totals.update({"ops": 1, "compared": int(compare), f"op {op[0]}": int(effect)})
        brief = {
            k: v for k, v in seen[0].items() if k not in ("blocks", "events", "usage", "nulls")
        }
        history.append(f"{number} {op}: {brief}")
    for side, driver, count in zip(SIDES, drivers, evicted, strict=True):
        more = Counter(evictions=count(), slots_checked=driver.attention.reads.total())
        totals.update({f"{side} {name}": number for name, number in (driver.counts | more).items()})
    return totals


def explore(
    strategy: st.SearchStrategy[Program], run: Callable[[Program], Totals], examples: int
) -> Totals:
    """Run many random programs and return their totals.

    The programs are the same in every run, unless ``HYBRID_KV_EXAMPLES`` is set to how many
    others to run.
    """
    totals = Totals()

    @settings(
        max_examples=int(os.environ.get("HYBRID_KV_EXAMPLES", examples)),
        derandomize="HYBRID_KV_EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(program=strategy)
    def one(program: Program) -> None:
        totals.update(run(program))

    one()
    return totals
