# SPDX-License-Identifier: Apache-2.0
"""Real vLLM requests with real block hashes, made from compact descriptions.

`RequestPlan` says what a request's tokens are; `LiveRequest` is one request that was
made from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.identity import MultiModalItem, PrefixIdentity
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

if TYPE_CHECKING:
    from support.oracle.step import Step

Hasher = Callable[[Request], list[BlockHash]]


def block_hasher(hash_block_size: int) -> Hasher:
    init_none_hash(sha256)
    return get_request_block_hasher(hash_block_size, sha256)


def build_request(
    req_id: str,
    tokens: Sequence[int],
    hasher: Hasher | None,
    identity: PrefixIdentity,
    *,
    max_tokens: int = 100_000,
    stop_tokens: Sequence[int] = (),
    arrival_time: float = 0.0,
    priority: int = 0,
    skip_reading: bool = False,
    report_full: bool = False,
    encoder_length: int = 0,
) -> Request:
    """A request as the engine core makes it.

    Args:
        req_id: The request's id.
        tokens: The prompt.
        hasher: For block hashes; None if prefix caching is off.
        identity: Salt, adapter and images.
        max_tokens: Length of the output.
        stop_tokens: Tokens that end the output.
        arrival_time: Priority scheduling breaks ties by it.
        priority: The lowest is served first.
        skip_reading: Whether the request does not read the prefix cache.
        report_full: Whether KV cache events report its hits, too.
        encoder_length: Tokens of the input to an encoder; no two requests have the same input.
    """
    lora, items = identity.lora_name, identity.mm_items
    features = [("image", item.identifier, item.offset, item.length) for item in items]
    if encoder_length:
        # What an encoder-decoder model gets in addition to the decoder's prompt.
        features.append(("audio", encoder_input(req_id), 0, encoder_length))
    return Request(
        request_id=req_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=list(stop_tokens),
            skip_reading_prefix_cache=skip_reading,
            extra_args={"kv_cache_report_mode": "full"} if report_full else None,
        ),
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        mm_features=[
            MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset, length))
            for modality, identifier, offset, length in features
        ],
        lora_request=LoRARequest(lora, 1 + sum(lora.encode()), f"/adapters/{lora}")
        if lora
        else None,
        cache_salt=identity.cache_salt,
        block_hasher=hasher,
        session_id=f"session-{req_id}",
    )


def encoder_input(req_id: str) -> str:
    """The name of what a request gives to an encoder."""
    return f"encoder input of {req_id}"


@dataclass(frozen=True)
class RequestPlan:
    """A request's prompt as a path in a tree of shared prefixes.

    ``path`` holds (label, length) pieces. A position's token is made of its label
    and its position, so two plans share exactly as many leading tokens as their
    labels agree, and the same label after another prefix gives the same tokens in
    another context. Output tokens carry the label ``output``: a later plan whose path
    goes on with that label is the next turn of the conversation.
    """

    path: tuple[tuple[int, int], ...]
    output: int = 99
    salt: str | None = None
    lora: int | None = None
    images: tuple[MultiModalItem, ...] = ()
    skip_reading: bool = False
    report_full: bool = False
    #: Tokens of the input to an encoder, if the model has one.
    encoder: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(length for _, length in self.path)

    @property
    def identity(self) -> PrefixIdentity:
        """What besides its tokens determines the KV of the request."""
        return PrefixIdentity(self.salt, self.lora and f"lora-{self.lora}", self.images)


def token_at(label: int, position: int) -> int:
    return label * 10_000 + position


def tokens_of(path: tuple[tuple[int, int], ...], start: int = 0) -> list[int]:
    tokens: list[int] = []
    for label, length in path:
        first = start + len(tokens)
        tokens.extend(token_at(label, position) for position in range(first, first + length))
    return tokens


def make_request(plan: RequestPlan, request_id: str, hasher: Hasher | None) -> Request:
    """The request of a plan, for managers that get the encoder's length from their caller."""
    return build_request(
        request_id,
        tokens_of(plan.path),
        hasher,
        plan.identity,
        skip_reading=plan.skip_reading,
        report_full=plan.report_full,
    )


class LiveRequest:
    """One request and its steps in flight."""

    def __init__(self, plan: RequestPlan, request_id: str, hasher: Hasher | None) -> None:
        self.plan = plan
        self.request = make_request(plan, request_id, hasher)
        self.steps: list[StepInFlight] = []
        #: Tells what this admission writes from what others do.
        self.serial = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def next_token(self) -> int:
        """The token that the model would sample next: fixed by the position."""
        return token_at(self.plan.output, self.request.num_tokens)

    def tokens(self, end: int) -> list[int]:
        """All tokens, and those that are yet to be sampled of the first ``end``."""
        known = list(self.request.all_token_ids)
        return known + [token_at(self.plan.output, i) for i in range(len(known), end)]

    def continue_session(self, path: tuple[tuple[int, int], ...], hash_block_size: int) -> None:
        """Next input of a streaming session, as base's scheduler does it: outputs become
        part of the prompt, except the last one, which has not been computed.
        """
        request = self.request
        computed = request.num_computed_tokens
        outputs = list(request.all_token_ids[request.num_prompt_tokens : computed])
        new_tokens = tokens_of(path, start=computed)
        assert request.prompt_token_ids is not None
        del request._all_token_ids[computed:]
        del request.block_hashes[computed // hash_block_size :]
        request._output_token_ids.clear()
        request.prompt_token_ids.extend([*outputs, *new_tokens])
        request._all_token_ids.extend(new_tokens)
        request.update_block_hashes()
        request.num_prompt_tokens = len(request.prompt_token_ids)


@dataclass
class StepInFlight:
    """One request's share of a step, of ``num_tokens`` positions.

    The last ``num_drafts`` of them are drafts, and the last ``num_rejected`` of those are wrong.
    """

    on_device: "Step"
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    num_rejected: int = 0
    stale: bool = False
    dropped: bool = False
