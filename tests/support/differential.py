# SPDX-License-Identifier: Apache-2.0
"""Runs one program on two managers and compares all that they show."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
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
    evict, count = pool._maybe_evict_cached_block, 0

    def counting(block: Any) -> bool:
        nonlocal count
        evicted = evict(block)
        count += bool(evicted)
        return evicted

    pool._maybe_evict_cached_block = counting
    return lambda: count


@dataclass
class Totals:
    """What a run, or many, went through; index 0 is the reference, 1 the candidate."""

    programs: int = 0
    ops: int = 0
    compared: int = 0
    skipped: int = 0
    effects: Counter[str] = field(default_factory=Counter)
    hits: list[int] = field(default_factory=lambda: [0, 0])
    junctions: list[int] = field(default_factory=lambda: [0, 0])
    hit_tokens: list[int] = field(default_factory=lambda: [0, 0])
    # Programs in which this side's hit was longer when hits differed for the first time.
    # Later ones compare nothing: a longer hit needs more blocks at once, so it may
    # not be admitted where a shorter one is, and then the two serve different requests.
    first_longer: list[int] = field(default_factory=lambda: [0, 0])
    evictions: list[int] = field(default_factory=lambda: [0, 0])
    preemptions: list[int] = field(default_factory=lambda: [0, 0])
    slots_checked: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, other: "Totals") -> None:
        for one in fields(self):
            mine, others = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, list):
                mine[:] = [a + b for a, b in zip(mine, others, strict=True)]
            elif isinstance(mine, Counter):
                mine.update(others)
            else:
                setattr(self, one.name, mine + others)

    def __str__(self) -> str:
        lines = [
            f"{self.programs:,} programs, {self.ops:,} operations, {self.compared:,} compared, "
            f"{self.skipped:,} without effect",
            "  " + ", ".join(f"{count:,} {name}" for name, count in self.effects.most_common()),
        ]
        for side, name in enumerate(("base", "ours")):
            lines.append(
                f"  {name}: {self.hits[side]:,} hits, {self.hit_tokens[side]:,} hit tokens, "
                f"{self.junctions[side]:,} junctions, {self.evictions[side]:,} evicted blocks, "
                f"{self.preemptions[side]:,} preemptions, "
                f"{self.slots_checked[side]:,} slots checked; longer hit at the first "
                f"lookup that differs in {self.first_longer[side]:,} programs"
            )
        return "\n".join(lines)


def first_difference(reference: Any, candidate: Any, path: str = "") -> str | None:
    """Where two observations differ first, or None."""
    if reference == candidate:
        return None
    if isinstance(reference, dict) and isinstance(candidate, dict):
        for key in [*reference, *(key for key in candidate if key not in reference)]:
            if key not in reference or key not in candidate:
                side = "reference" if key in reference else "candidate"
                return f"{path}[{key!r}]: only the {side} has it"
            found = first_difference(reference[key], candidate[key], f"{path}[{key!r}]")
            if found:
                return found
    if isinstance(reference, list | tuple) and isinstance(candidate, list | tuple):
        for i, (a, b) in enumerate(zip(reference, candidate, strict=False)):
            found = first_difference(a, b, f"{path}[{i}]")
            if found:
                return found
        for i in range(min(len(reference), len(candidate)), len(reference)):
            return f"{path}[{i}]: only the reference has {reference[i]!r}"
        for i in range(len(reference), len(candidate)):
            return f"{path}[{i}]: only the candidate has {candidate[i]!r}"
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
        totals.ops += 1
        totals.skipped += "skipped" in seen[1]
        totals.effects[op[0]] += "skipped" not in seen[1]
        started = [bool(count()) for count in evicted]
        if comparing and not exact and any(started):
            comparing = False
            if not all(started):
                raise Difference(f"operation {len(history)} {op}: only one evicts: {started}")
        if comparing:
            totals.compared += 1
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
    totals.hits = [driver.num_hits for driver in drivers]
    for one, other in zip(*(driver.lookups for driver in drivers), strict=False):
        if one != other:
            if one[:2] == other[:2]:
                totals.first_longer[other[2] > one[2]] += 1
            break
    totals.junctions = [driver.num_junctions for driver in drivers]
    totals.hit_tokens = [driver.hit_tokens for driver in drivers]
    totals.evictions = [count() for count in evicted]
    totals.preemptions = [driver.num_preemptions for driver in drivers]
    totals.slots_checked = [driver.content.num_slots_checked for driver in drivers]
    return totals


def num_examples(default: int) -> int:
    """Random programs for one test: ``HYBRID_KV_EXAMPLES`` if it is set."""
    return int(os.environ.get("HYBRID_KV_EXAMPLES", default))


def explore(
    strategy: st.SearchStrategy[Program], run: Callable[[Program], Totals], examples: int
) -> Totals:
    """Run many random programs and return their totals.

    The programs are the same in every run, unless ``HYBRID_KV_EXAMPLES`` asks for more.
    """
    totals = Totals()

    @settings(
        max_examples=num_examples(examples),
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
