# SPDX-License-Identifier: Apache-2.0
"""Real vLLM requests with real block hashes, made from compact descriptions.

`RequestPlan` says what a request's tokens are; `LiveRequest` is one request that was
made from it, together with what identifies the KV at each of its positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

Hasher = Callable[[Request], list[BlockHash]]


#: Length in tokens of each known image: the same item always takes as many.
IMAGE_LENGTHS = {"cat": 5, "dog": 9, "dot": 1}


@dataclass(frozen=True)
class Image:
    """A multimodal item whose placeholder tokens begin at prompt position ``offset``."""

    offset: int
    identifier: str

    @property
    def length(self) -> int:
        return IMAGE_LENGTHS[self.identifier]


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
    images: tuple[Image, ...] = ()
    skip_reading: bool = False
    report_full: bool = False
    #: Tokens of the input to an encoder, if the model has one; no two requests have the same.
    encoder: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(length for _, length in self.path)


def token_at(label: int, position: int) -> int:
    return label * 10_000 + position


def tokens_of(path: tuple[tuple[int, int], ...], start: int = 0) -> list[int]:
    tokens: list[int] = []
    for label, length in path:
        first = start + len(tokens)
        tokens.extend(token_at(label, position) for position in range(first, first + length))
    return tokens


def block_hasher(hash_block_size: int) -> Hasher:
    init_none_hash(sha256)
    return get_request_block_hasher(hash_block_size, sha256)


def make_request(plan: RequestPlan, request_id: str, hasher: Hasher | None) -> Request:
    """A request as the engine core would make it; ``hasher`` None: prefix caching is off."""
    extra_args = {"kv_cache_report_mode": "full"} if plan.report_full else None
    params = SamplingParams(
        max_tokens=100_000, skip_reading_prefix_cache=plan.skip_reading, extra_args=extra_args
    )
    lora = None
    if plan.lora is not None:
        lora = LoRARequest(f"lora-{plan.lora}", plan.lora, lora_path=f"/adapters/{plan.lora}")
    images = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=image.identifier,
            mm_position=PlaceholderRange(offset=image.offset, length=image.length),
        )
        for image in plan.images
    ]
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens_of(plan.path),
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        mm_features=images,
        lora_request=lora,
        cache_salt=plan.salt,
        block_hasher=hasher,
        session_id=f"session-{request_id}",
    )


class Identities:
    """Numbers for token prefixes: equal numbers, equal prefixes (and salt, LoRA, images).

    A trie instead of a hash, so that nothing rests on the block hashes under test.
    """

    ROOT = 0

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int, object], int] = {}

    def extend(self, parent: int, token: int, key: object) -> int:
        return self._nodes.setdefault((parent, token, key), len(self._nodes) + 1)


class LiveRequest:
    """One request, the identity of the KV at each of its positions, and its steps in flight."""

    def __init__(
        self, plan: RequestPlan, request_id: str, hasher: Hasher | None, identities: Identities
    ) -> None:
        self.plan = plan
        self.request = make_request(plan, request_id, hasher)
        self._identities = identities
        self._known: list[int] = []
        self.steps: list[Step] = []

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def next_token(self) -> int:
        """The token that the model would sample next: fixed by the position."""
        return token_at(self.plan.output, self.request.num_tokens)

    def identities(self, end: int) -> list[int]:
        """Identities of the first ``end`` positions, also of tokens that are yet to be sampled."""
        known = self._known
        tokens = self.request.all_token_ids
        while len(known) < end:
            position = len(known)
            token = (
                tokens[position] if position < len(tokens) else token_at(self.plan.output, position)
            )
            parent = known[-1] if known else Identities.ROOT
            known.append(self._identities.extend(parent, token, self._key(position)))
        return known[:end]

    def encoder_identities(self) -> list[int]:
        """Identities of what an encoder makes of the request's input."""
        extend, root = self._identities.extend, Identities.ROOT
        return [extend(root, i, ("encoder", self.request_id)) for i in range(self.plan.encoder)]

    def _key(self, position: int) -> object:
        salt = self.plan.salt if position == 0 else None
        image = next(
            (
                (feature.identifier, position - feature.mm_position.offset)
                for feature in self.request.mm_features
                if 0 <= position - feature.mm_position.offset < feature.mm_position.length
            ),
            None,
        )
        return (salt, self.plan.lora, image)

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
        del self._known[computed:]
        request._output_token_ids.clear()
        request.prompt_token_ids.extend([*outputs, *new_tokens])
        request._all_token_ids.extend(new_tokens)
        request.update_block_hashes()
        request.num_prompt_tokens = len(request.prompt_token_ids)


@dataclass
class Step:
    """Tokens of one request in flight: positions ``start`` to ``start + num_tokens``.

    The last ``num_drafts`` of them are drafts, and the last ``num_rejected`` of those are wrong.
    """

    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    num_rejected: int = 0
    stale: bool = False
    dropped: bool = False


# --------------------------------------------------------------------------------------
# Strategies


@st.composite
def plan_trees(draw: st.DrawFn, max_tokens: int, unit: int) -> tuple[RequestPlan, ...]:
    """Several plans, most of which grow from one or two trunks, so that prefixes are shared
    and requests part where no prompt ends.
    """
    lengths = st.one_of(
        st.integers(1, max(1, max_tokens // unit // 2)).map(lambda n: n * unit),
        st.integers(1, max_tokens),
    )
    trunks = draw(st.lists(lengths, min_size=1, max_size=2))
    return tuple(draw(st.lists(plans(max_tokens, unit, trunks), min_size=1, max_size=6)))


@st.composite
def plans(draw: st.DrawFn, max_tokens: int, unit: int, trunks: Sequence[int] = ()) -> RequestPlan:
    """One plan: now and then with a salt, an adapter, images, or other extras."""
    lengths = st.one_of(
        st.integers(1, 16).map(lambda n: n * unit),
        st.integers(1, 4 * unit + 1),
        st.integers(1, max_tokens),
        st.just(1),
    )
    pieces = draw(
        st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), lengths), min_size=1, max_size=3)
    )
    if trunks and draw(st.integers(0, 3)):
        pieces.insert(0, (0, draw(st.sampled_from(trunks))))
    path: list[tuple[int, int]] = []
    left = max_tokens
    for label, length in pieces:
        if left > 0:
            path.append((label, min(length, left)))
            left -= path[-1][1]
    plan = RequestPlan(tuple(path), output=draw(st.integers(0, 3)))
    special = draw(st.integers(0, 11))
    if special == 7:
        plan = replace(plan, salt=draw(st.sampled_from(["a", "b"])))
    elif special == 8:
        plan = replace(plan, lora=draw(st.integers(1, 2)))
    elif special == 9:
        images, end = [], 0
        for identifier in draw(st.lists(st.sampled_from(sorted(IMAGE_LENGTHS)), max_size=3)):
            image = Image(end + draw(st.integers(0, 2 * unit)), identifier)
            end = image.offset + image.length
            if end <= plan.num_prompt_tokens:
                images.append(image)
        plan = replace(plan, images=tuple(images))
    elif special == 10:
        plan = replace(plan, skip_reading=True)
    elif special == 11:
        plan = replace(plan, report_full=True)
    return plan
