# SPDX-License-Identifier: Apache-2.0
"""Prompts for tests of the real engine; the same seed gives the same prompt."""

import random
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

#: Token ids of printable characters in the tiny models' vocabulary.
ORDINARY_TOKENS = range(37, 132)

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


def noise_prompt(seed: int, num_samples: int, tokens: Sequence[int]) -> dict[str, Any]:
    """For encoder-decoder models: noise (16,000 samples a second) and the decoder's token ids."""
    noise = np.random.default_rng(seed).standard_normal(num_samples).astype(np.float32)
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (noise, 16_000)}},
        "decoder_prompt": {"prompt_token_ids": tokens},
    }


def image_prompt(text: str, seeds: Sequence[int]) -> dict[str, Any]:
    """A text with ``<start_of_image>`` where each image goes. The images are noise."""
    noises = [np.random.default_rng(seed).integers(0, 256, (64, 64, 3)) for seed in seeds]
    images = [Image.fromarray(noise.astype(np.uint8)) for noise in noises]
    return {"prompt": text, "multi_modal_data": {"image": images}}


def random_tokens(length: int, seed: int) -> list[int]:
    """Random token ids; with the same seed, a longer result begins with a shorter one."""
    draw = random.Random(seed)
    return [draw.choice(ORDINARY_TOKENS) for _ in range(length)]


def random_text(length: int, seed: int) -> str:
    """Random letters, one token each in the tiny models' vocabulary; as `random_tokens`."""
    return "".join(random.Random(seed).choices(string.ascii_letters, k=length))


def prompts(lengths: Sequence[int], seed: int, shared: Sequence[int] = ()) -> list[list[int]]:
    """A prompt of each length; they differ after their ``shared`` beginning."""
    own = (random_tokens(length - len(shared), seed + i) for i, length in enumerate(lengths))
    return [[*shared, *tokens] for tokens in own]


def with_changed_token(prompt: Sequence[int], distance: int) -> list[int]:
    """The prompt with another token at `distance` from its last token.

    The last token computes the output's first token; to the later ones the distance is larger.
    """
    position = len(prompt) - 1 - distance
    others = [token for token in ORDINARY_TOKENS if token != prompt[position]]
    return [*prompt[:position], random.Random(distance).choice(others), *prompt[position + 1 :]]


def pass_key_prompt(key: str, num_fillers: int) -> str:
    """A text that states a pass key, continues with filler, and ends where the key must follow.

    Each filler is about 24 of Gemma's tokens.
    """
    return (
        f"{FILLER * 3}The pass key is {key}. Remember it. {key} is the pass key. "
        f"{FILLER * num_fillers}What is the pass key? The pass key is"
    )
