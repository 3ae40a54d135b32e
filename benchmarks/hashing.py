# SPDX-License-Identifier: Apache-2.0
"""Block hashes: base's hasher and the hybrid manager's, in one process.

    python benchmarks/hashing.py [--trials N] [--json FILE]

Every call has another prompt, as every request does. Otherwise the branch predictor of the CPU
would learn the sizes of repeated tokens. Ids are log-uniform from 128 to 262,143, which makes 3.3
bytes per token in a pickle. English and Python code have 3.3 and 3.5 bytes with Gemma 3's
tokenizer. Uniform ids are measured for comparison: nearly all take five bytes, 1.5 times as much
work for SHA-256.
"""

import argparse
import math
import random
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

from common import (
    add_common_arguments,
    format_seconds,
    median_seconds,
    print_table,
    write_json,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.hybrid.block_hashing.block_hasher import (
    RequestBlockHasher,
    create_request_block_hasher,
)
from vllm.v1.request import Request

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
BLOCK_SIZES = (16, 32, 128)
PROMPT_TOKENS = 2048
PROMPTS = 8
DECODE_BLOCKS = 32
LONG_PROMPT_TOKENS = 100_000
VOCABULARY = 262_144

Row = dict[str, Any]


def text_like(generator: random.Random, count: int) -> list[int]:
    return [int(128 * (VOCABULARY / 128) ** generator.random()) for _ in range(count)]


def uniform(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def make_hashers(algorithm: str, block_size: int) -> dict[str, RequestBlockHasher]:
    hash_fn = get_hash_fn_by_name(algorithm)
    # The engine core does this first. Any first parent works, and this one logs nothing.
    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_fn("first"))
    base = kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
    hybrid = create_request_block_hasher(block_size, hash_fn, base)
    if hybrid is base:
        raise SystemExit(
            f"{algorithm}, block size {block_size}: the hasher must be native, got base's"
        )
    return {"base": base, "hybrid": hybrid}


def make_request(tokens: list[int]) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=8), None)


def compare(functions: dict[str, Callable[[], object]], trials: int) -> Row:
    seconds = median_seconds(functions, trials)
    return seconds | {"ratio": seconds["base"] / seconds["hybrid"]}


def prompt_case(algorithm: str, block_size: int, draw: Any, trials: int) -> Row:
    """One whole prompt."""
    hashers = make_hashers(algorithm, block_size)
    generator = random.Random(0)
    requests = [make_request(draw(generator, PROMPT_TOKENS)) for _ in range(PROMPTS)]
    if any(hashers["base"](request) != hashers["hybrid"](request) for request in requests):
        raise SystemExit(f"{algorithm}, block size {block_size}: the hashes must be those of base")

    def hash_next(hasher: RequestBlockHasher) -> Callable[[], object]:
        turns = cycle(requests)
        return lambda: hasher(next(turns))

    row = compare({name: hash_next(hasher) for name, hasher in hashers.items()}, trials)
    return {"algorithm": algorithm, "block_size": block_size, "tokens": draw.__name__} | row


def decode_case(algorithm: str, block_size: int, trials: int) -> Row:
    """Hash blocks that become full one at a time after a prompt; seconds per block."""
    hashers = make_hashers(algorithm, block_size)
    generator = random.Random(0)
    tokens = text_like(generator, PROMPT_TOKENS + DECODE_BLOCKS * block_size)
    full = make_request(tokens)
    hashes = hashers["base"](full)
    first = PROMPT_TOKENS // block_size
    # One request per block, which is its only block without a hash.
    requests = []
    for known in range(first, first + DECODE_BLOCKS):
        requests.append(make_request(tokens[: (known + 1) * block_size]))
        requests[-1].block_hashes = hashes[:known]

    def hash_each(hasher: RequestBlockHasher) -> Callable[[], float]:
        def timed() -> float:
            start = perf_counter()
            for request in requests:
                hasher(request)
            return (perf_counter() - start) / len(requests)

        return timed

    row = compare({name: hash_each(hasher) for name, hasher in hashers.items()}, trials)
    return {"algorithm": algorithm, "block_size": block_size} | row


