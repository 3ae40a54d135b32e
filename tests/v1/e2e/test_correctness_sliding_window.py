# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows recall text from far outside of the window.

Gemma 3 270M must repeat pass keys that only its layers with full attention can still read. They
read them only if their blocks are kept, found again in the prefix cache and put into the right
block table, while blocks of the sliding-window layers are allocated and freed.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from support.engine import EnginePair, EngineResult, Round, assert_same_outputs
from support.engine_prompts import pass_key_prompt, prompts
from tools import checkpoints

WINDOW = 512
#: Keys, and the fillers after them; the first key is just outside of the window.
PASS_KEYS = {"86465": 26, "31927": 42, "50748": 60, "92613": 80}
MODES = ("hybrid", "base", "hybrid, one type of attention", "base, one type of attention")


@dataclass(frozen=True)
class PassKeyRuns:
    """Results per mode, and each prompt's tokens after its key."""

    results: dict[str, EngineResult]
    distances: list[int]
    prompt_lengths: list[int]


@pytest.fixture(scope="module")
def pass_key_runs(engines: EnginePair, gemma3_270m: Path) -> PassKeyRuns:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma3_270m)
    token_ids, distances = [], []
    for key, num_fillers in PASS_KEYS.items():
        text = pass_key_prompt(key, num_fillers)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Without <bos>, Gemma only repeats itself.
        token_ids.append([tokenizer.convert_tokens_to_ids("<bos>"), *ids])
        after = text[text.rindex(key) + len(key) :]
        distances.append(len(tokenizer.encode(after, add_special_tokens=False)))

    rounds = [Round(token_ids, max_tokens=7), Round(token_ids[::-1], max_tokens=7)]
    results: dict[str, EngineResult] = {}
    for suffix, disabled in (("", False), (", one type of attention", True)):
        results["base" + suffix], results["hybrid" + suffix] = engines.run(
            gemma3_270m,
            rounds,
            max_model_len=2560,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=512 << 20,
            disable_hybrid_kv_cache_manager=disabled,
        )
    return PassKeyRuns(results, distances, [len(ids) for ids in token_ids])


def test_pass_keys_lie_outside_of_the_window(pass_key_runs: PassKeyRuns) -> None:
    assert len(pass_key_runs.distances) == len(PASS_KEYS)
    assert min(pass_key_runs.distances) > WINDOW
    assert 1900 < max(pass_key_runs.distances) <= 2000


@pytest.mark.parametrize("mode", MODES)
def test_recalls_pass_keys(pass_key_runs: PassKeyRuns, mode: str) -> None:
    fresh, _ = pass_key_runs.results[mode].rounds

    assert [text.strip()[:5] for text in fresh.texts] == list(PASS_KEYS)
    # The prompts share the first filler, and no key.
    assert max(fresh.num_cached_tokens) < 100


@pytest.mark.parametrize("mode", MODES)
def test_recalls_pass_keys_from_the_prefix_cache(pass_key_runs: PassKeyRuns, mode: str) -> None:
    """The same prompts in reverse order: all but their last few tokens are in the cache."""
    _, cached = pass_key_runs.results[mode].rounds

    assert [text.strip()[:5] for text in cached.texts] == list(PASS_KEYS)[::-1]
    for num_cached, length in zip(
        cached.num_cached_tokens, pass_key_runs.prompt_lengths[::-1], strict=True
    ):
        assert length - 64 <= num_cached < length
    assert cached.counters["prefix_cache_hits"] == sum(cached.num_cached_tokens)


def test_recalls_pass_keys_with_the_same_tokens_as_base(pass_key_runs: PassKeyRuns) -> None:
    results = pass_key_runs.results

    assert_same_outputs(results["base"], results["hybrid"])
    assert_same_outputs(
        results["base, one type of attention"], results["hybrid, one type of attention"]
    )


@pytest.mark.parametrize("mode", MODES)
def test_arranges_gemma_3_as_expected(pass_key_runs: PassKeyRuns, mode: str) -> None:
    """18 layers, one in six with full attention, make six groups of three, or a single group."""
    assert pass_key_runs.results[mode].num_groups == (1 if "one type" in mode else 6)


def test_windows_alone(engines: EnginePair) -> None:
    """A model in which every layer has a sliding window of 64 tokens."""
    lengths = [65, 130, 300, 500]
    base, hybrid = engines.run(
        checkpoints.tiny_mistral(),
        [
            Round(prompts(lengths, seed=1), max_tokens=100),
            Round(prompts(lengths, seed=1), max_tokens=100),
            Round(prompts(lengths, seed=5, shared=prompts([300], seed=3)[0][:60])),
        ],
    )

    assert hybrid.num_groups == 1
    assert_same_outputs(base, hybrid)
    assert [len(ids) for ids in hybrid.rounds[0].token_ids] == [100] * len(lengths)
    assert hybrid.rounds[1].num_cached_tokens == base.rounds[1].num_cached_tokens
    assert min(hybrid.rounds[1].num_cached_tokens) >= 64
