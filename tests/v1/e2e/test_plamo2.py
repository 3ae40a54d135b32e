# SPDX-License-Identifier: Apache-2.0
"""PLaMo 2, which base no longer has: what the engine computes is what the formulas say, and it
is the same with base's KV cache manager and with the fork's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engine import (
    EnginePair,
    EngineResult,
    Round,
    assert_fork_ran,
    assert_same_outputs,
    verify_pair,
)
from support.engine_prompts import prompts, random_tokens
from support.plamo2_reference import Plamo2Reference
from tools import checkpoints
from tools.checkpoints.byte_tokenizer import VOCAB_SIZE
from tools.checkpoints.plamo2 import TinyPlamo2, ensure_tiny_plamo2
from tools.checkpoints.store import CACHE_VARIABLE

#: Around the window of 64 tokens, and far beyond it.
LENGTHS = [40, 64, 65, 130, 310]
#: float32 in the engine, float64 in the reference; 6e-5 was seen.
TOLERANCE = 5e-4
CHUNKS_OF_40: dict[str, Any] = {
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 40,
    "long_prefill_token_threshold": 24,
}


@pytest.fixture
def with_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What published configurations may have and `tiny-plamo2` has not."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    config = {
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "num_hidden_layers": 6,
        "mamba_step": 3,
        "full_attention_idx": [4],
        "rope_theta": 100_000.0,
        "rope_local_theta": 20_000.0,
    }
    return ensure_tiny_plamo2(TinyPlamo2("tiny-plamo2-options", config))


def assert_right(result: EngineResult, reference: Plamo2Reference, batch: list[list[int]]) -> None:
    """Of each request, every token is the likeliest by the reference, and so likely."""
    requests = [request for each in result.rounds for request in each.requests]
    for prompt, request in zip(batch * len(result.rounds), requests, strict=True):
        output = request["token_ids"]
        assert len(output) > 10
        # Row i is what follows token i, so the prompt's last row is of the first output token.
        expected = reference.log_probabilities([*prompt, *output[:-1]])[len(prompt) - 1 :]
        best = expected.max(-1)
        assert output == best.indices.tolist()
        assert request["logprobs"] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def test_the_engine_computes_what_the_formulas_say(engines: EnginePair) -> None:
    """Prompts in chunks, and decodes beside them, on states that others have left behind."""
    model = checkpoints.tiny_plamo2()
    batch = prompts(LENGTHS, seed=1)
    work = Round(batch, max_tokens=[24, 70, 40], arrivals=[0, 0, 6, 9, 30])
    result = engines.fork.run(model, [work], **CHUNKS_OF_40)

    assert_fork_ran(result)
    assert result.num_groups == 2
    reference = Plamo2Reference(model)
    assert_right(result, reference, batch)
    for text in result.rounds[0].each("text"):
        assert text.isascii() and text.isprintable() and len(set(text)) > 10
    # It would not be right with a window of one token less.
    reference.config["attention_window_size"] -= 1
    with pytest.raises(AssertionError):
        assert_right(result, reference, batch)


def test_with_other_options_too(engines: EnginePair, with_all_options: Path) -> None:
    batch = prompts([130, 40], seed=2)
    result = engines.fork.run(with_all_options, [Round(batch, max_tokens=24)], **CHUNKS_OF_40)

    assert_fork_ran(result)
    for kind in ("mamba", "sliding_window 64", "full_attention"):
        assert kind in result.log
    reference = Plamo2Reference(with_all_options)
    assert len(reference.weights["lm_head.weight"]) > VOCAB_SIZE
    assert_right(result, reference, batch)


def test_states_from_the_prefix_cache(engines: EnginePair) -> None:
    """Base's mode ``align`` on the engine: PLaMo 2 is the one model with Mamba whose states base
    can cache on CPUs, since it computes them between steps only.
    """
    batch = prompts([310, 130], seed=3)
    longer = [[*prompt, *random_tokens(40, seed=7)] for prompt in batch]
    base, fork = run_both(
        engines,
        checkpoints.tiny_plamo2,
        [Round(batch, max_tokens=12), Round(batch, max_tokens=12), Round(longer, max_tokens=12)],
        max_num_batched_tokens=256,
    )
    assert "mamba (" in fork.log and "sliding_window 64 (" in fork.log
    for again in (1, 2):
        assert min(fork.rounds[again].num_cached_tokens) >= 96
        assert fork.rounds[again].num_cached_tokens == base.rounds[again].num_cached_tokens
    fork.rounds[2:] = []
    assert_right(fork, Plamo2Reference(checkpoints.tiny_plamo2()), batch)


def test_states_in_a_small_pool(engines: EnginePair) -> None:
    """States are evicted, and requests that are preempted resume from those that are left."""
    shared = random_tokens(150, seed=5)
    _, fork = run_both(
        engines,
        checkpoints.tiny_plamo2,
        [
            Round(
                prompts([210, 230, 180, 260, 220], seed=60, shared=shared),
                max_tokens=[60, 30, 45, 70],
                arrivals=[0, 0, 4, 9, 14],
            )
        ]
        * 2,
        max_model_len=512,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=10,
    )
    assert fork.total("num_preemptions") > 0
    assert sum(sum(r.num_cached_tokens) for r in fork.rounds) > 0


def run_both(
    engines: EnginePair, model: Callable[[], Path], rounds: list[Round], **engine_args: Any
) -> tuple[EngineResult, EngineResult]:
    """With the plugin on, without which there is no PLaMo 2, and base's manager or the fork's."""
    off = {"hybrid_kv": {"enabled": False}}
    base = engines.fork.run(model(), rounds, additional_config=off, **engine_args)
    fork = engines.fork.run(model(), rounds, **engine_args)
    verify_pair(base, fork)
    assert_same_outputs(base, fork)
    return base, fork


def test_the_same_with_both_managers_in_a_small_pool(engines: EnginePair) -> None:
    shared = random_tokens(200, seed=99)
    base, fork = run_both(
        engines,
        checkpoints.tiny_plamo2,
        [
            Round(prompts([200, 150, 300, 90, 250, 180], seed=40), max_tokens=[60, 30, 45]),
            Round(
                prompts([210, 230, 280, 260, 220, 250, 300, 240], seed=50, shared=shared),
                max_tokens=[70, 20, 40],
                arrivals=[0, 0, 5, 9, 9, 14, 20, 31],
                aborts={0: 25, 1: 40},
            ),
        ],
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=9,
    )
    assert "mamba (" in fork.log and "sliding_window 64 (" in fork.log
    assert fork.total("num_preemptions") == base.total("num_preemptions") > 0
    assert fork.num_steps == base.num_steps
