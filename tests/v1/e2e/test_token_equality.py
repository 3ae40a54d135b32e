# SPDX-License-Identifier: Apache-2.0
"""Token ids and log-probabilities are the same with base's manager and the hybrid manager.

On one core with float32 weights, base is deterministic: it gives the same tokens for a prompt
however the prompt is batched, cut into chunks, preempted or found in the prefix cache.
Log-probabilities then differ by about 1e-6, since sums come in another order. So all runs can be
compared, including those in which the two managers evict different blocks and therefore hit,
batch and preempt differently. In bfloat16, the default for real models, log-probabilities of
different batches differ by about 0.01, which can change a greedy choice between two almost
equally likely tokens. There, only runs with the same batch in each step are compared
(`test_gemma3_270m_in_its_own_dtype`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engine import (
    ASYNC_SCHEDULER,
    EnginePair,
    EngineProcess,
    EngineResult,
    Round,
    assert_same_outputs,
    verify_pair,
)
from support.engine_prompts import noise_prompt, pass_key_prompt, prompts, random_tokens
from tools import checkpoints

#: Around the tiny models' window of 64 tokens, and far beyond it.
LENGTHS = [40, 64, 65, 130, 200, 310]
SHARED = random_tokens(200, seed=99)

#: Numbers of blocks, too few for the requests of `busy_rounds`.
SMALL_POOLS = {
    "tiny-gemma3": 56,
    "tiny-gemma2": 30,
    "tiny-mistral": 12,
    "tiny-llama": 24,
    "tiny-llama4": 44,
    "tiny-granite4": 20,
    "tiny-falcon-h1": 14,
}
REAL_POOL = 190


def small_pool(model: Path) -> dict[str, Any]:
    """Engine arguments with which `busy_rounds` cannot all run at once."""
    return {
        "num_gpu_blocks_override": SMALL_POOLS[model.name],
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
    }


def ordinary_rounds() -> list[Round]:
    """Batches, the same batches from the prefix cache, and prompts with a shared prefix."""
    batch = prompts(LENGTHS, seed=1)
    siblings = prompts([230, 260, 400], seed=20, shared=SHARED)
    return [
        Round(batch, max_tokens=[24, 40, 8]),
        Round(batch[::-1], max_tokens=24),
        # The first sibling caches the shared prefix. At its end, full attention could resume the
        # second sibling, but sliding windows cannot yet. The third resumes there.
        *(Round([sibling], max_tokens=8) for sibling in siblings),
        Round([*siblings, SHARED, *batch[:2]], max_tokens=8),
        # A conversation's next turn.
        Round([[*batch[5], *random_tokens(90, seed=30)]], max_tokens=8),
        Round([{"prompt_token_ids": p, "cache_salt": "another"} for p in batch], max_tokens=8),
        Round(batch, max_tokens=8, reset_prefix_cache=True),
    ]


def busy_rounds() -> list[Round]:
    """More requests than a small pool holds; they arrive and end while others run."""
    return [
        Round(prompts([200, 150, 300, 90, 250, 180], seed=40), max_tokens=[60, 30, 45]),
        Round(
            prompts([210, 230, 280, 260, 220, 250, 300, 240], seed=50, shared=SHARED),
            max_tokens=[70, 20, 40],
            arrivals=[0, 0, 5, 9, 9, 14, 20, 31],
        ),
        Round(
            prompts([300, 200, 250, 120, 310], seed=60),
            max_tokens=60,
            arrivals=[0, 2, 4, 6, 8],
            aborts={0: 25, 1: 40, 3: 60},
        ),
    ]


def assert_same_hits(base: EngineResult, hybrid: EngineResult) -> None:
    """Assert equal hits, which holds only where nothing was evicted."""
    assert hybrid.num_cached_tokens == base.num_cached_tokens
    assert hybrid.total("prefix_cache_hits") == base.total("prefix_cache_hits") > 0


def assert_preempted(base: EngineResult, hybrid: EngineResult) -> None:
    assert base.total("num_preemptions") > 0
    assert hybrid.total("num_preemptions") > 0


def run_in_small_pool(
    engines: EnginePair, model: Path, **engine_args: Any
) -> tuple[EngineResult, EngineResult]:
    """Run `busy_rounds`, and assert the same outputs and preemptions on both."""
    base, hybrid = engines.run(model, busy_rounds(), **small_pool(model), **engine_args)
    assert_same_outputs(base, hybrid)
    assert_preempted(base, hybrid)
    return base, hybrid


@pytest.mark.parametrize(
    "interval", [0, None, 64], ids=["at prompt ends", "densely", "every 64 tokens"]
)
def test_prefix_cache(engines: EnginePair, tiny_window_model: Path, interval: int | None) -> None:
    """The interval sets for which positions sliding windows keep blocks in the prefix cache."""
    base, hybrid = engines.run(
        tiny_window_model, ordinary_rounds(), prefix_cache_retention_interval=interval
    )

    # Base finds where prefixes diverge from the blocks that full attention has kept.
    sees_junctions = tiny_window_model.name != "tiny-mistral" or interval != 0
    assert_prefix_cache_works(base, hybrid, sees_junctions)


@pytest.mark.parametrize("model", [checkpoints.tiny_llama, checkpoints.tiny_llama4])
def test_prefix_cache_without_windows(engines: EnginePair, model: Callable[[], Path]) -> None:
    """Full attention; chunks of 64 tokens and full attention."""
    base, hybrid = engines.run(model(), ordinary_rounds())

    assert ("chunked_local_attention 64 (3 groups" in hybrid.log) == (
        model == checkpoints.tiny_llama4
    )
    assert_prefix_cache_works(base, hybrid, sees_junctions=True)


def assert_prefix_cache_works(
    base: EngineResult, hybrid: EngineResult, sees_junctions: bool
) -> None:
    """Assert what `ordinary_rounds` must show."""
    assert_same_outputs(base, hybrid)
    assert_same_hits(base, hybrid)
    # All but the last block of each prompt was hit.
    again = hybrid.rounds[1].num_cached_tokens
    assert all(n - 32 <= hit < n for n, hit in zip(LENGTHS[::-1], again, strict=True))
    if sees_junctions:
        # The third sibling resumed at the end of the shared prefix.
        assert hybrid.rounds[4].num_cached_tokens[0] >= 192
    assert max(hybrid.rounds[7].num_cached_tokens) == max(hybrid.rounds[8].num_cached_tokens) == 0


def test_no_prefix_cache(engines: EnginePair, tiny_model: Path) -> None:
    rounds = [r for r in ordinary_rounds() if not r.reset_prefix_cache]
    base, hybrid = engines.run(tiny_model, rounds, enable_prefix_caching=False)

    assert_same_outputs(base, hybrid)
    assert hybrid.total("prefix_cache_hits") == 0


MAMBA_MODELS = [checkpoints.tiny_granite4, checkpoints.tiny_falcon_h1]


@pytest.mark.parametrize("model", MAMBA_MODELS)
def test_mamba_without_prefix_cache(engines: EnginePair, model: Callable[[], Path]) -> None:
    """Requests reuse the states of requests that have ended."""
    rounds = [r for r in ordinary_rounds() if not r.reset_prefix_cache]
    base, hybrid = engines.run(
        model(), [*rounds, *busy_rounds()], enable_prefix_caching=False, max_num_batched_tokens=64
    )

    assert "Hybrid KV cache: active" in hybrid.log and "mamba (" in hybrid.log
    assert_same_outputs(base, hybrid)
    assert hybrid.num_steps == base.num_steps


@pytest.mark.parametrize("model", MAMBA_MODELS)
def test_mamba_with_preemption(engines: EnginePair, model: Callable[[], Path]) -> None:
    base, hybrid = run_in_small_pool(engines, model(), enable_prefix_caching=False)

    assert hybrid.total("num_preemptions") == base.total("num_preemptions")


def whisper_rounds() -> list[Round]:
    """Sounds from a tenth of a second to the model's limit, and decoder prompts of all lengths."""
    lengths = [4, 31, 32, 33, 90, 150, 220, 1]
    sounds = [
        noise_prompt(seed, 1_600 + 4_000 * seed, random_tokens(length, seed))
        for seed, length in enumerate(lengths)
    ]
    return [
        Round(sounds, max_tokens=[60, 30, 90]),
        Round(
            sounds[::-1], max_tokens=60, arrivals=[0, 0, 3, 7, 7, 14, 20, 31], aborts={1: 9, 4: 30}
        ),
    ]


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_whisper(engines: EnginePair, is_async: bool) -> None:
    """Each request holds 4 blocks for its encoder and up to 10 of its own; the pool has 29."""
    base, hybrid = engines.run(
        checkpoints.tiny_whisper(),
        whisper_rounds(),
        max_model_len=448,
        max_num_batched_tokens=448,
        num_gpu_blocks_override=30,
        async_scheduling=is_async,
    )

    assert "full_attention (1 group, block size 32); cross_attention (1 group" in hybrid.log
    assert_same_outputs(base, hybrid)
    assert_preempted(base, hybrid)
    # Without a prefix cache, the runs must be identical.
    assert hybrid.total("num_preemptions") == base.total("num_preemptions")
    assert hybrid.num_steps == base.num_steps
    assert hybrid.peak_usage == base.peak_usage > 0.8


