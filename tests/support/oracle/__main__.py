# SPDX-License-Identifier: Apache-2.0
"""Measure the oracle, or run random cases under it for a while.

PYTHONPATH=tests python -m support.oracle speed
PYTHONPATH=tests python -m support.oracle search --manager hybrid --seconds 600
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import hypothesis

from support.kv_configs import full, sliding
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

from .attention import total_reads_checked
from .engine_config import OracleSettings
from .strategies import cases
from .workload import Add, Case, apply, make_engine, run_case

_MANAGERS = {"base": BaseManager, "hybrid": HybridManager}
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
        kinds = (full(), sliding(32, num_groups=num_groups - 1))[: 1 + (num_groups > 1)]
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


def search(manager: str, seconds: float, first_seed: int) -> int:
    """Run random cases, as `test_oracle_random` does; returns the number of seeds that failed."""
    until = time.monotonic() + seconds
    failed = 0
    seed = first_seed
    while time.monotonic() < until:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=10,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=cases())
        def run_some(case: Case) -> None:
            run_case(_MANAGERS[manager], case)

        try:
            run_some()
        except Exception as error:
            failed += 1
            notes = "\n".join(getattr(error, "__notes__", ()))
            print(f"seed {seed}: {type(error).__name__}: {error}\n{notes}\n", flush=True)
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
    searching.add_argument("--manager", choices=_MANAGERS, default="hybrid")
    searching.add_argument("--seconds", type=float, default=60)
    searching.add_argument("--seed", type=int, default=0, help="the first case's seed")
    options = parser.parse_args()
    if options.command == "speed":
        measure_speed()
    elif search(options.manager, options.seconds, options.seed) or not total_reads_checked():
        sys.exit(1)


if __name__ == "__main__":
    main()
