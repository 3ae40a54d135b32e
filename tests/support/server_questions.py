# SPDX-License-Identifier: Apache-2.0
"""Requests to servers as their users send them: through the `openai` client."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

from support.engine_prompts import random_text
from support.server import MODEL_NAME, Server

T = TypeVar("T")


@dataclass(frozen=True)
class Servers:
    """Two servers of the same model, one with base's manager and one with the hybrid manager."""

    base: Server
    hybrid: Server

    def both(self, scenario: Callable[[Server], T]) -> T:
        """Run a scenario on both, assert that the results are equal, and return the result."""
        expected = scenario(self.base)
        got = scenario(self.hybrid)
        assert got == expected
        return got

    def reset_prefix_caches(self) -> None:
        for server in (self.base, self.hybrid):
            assert server.reset_prefix_cache()


def text_prompt(num_tokens: int, seed: int) -> str:
    """Random text of so many tokens, the <bos> that the tokenizer adds included."""
    return random_text(num_tokens - 1, seed)


def wait_until_idle(server: Server) -> None:
    """Wait until no request is running or waiting and no KV cache block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    server.wait_for(lambda: [server.metric(name) for name in names], lambda seen: seen == [0, 0, 0])


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.api_url, api_key="none", max_retries=0, timeout=120)


def ask(
    client: openai.OpenAI, prompt: Any, max_tokens: int, temperature: float = 0.0, **kwargs: Any
) -> Any:
    """A completion; chunks of it with ``stream=True``."""
    return client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, temperature=temperature, **kwargs
    )


def complete(server: Server, prompt: Any, max_tokens: int = 48, **kwargs: Any) -> dict[str, Any]:
    """A completion as the client receives it, without what identifies the response."""
    with client_of(server) as client:
        answer = ask(client, prompt, max_tokens, **kwargs)
    assert answer.id
    assert answer.usage.completion_tokens > 0
    return answer.model_dump(exclude={"id", "created"})


def chat(client: openai.OpenAI, messages: list[Any], max_tokens: int, **kwargs: Any) -> Any:
    """The model's answer in a conversation; chunks of it with ``stream=True``."""
    return client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=max_tokens, temperature=0.0, **kwargs
    )


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return choice["text"]


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]
