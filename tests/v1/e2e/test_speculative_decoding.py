# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on the real engine: token ids are the same with the fork on and off.

Engines with n-gram drafting have processes of their own: after it, base cannot start another engine
in the same one (its search for kernels trips over a module that came with Numba).
"""

from pathlib import Path

from support import drafters
from support.engine import EnginePair, EngineResult, Round, assert_same_outputs, engine_pair
from support.engine_prompts import prompts, random_tokens
from tools import checkpoints

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def rounds() -> list[Round]:
    """Prompts that repeat themselves and others; found again in the cache; too many at once."""
    phrase = random_tokens(12, seed=5)
    batch = [phrase * 8, random_tokens(150, seed=6), phrase * 4 + random_tokens(40, seed=7)]
    crowd = [phrase * 8 + rest for rest in prompts([20, 60, 90, 40, 110], seed=50)]
    return [
        Round(batch, max_tokens=40),
        Round([*batch, phrase * 9], max_tokens=20),
        Round(crowd, max_tokens=[60, 40, 50], arrivals=[0, 0, 3, 6, 6], aborts={2: 20}),
    ]


def assert_drafts_were_judged(result: EngineResult) -> None:
    accepted = result.total("spec_decode_num_accepted_tokens")
    assert 0 < accepted < result.total("spec_decode_num_draft_tokens")


def test_ngram(tiny_gemma3: Path) -> None:
    with engine_pair() as engines:
        base, fork = engines.run(
            tiny_gemma3,
            rounds(),
            speculative_config=NGRAM,
            num_gpu_blocks_override=48,
            max_model_len=512,
            max_num_batched_tokens=64,
        )

    assert_same_outputs(base, fork)
    for result in (base, fork):
        assert_drafts_were_judged(result)
        assert result.total("num_preemptions") > 0
        assert result.total("prefix_cache_hits") > 0


def assert_same_guesses(base: EngineResult, fork: EngineResult) -> None:
    """What a drafter guesses shows what its layers read: where nothing was evicted, the same."""
    assert fork.total("num_preemptions") == base.total("num_preemptions") == 0
    for of_base, of_fork in zip(base.rounds, fork.rounds, strict=True):
        assert of_fork.counters == of_base.counters
        assert of_fork.num_cached_tokens == of_base.num_cached_tokens


def test_draft_model(engines: EnginePair, tmp_path: Path) -> None:
    """A second Llama, whose layers are in the group of the first one's."""
    target = checkpoints.tiny_llama()
    draft = drafters.draft_model(target, tmp_path / "draft", noise=0.02)
    base, fork = engines.run(
        target,
        rounds()[:2],
        speculative_config={
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
        },
    )

    assert_same_outputs(base, fork)
    assert_drafts_were_judged(fork)
    assert_same_guesses(base, fork)


def test_eagle(engines: EnginePair, tmp_path: Path) -> None:
    """Hits end a block earlier, so that the drafter's last one is right."""
    target, head = drafters.eagle_pair(checkpoints.tiny_llama(), tmp_path, noise=0.05)
    base, fork = engines.run(
        target,
        rounds()[:2],
        speculative_config={
            "method": "eagle",
            "model": str(head),
            "num_speculative_tokens": 3,
        },
    )

    assert_same_outputs(base, fork)
    assert_drafts_were_judged(fork)
    assert_same_guesses(base, fork)
    # 150 tokens: four blocks of 32 match, of which the last is dropped.
    assert fork.rounds[1].num_cached_tokens[1] == 96


def test_mtp(engines: EnginePair, tmp_path: Path) -> None:
    """The same where the model brings its drafter along, which guesses one token."""
    model = drafters.mtp_model(checkpoints.tiny_llama(), tmp_path / "mimo", noise=0.05)
    base, fork = engines.run(
        model, rounds()[:2], speculative_config={"method": "mtp", "num_speculative_tokens": 1}
    )

    assert_same_outputs(base, fork)
    assert_drafts_were_judged(fork)
    assert_same_guesses(base, fork)
    assert fork.rounds[1].num_cached_tokens[1] == 96
