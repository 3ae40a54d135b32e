# SPDX-License-Identifier: Apache-2.0
"""Real servers: `vllm serve` in processes of their own, with the plugin on or off.

with Server(model, hybrid=True) as server:
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from support import vllm_settings

T = TypeVar("T")

HOST = "127.0.0.1"
COMMAND = Path(__file__).with_name("vllm_cli.py")
MODEL_NAME = "tiny"
#: The beginning of the line that the plugin logs where the hybrid manager serves an engine.
ACTIVE_LINE = "Hybrid KV cache: active"

ENVIRONMENT = {
    # Enables /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
    # Tests read the log.
    "NO_COLOR": "1",
}
SERVER_ARGS = vllm_settings.ENGINE_ARGS | {
    "enable_prompt_tokens_details": True,
    # By default the server kills its processes at once instead of letting them end.
    "shutdown_timeout": 20,
}


class ServerError(AssertionError):
    """A server did not start or did not stay up; the message has the end of its log."""


class Server:
    """`vllm serve` on a free port of the loopback interface; a context manager.

    Entering starts the process and does not wait for it, so that several can start at once.
    Leaving ends it, and raises `ServerError` if it does not end cleanly, or if it had ended
    before and no method of this class has reported that.

    Args:
        arguments: Arguments of `vllm serve`, which replace those of `SERVER_ARGS`.
    """

    def __init__(
        self,
        model: Path,
        *,
        hybrid: bool,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        with socket.create_server((HOST, 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        self.api_url = f"{self.url}/v1"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._end_is_reported = False
        self._environment = vllm_settings.environment(hybrid, ENVIRONMENT | (environment or {}))
        address = {"host": HOST, "port": port, "served_model_name": MODEL_NAME}
        self._command = [sys.executable, "-P", str(COMMAND), "serve", str(model)]
        # The last argument of a name counts.
        self._command += [*command_line(address | SERVER_ARGS), *arguments]

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
                # Makes a process group, with which all that it starts can be ended.
                start_new_session=True,
            )
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            problem = self._stop()
            self.http.close()
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
        """Wait until the server answers; raises as `wait_for`."""
        self.wait_for(self.is_healthy, bool, timeout)
        return self

    def wait_for(
        self, observe: Callable[[], T], accept: Callable[[T], bool], timeout: float = 60
    ) -> T:
        """Observe again and again until the result is accepted, and return it.

        Raises:
            ServerError: the server has ended, or `timeout` seconds have passed.
        """
        end = time.monotonic() + timeout
        while not accept(seen := observe()):
            if not self.is_running:
                self._end_is_reported = True
                raise ServerError(self.describe(f"It ended with {self._process.returncode}."))
            if time.monotonic() > end:
                raise ServerError(self.describe(f"After {timeout} s still {seen!r}."))
            time.sleep(0.1)
        return seen

    def is_healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        """The value of one of vLLM's metrics.

        A metric appears as soon as the server has recorded it, so a missing one is an error and
        not zero.
        """
        return parse_metrics(self.http.get("/metrics").raise_for_status().text)[f"vllm:{name}"]

    def reset_prefix_cache(self, **parameters: Any) -> bool:
        response = self.http.post("/reset_prefix_cache", params=parameters)
        return response.raise_for_status().json()["success"]

    def _stop(self) -> str | None:
        """End all processes, and describe what was wrong with that, if anything was."""
        status = self._process.poll()
        problem = None
        if status is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                status = self._process.wait(timeout=60)
                problem = f"It ended with status {status} after SIGTERM." if status else None
            except subprocess.TimeoutExpired:
                problem = "It did not end within 60 s of SIGTERM."
        elif not self._end_is_reported:
            problem = f"It had ended by itself, with status {status}."
        left_behind = end_group(self._process.pid, patience=0 if problem else 10)
        self._process.wait()
        if left_behind and problem is None:
            problem = f"It left processes behind: {', '.join(left_behind)}."
        return problem

    def describe(self, problem: str) -> str:
        """A problem with this server, between its command and the end of its log."""
        return f"{' '.join(self._command)}\n{problem} The end of its log:\n{self.log[-8000:]}"


def command_line(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments as vLLM's command takes them; those that are True become flags."""
    for name, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        yield f"--{name.replace('_', '-')}" + ("" if value is True else f"={text}")


def end_group(group: int, patience: float) -> list[str]:
    """Give the processes of a group some seconds to end, and kill and name those that do not."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    _, members = psutil.wait_procs(members, timeout=patience)
    names = [" ".join(process.cmdline()[:3]) for process in members if process.is_running()]
    if members:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return names


def parse_metrics(text: str) -> dict[str, float]:
    """Metrics by sample name, each summed over its labels."""
    totals: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return dict(totals)