def test_whisper_with_prefix_caching_requested(engines: EnginePair) -> None:
    """Base logs that it disables prefix caching, but then raises in the first lookup."""
    rounds = [Round([noise_prompt(1, 32_000, random_tokens(100, seed=1))] * 2, max_tokens=24)] * 2
    model = checkpoints.tiny_whisper()
    base = engines.base.run(model, rounds, max_model_len=448)
    hybrid = engines.hybrid.run(model, rounds, max_model_len=448, enable_prefix_caching=True)

    verify_pair(base, hybrid)
    assert_same_outputs(base, hybrid)
    assert hybrid.total("prefix_cache_hits") == 0


def test_chunked_prefill(engines: EnginePair, tiny_model: Path) -> None:
    """Chunks of 40 tokens, whose ends are neither those of blocks nor of windows."""
    base, hybrid = engines.run(
        tiny_model,
        [*ordinary_rounds(), *busy_rounds()],
        max_num_batched_tokens=40,
        long_prefill_token_threshold=24,
    )

    assert_same_outputs(base, hybrid)
    assert_same_hits(base, hybrid)
    assert hybrid.num_steps == base.num_steps


@pytest.mark.parametrize("interval", [0, None], ids=["at prompt ends", "densely"])
def test_preemption(engines: EnginePair, tiny_model: Path, interval: int | None) -> None:
    _, hybrid = run_in_small_pool(engines, tiny_model, prefix_cache_retention_interval=interval)

    assert hybrid.peak_usage > 0.8


