# SPDX-License-Identifier: Apache-2.0
"""Drive a real server for minutes with clients that ask, cancel, repeat and send invalid requests.

    python -m tools.soak --minutes 30 [--clients 12] [--seed 0] [--num-gpu-blocks 72]

It serves the tiny Gemma 3 checkpoint with a KV cache so small that requests are preempted all the
time, and compares each answer, token by token, with the answer of an idle server with base's
manager. It also checks that the server stays up, that the memory of its processes stays flat, and
that no KV cache block is in use while no request is. The exit status is 1 if a check fails.
"""

import argparse
import asyncio
import json
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
from rich.console import Console

# The support code of the tests starts the servers.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.server import ACTIVE_LINE, Server, ServerError, parse_metrics
from tools import checkpoints
from tools.soak.answers import Reference, ask_reference
from tools.soak.clients import SoakClient
from tools.soak.memory import MemoryWatch
from tools.soak.questions import MAX_MODEL_LEN, MODEL_NAME, make_questions
from tools.soak.report import Report

#: Seconds between samples of memory and of the KV cache's usage.
SAMPLE_INTERVAL = 2.0
#: Actions of each client in a round, after which the server becomes idle.
ACTIONS_A_ROUND = 6
#: Rounds between two resets of the prefix cache.
ROUNDS_A_RESET = 3
#: For the server. With either manager, oneDNN caches a kernel for each batch size. These take up to
#: 200 MiB in the worker within minutes, which would hide a leak.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
COUNTERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")

console = Console(stderr=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    # SIGTERM must end the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = run_soak(options)
    report.print(Console())
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 0 if report.passed else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Drive a server with many clients and check every answer."
    )
    parser.add_argument("--minutes", type=positive, required=True, help="length of the soak")
    parser.add_argument("--clients", type=int, default=12, help="number of clients")
    parser.add_argument("--questions", type=int, default=60, help="number of different prompts")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and actions")
    parser.add_argument(
        "--num-gpu-blocks", type=int, default=72, help="the size of the KV cache, in blocks of 32"
    )
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument(
        "--manager", choices=("hybrid", "base"), default="hybrid", help="default: %(default)s"
    )
    return parser.parse_args(arguments)


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def run_soak(options: argparse.Namespace) -> Report:
    report = Report({key: value for key, value in vars(options).items() if key != "json"})
    model = checkpoints.tiny_gemma3()
    limits = [f"--served-model-name={MODEL_NAME}", f"--max-model-len={MAX_MODEL_LEN}"]
    small = [f"--num-gpu-blocks-override={options.num_gpu_blocks}", "--max-num-batched-tokens=128"]
    try:
        with Server(
            model,
            hybrid=options.manager == "hybrid",
            arguments=limits + small,
            environment=ENVIRONMENT,
        ) as server:
            with Server(model, hybrid=False, arguments=limits) as idle:
                console.print("starting the reference server and the server to soak ...")
                idle.wait_until_healthy()
                server.wait_until_healthy()
                console.print(f"asking the reference server {options.questions} questions ...")
                questions = make_questions(options.questions, options.seed)
                reference = ask_reference(idle.url, questions)
            soak = Soak(server, reference, report, options)
            try:
                asyncio.run(soak.run())
            finally:
                soak.take_stock()
    except (ServerError, RuntimeError, httpx.HTTPError) as error:
        notes = getattr(error, "__notes__", [])
        report.breakdown = "\n".join([f"{type(error).__name__}: {error}", *notes])
    return report


class Soak:
    """One run of the clients against one server."""

    def __init__(
        self, server: Server, reference: Reference, report: Report, options: argparse.Namespace
    ) -> None:
        self._server = server
        self._reference = reference
        self._report = report
        self._options = options
        self._memory = MemoryWatch(server.processes())

    async def run(self) -> None:
        """Run rounds until the time is over.

        Raises:
            ServerError: if the server has ended.
        """
        report, options = self._report, self._options
        start = time.monotonic()
        end = start + options.minutes * 60
        # A new connection for each request: the server may close idle connections at any time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=None, limits=limits
        ) as http:
            before = await self._metrics(http)
            sampler = asyncio.create_task(self._sample(http))
            try:
                while time.monotonic() < end:
                    await self._round(http, end)
                    console.print(self._progress(end))
            finally:
                report.seconds = time.monotonic() - start
                sampler.cancel()
                with suppress(asyncio.CancelledError, httpx.HTTPError):
                    await sampler
            after = await self._metrics(http)
        for name in COUNTERS:
            sample = f"vllm:{name}_total"
            report.counters[name] = after[sample] - before[sample]

    def take_stock(self) -> None:
        """Add the server's log and memory to the report."""
        lines = self._server.log.splitlines()
        self._report.active_lines = sum(ACTIVE_LINE in line for line in lines)
        # The API server logs an error, with a traceback, for each request that it refuses.
        self._report.error_lines = [
            line for line in lines if re.match(r"\((EngineCore|Worker).* ERROR ", line)
        ]
        with suppress(ValueError):
            self._report.growths = self._memory.growths()

    async def _round(self, http: httpx.AsyncClient, end: float) -> None:
        report, options = self._report, self._options
        clients = [
            SoakClient(
                http, self._reference, report.tally, f"{options.seed}/{report.rounds}/{number}"
            )
            for number in range(options.clients)
        ]

        async def act_for_a_while(client: SoakClient) -> None:
            for _ in range(ACTIONS_A_ROUND):
                if time.monotonic() < end:
                    await client.act()

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(act_for_a_while(client))
        report.usages.append(await self._rest(http))
        report.rounds += 1
        if report.rounds % ROUNDS_A_RESET == 1:
            answer = await http.post("/reset_prefix_cache")
            report.resets.append(answer.raise_for_status().json()["success"])

    async def _rest(self, http: httpx.AsyncClient) -> float:
        """Wait until no request runs, and return the share of the KV cache that is still in use.

        Raises:
            ServerError: if the server has ended.
        """
        for _ in range(600):
            self._raise_if_down()
            metrics = await self._metrics(http)
            requests = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
            usage = metrics["vllm:kv_cache_usage_perc"]
            if requests == 0 and usage == 0:
                break
            await asyncio.sleep(0.1)
        return usage

    async def _sample(self, http: httpx.AsyncClient) -> None:
        while True:
            self._memory.sample()
            usage = (await self._metrics(http))["vllm:kv_cache_usage_perc"]
            self._report.peak_usage = max(self._report.peak_usage, usage)
            await asyncio.sleep(SAMPLE_INTERVAL)

    async def _metrics(self, http: httpx.AsyncClient) -> dict[str, float]:
        return parse_metrics((await http.get("/metrics")).raise_for_status().text)

    def _raise_if_down(self) -> None:
        if not self._server.is_running:
            raise ServerError(self._server.describe("It has ended."))

    def _progress(self, end: float) -> str:
        tally, left = self._report.tally, max(0.0, end - time.monotonic())
        return (
            f"round {self._report.rounds}: {tally.answers:,} answers, "
            f"{tally.cancelled:,} cancelled, {len(tally.faults):,} faults, {left:.0f} s left"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
