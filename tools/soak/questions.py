# SPDX-License-Identifier: Apache-2.0
"""The requests of a soak: a tree of prompts with shared prefixes, and invalid requests."""

import json
import random
import string
from dataclasses import dataclass
from typing import Any

MODEL_NAME = "tiny"
#: In tokens; each character is one token.
MAX_MODEL_LEN = 512
#: The length of the longest answer.
MAX_TOKENS = 96

_CHARACTERS = string.ascii_letters + string.digits + " .,;:!?"
_NUM_TRUNKS = 4


@dataclass(frozen=True)
class Question:
    """One prompt. Questions of one trunk share a prefix, of different lengths."""

    index: int
    trunk: int
    prompt: str
    is_chat: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, max_tokens: int, *, num_logprobs: int = 0, **more: Any) -> dict[str, Any]:
        common = {
            "model": MODEL_NAME,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        if not self.is_chat:
            return common | {"prompt": self.prompt, "logprobs": num_logprobs}
        messages = [{"role": "user", "content": self.prompt}]
        return common | {"messages": messages, "logprobs": True, "top_logprobs": num_logprobs}


def make_questions(count: int, seed: int) -> list[Question]:
    """Prompts of 4 to 370 characters, the same for the same seed."""
    draw = random.Random(seed)
    trunks = [_text(draw, length) for length in (40, 130, 200, 260)]
    branches = [[trunk + _text(draw, 30) for _ in range(2)] for trunk in trunks]
    questions = []
    for index in range(count):
        trunk = index % _NUM_TRUNKS
        # One in four leaves its trunk early, so that little or none of it can be reused.
        if draw.random() < 0.25:
            prompt = trunks[trunk][: draw.randrange(len(trunks[trunk]))]
        else:
            prompt = draw.choice(branches[trunk])
        prompt += _text(draw, draw.choice((4, 20, 80)))
        questions.append(Question(index, trunk, prompt, is_chat=draw.random() < 0.3))
    return questions


def _text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(_CHARACTERS, k=length))


def _completion(**values: Any) -> bytes:
    body = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 8} | values
    return json.dumps(body).encode()


def _chat(**values: Any) -> bytes:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}]} | values
    return json.dumps(body).encode()


#: Requests that a server must refuse: path and body.
GARBAGE: dict[str, tuple[str, bytes]] = {
    "prompt too long": ("/v1/completions", _completion(prompt="x" * 5000)),
    "token ids too many": ("/v1/completions", _completion(prompt=[40] * 2000)),
    "token id out of range": ("/v1/completions", _completion(prompt=[40, 99_999])),
    "cut off": ("/v1/completions", _completion()[:-9]),
    "empty": ("/v1/completions", b""),
    "a number": ("/v1/completions", b"17"),
    "wrong type of prompt": ("/v1/completions", _completion(prompt={"text": 1})),
    "wrong type of max_tokens": ("/v1/completions", _completion(max_tokens="many")),
    "negative max_tokens": ("/v1/completions", _completion(max_tokens=-5)),
    "no prompt": ("/v1/completions", _completion(prompt=None)),
    "unknown model": ("/v1/completions", _completion(model="no-such-model")),
    "chat too long": (
        "/v1/chat/completions",
        _chat(messages=[{"role": "user", "content": "x" * 5000}]),
    ),
    "wrong type of messages": ("/v1/chat/completions", _chat(messages=5)),
    "chat cut off": ("/v1/chat/completions", _chat()[:-3]),
}
