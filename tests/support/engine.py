# SPDX-License-Identifier: Apache-2.0
"""Real engines with the plugin on and off, in processes of their own.

A process runs any number of jobs: importing vLLM takes ten seconds, starting a tiny model one or
two. The environment switches the plugin, so each process has it either on or off.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from support import vllm_settings
from support.engine_job import EngineResult, Round

__all__ = ["EngineResult", "Round"]

ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
#: The program of an engine's process; its arguments are a folder for `sys.path` and the pipe.
WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from support.engine_worker import serve; serve(int(sys.argv[2]))"
)
ENGINE_ARGS = vllm_settings.ENGINE_ARGS | {
    "disable_log_stats": False,
    # Base's default on CPUs. Without it, a job would inherit what an earlier one had enabled.
    "async_scheduling": False,
}


class EngineProcess:
    """A process that runs engines, one job after another; a context manager.

    It starts with its first job, and again with the next job after a failed one.
    """

    def __init__(self, *, hybrid: bool, environment: dict[str, str] | None = None) -> None:
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environment or {})}
        self._environment = vllm_settings.environment(hybrid, own)
        self._log = tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, model: Path, rounds: Sequence[Round], **engine_args: Any
    ) -> Callable[[], EngineResult]:
        """Begin a job. Call the returned function to wait for its result, before the next job."""
        if self._process is None:
            self._spawn()
        log_start = os.path.getsize(self._log.name)
        self._jobs.send((model, rounds, ENGINE_ARGS | engine_args))
        return lambda: self._finish(log_start)

    def run(self, model: Path, rounds: Sequence[Round], **engine_args: Any) -> EngineResult:
        return self.start(model, rounds, **engine_args)()

    def stop(self) -> None:
        if self._process is None:
            return
        self._jobs.close()  # The worker ends when there are no more jobs.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        self._process.kill()
        self._process.wait()
        self._process = None

    def _spawn(self) -> None:
        self._jobs, theirs = multiprocessing.Pipe()
        tests = str(Path(__file__).parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORKER, tests, str(theirs.fileno())],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )

    def _finish(self, log_start: int) -> EngineResult:
        result = None
        try:
            result = self._jobs.recv()
        except (EOFError, ConnectionResetError):
            self.stop()  # Its traceback is in the log once it has ended.
        except BaseException:
            # A result that nobody waits for must not be taken for the next job's.
            self._process.kill()
            self.stop()
            raise
        log = Path(self._log.name).read_bytes()[log_start:].decode(errors="replace")
        if result is None:
            pytest.fail(f"The engine's process died. The end of its log:\n{log[-8000:]}")
        result.log = log
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()


@dataclass(frozen=True)
class EnginePair:
    """An engine process with base's manager and one with the hybrid manager."""

    base: EngineProcess
    hybrid: EngineProcess

    def run(
        self, model: Path, rounds: Sequence[Round], **engine_args: Any
    ) -> tuple[EngineResult, EngineResult]:
        """Run the same job on both, verify that each ran its own manager, and return the results:
        (base's, the hybrid manager's).
        """
        wait_for_base, wait_for_hybrid = (
            process.start(model, rounds, **engine_args) for process in (self.base, self.hybrid)
        )
        try:
            base = wait_for_base()
        finally:
            hybrid = wait_for_hybrid()
        verify_pair(base, hybrid)
        return base, hybrid


@contextmanager
def engine_pair() -> Iterator[EnginePair]:
    with EngineProcess(hybrid=False) as base, EngineProcess(hybrid=True) as hybrid:
        yield EnginePair(base, hybrid)


def verify_pair(base: EngineResult, hybrid: EngineResult) -> None:
    assert_base_ran(base)
    assert_hybrid_ran(hybrid)


def assert_base_ran(result: EngineResult) -> None:
    assert result.manager == "vllm.v1.core.kv_cache_manager.KVCacheManager"
    assert result.num_steps > 0
    assert "Hybrid KV cache: active" not in result.log
    assert not any(r.usage for r in result.rounds)


def assert_hybrid_ran(result: EngineResult) -> None:
    """The hybrid manager ran, and verified its bookkeeping in every step."""
    assert result.hybrid_is_active, f"{result.manager} ran:\n{result.log[-6000:]}"
    assert result.num_checks == result.num_steps > 0
    assert not any(r.usage for r in result.rounds)


def assert_same_outputs(
    base: EngineResult, hybrid: EngineResult, logprob_tolerance: float = 1e-4
) -> None:
    """Assert the same tokens, at least one per finished request, and close log-probabilities.

    Log-probabilities show a wrong read that does not happen to change the greedy choice.
    Outputs of an aborted request are compared as far as both had come, which may depend on what
    was evicted.
    """
    assert len(base.rounds) == len(hybrid.rounds) > 0
    for of_base, of_hybrid in zip(base.rounds, hybrid.rounds, strict=True):
        assert of_hybrid.finished == of_base.finished != []
        assert any(of_base.token_ids)
        expected = zip(of_base.finished, of_base.token_ids, of_base.logprobs, strict=True)
        got = zip(of_hybrid.token_ids, of_hybrid.logprobs, strict=True)
        for (finished, tokens, logprobs), (got_tokens, got_logprobs) in zip(
            expected, got, strict=True
        ):
            count = min(len(tokens), len(got_tokens))
            if finished:
                assert len(got_tokens) == len(tokens) > 0
            assert got_tokens[:count] == tokens[:count]
            assert got_logprobs[:count] == pytest.approx(logprobs[:count], abs=logprob_tolerance)
