# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs inside base's own tests and reports what they did.

With ``VLLM_HYBRID_KV=0`` it only reports. Otherwise it activates the hybrid manager and reports,
for every scheduler that a test builds, whether the hybrid manager serves it or why base does. The
hybrid manager then verifies itself at every step and at the end of each test, and `views` answers
what tests read from base's structures.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tools.base_tests import views
from tools.base_tests.verdicts import HYBRID
from vllm.plugins import load_general_plugins

REPORT_VARIABLE = "BASE_TESTS_REPORT"
ACTIVE = os.environ["VLLM_HYBRID_KV"] != "0"
#: KV connectors that the tests define; they read no more than a request's block ids.
TEST_CONNECTORS = ("MockKVConnector", "TestExampleConnector")

#: For each scheduler of the running test: `HYBRID`, or the reason why base serves it.
_served: list[str] = []
#: The hybrid managers of the running test.
_managers: list[Any] = []


def _write(**line: Any) -> None:
    with Path(os.environ[REPORT_VARIABLE]).open("a") as report:
        report.write(json.dumps(line) + "\n")


def _watch_schedulers() -> None:
    from vllm.v1.core.hybrid import coverage, factory
    from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    coverage._COVERED_CONNECTORS.update(TEST_CONNECTORS)
    reasons: list[str | None] = []
    decide, init = factory.find_reason_for_base, Scheduler.__init__

    def find_reason_for_base(facts: Any) -> str | None:
        reasons.append(decide(facts))
        return reasons[-1]

    def scheduler_init(self: Any, *args: Any, **kwargs: Any) -> None:
        reasons.clear()
        init(self, *args, **kwargs)
        manager = self.kv_cache_manager
        (reason,) = reasons
        assert isinstance(manager, KVCacheManager) == (reason is None), f"{manager} for {reason}"
        _served.append(reason or HYBRID)
        if isinstance(manager, KVCacheManager):
            manager.verify_every_step = True
            views.show(manager)
            _managers.append(manager)

    factory.find_reason_for_base = find_reason_for_base
    Scheduler.__init__ = scheduler_init  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("cpu_test", "skip_global_cleanup", "core_model", "hybrid_model"):
        config.addinivalue_line("markers", f"{mark}: base's")
    load_general_plugins()
    if ACTIVE:
        from vllm.v1.core.hybrid import plugin

        if not plugin.is_active():
            raise pytest.UsageError(f"the plugin is not active: {plugin.find_obstacle()}")
        _watch_schedulers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Base's cleanup of GPUs and process groups takes longer than most tests.
        item.add_marker("skip_global_cleanup")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(test=report.nodeid, outcome="failed", why=str(report.longrepr).splitlines()[-1])


def pytest_runtest_logstart() -> None:
    _served.clear()
    _managers.clear()
    views.looked_at.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    yield
    for manager in _managers:
        manager.check_integrity()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # One line per test: the phase that failed, or else the call.
    if report.when == "call" or not report.passed:
        why = ""
        if call.excinfo is not None:
            error = call.excinfo.value
            why = f"{type(error).__name__}: {str(error) or 'assert'}".splitlines()[0]
        _write(
            test=item.nodeid,
            outcome=report.outcome,
            why=why,
            served=list(_served),
            looked_at=sorted(set(views.looked_at)),
        )
    return report
