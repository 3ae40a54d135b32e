# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests under the content oracle, as a pytest plugin.

A test module says ``pytest_plugins = ["support.oracle.fixtures"]``.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

from .attention import TOTAL_READS


@pytest.fixture(params=[BaseManager, HybridManager], ids=["base", "hybrid"])
def manager_cls(request: pytest.FixtureRequest) -> Any:
    """Each KV cache manager: base's shows that the oracle raises no false alarm."""
    return request.param


@pytest.fixture(scope="module")
def reads_are_checked() -> Iterator[None]:
    """Print how many KV reads a module checked (shown with ``-s``); none is a failure."""
    before = TOTAL_READS.total()
    yield
    checked = TOTAL_READS.total() - before
    print(f"{checked:,} KV reads checked")
    assert checked > 0, "no KV read was checked"
