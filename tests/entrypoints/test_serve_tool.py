# SPDX-License-Identifier: Apache-2.0
"""The program of `make serve`: it reports an obstacle in one line, and ends on a signal.

No model is loaded here; where a server is needed, a small program takes its place.
"""

import importlib.util
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tools import serve
from tools.checkpoints.store import CACHE_VARIABLE

ROOT = Path(__file__).parents[2]
ENOUGH_MEMORY = SimpleNamespace(available=1 << 40)

#: Answers on /health as vLLM does, after half a second; ends on SIGTERM with status 0.
SERVER = """
import http.server, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(0.5)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
#: Starts a child process, and does not end on SIGTERM.
STUBBORN_SERVER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("child", child.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough memory, an empty cache, and none of the variables that a user may have set."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ENOUGH_MEMORY)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for name in ("PORT", serve.KV_CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def must_not_start(*arguments: object) -> int:
    raise AssertionError("a server was started")


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the program, which must refuse to start, and returns the line that it prints."""
    monkeypatch.setattr(serve, "run_server", must_not_start)

    def run(*arguments: str) -> str:
        assert serve.main(["--model", "tiny", *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line

    return run


def test_a_port_in_use(used_port: int, refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (
        f"error: cannot listen on port {used_port} of 127.0.0.1 (Address already in use); "
        f'choose another one, as in: make serve SERVE_ARGS="--port {used_port + 1}"'
    )
    assert refusal("--port", str(used_port)) == expected
    monkeypatch.setenv("PORT", str(used_port))
    assert refusal() == expected


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "8000.0", "²"])
def test_an_invalid_port_is_refused(port: str, refusal) -> None:
    expected = f"error: the port must be from 1 to 65535, got {port!r}"
    assert refusal(f"--port={port}") == expected


def test_an_address_that_is_not_of_this_machine(free_port: int, refusal) -> None:
    # An address that is reserved for documentation.
    line = refusal("--host", "192.0.2.77", "--port", str(free_port))
    assert line.startswith(f"error: cannot listen on port {free_port} of 192.0.2.77 (")


def test_too_little_memory(free_port: int, refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = serve.MODELS["tiny"].memory + serve.GIB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    line = refusal("--port", str(free_port))
    assert line.startswith(
        "error: too little memory to serve tiny-gemma3 with VLLM_CPU_KVCACHE_SPACE=1 (GiB): "
        "3.2 GB available, 3.2 GB needed; end other programs, or"
    )
    # A larger KV cache needs more.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    monkeypatch.setenv(serve.KV_CACHE_VARIABLE, "2")
    line = refusal("--port", str(free_port))
    assert line.endswith(
        "4.3 GB needed; lower VLLM_CPU_KVCACHE_SPACE, end other programs, or use a larger machine"
    )


def test_a_kv_cache_size_that_is_not_a_number(
    free_port: int, refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(serve.KV_CACHE_VARIABLE, "2GB")
    line = refusal("--port", str(free_port))
    assert line == "error: VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, got '2GB'"


@pytest.mark.parametrize("found", [None, ModuleSpec("vllm", None)])
def test_without_vllm(found: ModuleSpec | None, refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python also finds a folder of that name without an __init__.py.
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    assert refusal() == (
        "error: vLLM is not installed in this Python environment; `make setup` does it"
    )


def test_a_cache_folder_that_cannot_be_used(
    free_port: int, tmp_path: Path, refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    line = refusal("--port", str(free_port))
    assert line.startswith("error: the cache folder cannot be used: HYBRID_KV_MODEL_CACHE is '")


def test_the_program_itself_says_one_line_and_ends_with_1(used_port: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tools.serve", "--port", str(used_port)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: cannot listen on port {used_port} ")
    assert result.stderr.count("\n") == 1


def test_arguments_go_to_vllm_and_replace_defaults(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def record(*call: Any) -> int:
        calls.append(call)
        return 7

    monkeypatch.setattr(serve, "run_server", record)
    model = serve.ServedModel(lambda: tmp_path, "some-model", 0, "It's", ("--dtype", "float32"))
    monkeypatch.setitem(serve.MODELS, "tiny", model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    more = ["--max-model-len", "512", "--additional-config", '{"hybrid_kv": {}}']
    assert serve.main(["--model=tiny", f"--port={free_port}", "--host=0.0.0.0", *more]) == 7
    ((command, environment, url, text),) = calls
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    pairs = list(itertools.pairwise(command))
    assert ("--model", str(tmp_path)) in pairs
    assert ("--served-model-name", "some-model") in pairs
    assert ("--host", "0.0.0.0") in pairs
    assert ("--port", str(free_port)) in pairs
    assert ("--dtype", "float32") in pairs
    # If an argument is given twice, the last one counts.
    assert command[-len(more) :] == more
    assert environment[serve.KV_CACHE_VARIABLE] == "1"
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert url == f"http://127.0.0.1:{free_port}"
    curl = shlex.split(text.strip().splitlines()[-1])
    assert curl[:2] == ["curl", f"{url}/v1/completions"]
    assert '"prompt": "It\'s"' in curl[-1]


def start_tool(server: str, port: int) -> "subprocess.Popen[str]":
    """Run the part of the program that runs a server, in a process of its own."""
    program = (
        "import os, sys\nfrom tools import serve\n"
        f"command = [sys.executable, '-c', {server!r}, '{port}']\n"
        f"sys.exit(serve.run_server(command, dict(os.environ), 'http://127.0.0.1:{port}', 'ready'))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("logged", "banner"),
    [
        (
            "INFO Hybrid KV cache: active, 2 managers for 6 KV cache groups: sliding_window 512",
            "Hybrid KV cache: active, 2 managers for 6 KV cache groups",
        ),
        (
            "INFO Hybrid KV cache: using base vLLM's manager, because some: feature is not covered",
            "Hybrid KV cache: using base vLLM's manager, because some: feature is not covered",
        ),
        ("INFO another line", "Hybrid KV cache: the plugin is off"),
    ],
)
def test_it_says_when_the_server_is_ready_and_ends_with_it(
    free_port: int, number: signal.Signals, logged: str, banner: str
) -> None:
    process = start_tool(f"print({logged!r}, flush=True)\n{SERVER}", free_port)
    assert [read_line(process) for _ in range(4)] == [logged, "", banner, "ready"]
    process.send_signal(number)
    rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")


def test_a_second_ctrl_c_ends_everything_at_once(free_port: int) -> None:
    process = start_tool(STUBBORN_SERVER, free_port)
    child = psutil.Process(int(read_line(process).removeprefix("child ")))
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (128 + signal.SIGINT, "")
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("server", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
)
def test_a_server_that_ends_by_itself(free_port: int, server: str, status: int) -> None:
    process = start_tool(server, free_port)
    rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (status, "")
