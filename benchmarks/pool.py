# SPDX-License-Identifier: Apache-2.0
"""The cost of a block pool by its size: start-up, memory, garbage collection, operations.

    python benchmarks/pool.py [--blocks 10000 100000 500000 2000000] [--served N ...] [--json FILE]

Each row is measured in a separate process. The model has one full-attention group and one
sliding-window group. The pool is full of cached blocks when operations and garbage collection are
measured.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from common import add_common_arguments, format_seconds, print_table, write_json
from shapes import BLOCK_SIZE, NUM_PROMPT_TOKENS, build_manager, make_requests, managers, start

NUM_GROUPS = 2
#: Requests that are placed before all of them are freed.
BATCH = 32


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(name: str, num_blocks: int, min_served: int, trials: int) -> dict[str, float]:
    """The figures of one manager at one size, after at least ``min_served`` requests."""
    manager_class = managers()[name]
    build_manager(manager_class, NUM_GROUPS, 100)  # imports and warms up
    gc.collect()
    gc.freeze()  # objects from before the pool do not count
    gc.disable()
    before, begin = resident_bytes(), perf_counter()
    manager = build_manager(manager_class, NUM_GROUPS, num_blocks)
    startup = perf_counter() - begin
    bytes_per_block = (resident_bytes() - before) / num_blocks

    seconds: list[float] = []
    num_served = 0
    # Enough requests to fill the pool and to evict from it.
    num_to_fill = max(num_blocks // (NUM_PROMPT_TOKENS // BLOCK_SIZE) + BATCH, min_served)
    while num_served < num_to_fill or len(seconds) < trials:
        requests = make_requests(BATCH, 0, first=num_served)
        begin = perf_counter()
        for request in requests:
            start(manager, request)
        for request in requests:
            manager.free(request)
        if num_served >= num_to_fill:
            seconds.append((perf_counter() - begin) / BATCH)
        num_served += BATCH
    requests = []
    garbage = gc.collect()
    pauses = []
    for _ in range(3):
        begin = perf_counter()
        gc.collect()
        pauses.append(perf_counter() - begin)
    return {
        "startup": startup,
        "bytes_per_block": bytes_per_block,
        "bytes_per_cached_block": (resident_bytes() - before) / num_blocks,
        "gc_pause": statistics.median(pauses),
        "cyclic_garbage": garbage,
        "serve": statistics.median(seconds),
        "served": num_served,
    }


def measure_apart(name: str, *numbers: int) -> dict[str, float]:
    """`measure` in a separate process."""
    command = [sys.executable, __file__, "--child", name, *map(str, numbers)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return figures


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=(10_000, 100_000, 500_000, 2_000_000)
    )
    parser.add_argument(
        "--served",
        type=int,
        nargs="+",
        default=(0,),
        help="requests served before operations are measured; at least as many as fill the pool",
    )
    parser.add_argument(
        "--managers", nargs="+", choices=tuple(managers()), default=tuple(managers())
    )
    add_common_arguments(parser, trials=9)
    arguments = parser.parse_args()
    results, rows = [], []
    for num_blocks, min_served in itertools.product(arguments.blocks, arguments.served):
        for name in arguments.managers:
            figures = measure_apart(name, num_blocks, min_served, arguments.trials)
            results.append({"blocks": num_blocks, "manager": name, **figures})
            rows.append(
                (
                    f"{num_blocks:,}",
                    name,
                    format_seconds(figures["startup"]),
                    f"{figures['bytes_per_block']:.1f}",
                    f"{figures['bytes_per_cached_block']:.0f}",
                    format_seconds(figures["gc_pause"]),
                    f"{figures['cyclic_garbage']:.0f}",
                    format_seconds(figures["serve"]),
                    f"{figures['served']:,}",
                )
            )
    print_table(
        "A pool by its size; serve: place a new prompt of 2,048 tokens, evicting, and free it",
        (
            "blocks",
            "manager",
            "start-up",
            "bytes per block",
            "when cached",
            "full gc",
            "garbage",
            "serve",
            "served",
        ),
        rows,
    )
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
