# SPDX-License-Identifier: Apache-2.0
"""KV connectors of base on the real engine, with the fork off and on."""

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
    """Processes of their own: what a connector leaves in one is there for all its engines."""
    with engine_pair() as engines:
        yield engines


def connector(name: str, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def test_decode_bench_connector(engines: EnginePair, tiny_gemma3: Path) -> None:
    """Blocks of all groups are filled by their ids; what a step reads elsewhere changes tokens."""
    arguments: dict[str, Any] = {
        "rounds": [Round(prompts([310, 130, 200, 90], seed=9), max_tokens=30)] * 2,
        "max_model_len": 512,
        "num_gpu_blocks_override": 120,
    }
    full, empty = (connector("DecodeBenchConnector", fill_mean=mean) for mean in (0.3, 0.0))
    base, fork = engines.run(tiny_gemma3, kv_transfer_config=full, **arguments)
    other = engines.fork.run(tiny_gemma3, kv_transfer_config=empty, **arguments)

    assert fork.num_groups > 1
    assert_same_outputs(base, fork)
    assert other.rounds[0].token_ids != fork.rounds[0].token_ids


def test_example_connector(engines: EnginePair, tiny_gemma3: Path, tmp_path: Path) -> None:
    """What one engine has stored, another loads: only the ends of the prompts are computed."""

    def run(process: EngineProcess, folder: str) -> EngineResult:
        return process.run(
            tiny_gemma3,
            [Round(prompts([310, 130, 200, 40], seed=8), max_tokens=12)],
            enable_prefix_caching=False,
            kv_transfer_config=connector(
                "ExampleConnector", shared_storage_path=str(tmp_path / folder)
            ),
        )

    base, stored = run(engines.base, "base"), run(engines.fork, "fork")
    loaded = run(engines.fork, "fork")
    verify_pair(base, stored)
    verify_pair(base, loaded)
    assert_same_outputs(base, stored)
    assert_same_outputs(base, loaded)
    assert stored.rounds[0].num_cached_tokens == [0, 0, 0, 0]
    # In blocks of 32, without the last token.
    assert loaded.rounds[0].num_cached_tokens == [288, 128, 192, 32]


def test_connector_from_outside_falls_back(
    engines: EnginePair, tiny_gemma3: Path, tmp_path: Path
) -> None:
    """Of one that is not base's nobody knows what it looks at."""
    outside = connector("ExampleConnector", shared_storage_path=str(tmp_path))
    outside["kv_connector_module_path"] = (
        "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    )
    fork = engines.fork.run(
        tiny_gemma3,
        [Round(prompts([60, 200], seed=1), max_tokens=8)],
        kv_transfer_config=outside,
    )

    assert not fork.fork_is_active
    reason = "KV connector ExampleConnector is not covered yet"
    assert f"using base vLLM's manager, because {reason}" in fork.log
