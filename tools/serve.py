# SPDX-License-Identifier: Apache-2.0
"""Serve Gemma 3 270M with vLLM's OpenAI-compatible server; `make serve` runs this.

    python -m tools.serve [--port 8000] [--model gemma3-270m|tiny] [vLLM's own options ...]

The model is converted first if it is missing. An obstacle is reported in one line before anything
is loaded. vLLM itself loads the plugin with the hybrid manager; this program does not.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tools import checkpoints
from tools.checkpoints.store import CheckpointError, require_memory

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = "8000"
KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
DEFAULT_KV_CACHE_GIB = "1"
GIB = 1 << 30
INTERRUPTED = 128 + signal.SIGINT


class ServeError(RuntimeError):
    """The server cannot start. The message is one line that says what to do."""


@dataclass(frozen=True)
class ServedModel:
    checkpoint: Callable[[], Path]
    name: str
    #: Bytes that the processes of the server take beside the KV cache.
    memory: int
    prompt: str
    arguments: tuple[str, ...] = ()


MODELS = {
    "gemma3-270m": ServedModel(checkpoints.gemma3_270m, "gemma-3-270m", 5 * GIB, "A B C D E F"),
    "tiny": ServedModel(
        checkpoints.tiny_gemma3, "tiny-gemma3", 2 * GIB, "Hello", ("--dtype", "float32")
    ),
}


def parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise ServeError(f"the port must be from 1 to 65535, got {text!r}")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the arguments for vLLM."""
    parser = argparse.ArgumentParser(
        description="Serve a model with vLLM's OpenAI-compatible server.",
        epilog="All other options go to vLLM's server as they are, as in `vllm serve`.",
        # No abbreviations: one of our options, abbreviated, could be an option of vLLM.
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=MODELS, default="gemma3-270m")
    parser.add_argument("--host", default=DEFAULT_HOST, help=f"address (default {DEFAULT_HOST})")
    parser.add_argument(
        "--port",
        default=os.environ.get("PORT") or DEFAULT_PORT,
        help=f"default: $PORT, or {DEFAULT_PORT}",
    )
    return parser.parse_known_args(arguments)


def check_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    # A bare folder of that name, such as the one in this repository, has no origin.
    if spec is None or spec.origin is None:
        raise ServeError("vLLM is not installed in this Python environment; `make setup` does it")


def check_port(host: str, port: int) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # Servers do the same, so that connections that were just closed do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ServeError(
            f"cannot listen on port {port} of {host} ({error.strerror or error}); "
            f'choose another one, as in: make serve SERVE_ARGS="--port {port % 65535 + 1}"'
        ) from error


def kv_cache_bytes(environment: Mapping[str, str]) -> int:
    text = environment[KV_CACHE_VARIABLE]
    if not (text.isascii() and text.isdigit()):
        raise ServeError(f"{KV_CACHE_VARIABLE} must be a whole number of GiB, got {text!r}")
    return int(text) * GIB


def server_environment() -> dict[str, str]:
    defaults = {
        KV_CACHE_VARIABLE: DEFAULT_KV_CACHE_GIB,
        # The model is a local folder; no hub is needed.
        "HF_HUB_OFFLINE": "1",
    }
    if sys.stdout.isatty():
        # The server writes into a pipe, and so would not use colours.
        defaults["VLLM_LOGGING_COLOR"] = "1"
    return defaults | os.environ


def server_command(
    model: ServedModel, folder: Path, host: str, port: int, more: Sequence[str]
) -> list[str]:
    # Not `vllm serve`: that command reads the version of a distribution called `vllm`, and fails
    # with a traceback if vLLM is installed as `vllm-cpu`. The server is the same.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", model.name, "--host", host, "--port", str(port)]
    # Compiling the model would take minutes on a small machine, and more memory. The user's
    # arguments come last, and so replace ours.
    return [*command, "--max-model-len", "4096", "--enforce-eager", *model.arguments, *more]


def greeting(model: ServedModel, url: str) -> str:
    body = json.dumps(
        {"model": model.name, "prompt": model.prompt, "max_tokens": 16, "temperature": 0}
    )
    curl = f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return f"{model.name} is ready at {url}/v1 (Ctrl-C ends it). Try:\n\n  {curl}\n"


class ServerLog:
    """Shows the output of a server, and remembers what the plugin says in it."""

    _PLUGIN_LINE = re.compile(rb"Hybrid KV cache: [^\r\n\x1b]*")

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._plugin = "Hybrid KV cache: the plugin is off"
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()

    def manager(self) -> str:
        """Which manager serves the engine, in one line without the arrangement of the groups."""
        name, _, found = self._plugin.partition(": ")
        return f"{name}: {found.split(': ')[0] if found.startswith('active') else found}"

    def wait(self) -> None:
        """Wait for the rest of the output, but not for a process that the server left behind."""
        self._thread.join(timeout=5)

    def _show(self) -> None:
        for line in self._output:
            if found := self._PLUGIN_LINE.search(line):
                self._plugin = found[0].decode(errors="replace")
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def say_when_ready(url: str, text: str, server: "subprocess.Popen[bytes]", log: ServerLog) -> None:
    """Wait until the server answers, and print ``text``; return early if the server ends."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                print(f"\n{log.manager()}\n{text}", flush=True)
                return
        except OSError:
            time.sleep(0.5)


def run_server(command: list[str], environment: dict[str, str], url: str, text: str) -> int:
    """Run the server until it ends or a signal ends it, and return our exit status.

    The first Ctrl-C ends it in an orderly way, the second one at once.
    """
    # A process group of its own: otherwise a Ctrl-C in the terminal reaches each of its processes,
    # and the first ones that end make the others report errors.
    server = subprocess.Popen(
        command,
        env=environment,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert server.stdout is not None
    log = ServerLog(server.stdout)
    received: list[int] = []

    def end_server(number: int, _: FrameType | None) -> None:
        received.append(number)
        if server.poll() is not None:
            return
        if len(received) == 1:
            # Not SIGINT, which causes a traceback while the server still loads.
            server.terminate()
        else:
            os.killpg(server.pid, signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_server)
    threading.Thread(target=say_when_ready, args=(url, text, server, log), daemon=True).start()
    status = server.wait()
    log.wait()
    if status and received:
        return 128 + received[0]
    # A negative status is the signal that killed it.
    return status if status >= 0 else 128 - status


def serve(arguments: Sequence[str] | None) -> int:
    options, more = parse_arguments(arguments)
    model = MODELS[options.model]
    host, port = options.host, parse_port(options.port)
    environment = server_environment()
    check_vllm()
    check_port(host, port)
    kv_cache = kv_cache_bytes(environment)
    lower = f"lower {KV_CACHE_VARIABLE}, " if kv_cache > GIB else ""
    require_memory(
        model.memory + kv_cache,
        f"to serve {model.name} with {KV_CACHE_VARIABLE}={kv_cache // GIB} (GiB)",
        f"{lower}end other programs",
    )
    folder = model.checkpoint()
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    print(f"Loading {model.name} from {folder}", flush=True)
    command = server_command(model, folder, host, port, more)
    return run_server(command, environment, url, greeting(model, url))


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return serve(arguments)
    except (ServeError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
