# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: arguments, medians, tables and JSON."""

import argparse
import gc
import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

#: A function to time. One call is one sample. If only a part of the call counts, the function
#: returns the seconds as a float. Other return values are ignored.
Timed = Callable[[], object]


def add_common_arguments(parser: argparse.ArgumentParser, trials: int = 15) -> None:
    """Add ``--trials N`` and ``--json FILE``."""
    counted = "samples of each (default %(default)s)"
    parser.add_argument("--trials", type=_positive, default=trials, metavar="N", help=counted)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")


def sample_seconds(functions: Mapping[str, Timed], trials: int) -> dict[str, list[float]]:
    """Seconds of ``trials`` calls of each function; the functions take turns.

    The speed of a machine changes within seconds. Because the functions take turns, a change
    affects all of them. Every other round runs in reverse order, so that no function always follows
    the same function.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()  # the first call fills caches and does not count
    gc.collect()
    gc.disable()  # like timeit, because a collection would slow down a random function
    try:
        for trial in range(trials):
            names = list(functions)
            for name in reversed(names) if trial % 2 else names:
                samples[name].append(_seconds(functions[name]))
    finally:
        gc.enable()
    return samples


def median_seconds(functions: Mapping[str, Timed], trials: int) -> dict[str, float]:
    """The median of `sample_seconds`, by function."""
    samples = sample_seconds(functions, trials)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns of numbers (``12 us``, ``3.4x``) are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        is_number = bool(rows) and all(str(row[index])[:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(str, row))
    # A fixed width for files, so that nothing is cut off.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def format_seconds(seconds: float) -> str:
    """At most three digits with a fitting unit, such as ``1.4 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def write_json(path: Path, results: object) -> None:
    """Write ``{"machine": ..., "results": results}``; the machine is the one that runs this."""
    record = {"machine": describe_machine(), "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n")


def describe_machine() -> dict[str, Any]:
    """The versions and the CPU behind the numbers."""
    from vllm import __version__

    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")]
        cpu = named[0].partition(":")[2].strip() if named else cpu
    return {"python": platform.python_version(), "cpu": cpu, "base": f"vllm {__version__}"}


def _seconds(function: Timed) -> float:
    start = perf_counter()
    own = function()
    end = perf_counter()
    return own if isinstance(own, float) else end - start


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return number
