# SPDX-License-Identifier: Apache-2.0
"""Real vLLM requests with real block hashes, made from compact descriptions.

`RequestPlan` says what a request's tokens are; `LiveRequest` is made from it, and has its steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
    request_class: Callable[..., Any] = Request,
    max_tokens: int = 100_000,
    stop_tokens: Sequence[int] = (),
    skip_reading: bool = False,
    report_full: bool = False,
    encoder_length: int = 0,
    **arguments: Any,
) -> Any:
    """A request as the engine core makes it, without hashes if ``hasher`` is None.

    With ``skip_reading`` it does not read the prefix cache; with ``report_full`` KV cache events
    report its hits, too. No two requests have the same input to an encoder, of
    ``encoder_length`` tokens. ``arguments`` are those of `Request`.
    """
    lora, items = identity.lora_name, identity.mm_items
    features = [("image", item.identifier, item.offset, item.length) for item in items]
    if encoder_length:
        # What an encoder-decoder model gets in addition to the decoder's prompt.
        features.append(("audio", encoder_input(req_id), 0, encoder_length))
    return request_class(
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
        mm_features=[
            MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset, length))
            for modality, identifier, offset, length in features
        ],
        lora_request=lora and LoRARequest(lora, 1 + sum(lora.encode()), f"/adapters/{lora}"),
        cache_salt=identity.cache_salt,
        block_hasher=hasher,
        session_id=f"session-{req_id}",
        **arguments,
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
    labels = [label for label, length in path for _ in range(length)]
    return [token_at(label, position) for position, label in enumerate(labels, start)]


def make_request(plan: RequestPlan, request_id: str, hasher: Hasher | None) -> "LiveRequest":
    """The request of a plan, for managers that get the encoder's length from their caller."""
    return build_request(
        request_id,
        tokens_of(plan.path),
        hasher,
        plan.identity,
        request_class=partial(LiveRequest, plan),
        skip_reading=plan.skip_reading,
        report_full=plan.report_full,
    )


class LiveRequest(Request):
    """A request and its steps in flight."""

    def __init__(self, plan: RequestPlan, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.plan = plan
        self.steps: list[StepInFlight] = []
        #: Tells what this admission writes from what others do.
        self.serial = 0

    def tokens(self, end: int) -> list[int]:
        """All tokens, and those that are yet to be sampled of the first ``end``."""
        known = list(self.all_token_ids)
        return known + [token_at(self.plan.output, i) for i in range(len(known), end)]


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
