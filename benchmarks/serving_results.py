# SPDX-License-Identifier: Apache-2.0
"""What `serving.py` measures in a run, and the comparison of two servers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HITS = "vllm:prefix_cache_hits_total"
QUERIES = "vllm:prefix_cache_queries_total"
PREEMPTIONS = "vllm:num_preemptions_total"


class ResultError(RuntimeError):
    """A run did not measure what it should have measured."""


@dataclass(frozen=True)
class Measure:
    """A line of the table."""

    name: str
    unit: str
    higher_is_better: bool


#: By field of `vllm bench serve`'s result, or by a name of our own.
MEASURES = {
    "request_throughput": Measure("requests", "1/s", True),
    "output_throughput": Measure("output tokens", "1/s", True),
    "total_token_throughput": Measure("all tokens", "1/s", True),
    "p50_ttft_ms": Measure("TTFT, median", "ms", False),
    "p99_ttft_ms": Measure("TTFT, 99%", "ms", False),
    "p50_itl_ms": Measure("inter-token latency, median", "ms", False),
    "p99_itl_ms": Measure("inter-token latency, 99%", "ms", False),
    "hit_rate": Measure("prefix hit rate", "%", True),
    "core_cpu_ms": Measure("CPU time of the engine core per request", "ms", False),
}
OWN_MEASURES = ("hit_rate", "core_cpu_ms")

#: Values of one run, by the names of `MEASURES`.
Sample = dict[str, float]


def read_sample(
    result: Mapping[str, Any],
    num_requests: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
    cpu_seconds: float,
) -> Sample:
    """The values of one run.

    Args:
        result: What `vllm bench serve` has saved.
        before: The server's metrics before the run, by sample name, summed over labels.
        after: The same after the run.
        cpu_seconds: CPU seconds of the engine core during the run.

    Raises:
        ResultError: a request failed, the server looked up no prefix, or a value is missing.
    """
    if (completed := result.get("completed")) != num_requests:
        raise ResultError(f"all {num_requests} requests must succeed, got {completed} that did")
    queries = after.get(QUERIES, 0.0) - before.get(QUERIES, 0.0)
    if queries <= 0:
        raise ResultError(f"the server must look up prefixes, got {queries:g} more in {QUERIES}")
    missing = [name for name in MEASURES if name not in result and name not in OWN_MEASURES]
    if missing:
        raise ResultError(f"the result must have {', '.join(missing)}, got {', '.join(result)}")
    sample = {name: float(result[name]) for name in MEASURES if name not in OWN_MEASURES}
    hits = after.get(HITS, 0.0) - before.get(HITS, 0.0)
    sample["hit_rate"] = 100 * hits / queries
    sample["core_cpu_ms"] = 1e3 * cpu_seconds / num_requests
    return sample


def ratios(measure: Measure, base: Sequence[float], hybrid: Sequence[float]) -> list[float]:
    """For each round, how much better the hybrid manager is: above 1 it is better.

    A round in which one of the values is 0 has no ratio.
    """
    pairs = zip(base, hybrid, strict=True)
    return [h / b if measure.higher_is_better else b / h for b, h in pairs if b > 0 and h > 0]


def table_rows(base: Sequence[Sample], hybrid: Sequence[Sample]) -> list[tuple[str, ...]]:
    """Name, medians of base and hybrid, the median of the rounds' ratios, and their range."""
    rows = []
    for key, measure in MEASURES.items():
        values = [[sample[key] for sample in samples] for samples in (base, hybrid)]
        quotients = ratios(measure, *values)
        rows.append(
            (
                f"{measure.name}, {measure.unit}",
                *(format_number(statistics.median(side)) for side in values),
                f"{statistics.median(quotients):.2f}x" if quotients else "-",
                f"{min(quotients):.2f} to {max(quotients):.2f}" if quotients else "-",
            )
        )
    return rows


def format_number(value: float) -> str:
    """Three digits, or all digits before the decimal point if there are more."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"
