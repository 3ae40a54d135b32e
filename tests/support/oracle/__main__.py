# SPDX-License-Identifier: Apache-2.0
"""Measure the oracle, or run random cases under it for a while.

PYTHONPATH=tests python -m support.oracle speed
PYTHONPATH=tests python -m support.oracle search --manager fork --seconds 600
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.hybrid import KVCacheManager as ForkManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

from .attention import total_reads_checked
from .engine_config import OracleSettings
from .models import AttentionKind, Full, Sliding
from .workload import Add, Case, apply, make_engine, random_operations, run_case

_MANAGERS = {"base": BaseManager, "fork": ForkManager}
_BATCH = 8


def _accumulate(owner: Any, name: str, spent: list[float]) -> None:
    """Make a method add the time it takes to ``spent``."""
    method: Callable = getattr(owner, name)

    def timed(*args: Any) -> Any:
        start = time.process_time()
        try:
            return method(*args)
        finally:
            spent[0] += time.process_time() - start

    setattr(owner, name, timed)


def measure_speed() -> None:
    """Print scheduler steps a second for a batch of small requests, in processor time."""
    print(f"{_BATCH} requests of 30 tokens that decode 200 each; steps per second of CPU time")
    print("manager  groups  oracle alone  with scheduler  reads/step")
    for name, num_groups in itertools.product(_MANAGERS, (1, 2, 6, 46)):
        sliding = (Sliding(32, num_groups=num_groups - 1),) if num_groups > 1 else ()
        kinds: tuple[AttentionKind, ...] = (Full(), *sliding)
        settings = OracleSettings(max_num_batched_tokens=512)
        case = Case(kinds, (), settings, extra_blocks=100 * _BATCH * num_groups)
        engine = make_engine(_MANAGERS[name], case, check_integrity=False)
        for _ in range(_BATCH):
            apply(engine, Add(tail=30, max_tokens=200))
        spent = [0.0]
        for method in ("submit", "run", "settle"):
            _accumulate(engine.worker, method, spent)
        start = time.process_time()
        engine.run_until_done()
        total = time.process_time() - start
        steps = engine.num_schedules
        print(
            f"{name:7}  {num_groups:6}  {steps / spent[0]:12,.0f}  {steps / total:14,.0f}  "
            f"{engine.reads_checked // steps:10,}"
        )


def _random_case(seed: int) -> Case:
    rng = random.Random(seed)
    steps_in_flight = rng.choice((0, 0, 1, 1, 2))
    settings = OracleSettings(
        max_num_seqs=rng.choice((2, 8, 16)),
        max_num_batched_tokens=rng.choice((16, 40, 100, 300)),
        async_scheduling=steps_in_flight > 0 and rng.random() < 0.8,
        steps_in_flight=steps_in_flight,
        policy=rng.choice(("fcfs", "priority")),
        watermark=rng.choice((0.0, 0.0, 0.1)),
        enable_prefix_caching=rng.random() < 0.9,
        long_prefill_token_threshold=rng.choice((0, 0, 5, 30)),
        reserve_full_sequence=rng.random() < 0.8,
        model_runner_v2=rng.random() < 0.3,
        vocab_size=256,
    )
    size = rng.choice((8, 16))
    kinds: list[AttentionKind] = [Full(size, rng.randint(1, 3))] if rng.random() < 0.8 else []
    windows = rng.sample(range(1, 120), rng.randint(0 if kinds else 1, 4))
    for window in windows:
        block_size = size if rng.random() < 0.7 else rng.choice((4, 8, 16, 32))
        kinds.append(Sliding(window, block_size, rng.randint(1, 6)))
    return Case(
        tuple(kinds),
        tuple(random_operations(rng, 80, settings.max_model_len)),
        settings,
        extra_blocks=rng.choice((0, 5, 20, 100, 1000)),
        retention_interval=rng.choice((None, 0, 96)) if windows else None,
        shuffle_groups=seed,
    )


def search(manager: str, seconds: float, first_seed: int) -> int:
    """Run random cases; returns the number that failed."""
    until = time.monotonic() + seconds
    failed = 0
    seed = first_seed
    while time.monotonic() < until:
        case = _random_case(seed)
        try:
            run_case(_MANAGERS[manager], case)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}\n{case}\n", flush=True)
        seed += 1
    print(
        f"{manager}: seeds {first_seed} to {seed - 1}, {failed} failed, "
        f"{total_reads_checked():,} KV reads checked"
    )
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.oracle", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("speed", help="measure the oracle")
    searching = commands.add_parser("search", help="run random cases")
    searching.add_argument("--manager", choices=_MANAGERS, default="fork")
    searching.add_argument("--seconds", type=float, default=60)
    searching.add_argument("--seed", type=int, default=0, help="the first case's seed")
    options = parser.parse_args()
    if options.command == "speed":
        measure_speed()
    elif search(options.manager, options.seconds, options.seed) or not total_reads_checked():
        sys.exit(1)


if __name__ == "__main__":
    main()
