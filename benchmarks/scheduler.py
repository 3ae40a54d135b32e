# SPDX-License-Identifier: Apache-2.0
"""The cost of a whole step of base's scheduler, with base's manager and the hybrid manager.

    python benchmarks/scheduler.py [--groups 6] [--requests 256] [--profile] [--json FILE]

A step is `Scheduler.schedule()` plus `update_from_output()`. All requests decode. No model runs:
each request gets the same token. Each figure is the median over the rounds, in microseconds
per request.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

from common import add_common_arguments, print_table, write_json
from shapes import BLOCK_SIZE, NUM_PROMPT_TOKENS, kv_cache_config, make_requests, managers

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.oracle.engine_config import (
    OracleSettings,
    make_vllm_config,
    structured_output_manager,
)
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.outputs import ModelRunnerOutput

#: The two schedulers take turns, a round of steps each.
STEPS_PER_ROUND = 2 * BLOCK_SIZE


class DecodingScheduler:
    """Base's scheduler with requests whose prompts are computed."""

    def __init__(self, manager_class: Any, num_groups: int, num_requests: int, steps: int) -> None:
        settings = OracleSettings(
            max_num_seqs=num_requests,
            max_num_batched_tokens=num_requests * NUM_PROMPT_TOKENS,
            max_model_len=NUM_PROMPT_TOKENS + steps + 64,
        )
        blocks_per_request = settings.max_model_len // BLOCK_SIZE + 2
        num_blocks = num_requests * num_groups * blocks_per_request + 1
        with mock.patch.object(scheduler_module, "KVCacheManager", manager_class):
            self.scheduler = scheduler_module.Scheduler(
                vllm_config=make_vllm_config(settings, BLOCK_SIZE, num_blocks),
                kv_cache_config=kv_cache_config(num_groups, num_blocks),
                structured_output_manager=structured_output_manager(),
                block_size=BLOCK_SIZE,
                hash_block_size=BLOCK_SIZE,
                log_stats=True,
            )
        for request in make_requests(num_requests, 0):
            self.scheduler.add_request(request)
        self.step()

    def step(self) -> float:
        """Schedule a step and process its output; returns the seconds."""
        begin = perf_counter()
        scheduled = self.scheduler.schedule()
        seconds = perf_counter() - begin
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )
        begin = perf_counter()
        self.scheduler.update_from_output(scheduled, output)
        return seconds + perf_counter() - begin


def measure(num_groups: int, num_requests: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step per request, by manager."""
    steps = (rounds + 1) * STEPS_PER_ROUND + 1
    schedulers = {
        name: DecodingScheduler(manager_class, num_groups, num_requests, steps)
        for name, manager_class in managers().items()
    }
    samples: dict[str, list[float]] = {name: [] for name in schedulers}
    gc.collect()
    gc.freeze()
    for number in range(rounds + 1):
        for name in sorted(schedulers, reverse=number % 2 == 1):
            seconds = [schedulers[name].step() for _ in range(STEPS_PER_ROUND)]
            if number > 0:  # the first warms up
                samples[name].append(statistics.mean(seconds) / num_requests)
    gc.unfreeze()
    return {name: statistics.median(values) for name, values in samples.items()}


def print_profile(num_groups: int, num_requests: int) -> None:
    """Print where the time of the hybrid manager's steps goes, by source file."""
    decoding = DecodingScheduler(managers()["hybrid"], num_groups, num_requests, STEPS_PER_ROUND)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(STEPS_PER_ROUND):
        decoding.step()
    profile.disable()
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for (path, _, function), (_, num_calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        # C methods, such as those of lists and dicts, and the gates before the manager's methods.
        place = path.partition("site-packages/")[2] or path.partition("vllm/v1")[1] + (
            path.partition("vllm/v1")[2] or function.strip("<>")
        )
        seconds[place] += own
        calls[place] += num_calls
    total = seconds.total()
    per_step = num_requests * STEPS_PER_ROUND
    print_table(
        f"A step with the hybrid manager, {num_groups} groups, with the profiler's own overhead",
        ("own time in", "share", "calls per request"),
        [
            (place, f"{own / total:.0%}", f"{calls[place] / per_step:.2f}")
            for place, own in seconds.most_common(12)
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=(1, 2, 6, 46))
    parser.add_argument("--requests", type=int, nargs="+", default=(256,))
    parser.add_argument(
        "--profile", action="store_true", help="show where the time of the hybrid manager goes"
    )
    add_common_arguments(parser, trials=7)
    arguments = parser.parse_args()
    results, rows = [], []
    for num_groups in arguments.groups:
        for num_requests in arguments.requests:
            seconds = measure(num_groups, num_requests, arguments.trials)
            results.append({"groups": num_groups, "requests": num_requests, **seconds})
            figures = [f"{seconds[name] * 1e6:,.1f}" for name in ("base", "hybrid")]
            ratio = f"{seconds['base'] / seconds['hybrid']:.2f}x"
            rows.append((num_groups, num_requests, *figures, ratio))
    print_table(
        "A scheduler step, us per decoding request",
        ("groups", "requests", "base", "hybrid", "ratio"),
        rows,
    )
    if arguments.profile:
        print_profile(arguments.groups[-1], arguments.requests[-1])
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
