# SPDX-License-Identifier: Apache-2.0
"""Models and ways to serve for KV connectors under the oracle, and random cases of them."""

import random
from typing import Any

from support.kv_configs import chunked, full, sliding

from .connector import ConnectorSettings
from .engine_config import OracleSettings
from .workload import Case, Operation, Reset, random_operations

MODELS = {
    "full attention": (full(16),),
    "Gemma": (full(16), sliding(40, 16, 5)),
    "windows only": (sliding(40, 16, 2),),
    "chunks": (full(16), chunked(48, 16, 3)),
    "unequal block sizes": (full(8), sliding(24, 16, 2)),
    "three types, zeroed blocks": (full(16, dtype="float32"), sliding(33, 16, 2), sliding(70, 16)),
}
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True, "steps_in_flight": 1},
    "pipeline parallel": {"steps_in_flight": 1},
    "runner v2": {"async_scheduling": True, "steps_in_flight": 2, "model_runner_v2": True},
    "drafts": {"num_spec_tokens": 2, "num_lookahead_tokens": 2},
}


def random_case(seed: int) -> Case:
    """Loads, failures, drafts, aborts and sends in a pool from base's minimum upwards."""
    rng = random.Random(seed)
    pipeline = rng.choice(list(PIPELINES))
    max_model_len = rng.choice([96, 240])
    asynchronous = rng.random() < 0.8
    # A load within a step that fails is simulated without steps in flight only.
    can_fail = asynchronous or pipeline in ("plain", "drafts")
    operations: tuple[Operation, ...] = tuple(
        operation
        for operation in random_operations(rng, rng.choice([8, 20, 60]), max_model_len)
        if not isinstance(operation, Reset)  # base refuses it during a transfer
    )
    connector = ConnectorSettings(
        seed,
        asynchronous=asynchronous,
        whole_prompts=rng.random() < 0.5,
        most_steps=rng.choice([0, 3, 6]),
        fails=rng.choice([0, 1, 2, 3]) if can_fail else 0,
        names_blocks=rng.random() < 0.5,
        sends=rng.random() < 0.5,
    )
    return Case(
        kinds=rng.choice(list(MODELS.values())),
        operations=operations,
        extra_blocks=rng.choice([0, 0, 1, 2, 5, 20, 100]),
        retention_interval=rng.choice([None, 0]),
        settings=OracleSettings(
            max_model_len=max_model_len,
            max_num_batched_tokens=rng.choice([24, 64, 128]),
            max_num_seqs=rng.choice([8, 8, 3]),
            policy=rng.choice(["fcfs", "priority"]),
            watermark=rng.choice([0.0, 0.0, 0.1]),
            reserve_full_sequence=rng.random() < 0.6,
            enable_prefix_caching=rng.random() < 0.85,
            vocab_size=64,
            connector=connector,
            **PIPELINES[pipeline],
        ),
    )
