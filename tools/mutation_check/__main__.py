# SPDX-License-Identifier: Apache-2.0
"""Plant each fault of `mutants` in a copy of the package and run the tests on it.

    python -m tools.mutation_check [--first] [--only WORD] [--jobs N] [--json FILE]

Prints which test of which layer caught each fault. With ``--first``, the layers of a fault run one
after another until one catches it. The exit status is 1 if no layer caught a fault, or if a test
fails on the unchanged copy.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.mutation_check.layers import LAYERS, run_layer
from tools.mutation_check.mutants import MUTANTS, Mutant
from tools.mutation_check.planting import NativeCore, plant

#: Per layer, the first test that failed, or "" if none did. Layers that did not run are missing.
Caught = dict[str, str]


def run_layers(job: tuple[Future[Path], Sequence[str]]) -> Caught:
    """Run layers on a planted copy of the package, up to the first one that catches the fault."""
    source, layers = job
    caught: Caught = {}
    for layer in layers:
        caught[layer] = run_layer(source.result(), layer)
        if caught[layer]:
            break
    return caught


def check(mutants: Sequence[Mutant], num_jobs: int, first: bool) -> list[Caught]:
    """The results of each fault. The first entry is that of the unchanged package."""
    # With `first`, one job runs all layers of a fault in order. Otherwise each layer is a job.
    parts = [tuple(LAYERS)] if first else [(layer,) for layer in LAYERS]
    progress = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(1) as planter,
        ThreadPoolExecutor(num_jobs) as pool,
    ):
        folder = Path(name)
        native_core = NativeCore(folder / "core")
        planted = [None, *mutants]
        sources = [
            planter.submit(plant, mutant, folder / str(i), native_core)
            for i, mutant in enumerate(planted)
        ]
        results = pool.map(run_layers, [(source, part) for source in sources for part in parts])
        caught: list[Caught] = []
        for mutant in track(planted, "planting faults", console=progress):
            caught.append({})
            for _ in parts:
                caught[-1] |= next(results)
            by = ", ".join(layer for layer, test in caught[-1].items() if test) or "none"
            # Print each result when it arrives, because the whole run takes long.
            progress.print(f"{mutant.fault if mutant else 'no fault'}: {by}")
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", action="store_true", help="stop at the layer that catches it")
    parser.add_argument("--only", default="", help="only faults whose description has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="test runs at once")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if arguments.only in mutant.fault]
    if not mutants:
        parser.error(f"--only must be part of a fault's description, got {arguments.only!r}")
    unchanged, *caught = check(mutants, max(arguments.jobs, 1), arguments.first)

    console = Console()
    table = Table(title="Planted faults and the first test of each layer that caught them")
    table.add_column("fault")
    for layer in LAYERS:
        table.add_column(layer, overflow="fold")
    for mutant, by_layer in zip(mutants, caught, strict=True):
        row = [by_layer.get(layer, "(not run)") or "-" for layer in LAYERS]
        table.add_row(mutant.fault, *row)
    console.print(table)
    missed = [m.fault for m, c in zip(mutants, caught, strict=True) if not any(c.values())]
    console.print(f"{len(mutants) - len(missed)} of {len(mutants)} faults were caught")
    for layer in LAYERS:
        console.print(f"  by {layer} tests: {sum(bool(c.get(layer)) for c in caught)}")
    for fault in missed:
        console.print(f"NOT CAUGHT: {fault}", style="bold red")
    false_alarms = [name for name in unchanged.values() if name]
    for name in false_alarms:
        console.print(f"FAILS WITHOUT A FAULT: {name}", style="bold red")
    if arguments.json:
        rows = [{"fault": m.fault, **c} for m, c in zip(mutants, caught, strict=True)]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if missed or false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
