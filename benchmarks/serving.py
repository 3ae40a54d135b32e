# SPDX-License-Identifier: Apache-2.0
"""Two servers, one with base's manager and one with the hybrid one, under the same requests.

    python benchmarks/serving.py [--model gemma3-270m tiny] [--workload prefixes chat short]
                                 [--rounds 3] [--requests N] [--blocks N] [--json FILE]

The client is vLLM's own serving benchmark. Both servers have started before the first run. They
take turns: one waits without requests. Each round sends new prompts, the same to both.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from common import print_table, write_json
from serving_client import Client, ClientError
from serving_results import ResultError, Sample, read_sample, table_rows
from serving_workloads import (
    BLOCK_SIZE,
    CONCURRENCY,
    MAX_MODEL_LEN,
    MODELS,
    WORKLOADS,
    ServedModel,
    client_arguments,
    count_requests,
    write_chats,
)

# `serving_workloads` has added the root of the repository, for `tools`.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.server import MODEL_NAME, Server, ServerError, parse_metrics
from tools.checkpoints.store import CheckpointError

MANAGERS = {"base": False, "hybrid": True}
#: The title that vLLM gives to the process of the engine core.
CORE_TITLE = "VLLM::EngineCore"
#: Lets the model run in the process of the engine core, as it does by default on one GPU. Otherwise
#: a CPU build runs it in a process of its own, and the engine core spins while it waits for that.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

console = Console(stderr=True)


def server_arguments(model: ServedModel) -> list[str]:
    """Arguments of `vllm serve`; the same for both servers."""
    return [
        f"--dtype={model.dtype}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-gpu-blocks-override={model.num_blocks}",
        f"--max-model-len={MAX_MODEL_LEN}",
        f"--max-num-seqs={max(CONCURRENCY.values())}",
        "--distributed-executor-backend=uni",
        # Servers of tests check the manager after each step.
        "--additional-config={}",
    ]


def engine_core(server: Server) -> psutil.Process:
    """The process of the engine core, in which scheduler and model run."""
    named = [p for p in server.processes() if any(CORE_TITLE in s for s in p.cmdline())]
    if len(named) != 1:
        raise ServerError(server.describe(f"One process must be {CORE_TITLE}, got {named}."))
    return named[0]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def metrics(server: Server) -> dict[str, float]:
    return parse_metrics(server.http.get("/metrics").raise_for_status().text)


class Bench:
    """A model's two servers and the client."""

    def __init__(self, servers: dict[str, Server], client: Client, checkpoint: Path) -> None:
        from transformers import AutoTokenizer

        self.servers = servers
        self.client = client
        self.checkpoint = checkpoint
        self.cores = {name: engine_core(server) for name, server in servers.items()}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)

    def measure(self, name: str, workload: str, num_requests: int, seed: int) -> Sample:
        """One run of one server, which begins with an empty prefix cache.

        Raises:
            ServerError: the server has ended, or its cache could not be reset.
            ClientError: the benchmark failed.
            ResultError: the run did not measure what it should have measured.
        """
        server = self.servers[name]
        server.wait_for(server.reset_prefix_cache, bool, 60)
        url = server.url
        arguments = client_arguments(workload, num_requests, seed, url, MODEL_NAME, self.checkpoint)
        if workload == "chat":
            chats = self.client.folder / "chats.json"
            write_chats(chats, self.tokenizer, num_requests, seed)
            arguments.append(f"--dataset-path={chats}")
        before, cpu_before = metrics(server), cpu_seconds(self.cores[name])
        try:
            result = self.client.run(arguments)
            cpu = cpu_seconds(self.cores[name]) - cpu_before
            return read_sample(result, num_requests, before, metrics(server), cpu)
        except Exception as error:
            # A server that has died is the cause of most other errors.
            server.wait_for(lambda: server.is_running, bool, 0)
            error.add_note(f"{name}, {workload}, {url}")
            raise


def run_model(
    name: str, model: ServedModel, workloads: Sequence[str], rounds: int, requests: int | None
) -> dict[str, dict[str, list[Sample]]]:
    """Print a table for each workload, and return samples by workload and by manager."""
    checkpoint = model.checkpoint()
    samples: dict[str, dict[str, list[Sample]]]
    samples = {workload: {manager: [] for manager in MANAGERS} for workload in workloads}
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        console.print(f"{name}: two servers start ...")
        servers = {
            manager: stack.enter_context(
                Server(
                    checkpoint,
                    hybrid=hybrid,
                    arguments=server_arguments(model),
                    environment=ENVIRONMENT,
                )
            )
            for manager, hybrid in MANAGERS.items()
        }
        for server in servers.values():
            server.wait_until_healthy()
        bench = Bench(servers, client, checkpoint)
        for workload in workloads:
            num_requests = count_requests(workload, requests or model.num_requests[workload])
            warm_up = count_requests(workload, min(num_requests, CONCURRENCY[workload]))
            for manager in MANAGERS:
                bench.measure(manager, workload, warm_up, seed=0)
            for i in range(rounds):
                for manager in sorted(MANAGERS, reverse=i % 2 == 1):
                    sample = bench.measure(manager, workload, num_requests, seed=1 + i)
                    samples[workload][manager].append(sample)
                    console.print(
                        f"{name}, {workload}, round {i + 1}, {manager}: "
                        f"{sample['request_throughput']:.2f} requests/s, "
                        f"{sample['hit_rate']:.1f}% hits",
                        highlight=False,
                    )
            print_table(
                f"{name}: {WORKLOADS[workload]} (above 1x: the hybrid manager is better)",
                ("", "base", "hybrid", "ratio", "of each round"),
                table_rows(samples[workload]["base"], samples[workload]["hybrid"]),
            )
    return samples


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N")
    parser.add_argument(
        "--requests", type=_positive, metavar="N", help="of a run (default: by model and workload)"
    )
    parser.add_argument(
        "--blocks", type=_positive, metavar="N", help="of both pools (default: by model)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    samples = {}
    try:
        for name in arguments.model:
            model = MODELS[name]
            model = replace(model, num_blocks=arguments.blocks or model.num_blocks)
            samples[name] = run_model(
                name, model, arguments.workload, arguments.rounds, arguments.requests
            )
    except (ServerError, ClientError, ResultError, CheckpointError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        raise SystemExit(f"error: {error}{notes}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the servers have ended") from None
    if arguments.json:
        write_json(arguments.json, samples)


if __name__ == "__main__":
    main()
