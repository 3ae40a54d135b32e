# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with long prompts on two tensor-parallel ranks answers as with base's manager.

An earlier hybrid KV cache for vLLM was taken back because Gemma 3 gave garbage for long prompts
under tensor parallelism. This is that configuration: the real Gemma 3 270M behind the OpenAI
server with ``--tensor-parallel-size 2``, eager, with a seed, one prompt of 2,000 tokens alone, and
then a batch.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.engine_prompts import pass_key_prompt
from support.server import ACTIVE_LINE, Server
from support.server_questions import cached_tokens, complete, text_of, wait_until_idle
from tools import checkpoints, serve

WINDOW = 512
KEY, FILLERS = "92613", 82
#: The batch: keys, and the fillers after them.
BATCH = {"86465": 26, "31927": 42, "50748": 60, "40812": 80}
SERVER_ARGS = (
    "--tensor-parallel-size=2",
    "--seed=42",
    "--max-model-len=2560",
    # A prompt is computed in several steps, and windows move within it.
    "--max-num-batched-tokens=1024",
    f"--kv-cache-memory-bytes={256 << 20}",
)


@dataclass(frozen=True)
class Answers:
    alone: dict[str, Any]
    again: dict[str, Any]
    batch: list[dict[str, Any]]
    sampled: dict[str, Any]
    alphabet: dict[str, Any]
    log: str


def ask_together(server: Server, prompts: Sequence[str]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: complete(server, prompt, 8), prompts))


def answers_of(*, hybrid: bool) -> Answers:
    """The answers of a server with the hybrid manager or with base's."""
    with Server(checkpoints.gemma3_270m(), hybrid=hybrid, arguments=SERVER_ARGS) as server:
        server.wait_until_healthy()
        long = pass_key_prompt(KEY, FILLERS)
        alone = complete(server, long, 8)
        again = complete(server, long, 8)
        batch = ask_together(server, [pass_key_prompt(*item) for item in BATCH.items()])
        sampled = complete(server, long, 24, temperature=0.8, seed=7)
        alphabet = complete(server, serve.MODELS["gemma3-270m"].prompt, 16)
        wait_until_idle(server)
        return Answers(alone, again, batch, sampled, alphabet, server.log)


@pytest.fixture(scope="module")
def base_answers() -> Answers:
    return answers_of(hybrid=False)


@pytest.fixture(scope="module")
def hybrid_answers() -> Answers:
    return answers_of(hybrid=True)


def test_the_hybrid_manager_serves_two_ranks(
    base_answers: Answers, hybrid_answers: Answers
) -> None:
    assert f"{ACTIVE_LINE}, 2 managers for 6 KV cache groups" in hybrid_answers.log
    assert "Hybrid KV cache" not in base_answers.log
    for answers in (base_answers, hybrid_answers):
        assert "tensor_parallel_size=2" in answers.log


def test_a_long_prompt_gives_its_pass_key(hybrid_answers: Answers) -> None:
    for answer in (hybrid_answers.alone, hybrid_answers.again):
        assert 1950 < answer["usage"]["prompt_tokens"] < 2100
        assert text_of(answer).strip()[: len(KEY)] == KEY
    assert cached_tokens(hybrid_answers.alone) == 0
    assert cached_tokens(hybrid_answers.again) > WINDOW


def test_a_batch_gives_its_pass_keys(hybrid_answers: Answers) -> None:
    assert [text_of(answer).strip()[:5] for answer in hybrid_answers.batch] == list(BATCH)


def test_answers_are_the_same_as_with_base(base_answers: Answers, hybrid_answers: Answers) -> None:
    assert hybrid_answers.alone == base_answers.alone
    assert hybrid_answers.again == base_answers.again
    # What is cached depends on which request of the batch arrives first.
    texts = [text_of(answer) for answer in hybrid_answers.batch]
    assert texts == [text_of(answer) for answer in base_answers.batch]
    assert text_of(hybrid_answers.sampled) == text_of(base_answers.sampled)
    assert hybrid_answers.sampled["usage"]["completion_tokens"] == 24


def test_the_answer_in_the_readme(hybrid_answers: Answers) -> None:
    text = text_of(hybrid_answers.alphabet)
    assert text == " G H I J K L M N O P Q R S T U V"
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    assert f'"text":"{text}"' in readme
    assert f"```\n{text}\n```" in readme