def pause_case(algorithm: str, block_size: int, trials: int) -> Row:
    """Medians of the longest pause of another thread while a long prompt is hashed."""
    hashers = make_hashers(algorithm, block_size)
    request = make_request(text_like(random.Random(0), LONG_PROMPT_TOKENS))
    pauses: dict[str, list[float]] = {"idle": [], "base": [], "hybrid": []}
    seconds: dict[str, list[float]] = {"base": [], "hybrid": []}
    for _ in range(trials):
        for name, hasher in hashers.items():
            pause, took = longest_pause(partial(hasher, request))
            pauses[name].append(pause)
            seconds[name].append(took)
        # Do nothing for as long as base takes. This shows the pauses that the machine causes.
        pauses["idle"].append(longest_pause(lambda: time.sleep(seconds["base"][-1]))[0])
    medians = {f"{name}_pause": statistics.median(values) for name, values in pauses.items()}
    medians |= {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["base_pause"] / medians["hybrid_pause"]
    return {"algorithm": algorithm, "block_size": block_size, "ratio": ratio} | medians


def longest_pause(work: Callable[[], object]) -> tuple[float, float]:
    """The largest gap between two clock reads of another thread, and the seconds of work."""
    started, stop, gaps = threading.Event(), threading.Event(), [0.0]

    def watch() -> None:
        longest, before = 0.0, perf_counter()
        started.set()
        while not stop.is_set():
            now = perf_counter()
            longest = max(longest, now - before)
            before = now
        # Also count work that ended before this thread ran again.
        gaps[0] = max(longest, perf_counter() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    started.wait()
    start = perf_counter()
    work()
    took = perf_counter() - start
    stop.set()
    thread.join()
    return gaps[0], took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_arguments(parser, trials=101)
    arguments = parser.parse_args()
    trials = arguments.trials

    prompts = [prompt_case(a, b, text_like, trials) for a in ALGORITHMS for b in BLOCK_SIZES]
    prompts += [prompt_case(a, 16, uniform, trials) for a in ALGORITHMS]
    decode = [decode_case(a, 16, trials) for a in ALGORITHMS]
    pauses = [pause_case(a, 16, math.ceil(trials / 10)) for a in ALGORITHMS]

    print_table(
        f"A prompt of {PROMPT_TOKENS:,} tokens",
        ["algorithm", "block size", "tokens", "base", "hybrid", "ratio"],
        [[r["algorithm"], r["block_size"], r["tokens"], *figures(r)] for r in prompts],
    )
    print_table(
        "A block that fills during decode",
        ["algorithm", "block size", "base", "hybrid", "ratio"],
        [[r["algorithm"], r["block_size"], *figures(r)] for r in decode],
    )
    print_table(
        f"The longest pause of another thread, {LONG_PROMPT_TOKENS:,} tokens, block size 16",
        ["algorithm", "base", "hybrid", "ratio", "no work", "base takes", "hybrid takes"],
        [[r["algorithm"], *pause_figures(r)] for r in pauses],
    )
    if arguments.json:
        write_json(arguments.json, {"prompt": prompts, "decode": decode, "pause": pauses})


def figures(row: Row) -> list[str]:
    return [format_seconds(row["base"]), format_seconds(row["hybrid"]), f"{row['ratio']:.1f}x"]


def pause_figures(row: Row) -> list[str]:
    names = ("base", "hybrid", "idle")
    base, hybrid, idle = (format_seconds(row[f"{name}_pause"]) for name in names)
    durations = [format_seconds(row["base"]), format_seconds(row["hybrid"])]
    return [base, hybrid, f"{row['ratio']:.1f}x", idle, *durations]


if __name__ == "__main__":
    main()
