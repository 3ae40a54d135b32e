# SPDX-License-Identifier: Apache-2.0
"""Real engines, with the fork on and off, in processes of their own.

A process serves any number of jobs: importing vLLM costs ten seconds, a tiny model one or
two. The fork is switched by the environment, so each process is either one or the other.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from support.engine_prompts import Illustrated, Noise

WORKER = Path(__file__).with_name("engine_worker.py")
FORK_PACKAGE = "vllm.v1.core.hybrid."
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"

#: Of every engine process.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # One core a process: two run side by side, and threads that wait by spinning
    # make an engine a hundred times slower as soon as something else runs.
    "OMP_NUM_THREADS": "1",
    # Ranks need no core of their own: on few cores there is none to bind.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Even an eager engine compiles a few small functions, for longer than these tests run.
    "TORCHDYNAMO_DISABLE": "1",
    # Block hashes, and so KV cache events, are then the same in all processes.
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

#: Of every engine; a job's own arguments come on top.
ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    # Sums in another order then hardly matter, as in batches that are put together otherwise.
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,  # The smallest that attention on CPUs takes.
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
    # As base decides on CPUs, also after a job that asked for it in the same process.
    "async_scheduling": False,
    # Ignored when the fork is off, as any other plugin's options are.
    "additional_config": {"hybrid_kv": {"check_integrity": True}},
}


@dataclass(frozen=True)
class Round:
    """Prompts that run together; the rounds of a job run one after another.

    Args:
        prompts: Texts, token ids, noise for a model that listens, or images for one that sees.
        max_tokens: Of each request; a single number, or one a request, repeated.
        arrivals: The engine step before which each request arrives; empty: all at once.
        aborts: Per request (index) that is aborted, the step before which.
        calls: What is asked of the engine before a step: the step, a method of ``LLM``, and its
            keyword arguments.
        sampling: More arguments of ``SamplingParams``.
        lora: The folder of an adapter; only where all requests arrive at once.
    """

    prompts: Sequence[str | Sequence[int] | Noise | Illustrated]
    max_tokens: int | Sequence[int] = 16
    priorities: Sequence[int] = ()
    arrivals: Sequence[int] = ()
    aborts: Mapping[int, int] = field(default_factory=dict)
    calls: Sequence[tuple[int, str, Mapping[str, Any]]] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    lora: str | None = None
    reset_prefix_cache: bool = False

    def as_json(self) -> dict[str, Any]:
        max_tokens = self.max_tokens if isinstance(self.max_tokens, Sequence) else [self.max_tokens]
        return asdict(self) | {"max_tokens": list(max_tokens)}


@dataclass(frozen=True)
class RoundResult:
    """What a round gave, per request in the order of the prompts."""

    requests: list[dict[str, Any]]
    counters: dict[str, int]
    #: Share of the KV cache in use after the round.
    usage: float

    def each(self, key: str) -> list[Any]:
        return [request[key] for request in self.requests]

    @property
    def token_ids(self) -> list[list[int]]:
        return self.each("token_ids")

    @property
    def num_cached_tokens(self) -> list[int]:
        return self.each("num_cached_tokens")


@dataclass(frozen=True)
class EngineResult:
    """What a job gave; the lower half needs the engine core in the engine's process."""

    rounds: list[RoundResult]
    embeddings: list[list[float]]
    log: str
    manager: str | None = None
    scheduler: str | None = None
    num_groups: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    num_checks: int = 0
    peak_usage: float = 0.0
    events: list[str] = field(default_factory=list)

    @property
    def fork_is_active(self) -> bool:
        return self.manager is not None and self.manager.startswith(FORK_PACKAGE)

    def total(self, counter: str) -> int:
        return sum(r.counters[counter] for r in self.rounds)


