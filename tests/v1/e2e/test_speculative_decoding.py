# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on the real engine, with base's manager and the hybrid manager.

Engines with n-gram drafting have processes of their own: after one, base cannot start another
engine in the same process (its search for kernels fails on a module that Numba brings).
"""

from pathlib import Path
from typing import Any

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
    """Prompts with repeated phrases; the same prompts again; more than a small pool holds."""
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
        base, hybrid = engines.run(
            tiny_gemma3,
            rounds(),
            speculative_config=NGRAM,
            num_gpu_blocks_override=48,
            max_model_len=512,
            max_num_batched_tokens=64,
        )

    assert_same_outputs(base, hybrid)
    for result in (base, hybrid):
        assert_drafts_were_judged(result)
        assert result.total("num_preemptions") > 0
        assert result.total("prefix_cache_hits") > 0


def run_drafter(engines: EnginePair, target: Path, **speculative_config: Any) -> EngineResult:
    """Run with a drafter that is a model; assert the same outputs, guesses and hits on both.

    The guesses show what the drafter's layers read. They are the same because nothing is evicted.
    """
    base, hybrid = engines.run(target, rounds()[:2], speculative_config=speculative_config)

    assert_same_outputs(base, hybrid)
    assert_drafts_were_judged(hybrid)
    assert hybrid.total("num_preemptions") == base.total("num_preemptions") == 0
    assert [r.counters for r in hybrid.rounds] == [r.counters for r in base.rounds]
    assert hybrid.num_cached_tokens == base.num_cached_tokens
    return hybrid


def test_draft_model(engines: EnginePair, tmp_path: Path) -> None:
    """The drafter is a second Llama, whose layers are in the same group as the first one's."""
    target = checkpoints.tiny_llama()
    draft = drafters.draft_model(target, tmp_path / "draft", noise=0.02)

    run_drafter(engines, target, method="draft_model", model=str(draft), num_speculative_tokens=3)


def test_eagle(engines: EnginePair, tmp_path: Path) -> None:
    """Hits end one block earlier, because the drafter's last block could be wrong."""
    target, head = drafters.eagle_pair(checkpoints.tiny_llama(), tmp_path, noise=0.05)
    hybrid = run_drafter(engines, target, method="eagle", model=str(head), num_speculative_tokens=3)

    # Of 150 tokens, four blocks of 32 match, and the last of them is dropped.
    assert hybrid.rounds[1].num_cached_tokens[1] == 96


def test_mtp(engines: EnginePair, tmp_path: Path) -> None:
    """Like `test_eagle`, with a drafter that is part of the model and guesses one token."""
    model = drafters.mtp_model(checkpoints.tiny_llama(), tmp_path / "mimo", noise=0.05)
    hybrid = run_drafter(engines, model, method="mtp", num_speculative_tokens=1)

    assert hybrid.rounds[1].num_cached_tokens[1] == 96
