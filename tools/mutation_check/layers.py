# SPDX-License-Identifier: Apache-2.0
"""The layers of tests, each of which runs on a copy of the package until its first failure."""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tools.mutation_check.planting import ROOT

TESTS = ROOT / "tests/v1/core/hybrid"
LAYERS = {
    "unit": (
        "test_block_pool.py",
        "test_managers.py",
        "test_kv_cache_manager.py",
        "test_cross_attention.py",
        "test_speculation.py",
        "test_kv_connectors.py",
    ),
    "differential": (
        "test_differential_cases.py",
        "test_differential_cross_attention.py",
        "test_differential.py",
        "test_differential_speculation.py",
    ),
    "oracle": (
        "test_oracle.py",
        "test_oracle_cross_attention.py",
        "test_oracle_speculation.py",
        "test_oracle_shapes.py",
        "test_oracle_random.py",
        "test_oracle_mamba.py",
        "test_oracle_connector.py",
        "test_load_failures.py",
    ),
}
NOT_CAUGHT = ""
#: Catches a fault that makes the manager loop forever. The limit is CPU time, so a busy machine
#: does not matter. Without a fault, the longest layer takes about a third of it.
CPU_SECONDS = 900

# Runs are forked from a process that has imported base already, which takes longer than many of
# the tests. It must not import the package, of which each run has a copy of its own.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "hypothesis", "vllm.v1.core.sched.async_scheduler", "vllm.engine.arg_utils"]
)


def run_layer(source: Path, layer: str) -> str:
    """The first test of a layer that fails on a copy of the package; "" if none fails.

    Raises:
        SystemExit: if pytest cannot run the tests.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        run = _CONTEXT.Process(target=_run_tests, args=(source, LAYERS[layer], log.name, sender))
        run.start()
        sender.close()
        run.join()
        if run.exitcode == -signal.SIGXCPU:
            return "(does not end)"
        if run.exitcode and run.exitcode < 0:
            return f"(crashes with signal {-run.exitcode})"
        if receiver.poll():
            status, failed = receiver.recv()
            if status == pytest.ExitCode.OK:
                return NOT_CAUGHT
            if failed:
                return failed
        raise SystemExit(f"pytest could not run the {layer} tests:\n{log.read()[-4000:]}")


class _FirstFailure:
    """A pytest plugin that remembers the first test, or file, that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.partition("::")[2]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = Path(report.nodeid).name


def _run_tests(source: Path, files: tuple[str, ...], log: str, sender: Connection) -> None:
    """Run test files in this process, and send pytest's exit status and the first failure."""
    with Path(log).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, resource.RLIM_INFINITY))
    os.chdir(ROOT)
    os.environ["HYBRID_KV_SOURCE"] = str(source)
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "tests"))
    first_failure = _FirstFailure()
    command = ["-x", "-q", "-p", "no:cacheprovider", "-p", "support.mutated_package"]
    command += [str(TESTS / name) for name in files]
    status = pytest.main(command, plugins=[first_failure])
    sender.send((int(status), first_failure.name))
