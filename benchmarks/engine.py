# SPDX-License-Identifier: Apache-2.0
"""Output tokens per second of the whole engine on a CPU, with either manager.

    python benchmarks/engine.py [--requests 256] [--tokens 64] [--trials 9] [--json FILE]

The model is a tiny random Gemma 3 with two attention types, which costs little time. Each engine
runs in its own process. The engines take turns: one generates while the other waits.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from common import add_common_arguments, print_table, write_json

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools.checkpoints import tiny_gemma3

SWITCH = {"base": "0", "hybrid": "1"}
#: The prefix of the lines that a child process prints for its parent.
MARK = "tokens per second: "


def serve(num_requests: int, num_tokens: int, checkpoint: str) -> None:
    """Generate once for each line of input, and print the tokens per second."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=num_requests,
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [1 + (number * 31 + i * 7) % 250 for i in range(64)]}
        for number in range(num_requests)
    ]
    for _ in sys.stdin:
        begin = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        print(f"{MARK}{num_requests * num_tokens / seconds}", flush=True)


class Engine:
    """An engine in its own process, with the manager ``name``."""

    def __init__(self, name: str, num_requests: int, num_tokens: int, checkpoint: str) -> None:
        environment = os.environ | {
            "VLLM_HYBRID_KV": SWITCH[name],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(num_requests), str(num_tokens), checkpoint],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def generate(self) -> float:
        """Output tokens per second."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        raise SystemExit(f"an engine must run until the end, got exit status {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    add_common_arguments(parser, trials=9)
    arguments = parser.parse_args()
    checkpoint = str(tiny_gemma3())
    engines = {
        name: Engine(name, arguments.requests, arguments.tokens, checkpoint) for name in SWITCH
    }
    for engine in engines.values():
        engine.generate()  # warms up, and fills the prefix cache
    samples: dict[str, list[float]] = {name: [] for name in SWITCH}
    for trial in range(arguments.trials):
        for name in sorted(SWITCH, reverse=trial % 2 == 1):
            samples[name].append(engines[name].generate())
    for engine in engines.values():
        engine.close()
    pairs = list(zip(samples["base"], samples["hybrid"], strict=True))
    rows: list[tuple[str, ...]] = [
        (f"round {i + 1}", f"{base:,.0f}", f"{hybrid:,.0f}", f"{hybrid / base:.2f}x")
        for i, (base, hybrid) in enumerate(pairs)
    ]
    rows.append(
        (
            "median",
            *(f"{statistics.median(samples[name]):,.0f}" for name in SWITCH),
            f"{statistics.median(hybrid / base for base, hybrid in pairs):.2f}x",
        )
    )
    print_table(
        f"Output tokens per second, {arguments.requests} requests at once",
        ("", "base", "hybrid", "hybrid / base"),
        rows,
    )
    if arguments.json:
        write_json(arguments.json, samples)


if __name__ == "__main__":
    main()
