# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for tests and demonstrations, made when first needed.

``python -m tools.checkpoints tiny-gemma3`` prints the folder of one. The tiny ones are random and
take seconds to make; all of them share one byte-level tokenizer and one chat template. Load them
with ``dtype="float32"``: vLLM's ``auto`` would round them to bfloat16. The folder that holds them
is ``$HYBRID_KV_MODEL_CACHE``, or ``~/.cache/vllm-hybrid-kv``.
"""

from collections.abc import Callable
from pathlib import Path

from tools.checkpoints import tiny_models
from tools.checkpoints.gemma3 import ensure_gemma3_270m
from tools.checkpoints.plamo2 import TINY_PLAMO2, ensure_tiny_plamo2
from tools.checkpoints.store import CheckpointError, cache_dir
from tools.checkpoints.tiny_models import ensure_tiny

__all__ = [
    "CHECKPOINTS",
    "CheckpointError",
    "cache_dir",
    "gemma3_270m",
    "tiny_falcon_h1",
    "tiny_gemma2",
    "tiny_gemma3",
    "tiny_gemma3_images",
    "tiny_granite4",
    "tiny_llama",
    "tiny_llama4",
    "tiny_mistral",
    "tiny_plamo2",
    "tiny_whisper",
]


def gemma3_270m(force: bool = False) -> Path:
    """Google's Gemma 3 270M in bfloat16: 15 layers with a window of 512, 3 with full attention."""
    return ensure_gemma3_270m(force)


def tiny_gemma3(force: bool = False) -> Path:
    """Gemma 3: five layers with a sliding window of 64, then one with full attention."""
    return ensure_tiny(tiny_models.TINY_GEMMA3, force)


def tiny_gemma3_images(force: bool = False) -> Path:
    """The tiny Gemma 3 with a vision tower of one layer. Each image is 64 tokens."""
    return ensure_tiny(tiny_models.TINY_GEMMA3_IMAGES, force)


def tiny_gemma2(force: bool = False) -> Path:
    """Gemma 2: four layers, by turns with a sliding window of 64 and full attention."""
    return ensure_tiny(tiny_models.TINY_GEMMA2, force)


def tiny_mistral(force: bool = False) -> Path:
    """Mistral: four layers, all with a sliding window of 64."""
    return ensure_tiny(tiny_models.TINY_MISTRAL, force)


def tiny_llama(force: bool = False) -> Path:
    """Llama: four layers, all with full attention."""
    return ensure_tiny(tiny_models.TINY_LLAMA, force)


def tiny_llama4(force: bool = False) -> Path:
    """Llama 4: three layers with chunks of 64 tokens, then one with full attention."""
    return ensure_tiny(tiny_models.TINY_LLAMA4, force)


def tiny_granite4(force: bool = False) -> Path:
    """Granite 4: three layers with a Mamba state, then one with full attention."""
    return ensure_tiny(tiny_models.TINY_GRANITE4, force)


def tiny_falcon_h1(force: bool = False) -> Path:
    """Falcon-H1: two layers, each with a Mamba state and full attention."""
    return ensure_tiny(tiny_models.TINY_FALCON_H1, force)


def tiny_whisper(force: bool = False) -> Path:
    """Whisper: an encoder, and two decoder layers with self attention and cross attention."""
    return ensure_tiny(tiny_models.TINY_WHISPER, force)


def tiny_plamo2(force: bool = False) -> Path:
    """PLaMo 2: four layers, by turns with a Mamba state and with a sliding window of 64."""
    return ensure_tiny_plamo2(TINY_PLAMO2, force)


#: Every checkpoint, by its name on the command line.
CHECKPOINTS: dict[str, Callable[[bool], Path]] = {
    "gemma3-270m": gemma3_270m,
    "tiny-gemma3": tiny_gemma3,
    "tiny-gemma3-images": tiny_gemma3_images,
    "tiny-gemma2": tiny_gemma2,
    "tiny-mistral": tiny_mistral,
    "tiny-llama": tiny_llama,
    "tiny-llama4": tiny_llama4,
    "tiny-granite4": tiny_granite4,
    "tiny-falcon-h1": tiny_falcon_h1,
    "tiny-whisper": tiny_whisper,
    "tiny-plamo2": tiny_plamo2,
}
