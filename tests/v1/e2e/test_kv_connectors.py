# SPDX-License-Identifier: Apache-2.0
"""KV connectors of base on the real engine, with base's manager and the hybrid manager."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engine import (
    EnginePair,
    EngineProcess,
    EngineResult,
    Round,
    assert_same_outputs,
    engine_pair,
    verify_pair,
)
from support.engine_prompts import prompts


@pytest.fixture(scope="module")
def engines() -> Iterator[EnginePair]:
    """Separate processes: what a connector leaves behind affects all engines of its process."""
    with engine_pair() as engines:
        yield engines


def connector(name: str, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def test_decode_bench_connector(engines: EnginePair, tiny_gemma3: Path) -> None:
    """The connector fills all groups' blocks by their ids; reads of other blocks change tokens."""
    arguments: dict[str, Any] = {
        "rounds": [Round(prompts([310, 130, 200, 90], seed=9), max_tokens=30)] * 2,
        "max_model_len": 512,
        "num_gpu_blocks_override": 120,
    }
    full, empty = (connector("DecodeBenchConnector", fill_mean=mean) for mean in (0.3, 0.0))
    base, hybrid = engines.run(tiny_gemma3, kv_transfer_config=full, **arguments)
    other = engines.hybrid.run(tiny_gemma3, kv_transfer_config=empty, **arguments)

    assert hybrid.num_groups > 1
    assert_same_outputs(base, hybrid)
    assert other.rounds[0].token_ids != hybrid.rounds[0].token_ids


def test_example_connector(engines: EnginePair, tiny_gemma3: Path, tmp_path: Path) -> None:
    """One engine loads what another has stored, and computes only the ends of the prompts."""

    def run(process: EngineProcess, folder: str) -> EngineResult:
        return process.run(
            tiny_gemma3,
            [Round(prompts([310, 130, 200, 40], seed=8), max_tokens=12)],
            enable_prefix_caching=False,
            kv_transfer_config=connector(
                "ExampleConnector", shared_storage_path=str(tmp_path / folder)
            ),
        )

    base, stored = run(engines.base, "base"), run(engines.hybrid, "hybrid")
    loaded = run(engines.hybrid, "hybrid")
    verify_pair(base, stored)
    verify_pair(base, loaded)
    assert_same_outputs(base, stored)
    assert_same_outputs(base, loaded)
    assert stored.rounds[0].num_cached_tokens == [0, 0, 0, 0]
    # Whole blocks of 32, without the last token.
    assert loaded.rounds[0].num_cached_tokens == [288, 128, 192, 32]


def test_connector_from_outside_falls_back(
    engines: EnginePair, tiny_gemma3: Path, tmp_path: Path
) -> None:
    """Which attributes of the manager such a connector reads is unknown."""
    outside = connector("ExampleConnector", shared_storage_path=str(tmp_path))
    outside["kv_connector_module_path"] = (
        "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    )
    hybrid = engines.hybrid.run(
        tiny_gemma3,
        [Round(prompts([60, 200], seed=1), max_tokens=8)],
        kv_transfer_config=outside,
    )

    assert not hybrid.hybrid_is_active
    reason = "KV connector ExampleConnector is not covered yet"
    assert f"using base vLLM's manager, because {reason}" in hybrid.log