class EngineProcess:
    """A process that runs engines, one job after another; a context manager.

    It starts with its first job, and anew with the next job after one that failed.
    """

    def __init__(self, *, fork: bool, environment: Mapping[str, str] | None = None) -> None:
        self._environment = ENVIRONMENT | {"VLLM_HYBRID_KV": "1" if fork else "0"}
        self._environment |= environment or {}
        self._log = tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        model: Path,
        rounds: Sequence[Round] = (),
        texts: Sequence[str] = (),
        **engine_args: Any,
    ) -> Callable[[], EngineResult]:
        """Begin a job. Call what is returned to wait for its result, before the next job."""
        if self._process is None:
            self._spawn()
        job = {
            "model": str(model),
            "args": ENGINE_ARGS | engine_args,
            "rounds": [r.as_json() for r in rounds],
            "texts": list(texts),
        }
        log_start = os.path.getsize(self._log.name)
        self._jobs.write(json.dumps(job).encode() + b"\n")
        self._jobs.flush()
        return lambda: self._finish(log_start)

    def run(self, model: Path, rounds: Sequence[Round] = (), **kwargs: Any) -> EngineResult:
        return self.start(model, rounds, **kwargs)()

    def stop(self) -> None:
        if self._process is None:
            return
        self._jobs.close()  # The worker ends when there are no more jobs.
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._results.close()
        self._process = None

    def _spawn(self) -> None:
        jobs_out, jobs_in = os.pipe()
        results_out, results_in = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(jobs_out), str(results_in)],
            env=os.environ | self._environment,
            pass_fds=(jobs_out, results_in),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(jobs_out)
        os.close(results_in)
        self._jobs, self._results = os.fdopen(jobs_in, "wb"), os.fdopen(results_out, "rb")

    def _finish(self, log_start: int) -> EngineResult:
        try:
            line = self._results.readline()
        except BaseException:
            # A result that nobody waits for must not be taken for the next job's.
            self._process.kill()
            self.stop()
            raise
        if not line:
            self.stop()  # Its traceback is in the log once it has ended.
        log = Path(self._log.name).read_bytes()[log_start:].decode(errors="replace")
        if not line:
            pytest.fail(f"The engine's process died. The end of its log:\n{log[-8000:]}")
        result = json.loads(line)
        rounds = [RoundResult(**r) for r in result.pop("rounds")]
        return EngineResult(rounds=rounds, log=log, **result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()


class EnginePair:
    """An engine process with the fork off and one with it on, for the same jobs."""

    def __init__(self, base: EngineProcess, fork: EngineProcess) -> None:
        self.base, self.fork = base, fork

    def run(
        self, model: Path, rounds: Sequence[Round], **kwargs: Any
    ) -> tuple[EngineResult, EngineResult]:
        """The same job with the fork off and on: (base's result, the fork's result).

        Verifies that the one was base's and the other the fork's, and that the fork's
        bookkeeping was checked in every step.
        """
        base, fork = self.run_unverified(model, rounds, **kwargs)
        verify_pair(base, fork)
        return base, fork

    def run_unverified(
        self, model: Path, rounds: Sequence[Round], **kwargs: Any
    ) -> tuple[EngineResult, EngineResult]:
        """As `run`, whichever managers ran."""
        wait_for_base, wait_for_fork = (
            process.start(model, rounds, **kwargs) for process in (self.base, self.fork)
        )
        try:
            base = wait_for_base()
        finally:
            fork = wait_for_fork()
        return base, fork


@contextmanager
def engine_pair() -> Iterator[EnginePair]:
    with EngineProcess(fork=False) as base, EngineProcess(fork=True) as fork:
        yield EnginePair(base, fork)


def verify_pair(base: EngineResult, fork: EngineResult) -> None:
    assert_base_ran(base)
    assert_fork_ran(fork)


def assert_base_ran(result: EngineResult) -> None:
    assert result.manager == "vllm.v1.core.kv_cache_manager.KVCacheManager"
    assert result.num_steps > 0
    assert "Hybrid KV cache: active" not in result.log
    assert_all_released(result)


def assert_fork_ran(result: EngineResult) -> None:
    assert result.fork_is_active, f"{result.manager} ran:\n{result.log[-6000:]}"
    assert result.num_checks == result.num_steps > 0
    assert_all_released(result)


def assert_all_released(result: EngineResult) -> None:
    assert [r.usage for r in result.rounds] == [0.0] * len(result.rounds)


def assert_same_outputs(
    base: EngineResult, fork: EngineResult, logprob_tolerance: float = 1e-4
) -> None:
    """The same tokens, none of them missing, and log-probabilities that far apart at most.

    Log-probabilities show a wrong read that does not happen to change the greedy choice.
    Of a request that was aborted, what both had by then is compared: how far it
    had come may depend on what was evicted.
    """
    assert len(base.rounds) == len(fork.rounds) > 0
    for of_base, of_fork in zip(base.rounds, fork.rounds, strict=True):
        assert len(of_base.requests) == len(of_fork.requests) > 0
        assert any(of_base.token_ids)
        for expected, got in zip(of_base.requests, of_fork.requests, strict=True):
            assert got["finished"] == expected["finished"]
            count = len(expected["token_ids"])
            if expected["finished"]:
                assert len(got["token_ids"]) == count > 0
            else:
                count = min(count, len(got["token_ids"]))
            assert got["token_ids"][:count] == expected["token_ids"][:count]
            assert got["logprobs"][:count] == pytest.approx(
                expected["logprobs"][:count], abs=logprob_tolerance
            )