def test_preemption_without_prefix_cache(engines: EnginePair, tiny_gemma3: Path) -> None:
    base, hybrid = run_in_small_pool(engines, tiny_gemma3, enable_prefix_caching=False)

    # Without a cache the runs must be identical: the same requests are preempted in the same steps.
    assert hybrid.total("num_preemptions") == base.total("num_preemptions")
    assert hybrid.num_steps == base.num_steps


def test_admission(engines: EnginePair, tiny_gemma3: Path) -> None:
    """A watermark holds back new requests. They are admitted even if not all of the prompt fits."""
    run_in_small_pool(engines, tiny_gemma3, watermark=0.1, scheduler_reserve_full_isl=False)


def test_priority_scheduling(engines: EnginePair, tiny_gemma3: Path) -> None:
    """Requests of high priority arrive late and preempt others."""
    lengths, priorities = [300, 250, 280, 200, 260, 180], [9, 9, 5, 5, 1, 0]
    base, hybrid = engines.run(
        tiny_gemma3,
        [
            Round(prompts(lengths, seed=1), max_tokens=40, priorities=priorities),
            Round(
                prompts(lengths, seed=70, shared=SHARED[:100]),
                max_tokens=[60, 40],
                priorities=priorities,
                arrivals=[0, 0, 12, 14, 25, 40],
            ),
        ],
        scheduling_policy="priority",
        **small_pool(tiny_gemma3),
    )

    assert_same_outputs(base, hybrid)
    assert_preempted(base, hybrid)


def test_async_scheduling(engines: EnginePair, tiny_gemma3: Path) -> None:
    """A step is scheduled while the previous one still runs.

    The step in flight reads blocks that leave a window, and tokens are counted before they are
    known.
    """
    base, hybrid = engines.run(tiny_gemma3, ordinary_rounds(), async_scheduling=True)

    assert hybrid.scheduler == base.scheduler == ASYNC_SCHEDULER
    assert_same_outputs(base, hybrid)
    assert_same_hits(base, hybrid)


