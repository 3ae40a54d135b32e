# SPDX-License-Identifier: Apache-2.0
"""Prompts for tests of the real engine."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

#: Token ids of printable characters in the tiny models' vocabulary.
ORDINARY_TOKENS = range(37, 132)

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


@dataclass(frozen=True)
class Noise:
    """What an encoder-decoder model gets: noise to listen to, 16,000 samples a second, the same
    for the same seed, and the decoder's prompt.
    """

    seed: int
    num_samples: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class Illustrated:
    """What a model that sees gets: a text with ``<start_of_image>`` where each image goes, and the
    seeds of the images. They are noise, the same for the same seed.
    """

    text: str
    images: Sequence[int]


def random_tokens(length: int, seed: int) -> list[int]:
    """Random token ids, the same for the same seed; a longer one begins with a shorter one."""
    draw = random.Random(seed)
    return [draw.choice(ORDINARY_TOKENS) for _ in range(length)]


def random_text(length: int, seed: int) -> str:
    """Random letters, a token each in the tiny models' vocabulary; as `random_tokens`."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=length))


def prompts(lengths: Sequence[int], seed: int, shared: Sequence[int] = ()) -> list[list[int]]:
    """A prompt of each length, all different after their ``shared`` beginning."""
    return [
        [*shared, *random_tokens(length - len(shared), seed + i)]
        for i, length in enumerate(lengths)
    ]


def pass_key_prompt(key: str, num_fillers: int) -> str:
    """A text that says a pass key, goes on about other things, and then asks for the key.

    Each filler is about 24 tokens of Gemma's.
    """
    return (
        f"{FILLER * 3}The pass key is {key}. Remember it. {key} is the pass key. "
        f"{FILLER * num_fillers}What is the pass key? The pass key is"
    )
