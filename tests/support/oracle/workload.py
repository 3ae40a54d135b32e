# SPDX-License-Identifier: Apache-2.0
"""Workloads as data: what clients do and when, small enough to print and to shrink.

The `repr` of a `Case` is the Python expression that builds it, so a failure is reported as
a program: ``run_case(KVCacheManager, <printed case>)``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.identity import MultiModalItem, PrefixIdentity, hash64
from support.kv_configs import (
    MAX_ENCODER_LENGTH,
    AttentionKind,
    Layout,
    full,
    make_kv_cache_config,
    smallest_pool,
)
from support.short_repr import ShortRepr

from .engine import OracleEngine
from .engine_config import OracleSettings

_PLACEHOLDER = 3
_DEFAULTS = OracleSettings()


@dataclass(frozen=True, repr=False)
class Add(ShortRepr):
    """Add a request.

    Its prompt is the first ``shared`` tokens of an earlier request's text, then ``tail``
    tokens that no other request has. The text is that request's prompt, with its answer if
    ``follow``. Numbers that exceed what there is are cut down, so every `Add` is valid.
    """

    tail: int = 1
    parent: int | None = None
    shared: int = 0
    follow: bool = False
    max_tokens: int = 1
    salt: int | None = None
    lora: int | None = None
    priority: int = 0
    #: Whether one in eight sampled tokens ends the answer.
    stops: bool = False
    #: An image in the place of the first tokens of the tail.
    image: int | None = None
    #: Tokens of the input to the encoder of a model that has one.
    encoder: int = 0


@dataclass(frozen=True, repr=False)
class Run(ShortRepr):
    """Run steps; abort a request while the device works on the last of them."""

    steps: int = 1
    abort: int | None = None


@dataclass(frozen=True, repr=False)
class Abort(ShortRepr):
    """Abort a request between steps."""

    request: int = 0


@dataclass(frozen=True, repr=False)
class Reset(ShortRepr):
    """Reset the prefix cache."""

    running: bool = False


Operation = Add | Run | Abort | Reset


@dataclass(frozen=True, repr=False)
class Case(ShortRepr):
    """A model, its pool, how it is served, and what happens.

    The pool holds one request of the greatest length and ``extra_blocks`` more blocks.
    """

    kinds: tuple[AttentionKind, ...] = (full(),)
    operations: tuple[Operation, ...] = ()
    settings: OracleSettings = _DEFAULTS
    extra_blocks: int = 0
    retention_interval: int | None = None
    layout: Layout = None
    flag_drafts: bool = False

    @property
    def num_blocks(self) -> int:
        settings = self.settings
        smallest = smallest_pool(self.kinds, settings.max_model_len, settings.max_in_flight_tokens)
        return smallest + self.extra_blocks


def make_engine(manager_cls: Any, case: Case, check_integrity: bool = True) -> OracleEngine:
    config = make_kv_cache_config(
        case.kinds,
        case.num_blocks,
        case.retention_interval,
        layout=case.layout,
        flag_drafts=case.flag_drafts,
    )
    return OracleEngine(manager_cls, config, case.settings, check_integrity)


def run_case(manager_cls: Any, case: Case, check_integrity: bool = True) -> OracleEngine:
    """Run a case to its end and check the outcome; returns the engine, for its counters."""
    engine = make_engine(manager_cls, case, check_integrity)
    for operation in case.operations:
        apply(engine, operation)
    engine.run_until_done()
    return engine


def apply(engine: OracleEngine, operation: Operation) -> None:
    """Do one operation."""
    req_ids = list(engine.submissions)
    match operation:
        case Add():
            _add(engine, operation, req_ids)
        case Run(steps, abort):
            for _ in range(steps - 1):
                engine.step()
            victims = [] if abort is None or not req_ids else [req_ids[abort % len(req_ids)]]
            engine.step(abort_before_output=victims)
        case Abort(request):
            if req_ids:
                engine.abort(req_ids[request % len(req_ids)])
        case Reset(running):
            engine.reset_prefix_cache(reset_running=running)


def _add(engine: OracleEngine, add: Add, req_ids: list[str]) -> None:
    prompt: list[int] = []
    items: list[MultiModalItem] = []
    if add.parent is not None and req_ids:
        parent = engine.submissions[req_ids[add.parent % len(req_ids)]]
        prompt += parent.prompt
        if add.follow:
            prompt += engine.expected_tokens(parent.req_id)
        del prompt[add.shared :]
        items += [
            item for item in parent.identity.mm_items if item.offset + item.length <= len(prompt)
        ]
    # A prompt needs a token, and room for one to sample.
    longest = engine.settings.max_model_len - 1
    offset = min(len(prompt), longest)
    tail = max(add.tail, 0 if prompt else 1)
    prompt += [_PLACEHOLDER] * tail if add.image is not None else _unique(len(req_ids), tail)
    del prompt[longest:]
    length = len(prompt) - offset
    if add.image is not None and length:
        # An identifier stands for one image, and so for one length.
        items.append(MultiModalItem(f"image{add.image}-{length}", offset, length))
    vocab_size = engine.settings.vocab_size
    engine.add_request(
        prompt,
        add.max_tokens,
        PrefixIdentity(
            cache_salt=None if add.salt is None else f"salt{add.salt}",
            lora_name=None if add.lora is None else f"lora{add.lora}",
            mm_items=tuple(items),
        ),
        priority=add.priority,
        stop_tokens=range(max(vocab_size // 8, 1)) if add.stops else (),
        encoder_length=min(add.encoder, MAX_ENCODER_LENGTH),
    )


def _unique(index: int, length: int) -> list[int]:
    rng = random.Random(hash64("tail", index))
    return [rng.randrange(1 << 20) for _ in range(length)]


def random_operations(
    rng: random.Random, count: int, max_model_len: int, vary_identity: bool = True
) -> Iterator[Operation]:
    """A lively mix: a tree of shared prefixes, bursts, aborts at all points, resets.

    Args:
        rng: Source of randomness.
        count: Number of operations.
        max_model_len: Prompts and answers are of all lengths up to it.
        vary_identity: Whether some requests have salts, adapters or images.
    """
    num_added = 0
    for _ in range(count):
        dice = rng.random()
        if dice < 0.45 or not num_added:
            yield _random_add(rng, num_added, max_model_len, vary_identity)
            num_added += 1
        elif dice < 0.90:
            abort = rng.randrange(num_added) if rng.random() < 0.1 else None
            yield Run(steps=rng.choice((1, 1, 2, 3, 8)), abort=abort)
        elif dice < 0.97:
            # Mostly a late one, which is likely to be alive.
            yield Abort(max(num_added - 1 - int(rng.expovariate(0.5)), 0))
        else:
            yield Reset(running=rng.random() < 0.5)


def _random_add(rng: random.Random, num_added: int, max_model_len: int, vary_identity: bool) -> Add:
    longest = int(max_model_len * rng.choice((0.1, 0.3, 0.3, 0.9)))
    # Often the same few parents, so that much is shared.
    parent = None
    if num_added and rng.random() < 0.85:
        parent = rng.randrange(min(num_added, 4)) if rng.random() < 0.5 else num_added - 1
    shared = max_model_len if rng.random() < 0.5 else rng.randint(0, max_model_len)
    identity: dict[str, int | None] = {}
    if vary_identity:
        identity = {
            name: rng.randrange(2) if rng.random() < chance else None
            for name, chance in (("salt", 0.15), ("lora", 0.15), ("image", 0.1))
        }
    return Add(
        tail=rng.choice((0, 1, rng.randint(0, longest))),
        parent=parent,
        shared=shared,
        follow=rng.random() < 0.5,
        max_tokens=rng.randint(1, max(longest // 2, 1)),
        priority=rng.randrange(3),
        stops=rng.random() < 0.3,
        **identity,
    )
