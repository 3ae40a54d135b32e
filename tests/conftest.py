# SPDX-License-Identifier: Apache-2.0
"""How the tests are divided among the processes of pytest-xdist."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Folders of tests that start engines or servers. These take all cores and several GB of memory.
ENGINES = ("entrypoints", "models", "v1/e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that start engines run in one process, one after another.

    The other files run beside them, each as a whole, because its tests may share fixtures.
    """
    for item in items:
        file = item.path.relative_to(HERE).as_posix()
        group = "engines" if file.startswith(ENGINES) else file
        item.add_marker(pytest.mark.xdist_group(group))
