# SPDX-License-Identifier: Apache-2.0
"""Output tokens a second of the whole engine on a CPU, with the fork on and off.

    python benchmarks/engine.py [--requests 256] [--tokens 64] [--trials 3] [--json FILE]

Serves a tiny random Gemma 3 (two attention types), so that the model costs little. The engines
run in processes of their own, one after the other, and take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from common import add_common_arguments, print_table, write_json

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from checkpoints import tiny_gemma3

SWITCH = {"base": "0", "fork": "1"}


def serve(num_requests: int, num_tokens: int, checkpoint: str) -> float:
    """Output tokens a second of an engine in this process."""
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
    seconds = []
    for _ in range(3):  # the first warms up, and fills the prefix cache
        begin = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(perf_counter() - begin)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return num_requests * num_tokens / min(seconds[1:])


def serve_apart(name: str, num_requests: int, num_tokens: int, checkpoint: str) -> float:
    """`serve`, in a process of its own, with the fork on or off."""
    environment = os.environ | {
        "VLLM_HYBRID_KV": SWITCH[name],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, __file__, "--child", str(num_requests), str(num_tokens), checkpoint]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stdout + run.stderr)
    return float(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    add_common_arguments(parser, trials=3)
    arguments = parser.parse_args()
    checkpoint = str(tiny_gemma3())
    samples: dict[str, list[float]] = {name: [] for name in SWITCH}
    for trial in range(arguments.trials):
        for name in sorted(SWITCH, reverse=trial % 2 == 1):
            rate = serve_apart(name, arguments.requests, arguments.tokens, checkpoint)
            samples[name].append(rate)
    medians = {name: statistics.median(rates) for name, rates in samples.items()}
    print_table(
        f"Output tokens a second, {arguments.requests} requests at once",
        ("", "base", "fork", "fork / base"),
        [
            *(
                (f"run {i + 1}", f"{base:,.0f}", f"{fork:,.0f}", f"{fork / base:.2f}x")
                for i, (base, fork) in enumerate(zip(*samples.values(), strict=True))
            ),
            (
                "median",
                *(f"{medians[name]:,.0f}" for name in SWITCH),
                f"{medians['fork'] / medians['base']:.2f}x",
            ),
        ],
    )
    if arguments.json:
        write_json(arguments.json, samples)


if __name__ == "__main__":
    main()
