# SPDX-License-Identifier: Apache-2.0
"""Real servers: `vllm serve` in processes of their own, with the fork on or off.

with Server(model, fork=True) as server:
    server.wait_until_healthy()
    client = openai.OpenAI(base_url=server.api_url, api_key="none")
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")

HOST = "127.0.0.1"
COMMAND = Path(__file__).with_name("vllm_cli.py")
MODEL_NAME = "tiny"
#: The beginning of the line that the fork logs where it serves an engine.
ACTIVE_LINE = "Hybrid KV cache: active"

#: Of every server process.
ENVIRONMENT = {
    # On few cores, threads that wait by spinning stop everything else.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Even an eager engine compiles a few small functions, for longer than these tests run.
    "TORCHDYNAMO_DISABLE": "1",
    # Has /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The log is read by tests.
    "NO_COLOR": "1",
}

#: Of every server; a server's own arguments come after, and the last of a name counts.
ARGUMENTS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--block-size=32",
    "--kv-cache-memory-bytes=64M",
    "--enable-prompt-tokens-details",
    # Or its processes are killed at once where they should end by themselves.
    "--shutdown-timeout=20",
    # Ignored when the fork is off, as any other plugin's options are.
    '--additional-config={"hybrid_kv": {"check_integrity": true}}',
)


class ServerError(AssertionError):
    """A server did not start, or did not stay up; says how its log ends."""


class Server:
    """`vllm serve` on a free port of the loopback interface; a context manager.

    Entering starts the process and does not wait for it, so that several can start at once.
    Leaving ends it, and raises `ServerError` if it does not end cleanly, or had ended before
    and nobody has waited for that.

    Args:
        arguments: Of `vllm serve`, on top of `ARGUMENTS`.
    """

    def __init__(
        self,
        model: Path,
        *,
        fork: bool,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = find_free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.api_url = f"{self.url}/v1"
        self._expected_to_end = False
        self._http = httpx.Client(base_url=self.url, timeout=60)
        self._environment = os.environ | ENVIRONMENT | {"VLLM_HYBRID_KV": "1" if fork else "0"}
        self._environment |= environment or {}
        self._command = [
            sys.executable,
            "-P",
            str(COMMAND),
            "serve",
            str(model),
            f"--host={HOST}",
            f"--port={self.port}",
            f"--served-model-name={MODEL_NAME}",
            *ARGUMENTS,
            *arguments,
        ]

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        self._log = Path(self._folder.name, "log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A process group: whatever it starts can be ended with it.
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            problem = self._stop()
            self._http.close()
            if error is None and problem:
                raise ServerError(self.describe(problem))
            if error is not None and not isinstance(error, ServerError):
                error.add_note(self.describe(problem or "The server was up."))
        finally:
            self._folder.cleanup()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The API server's process first, then those that it has started."""
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def wait_until_healthy(self, timeout: float = 500) -> Self:
        """Wait until the server answers.

        Raises:
            ServerError: it has ended instead, or `timeout` seconds have passed.
        """
        self.wait_for(self.is_healthy, bool, timeout)
        return self

    def wait_until_ended(self, timeout: float = 500) -> int:
        """Wait until the server has ended by itself, and return its exit status."""
        self._expected_to_end = True
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ServerError(self.describe(f"It still ran after {timeout} s.")) from None

    def wait_for(
        self, observe: Callable[[], T], accept: Callable[[T], bool], timeout: float = 60
    ) -> T:
        """Observe again and again until what is seen is accepted, and return it.

        Raises:
            ServerError: the server has ended, or `timeout` seconds have passed.
        """
        end = time.monotonic() + timeout
        while not accept(seen := observe()):
            if not self.is_running:
                raise ServerError(self.describe(f"It ended with {self._process.returncode}."))
            if time.monotonic() > end:
                raise ServerError(self.describe(f"After {timeout} s still {seen!r}."))
            time.sleep(0.1)
        return seen

    def is_healthy(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> dict[str, float]:
        """The server's metrics by sample name, each summed over its labels."""
        return parse_metrics(self._http.get("/metrics").raise_for_status().text)

    def metric(self, name: str, **labels: str) -> float:
        """One sample, of which exactly one has the labels.

        A metric appears as soon as the server has recorded it, so one that is missing is an
        error and not zero.
        """
        text = self._http.get("/metrics").raise_for_status().text
        (value,) = (
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
        return value

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """Send JSON, or other content as `content=`, and return the answer whatever it is."""
        if body is not None:
            kwargs |= {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        return self._http.post(path, **kwargs)

    def reset_prefix_cache(self, **parameters: Any) -> bool:
        answer = self.post("/reset_prefix_cache", params=parameters)
        return answer.raise_for_status().json()["success"]

    def _stop(self) -> str | None:
        """End all processes, and say what was wrong with that, if anything was."""
        status = self._process.poll()
        problem = None
        if status is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                status = self._process.wait(timeout=60)
                problem = f"It ended with status {status} after SIGTERM." if status else None
            except subprocess.TimeoutExpired:
                problem = "It did not end within 60 s of SIGTERM."
        elif not self._expected_to_end:
            problem = f"It had ended by itself, with status {status}."
        left_behind = end_group(self._process.pid, patience=0 if problem else 10)
        self._process.wait()
        if left_behind and problem is None:
            problem = f"It left processes behind: {', '.join(left_behind)}."
        return problem

    def describe(self, problem: str) -> str:
        """A problem with this server, between its command and the end of its log."""
        return f"{' '.join(self._command)}\n{problem} The end of its log:\n{self.log[-8000:]}"


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def end_group(group: int, patience: float) -> list[str]:
    """Give the processes of a group some seconds to end, and kill and name those that do not."""
    members = [process for process in psutil.process_iter() if _is_in_group(process, group)]
    _, members = psutil.wait_procs(members, timeout=patience)
    names = [" ".join(process.cmdline()[:3]) for process in members if process.is_running()]
    if members:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return names


def _is_in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def parse_metrics(text: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
