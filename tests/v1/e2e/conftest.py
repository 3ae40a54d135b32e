# SPDX-License-Identifier: Apache-2.0
"""Engines and models that the tests of the real engine share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engine import EnginePair, engine_pair
from tools import checkpoints

#: Models with sliding windows of 64 tokens.
TINY_WINDOW_MODELS: dict[str, Callable[[], Path]] = {
    "gemma3": checkpoints.tiny_gemma3,
    "gemma2": checkpoints.tiny_gemma2,
    "mistral": checkpoints.tiny_mistral,
}
TINY_MODELS = TINY_WINDOW_MODELS | {
    "llama": checkpoints.tiny_llama,
    # Its chunks have 64 tokens.
    "llama4": checkpoints.tiny_llama4,
}


@pytest.fixture(scope="session")
def engines() -> Iterator[EnginePair]:
    """An engine process with base's manager and one with the hybrid manager, for all tests."""
    with engine_pair() as engines:
        yield engines


@pytest.fixture(params=TINY_MODELS)
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Each tiny model in turn."""
    return TINY_MODELS[request.param]()


@pytest.fixture(params=TINY_WINDOW_MODELS)
def tiny_window_model(request: pytest.FixtureRequest) -> Path:
    """Each tiny model with sliding windows in turn."""
    return TINY_WINDOW_MODELS[request.param]()


@pytest.fixture(scope="session")
def tiny_gemma3() -> Path:
    return checkpoints.tiny_gemma3()


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Google's Gemma 3 270M, with windows of 512 tokens."""
    return checkpoints.gemma3_270m()
