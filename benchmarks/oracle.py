# SPDX-License-Identifier: Apache-2.0
"""The speed of the tests' content oracle: PYTHONPATH=tests python benchmarks/oracle.py"""

import itertools
import time
from typing import Any

from support.kv_configs import full, sliding
from support.oracle.engine_config import OracleSettings
from support.oracle.workload import Add, Case, apply, make_engine
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

_BATCH = 8


def _accumulate(owner: Any, name: str, spent: list[float]) -> None:
    """Make a method add the time it takes to ``spent``."""
    method = getattr(owner, name)

    def timed(*args: Any) -> Any:
        start = time.process_time()
        try:
            return method(*args)
        finally:
            spent[0] += time.process_time() - start

    setattr(owner, name, timed)


def main() -> None:
    """Print scheduler steps a second for a batch of small requests, in processor time."""
    print(f"{_BATCH} requests of 30 tokens that decode 200 each; steps per second of CPU time")
    print("manager  groups  oracle alone  with scheduler  reads/step")
    managers = {"base": BaseManager, "hybrid": HybridManager}
    for name, num_groups in itertools.product(managers, (1, 2, 6, 46)):
        kinds = (full(), sliding(32, num_groups=num_groups - 1))[: 1 + (num_groups > 1)]
        settings = OracleSettings(max_num_batched_tokens=512)
        case = Case(kinds, (), settings, extra_blocks=100 * _BATCH * num_groups)
        engine = make_engine(managers[name], case, check_integrity=False)
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
            f"{engine.reads['kv'] // steps:10,}"
        )


if __name__ == "__main__":
    main()
