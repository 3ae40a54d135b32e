# SPDX-License-Identifier: Apache-2.0
"""Prefill in one engine, decode in another, over NIXL on a CPU, with either manager.

    python -m tools.prefill_decode [--manager base|hybrid]

Needs NIXL, which is not among the pinned packages: ``pip install --no-deps nixl nixl-cu12`` (it
runs without a GPU). The model is a tiny Gemma 3: one full-attention group, and five with windows
of 64 tokens in blocks of 32. Each answer is compared with that of one engine that does both. The
exit status is 1 if an answer of the hybrid manager differs.
"""

import argparse
import importlib.util
import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_TOKENS = 24
#: Lengths of prompts around the ends of blocks and windows. At 31 modulo 32, the window of the last
#: token begins one block earlier than the window of the next token.
LENGTHS = (5, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161, 191, 223, 287, 300)
MANAGERS = ("base", "hybrid")
COLUMNS = ("manager", "answers", "differ", "lengths of their prompts", "hit in the decode engine")
Answer = dict[str, Any]


@dataclass(frozen=True)
class Role:
    """The settings of an engine's process."""

    name: str
    hybrid: bool
    port: int = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "VLLM_HYBRID_KV": "1" if self.hybrid else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            # Base would compile small functions for longer than the engines run.
            "TORCHDYNAMO_DISABLE": "1",
            # Engines that exchange blocks must agree on their hashes.
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
        }


def serve(pipe: Connection, role: Role) -> None:
    """Answer batches of (prompts, transfer parameters, number of tokens) until None comes."""
    os.environ.update(role.environment)
    from tools import checkpoints
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    arguments: dict[str, Any] = {"disable_hybrid_kv_cache_manager": False}
    if role.port:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"
        )
    llm = LLM(
        model=str(checkpoints.tiny_gemma3()),
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=8,
        num_gpu_blocks_override=800,
        kv_cache_memory_bytes=64 << 20,
        additional_config={"hybrid_kv": {"check_integrity": True}},
        **arguments,
    )
    engine_core: Any = llm.llm_engine.engine_core
    manager = engine_core.engine_core.scheduler.kv_cache_manager
    assert type(manager).__module__.startswith("vllm.v1.core.hybrid") == role.hybrid
    pipe.send(role.name)
    while (batch := pipe.recv()) is not None:
        prompts, transfers, max_tokens = batch
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args={"kv_transfer_params": transfer} if transfer else None,
            )
            for transfer in transfers
        ]
        inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        pipe.send(
            [
                {
                    "tokens": list(output.outputs[0].token_ids),
                    "transfer": output.kv_transfer_params,
                    "hit": output.num_cached_tokens,
                }
                for output in outputs
            ]
        )


class Engine:
    """An engine in its own process."""

    def __init__(self, role: Role) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, role), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()

    def answer(
        self, prompts: Sequence[list[int]], transfers: Sequence[Any], max_tokens: int
    ) -> list[Answer]:
        self._pipe.send((prompts, transfers, max_tokens))
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def make_batches() -> list[list[list[int]]]:
    """Prompts one by one, then all together, then all together with different ends."""
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 250) for _ in range(length)] for length in LENGTHS]
    others = [prompt[: len(prompt) * 2 // 3] + prompts[-1][:50] for prompt in prompts]
    return [[prompt] for prompt in prompts] + [prompts[:10], prompts[10:], others[:10], others[10:]]


def compare(name: str, batches: list[list[list[int]]], expected: list[list[Answer]]) -> list[str]:
    """A row of the table (`COLUMNS`) for the manager ``name``."""
    hybrid = name == "hybrid"
    prefill = Engine(Role(f"{name}, prefill", hybrid, port=25600))
    decode = Engine(Role(f"{name}, decode", hybrid, port=25700))
    num_answers = num_hit = 0
    wrong = []
    for prompts, right in zip(batches, expected, strict=True):
        ask = [{"do_remote_decode": True, "do_remote_prefill": False}] * len(prompts)
        firsts = prefill.answer(prompts, ask, 1)
        answers = decode.answer(prompts, [first["transfer"] for first in firsts], MAX_TOKENS)
        for prompt, answer, single in zip(prompts, answers, right, strict=True):
            num_answers += 1
            num_hit += answer["hit"] or 0
            if answer["tokens"] != single["tokens"]:
                wrong.append(len(prompt))
    for engine in (prefill, decode):
        engine.stop()
    lengths = ", ".join(map(str, wrong)) or "-"
    return [name, str(num_answers), str(len(wrong)), lengths, str(num_hit)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--manager", choices=MANAGERS, help="only one of the two")
    only = parser.parse_args().manager
    if importlib.util.find_spec("nixl") is None:
        parser.error("NIXL is not installed; run: pip install --no-deps nixl nixl-cu12")
    batches = make_batches()
    single = Engine(Role("one engine", hybrid=False))
    expected = [single.answer(prompts, [None] * len(prompts), MAX_TOKENS) for prompts in batches]
    single.stop()
    table = Table(title="Prefill and decode in two engines")
    for column in COLUMNS:
        table.add_column(column)
    rows = [compare(name, batches, expected) for name in ([only] if only else MANAGERS)]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return int(any(row[0] == "hybrid" and row[2] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
