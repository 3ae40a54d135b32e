# SPDX-License-Identifier: Apache-2.0
"""What an engine's process receives and returns: rounds of prompts, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

Prompt = str | list[int] | dict[str, Any]


@dataclass(frozen=True)
class Round:
    """Prompts that run together; the rounds of a job run one after another.

    Args:
        prompts: Texts, token ids, or other prompts of vLLM.
        max_tokens: Per request; a single number for all, or numbers that repeat.
        arrivals: Per request, the engine step before which it arrives; empty: all at once.
        aborts: Per aborted request (its index), the step before which it is aborted.
        calls: Calls of the engine: the step before which, a method of ``LLM``, and its
            keyword arguments.
        sampling: More arguments of ``SamplingParams``.
        lora: An adapter; only where all requests arrive at once.
    """

    prompts: Sequence[Prompt]
    max_tokens: int | Sequence[int] = 16
    priorities: Sequence[int] = ()
    arrivals: Sequence[int] = ()
    aborts: Mapping[int, int] = field(default_factory=dict)
    calls: Sequence[tuple[int, str, Mapping[str, Any]]] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lora: "LoRARequest | None" = None
    reset_prefix_cache: bool = False


@dataclass(frozen=True)
class RoundResult:
    """A round's results. Lists are per request, in the order of the prompts.

    A request that was aborted before its first token has not finished, and nothing else.
    """

    finished: list[bool]
    token_ids: list[list[int]]
    #: Of the sampled tokens.
    logprobs: list[list[float]]
    texts: list[str]
    num_cached_tokens: list[int]
    #: Of the prompts, from an embedding model, which generates nothing.
    embeddings: list[list[float]]
    #: By how much vLLM's own counters rose.
    counters: dict[str, int]
    #: Share of the KV cache in use after the round.
    usage: float


@dataclass
class EngineResult:
    """A job's results. From `manager` on, they need the engine core in the engine's process."""

    rounds: list[RoundResult] = field(default_factory=list)
    log: str = ""
    #: Our metrics at the end, by name and value of their own label: the reason, the attention type.
    own_metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    manager: str | None = None
    scheduler: str | None = None
    num_groups: int = 0
    num_steps: int = 0
    num_checks: int = 0
    peak_usage: float = 0.0
    events: list[str] = field(default_factory=list)

    @property
    def hybrid_is_active(self) -> bool:
        return (self.manager or "").startswith("vllm.v1.core.hybrid.")

    @property
    def num_cached_tokens(self) -> list[list[int]]:
        """Per round and request."""
        return [r.num_cached_tokens for r in self.rounds]

    def total(self, counter: str) -> int:
        """A counter's sum over the rounds."""
        return sum(r.counters[counter] for r in self.rounds)
