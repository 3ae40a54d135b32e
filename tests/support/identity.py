# SPDX-License-Identifier: Apache-2.0
"""The identity of a token prefix, and the tokens that a simulated model samples from it.

KV at a position depends on every token up to it, and on what else enters the computation
(adapter, images) or must keep requests apart (cache salt). An identity is a 64-bit hash of
all that, so equal identities mean interchangeable KV.

The hash of a prefix is a running sum of one independent random number per (position,
token), mixed at the end. The sum makes whole prompts one vectorised `cumsum`, and a decoded
token one addition.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_TOKEN_FACTOR = 0xD1B54A32D192ED03
_POSITION_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def token_terms(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The random numbers, uint64, that tokens add to the sum at their positions."""
    return mix(
        tokens.astype(np.uint64) * np.uint64(_TOKEN_FACTOR)
        + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_POSITION_FACTOR)
    )


def sample_tokens(identities: np.ndarray, vocab_size: int) -> np.ndarray:
    """The token that the simulated model samples after each prefix."""
    return ((identities >> np.uint64(24)) % np.uint64(vocab_size)).astype(np.int64)


def hash64(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class MultiModalItem:
    """An image or the like at ``[offset, offset + length)`` of the prompt."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class PrefixIdentity:
    """What besides its tokens determines the KV of a request."""

    cache_salt: str | None = None
    lora_name: str | None = None
    mm_items: tuple[MultiModalItem, ...] = ()

    @property
    def seed(self) -> int:
        return hash64("prefix", self.cache_salt, self.lora_name)


def prefix_sums(tokens: Sequence[int], identity: PrefixIdentity) -> np.ndarray:
    """Per position, the sum of the prefix that ends there, without the seed."""
    inputs = np.array(tokens, dtype=np.uint64)
    for item in identity.mm_items:
        content = np.uint64(hash64("item", item.identifier))
        end = item.offset + item.length
        inputs[item.offset : end] ^= content + np.arange(item.length, dtype=np.uint64)
    return np.cumsum(token_terms(inputs, np.arange(len(tokens))))


def prefix_identities(tokens: Sequence[int], identity: PrefixIdentity) -> np.ndarray:
    """Per position, the identity of the prefix that ends there."""
    return mix(np.uint64(identity.seed) + prefix_sums(tokens, identity))


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    vocab_size: int,
    identity: PrefixIdentity | None = None,
    stop_tokens: Sequence[int] = (),
    max_model_len: int | None = None,
) -> list[int]:
    """The whole output of a request, from its prompt alone.

    Plain integers, one token after the other: it shares no code with the worker's
    vectorised sums, and so checks them.
    """
    identity = identity or PrefixIdentity()
    inputs = [int(token) for token in prompt]
    for item in identity.mm_items:
        content = hash64("item", item.identifier)
        for i in range(item.length):
            inputs[item.offset + i] ^= (content + i) & _MASK
    total, length = identity.seed, len(prompt)
    end = min(length + max_tokens, max_model_len or length + max_tokens)
    for position, token in enumerate(inputs, start=1):  # It grows meanwhile.
        total += _mix_int((token * _TOKEN_FACTOR + position * _POSITION_FACTOR) & _MASK)
        if position >= length:
            inputs.append((_mix_int(total & _MASK) >> 24) % vocab_size)
            if inputs[-1] in stop_tokens or len(inputs) >= end:
                break
    return inputs[length:]