def test_async_scheduling_with_preemption(engines: EnginePair, tiny_model: Path) -> None:
    # Otherwise the hybrid manager admits requests only once they fit, and preempts none.
    base, hybrid = run_in_small_pool(
        engines, tiny_model, async_scheduling=True, scheduler_reserve_full_isl=False
    )

    assert hybrid.scheduler == base.scheduler == ASYNC_SCHEDULER


def test_one_type_of_attention(engines: EnginePair, tiny_gemma3: Path) -> None:
    """With base's option that disables hybrid KV caches, sliding-window layers keep all blocks."""
    base, hybrid = engines.run(tiny_gemma3, ordinary_rounds(), disable_hybrid_kv_cache_manager=True)

    assert hybrid.num_groups == base.num_groups == 1
    assert_same_outputs(base, hybrid)
    assert_same_hits(base, hybrid)


def test_sampling(engines: EnginePair, tiny_gemma3: Path) -> None:
    """Seeded random sampling, and stop tokens."""
    batch = prompts(LENGTHS, seed=1)
    base, hybrid = engines.run(
        tiny_gemma3,
        [
            Round(batch, max_tokens=40, sampling={"temperature": 0.8, "top_p": 0.9, "seed": 7}),
            Round(batch, max_tokens=40, sampling={"stop_token_ids": list(range(37, 60))}),
        ],
    )

    assert_same_outputs(base, hybrid)
    assert min(map(len, hybrid.rounds[1].token_ids)) < 40


def test_kv_cache_events(engines: EnginePair, tiny_gemma3: Path) -> None:
    """The same blocks are published for each group; only their order may differ."""
    base, hybrid = engines.run(
        tiny_gemma3,
        ordinary_rounds(),
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )

    assert_same_outputs(base, hybrid)
    assert len(base.events) > 100
    assert sorted(hybrid.events) == sorted(base.events)


def real_texts() -> list[str]:
    """Two shorter than Gemma 3 270M's window of 512 tokens, two longer."""
    keys = {"86465": 13, "31927": 14, "40518": 18, "50748": 25}
    return [pass_key_prompt(key, num_fillers) for key, num_fillers in keys.items()]


def test_gemma3_270m(engines: EnginePair, gemma3_270m: Path) -> None:
    """A real model, in a pool that two requests fit in at first and then outgrow."""
    texts = real_texts()
    base, hybrid = engines.run(
        gemma3_270m,
        [
            Round(texts[:3], max_tokens=96),
            Round([f"{texts[3]} 50748. Now say it again:", *texts[::-1]], max_tokens=24),
        ],
        max_num_batched_tokens=256,
        num_gpu_blocks_override=REAL_POOL,
    )

    assert_same_outputs(base, hybrid, logprob_tolerance=1e-3)
    assert_preempted(base, hybrid)
    assert hybrid.total("prefix_cache_hits") > 0


def test_gemma3_270m_in_its_own_dtype(engines: EnginePair, gemma3_270m: Path) -> None:
    texts = real_texts()
    base, hybrid = engines.run(
        gemma3_270m,
        [Round(texts, max_tokens=24), Round(texts[::-1], max_tokens=24)],
        dtype="bfloat16",
    )

    assert_same_outputs(base, hybrid, logprob_tolerance=1e-3)
    assert_same_hits(base, hybrid)
    assert hybrid.num_steps == base.num_steps


def test_two_tensor_parallel_ranks(tiny_gemma3: Path) -> None:
    # One after the other: the two ranks of one engine already keep two cores busy.
    results = []
    for is_hybrid in (False, True):
        with EngineProcess(hybrid=is_hybrid) as process:
            results.append(
                process.run(
                    tiny_gemma3,
                    [*ordinary_rounds()[:2], busy_rounds()[1]],
                    tensor_parallel_size=2,
                    distributed_executor_backend="mp",
                    **small_pool(tiny_gemma3),
                )
            )
    base, hybrid = results
    verify_pair(base, hybrid)
    assert_same_outputs(base, hybrid)
    assert_preempted(base, hybrid)
