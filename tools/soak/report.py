# SPDX-License-Identifier: Apache-2.0
"""The report of a soak: checks, passed or not, and the numbers behind them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.soak.clients import Tally
from tools.soak.memory import MIB, Growth


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    seen: str
    wanted: str


@dataclass
class Report:
    """The numbers of one soak; `checks` judges them."""

    settings: dict[str, Any]
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    rounds: int = 0
    #: The increase of the server's counters over the soak.
    counters: dict[str, float] = field(default_factory=dict)
    growths: Sequence[Growth] = ()
    #: The share of the KV cache in use after each round.
    usages: list[float] = field(default_factory=list)
    peak_usage: float = 0.0
    #: Whether each reset of the prefix cache succeeded.
    resets: list[bool] = field(default_factory=list)
    active_lines: int = 0
    error_lines: list[str] = field(default_factory=list)
    #: The reason why the soak stopped early.
    breakdown: str | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks())

    def checks(self) -> list[Check]:
        tally, actions, counters = self.tally, self.tally.actions, self.counters
        expected_lines = int(self.settings["manager"] == "hybrid")
        checks = [
            _check("server stays up", self.breakdown is None, self.breakdown is None, True),
            _check(
                "lines that say the hybrid manager is active",
                self.active_lines == expected_lines,
                self.active_lines,
                expected_lines,
            ),
            _none("errors in the engine's log", self.error_lines),
            _none("wrong answers and other faults", tally.faults),
            _some("answers compared with the reference", tally.answers),
            _some("parts of cancelled streams compared", tally.parts),
            _some("requests cancelled", tally.cancelled),
            _some("invalid requests refused as by the reference", tally.refused),
            _some("duplicates sent at once", actions.get("ask_the_same_at_once", 0)),
            _some(
                "prompts with a shared prefix at once",
                actions.get("ask_what_begins_alike", 0),
            ),
            _some("preemptions", counters.get("num_preemptions", 0)),
            _some("prefix cache hits, tokens", counters.get("prefix_cache_hits", 0)),
            _check(
                "KV cache in use after each round",
                bool(self.usages) and not any(self.usages),
                f"{max(self.usages, default=1):.1%} of {len(self.usages)} rounds",
                "0",
            ),
            _check(
                "prefix cache can be reset when idle",
                bool(self.resets) and all(self.resets),
                f"{sum(self.resets)} of {len(self.resets)}",
                "always",
            ),
        ]
        checks += [_growth(growth) for growth in self.growths]
        checks.append(_some("processes watched", len(self.growths)))
        return checks

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks()],
            **asdict(self),
        }

    def print(self, console: Console) -> None:
        table = Table(title="Soak", title_justify="left")
        table.add_column("check")
        table.add_column("seen", justify="right", overflow="fold")
        table.add_column("wanted", justify="right")
        table.add_column("")
        for check in self.checks():
            verdict = "[green]ok[/]" if check.passed else "[red]FAILED[/]"
            table.add_row(check.name, escape(check.seen), check.wanted, verdict)
        console.print(table)
        self._print_numbers(console)
        if self.breakdown:
            console.print(self.breakdown, markup=False, highlight=False, soft_wrap=True)
        for title, lines in (("Faults", self.tally.faults), ("Errors", self.error_lines)):
            if lines:
                console.print(f"{title}, the first of {len(lines)}:")
                for line in lines[:10]:
                    console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def _print_numbers(self, console: Console) -> None:
        numbers = Table(title="Memory after the warm-up", title_justify="left")
        for column in ("process", "first", "last", "peak", "a minute", "samples"):
            numbers.add_column(column, justify="left" if column == "process" else "right")
        for g in self.growths:
            sizes = [f"{size / MIB:.1f} MiB" for size in (g.first, g.last, g.peak)]
            numbers.add_row(g.process, *sizes, f"{g.per_minute / MIB:+.2f} MiB", str(g.num_samples))
        console.print(numbers)
        console.print(
            f"{self.seconds:.0f} s, {self.rounds} rounds, {self.tally.tokens:,} tokens compared, "
            f"peak KV cache usage {self.peak_usage:.0%}; "
            + ", ".join(f"{n:,} {name}" for name, n in sorted(self.tally.actions.items())),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _check(name: str, passed: bool, seen: object, wanted: object) -> Check:
    return Check(name, passed, str(seen), str(wanted))


def _some(name: str, seen: float) -> Check:
    return Check(name, seen > 0, f"{seen:,.0f}", "> 0")


def _none(name: str, lines: Sequence[str]) -> Check:
    return Check(name, not lines, f"{len(lines):,}", "0")


def _growth(growth: Growth) -> Check:
    seen, wanted = f"{growth.total / MIB:+.1f} MiB", f"<= {growth.allowed / MIB:.0f} MiB"
    return _check(f"growth of {growth.process}", growth.total <= growth.allowed, seen, wanted)
