# SPDX-License-Identifier: Apache-2.0
"""What Hypothesis draws from, and which tests may run at the same time."""

from typing import Any

import pytest
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

# Hypothesis draws integers from the source of this repository's modules, too, as far as they are
# loaded. Then a test's random programs would depend on which tests ran before it in its process.
# `setattr` raises if a new version of Hypothesis has no such function.
pytest.MonkeyPatch().setattr(providers, "_get_local_constants", lambda: providers._local_constants)

#: Tests in these folders start engines or servers, which take most of the memory and of the cores.
ENGINE_FOLDERS = ("tests/entrypoints/", "tests/models/", "tests/v1/e2e/")


class EnginesInOneWorker(LoadScopeScheduling):
    """One worker of pytest-xdist runs all tests with engines; the others run what is left.

    pytest-xdist 3.8 has ``--dist loadgroup`` for this, but ignores its groups with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if nodeid.startswith(ENGINE_FOLDERS) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> EnginesInOneWorker:
    return EnginesInOneWorker(config, log)
