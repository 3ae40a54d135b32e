# SPDX-License-Identifier: Apache-2.0
"""The cost of the KV cache manager: base's and the hybrid manager in one process.

    python benchmarks/manager.py [--groups 1 2 6 46] [--requests 256 ...] [--json FILE]

Drives both managers as base's scheduler does, with requests of 2,048 tokens. The managers take
turns. Each figure is the median over the trials, in microseconds per request.
"""

import argparse
import gc
import itertools
import statistics
from time import perf_counter
from typing import Any

from common import add_common_arguments, print_table, write_json
from shapes import (
    BLOCK_SIZE,
    NUM_GROUPS,
    NUM_PROMPT_TOKENS,
    build_manager,
    make_requests,
    managers,
    reset,
    start,
)
from vllm.v1.request import Request

#: Two blocks, so that every kind of work occurs twice.
NUM_DECODE_STEPS = 2 * BLOCK_SIZE
OPERATIONS = {
    "decode": "one decode step",
    "quiet": "a decode step without an event",
    "place": "place a new prompt",
    "adopt": "adopt a cached prompt",
    "free": "free",
}


def run_trial(
    manager: Any, requests: list[Request], same_prompts: list[Request]
) -> dict[str, float]:
    """Seconds of each operation per request."""
    allocate_slots, free = manager.allocate_slots, manager.free
    seconds = {}

    begin = perf_counter()
    for request in requests:
        start(manager, request)
    seconds["place"] = (perf_counter() - begin) / len(requests)

    steps = []
    for _ in range(NUM_DECODE_STEPS):
        begin = perf_counter()
        for request in requests:
            allocate_slots(request, 1, num_lookahead_tokens=0)
            request.num_computed_tokens += 1
        steps.append((perf_counter() - begin) / len(requests))
    seconds["decode"] = statistics.mean(steps)
    # The prompt ends at the end of a block: new blocks begin in the first step and end in the last.
    quiet = [step for i, step in enumerate(steps, start=1) if i % BLOCK_SIZE not in (0, 1)]
    seconds["quiet"] = statistics.mean(quiet)

    begin = perf_counter()
    for request in requests:
        free(request)
    seconds["free"] = (perf_counter() - begin) / len(requests)

    begin = perf_counter()
    num_hits = [start(manager, request) for request in same_prompts]
    seconds["adopt"] = (perf_counter() - begin) / len(requests)
    assert set(num_hits) == {NUM_PROMPT_TOKENS - BLOCK_SIZE}, "not everything was cached"

    for request in same_prompts:
        free(request)
    for request in (*requests, *same_prompts):
        reset(request)
    assert manager.reset_prefix_cache()
    return seconds


def measure(num_groups: int, num_requests: int, trials: int) -> dict[str, dict[str, float]]:
    """Median seconds, by manager and operation."""
    blocks_per_request = (NUM_PROMPT_TOKENS + NUM_DECODE_STEPS) // BLOCK_SIZE + 1
    num_blocks = num_requests * num_groups * blocks_per_request + 1
    requests = make_requests(num_requests, NUM_DECODE_STEPS + 1)
    same_prompts = make_requests(num_requests, 0)
    both = {
        name: build_manager(manager_class, num_groups, num_blocks)
        for name, manager_class in managers().items()
    }
    samples: dict[str, dict[str, list[float]]] = {
        name: {operation: [] for operation in OPERATIONS} for name in both
    }
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for trial in range(trials + 1):
            for name in sorted(both, reverse=trial % 2 == 1):
                seconds = run_trial(both[name], requests, same_prompts)
                if trial > 0:  # the first warms up
                    for operation, value in seconds.items():
                        samples[name][operation].append(value)
    finally:
        gc.enable()
        gc.unfreeze()
    return {
        name: {operation: statistics.median(values) for operation, values in by_operation.items()}
        for name, by_operation in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=NUM_GROUPS)
    parser.add_argument("--requests", type=int, nargs="+", default=(256,))
    add_common_arguments(parser, trials=7)
    arguments = parser.parse_args()
    results = []
    rows = []
    for num_groups, num_requests in itertools.product(arguments.groups, arguments.requests):
        medians = measure(num_groups, num_requests, arguments.trials)
        for operation, title in OPERATIONS.items():
            base, hybrid = (medians[name][operation] for name in ("base", "hybrid"))
            case = {"groups": num_groups, "requests": num_requests, "operation": operation}
            results.append(case | {"base": base, "hybrid": hybrid})
            rows.append(
                (
                    f"{num_groups}",
                    f"{num_requests}",
                    title,
                    f"{base * 1e6:,.2f}",
                    f"{hybrid * 1e6:,.2f}",
                    f"{base / hybrid:,.1f}x",
                )
            )
    print_table(
        f"Requests of {NUM_PROMPT_TOKENS:,} tokens, us per request",
        ("groups", "requests", "operation", "base", "hybrid", "ratio"),
        rows,
    )
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
