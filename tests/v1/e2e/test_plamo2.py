# SPDX-License-Identifier: Apache-2.0
"""The engine computes for PLaMo 2, which base no longer has, what the formulas say.

Its outputs are the same with base's manager and with the hybrid manager.
"""

from pathlib import Path
from typing import Any

import pytest

from support.engine import (
    EnginePair,
    EngineResult,
    Round,
    assert_hybrid_ran,
    assert_same_outputs,
    verify_pair,
)
from support.engine_prompts import prompts, random_tokens
from support.plamo2_reference import Plamo2Reference
from tools import checkpoints
from tools.checkpoints.byte_tokenizer import VOCAB_SIZE
from tools.checkpoints.plamo2 import TinyPlamo2, ensure_tiny_plamo2
from tools.checkpoints.store import CACHE_VARIABLE

#: Lengths around the window of 64 tokens, and far beyond it.
LENGTHS = [40, 64, 65, 130, 310]
#: Between float32 in the engine and float64 in the reference; the largest seen was 6e-5.
TOLERANCE = 5e-4
CHUNKS_OF_40: dict[str, Any] = {
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 40,
    "long_prefill_token_threshold": 24,
}


@pytest.fixture
def with_all_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with options of published configurations that `tiny-plamo2` does not have."""
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
    """Assert that the reference gives each token the highest, and the same, probability."""
    outputs = [output for each in result.rounds for output in each.token_ids]
    logprobs = [of_output for each in result.rounds for of_output in each.logprobs]
    asked = batch * len(result.rounds)
    for prompt, output, of_output in zip(asked, outputs, logprobs, strict=True):
        assert len(output) > 10
        # Row i is for the token after token i: the prompt's last row is for the first output.
        expected = reference.log_probabilities([*prompt, *output[:-1]])[len(prompt) - 1 :]
        best = expected.max(-1)
        assert output == best.indices.tolist()
        assert of_output == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def test_the_engine_computes_what_the_formulas_say(engines: EnginePair) -> None:
    """Prompts in chunks beside decodes, in blocks that other requests have used before."""
    model = checkpoints.tiny_plamo2()
    batch = prompts(LENGTHS, seed=1)
    work = Round(batch, max_tokens=[24, 70, 40], arrivals=[0, 0, 6, 9, 30])
    result = engines.hybrid.run(model, [work], **CHUNKS_OF_40)

    assert_hybrid_ran(result)
    assert result.num_groups == 2
    reference = Plamo2Reference(model)
    assert_right(result, reference, batch)
    for text in result.rounds[0].texts:
        assert text.isascii() and text.isprintable() and len(set(text)) > 10
    # The outputs differ from those with a window of one token less.
    reference.config["attention_window_size"] -= 1
    with pytest.raises(AssertionError):
        assert_right(result, reference, batch)


def test_the_engine_computes_what_the_formulas_say_with_other_options(
    engines: EnginePair, with_all_options: Path
) -> None:
    batch = prompts([130, 40], seed=2)
    result = engines.hybrid.run(with_all_options, [Round(batch, max_tokens=24)], **CHUNKS_OF_40)

    assert_hybrid_ran(result)
    for kind in ("mamba", "sliding_window 64", "full_attention"):
        assert kind in result.log
    reference = Plamo2Reference(with_all_options)
    assert len(reference.weights["lm_head.weight"]) > VOCAB_SIZE
    assert_right(result, reference, batch)


def test_states_from_the_prefix_cache(engines: EnginePair) -> None:
    """Base's mode ``align`` on the engine.

    PLaMo 2 is the only model with Mamba whose states base can cache on CPUs, since it computes
    states between steps only.
    """
    batch = prompts([310, 130], seed=3)
    longer = [[*prompt, *random_tokens(40, seed=7)] for prompt in batch]
    base, hybrid = run_both(
        engines,
        [Round(batch, max_tokens=12), Round(batch, max_tokens=12), Round(longer, max_tokens=12)],
        max_num_batched_tokens=256,
    )
    assert "mamba (" in hybrid.log and "sliding_window 64 (" in hybrid.log
    for again in (1, 2):
        assert min(hybrid.rounds[again].num_cached_tokens) >= 96
        assert hybrid.rounds[again].num_cached_tokens == base.rounds[again].num_cached_tokens
    hybrid.rounds[2:] = []
    assert_right(hybrid, Plamo2Reference(checkpoints.tiny_plamo2()), batch)


def test_states_in_a_small_pool(engines: EnginePair) -> None:
    """States are evicted, and preempted requests resume from the remaining ones."""
    shared = random_tokens(150, seed=5)
    _, hybrid = run_both(
        engines,
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
    assert hybrid.total("num_preemptions") > 0
    assert sum(sum(r.num_cached_tokens) for r in hybrid.rounds) > 0


def run_both(
    engines: EnginePair, rounds: list[Round], **engine_args: Any
) -> tuple[EngineResult, EngineResult]:
    """Run with either manager, but always with the plugin, which brings PLaMo 2."""
    model, off = checkpoints.tiny_plamo2(), {"hybrid_kv": {"enabled": False}}
    base = engines.hybrid.run(model, rounds, additional_config=off, **engine_args)
    hybrid = engines.hybrid.run(model, rounds, **engine_args)
    verify_pair(base, hybrid)
    assert_same_outputs(base, hybrid)
    return base, hybrid


def test_the_same_with_both_managers_in_a_small_pool(engines: EnginePair) -> None:
    shared = random_tokens(200, seed=99)
    base, hybrid = run_both(
        engines,
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
    assert "mamba (" in hybrid.log and "sliding_window 64 (" in hybrid.log
    assert hybrid.total("num_preemptions") == base.total("num_preemptions") > 0
    assert hybrid.num_steps == base.num_steps
