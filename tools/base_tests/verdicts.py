# SPDX-License-Identifier: Apache-2.0
"""Compares two runs of base's tests, one with each manager."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

#: Tests that only base's own manager can pass, because they do more than read it.
NEEDS_BASE = {
    "looks for base's class CrossAttentionManager": (
        "test_variable_length_cross_attn_block_allocation",
        "test_cross_attn_blocks_not_over_allocated",
        "test_cross_attn_blocks_not_under_allocated",
        "test_cross_attn_zero_blocks_without_encoder_inputs",
    ),
    "takes blocks out of base's pool (get_new_blocks)": (
        "test_cow_retentions_deferred_until_copy_step_processed",
    ),
    "fakes a full pool by setting free_block_queue.num_free_blocks": (
        "test_request_preemption[True]",
        "test_request_preemption[False]",
        "test_async_preempt_readmit_before_transfer_output_is_deferred",
    ),
    "walks through the dictionary inside of base's prefix cache": (
        "test_invalid_blocks_evicted_prevents_cache_pollution",
    ),
    "expects that failed blocks of several groups end the engine": (
        "test_block_level_load_failure_fails_closed_with_multiple_groups",
    ),
    "expects that a request whose load failed within a step keeps running": (
        "test_sync_recompute_blocks_not_freed_for_running_requests",
        "test_sync_load_failure[100-99-invalid_block_idxs0]",
        "test_sync_load_failure[100-99-invalid_block_idxs1]",
        "test_sync_load_failure[100-99-invalid_block_idxs2]",
        "test_sync_load_failure_with_shared_blocks[100-99-50-invalid_block_idxs0]",
        "test_sync_load_failure_with_shared_blocks[100-99-50-invalid_block_idxs1]",
        "test_sync_load_failure_with_shared_blocks[100-99-50-invalid_block_idxs2]",
    ),
    "expects the order in which base hands out blocks after a reset": (
        "test_request_finished_mixed_full_attn_and_sliding_window",
    ),
}

BASE, HYBRID = "base", "hybrid"
PASS, NOT_FOR_US, HYBRID_ONLY = "pass with both", "need base's own", "FAIL WITH HYBRID ONLY"
BASE_TOO, SKIPPED = "fail with base", "skipped"
SERVED, READ = "of them served by hybrid", "that read its tables"


@dataclass
class Outcome:
    """The outcome of one test in one run, as the pytest plugin reports it."""

    outcome: str = "not run"
    #: The first line of the error, for a failure.
    why: str = ""
    #: For each scheduler that was built: `HYBRID`, or the reason why base served it.
    served: list[str] = field(default_factory=list)
    #: Names of base's structures that the test read from the hybrid manager (`views`).
    looked_at: list[str] = field(default_factory=list)


def read_report(lines: Iterable[str]) -> dict[str, Outcome]:
    """The outcome of each test. A failed phase counts more than the phases that passed."""
    outcomes: dict[str, Outcome] = {}
    for line in lines:
        values = json.loads(line)
        test = values.pop("test")
        if test not in outcomes or outcomes[test].outcome != "failed":
            outcomes[test] = Outcome(**values)
    return outcomes


def judge(test: str, base: Outcome, hybrid: Outcome) -> tuple[str, str]:
    """The verdict on one test, and the reason for a failure or for a test that proves nothing."""
    if base.outcome == hybrid.outcome == "skipped":
        return SKIPPED, ""
    if base.outcome != "passed":
        return BASE_TOO, base.why or base.outcome
    if hybrid.outcome == "passed":
        return PASS, ""
    for reason, names in NEEDS_BASE.items():
        if test.rpartition("::")[2] in names:
            return NOT_FOR_US, reason
    return HYBRID_ONLY, hybrid.why or hybrid.outcome


class Tally:
    """The number of tests with each verdict, per file, and the reasons."""

    COLUMNS = (PASS, SERVED, READ, NOT_FOR_US, HYBRID_ONLY, BASE_TOO, SKIPPED)

    def __init__(self, base: dict[str, Outcome], hybrid: dict[str, Outcome]) -> None:
        self.files: dict[str, Counter[str]] = {}
        self.reasons: dict[str, Counter[str]] = {NOT_FOR_US: Counter(), BASE_TOO: Counter()}
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        for test in base | hybrid:
            result = hybrid.get(test, Outcome())
            verdict, why = judge(test, base.get(test, Outcome()), result)
            count = self.files.setdefault(test.partition("::")[0], Counter())
            count[verdict] += 1
            count[SERVED] += verdict == PASS and HYBRID in result.served
            count[READ] += verdict == PASS and bool(result.looked_at)
            self.served.update(result.served)
            if verdict in self.reasons:
                self.reasons[verdict][why] += 1
            elif verdict == HYBRID_ONLY:
                self.failures.append(f"{test}: {why}")

    def print(self, console: Console) -> None:
        table = Table(title="Base's own tests")
        table.add_column("file", no_wrap=True)
        for column in self.COLUMNS:
            table.add_column(column, justify="right")
        rows, others = {}, []
        for name, count in sorted(self.files.items()):
            if count[SERVED] or count[NOT_FOR_US] or count[HYBRID_ONLY]:
                rows[name.removeprefix("tests/v1/")] = count
            else:
                others.append(count)
        rows[f"{len(others)} others"] = sum(others, Counter[str]())
        rows["all"] = sum(self.files.values(), Counter[str]())
        for name, count in rows.items():
            table.add_row(name, *(str(count[column] or "") for column in self.COLUMNS))
        console.print(table)
        titles = {"The schedulers of the hybrid manager's run were served by": self.served}
        titles |= {f"They {verdict}:": reasons for verdict, reasons in self.reasons.items()}
        for title, reasons in titles.items():
            lines = [f"{number:6} {why[:160]}" for why, number in reasons.most_common()]
            console.print(f"\n{title}", *lines, sep="\n", markup=False)
        for failure in self.failures:
            console.print(f"{HYBRID_ONLY}: {failure}", style="bold red", markup=False)
