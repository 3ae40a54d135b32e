# SPDX-License-Identifier: Apache-2.0
"""Events, structured output, LoRA and sleep on the real engine, with either manager."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from support.engine import EnginePair, EngineProcess, EngineResult, Round, assert_same_outputs
from support.engine_prompts import prompts
from support.lora import write_adapter
from tools.checkpoints.store import CACHE_VARIABLE
from tools.checkpoints.tiny_models import TINY_GEMMA3, ensure_tiny
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams


@contextmanager
def subscriber(endpoint: str) -> Iterator[list[tuple[int, KVEventBatch]]]:
    """A subscriber to KV cache events; the list fills with sequence numbers and batches."""
    received: list[tuple[int, KVEventBatch]] = []
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 200)
    socket.subscribe(b"")
    socket.connect(endpoint)
    done = threading.Event()

    def receive() -> None:
        # Read until nothing has arrived for a while after the engine has ended.
        while True:
            try:
                _, sequence, payload = socket.recv_multipart()
            except zmq.Again:
                if done.is_set():
                    return
                continue
            received.append((int.from_bytes(sequence, "big"), decode(payload)))

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield received
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)


def published(engine: EngineProcess, model: Path, endpoint: str) -> tuple[EngineResult, list[Any]]:
    """Run repeated prompts with evictions; returns also the events that a subscriber received."""
    batches = [prompts([310, 130, 200, 90], seed=seed) for seed in (3, 3, 4, 5, 3)]
    with subscriber(endpoint) as received:
        result = engine.run(
            model,
            [Round(batch, max_tokens=20) for batch in batches],
            max_model_len=512,
            num_gpu_blocks_override=120,
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": endpoint,
            },
        )
    assert [number for number, _ in received] == list(range(len(received)))
    return result, [event for _, batch in received for event in batch.events]


def test_kv_cache_events_over_zmq(engines: EnginePair, tiny_gemma3: Path, tmp_path: Path) -> None:
    """A subscriber receives all published events, which are the same from both managers."""
    base, of_base = published(engines.base, tiny_gemma3, f"ipc://{tmp_path}/base")
    hybrid, of_hybrid = published(engines.hybrid, tiny_gemma3, f"ipc://{tmp_path}/hybrid")

    assert hybrid.hybrid_is_active and not base.hybrid_is_active
    assert_same_outputs(base, hybrid)
    assert len(of_hybrid) > 100
    assert list(map(repr, of_hybrid)) == hybrid.events
    assert sorted(map(repr, of_hybrid)) == sorted(map(repr, of_base))
    # All blocks but the first of a prompt name the block before them, which was stored earlier.
    stored = [event for event in of_hybrid if isinstance(event, BlockStored)]
    hashes: set[Any] = set()
    for event in stored:
        assert event.parent_block_hash is None or event.parent_block_hash in hashes
        hashes.update(event.block_hashes)
    assert sum(event.parent_block_hash is not None for event in stored) > 10
    assert {event.group_idx for event in stored} == set(range(hybrid.num_groups))
    assert any(isinstance(event, BlockRemoved) for event in of_hybrid)


def test_structured_output(engines: EnginePair, tiny_gemma3: Path) -> None:
    pattern = "(yes|no)(, (yes|no)){3}"
    choice = StructuredOutputsParams(regex=pattern)
    base, hybrid = engines.run(
        tiny_gemma3,
        [
            Round(
                ["The first one", "Something else entirely"] * 2,
                max_tokens=24,
                sampling={"structured_outputs": choice, "ignore_eos": False},
            )
        ]
        * 2,
    )

    assert_same_outputs(base, hybrid)
    for again in hybrid.rounds:
        for text in again.texts:
            assert re.fullmatch(pattern, text)


def test_adapters(engines: EnginePair, tiny_gemma3: Path, tmp_path: Path) -> None:
    """Two LoRA adapters and no adapter take turns. Each hits only blocks that it has computed."""
    first, second = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, tiny_gemma3, seed=number)))
        for number, name in enumerate(("first", "second"), start=1)
    )
    batch = prompts([310, 130, 200], seed=4)
    base, hybrid = engines.run(
        tiny_gemma3,
        [Round(batch, max_tokens=12, lora=lora) for lora in (first, second, None) * 2],
        enable_lora=True,
        max_lora_rank=8,
    )

    assert_same_outputs(base, hybrid)
    outputs = [again.token_ids for again in hybrid.rounds]
    assert outputs[:3] == outputs[3:]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]
    for before, after in zip(hybrid.rounds[:3], hybrid.rounds[3:], strict=True):
        assert sum(before.num_cached_tokens) == 0
        assert min(after.num_cached_tokens) >= 96


Call = tuple[int, str, dict[str, Any]]


def reload_weights(step: int, model: Path) -> Call:
    weights = {"weights_path": str(model)}
    return step, "collective_rpc", {"method": "reload_weights", "kwargs": weights}


def test_sleep_and_new_weights(
    engines: EnginePair, tiny_gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep pauses the engine, preempts running requests and resets the prefix cache.

    On CPUs, base keeps the weights and the KV cache in memory.
    """
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(CACHE_VARIABLE, str(tmp_path))
        other = ensure_tiny(replace(TINY_GEMMA3, seed=1))
    pause: Call = (4, "sleep", {"level": 0, "mode": "keep"})
    sleep: Call = (4, "sleep", {"level": 1, "mode": "keep"})
    sleep_when_idle: Call = (0, "sleep", {"level": 2})
    batch = prompts([310, 130, 200], seed=5)
    calls: list[list[Call]] = [
        [],
        [sleep, reload_weights(5, other), (6, "wake_up", {})],
        [],
        [sleep_when_idle, (0, "wake_up", {})],
        [sleep_when_idle, reload_weights(0, tiny_gemma3), (0, "wake_up", {})],
        [pause, (7, "wake_up", {"tags": ["scheduling"]})],
    ]
    base, hybrid = engines.run(
        tiny_gemma3, [Round(batch, max_tokens=8, calls=before_steps) for before_steps in calls]
    )

    assert_same_outputs(base, hybrid)
    assert [again.counters for again in hybrid.rounds] == [again.counters for again in base.rounds]
    first, changed, hit_by_changed, other_weights, restored, paused = hybrid.rounds
    assert changed.counters["num_preemptions"] == len(batch)
    assert paused.counters["num_preemptions"] == 0
    for before, after in zip(first.token_ids, changed.token_ids, strict=True):
        assert before[:3] == after[:3] and before[3:] != after[3:]
    assert first.token_ids == restored.token_ids == paused.token_ids
    # With the other weights, all of it was computed, or resumed from blocks of `changed`.
    assert hit_by_changed.token_ids == other_weights.token_ids != first.token_ids
    for forgotten in (other_weights, restored):
        assert forgotten.num_cached_tokens == first.num_cached_tokens == [0, 0, 0]
    for hit in (changed, hit_by_changed, paused):
        assert hit.num_cached_tokens == [288, 128, 192]
