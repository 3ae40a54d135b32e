# SPDX-License-Identifier: Apache-2.0
"""Runs one program on two managers and compares all that they show."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.manager_driver import ManagerDriver, Op
from support.manager_model import Observation
from support.programs import Program
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager


class Difference(AssertionError):
    """The two managers showed something different where they must agree."""


def count_evictions(manager: Any) -> Callable[[], int]:
    """A counter of cached physical blocks that ``manager`` gives to other uses from now on."""
    pool = manager.block_pool
    if hasattr(pool, "num_evicted_ids"):
        return lambda: pool.num_evicted_ids
    evict = pool._maybe_evict_cached_block
    evicted: list[bool] = []

    def counting(block: Any) -> bool:
        evicted.append(evict(block))
        return evicted[-1]

    pool._maybe_evict_cached_block = counting
    return lambda: sum(evicted)


class Totals:
    """What a run, or many, went through."""

    def __init__(self) -> None:
        #: Programs, operations, how many of these were compared, how many had no effect.
        self.counts: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        #: Of the reference and of the candidate.
        self.sides: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def add(self, other: "Totals") -> None:
        mine = (self.counts, self.effects, *self.sides)
        for counts, more in zip(mine, (other.counts, other.effects, *other.sides), strict=True):
            counts.update(more)

    def of_both(self, name: str) -> list[int]:
        return [side[name] for side in self.sides]

    def __str__(self) -> str:
        named = {"in all": self.counts, "with effect": self.effects}
        named |= dict(zip(("base", "ours"), self.sides, strict=True))
        return "\n  ".join(
            f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in counts.most_common())
            for name, counts in named.items()
        )


def first_difference(reference: Any, candidate: Any, path: str = "") -> str | None:
    """Where two observations differ first, or None."""
    if reference == candidate:
        return None
    if isinstance(reference, list | tuple) and isinstance(candidate, list | tuple):
        reference, candidate = dict(enumerate(reference)), dict(enumerate(candidate))
    if isinstance(reference, dict) and isinstance(candidate, dict):
        for key in reference | candidate:
            where = f"{path}[{key!r}]"
            for name, one, other in (
                ("reference", reference, candidate),
                ("candidate", candidate, reference),
            ):
                if key not in other:
                    return f"{where}: only the {name} has {one[key]!r}"
            found = first_difference(reference[key], candidate[key], where)
            if found:
                return found
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
    totals = Totals()
    totals.counts["programs"] = 1
    history: list[str] = []
    comparing = compare

    def both(op: Op, perform: Callable[[ManagerDriver], Observation]) -> None:
        nonlocal comparing
        seen: list[Observation] = []
        for driver, side in zip(drivers, ("reference", "candidate"), strict=True):
            try:
                seen.append(perform(driver))
            except Exception as error:
                error.add_note(f"in operation {len(history)} {op}, by the {side}")
                error.add_note("\n".join(history[-40:]))
                raise
        totals.counts["operations"] += 1
        totals.counts["skipped"] += "skipped" in seen[1]
        totals.effects[op[0]] += "skipped" not in seen[1]
        started = [bool(count()) for count in evicted]
        if comparing and not exact and any(started):
            comparing = False
            if not all(started):
                raise Difference(f"operation {len(history)} {op}: only one evicts: {started}")
        if comparing:
            totals.counts["compared"] += 1
            found = first_difference(*seen)
            if found:
                raise Difference(
                    f"operation {len(history)} {op}: {found}\n" + "\n".join(history[-40:])
                )
        brief = {
            key: value
            for key, value in seen[0].items()
            if key not in ("blocks", "events", "usage", "nulls")
        }
        history.append(f"{len(history)} {op}: {brief}")

    for op in program.ops:
        both(op, lambda driver, op=op: driver.apply(op))
    both(("wind_down",), lambda driver: driver.wind_down())
    for one, other in zip(*(driver.lookups for driver in drivers), strict=False):
        if one != other:
            # Later ones compare nothing: a longer hit needs more blocks at once, so it may not be
            # admitted where a shorter one is, and then the two serve different requests.
            if one[:2] == other[:2]:
                totals.sides[other[2] > one[2]]["programs with the first longer hit"] = 1
            break
    for side, driver, count in zip(totals.sides, drivers, evicted, strict=True):
        side.update(driver.counts)
        side["evictions"] = count()
        side["slots checked"] = driver.attention.reads.total()
    return totals


def explore(
    strategy: st.SearchStrategy[Program], run: Callable[[Program], Totals], examples: int
) -> Totals:
    """Run many random programs and return their totals.

    The programs are the same in every run, unless ``HYBRID_KV_EXAMPLES`` sets their number.
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
        totals.add(run(program))

    one()
    return totals
