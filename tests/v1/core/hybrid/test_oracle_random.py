# SPDX-License-Identifier: Apache-2.0
"""Random models, pools and workloads under the content oracle.

A failing case is shrunk and printed as a program: paste the printed `Case` into
``run_case(KVCacheManager, ...)``.

``ORACLE_EXAMPLES`` sets the number of examples; without it, a fixed choice of them runs.
"""

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from support.kv_configs import full, sliding
from support.oracle import OracleSettings
from support.oracle.strategies import cases
from support.oracle.workload import Case, random_operations, run_case
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

NUM_EXAMPLES = int(os.environ.get("ORACLE_EXAMPLES", "30"))

_settings = settings(
    max_examples=NUM_EXAMPLES,
    derandomize="ORACLE_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@_settings
@given(case=cases())
def test_random_case_on_the_hybrid_manager(case: Case) -> None:
    run_case(HybridManager, case)


@_settings
@given(case=cases(for_base=True))
def test_random_case_on_base(case: Case) -> None:
    run_case(BaseManager, case)


def test_a_long_life(manager_cls: Any) -> None:
    """One engine serves many requests, with many hits, evictions and preemptions."""
    config = OracleSettings(
        async_scheduling=True, steps_in_flight=1, max_num_batched_tokens=100, vocab_size=256
    )
    operations = random_operations(random.Random(0), 800, config.max_model_len)
    kinds = (full(), sliding(40, 16, 5))
    engine = run_case(manager_cls, Case(kinds, tuple(operations), config, extra_blocks=90))
    assert engine.tokens_from_cache > 1000
    assert engine.num_preemptions > 20
