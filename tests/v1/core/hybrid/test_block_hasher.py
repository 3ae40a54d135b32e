# SPDX-License-Identifier: Apache-2.0
"""Native block hashes are base's, for every algorithm and kind of request."""

import gc
import hashlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plugin_state import collected_log
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.hybrid._core import BlockHasher, sha256_portable
from vllm.v1.core.hybrid.block_hashing import block_hasher
from vllm.v1.core.hybrid.block_hashing.block_hasher import (
    MAX_NATIVE_BLOCK_SIZE,
    create_request_block_hasher,
)
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
#: How a pickle of (parent, tokens, None) ends.
NO_KEYS = b"N\x87\x94."
#: Values around each length that a token has in a pickle or in CBOR.
EDGES = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, -1, -24, -25, -256, -257, -(2**31)]

tokens_of_any_length = st.one_of(
    st.sampled_from(EDGES), st.integers(0, 262_144), st.integers(-(2**31), 2**31 - 1)
)


@pytest.fixture(params=ALGORITHMS)
def hash_fn(request: pytest.FixtureRequest) -> Callable[[Any], bytes]:
    return get_hash_fn_by_name(request.param)


@pytest.fixture(autouse=True)
def none_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", hashlib.sha256(b"none").digest(), False)


def make_request(tokens: list[int], **changes: Any) -> Request:
    arguments: dict[str, Any] = {"prompt_token_ids": tokens} | changes
    return Request(
        request_id="r",
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        **arguments,
    )


def image(offset: int, length: int) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=f"image {offset}", mm_position=position
    )


def assert_base_agrees(
    request: Request, block_size: int, hash_fn: Callable[[Any], bytes], steps: list[list[int]]
) -> int:
    """Compare the hashes after the prompt and after each step; returns the number of hashes."""
    base = get_request_block_hasher(block_size, hash_fn)
    ours = create_request_block_hasher(block_size, hash_fn, base)
    assert ours is not base
    for new_tokens in ([], *steps):
        request.append_output_token_ids(new_tokens)
        expected = base(request)
        assert ours(request) == expected
        request.block_hashes.extend(expected)
    return len(request.block_hashes)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), algorithm=st.sampled_from(ALGORITHMS), block_size=st.integers(1, 70))
def test_any_tokens_in_any_steps(data: st.DataObject, algorithm: str, block_size: int) -> None:
    tokens = st.lists(tokens_of_any_length, max_size=3 * block_size)
    prompt = data.draw(st.lists(tokens_of_any_length, min_size=1, max_size=4 * block_size))
    request = make_request(prompt)
    steps = data.draw(st.lists(tokens, max_size=3))
    num_hashes = assert_base_agrees(request, block_size, get_hash_fn_by_name(algorithm), steps)
    assert num_hashes == request.num_tokens // block_size


texts = st.one_of(
    st.sampled_from(
        ["", "a", "lora", "cache_salt", "mm", "x" * 255, "y" * 256, "\u20ac\U0001f600"]
    ),
    st.text(max_size=40),
)


@st.composite
def adapters(draw: st.DrawFn) -> LoRARequest:
    name = draw(texts)
    # A request must have a path. If path and name are the same object, pickle writes a reference.
    path = draw(st.one_of(texts, st.just(name)).filter(bool))
    return LoRARequest(name, 1, path)


@st.composite
def images_within(draw: st.DrawFn, num_tokens: int) -> list[MultiModalFeatureSpec]:
    bounds = draw(st.lists(st.integers(0, num_tokens), max_size=8, unique=True).map(sorted))
    return [image(a, b - a) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), algorithm=st.sampled_from(ALGORITHMS), block_size=st.integers(1, 40))
def test_any_request(data: st.DataObject, algorithm: str, block_size: int) -> None:
    """Salt, adapter, images and prompt embeddings, in any combination."""
    prompt = data.draw(st.lists(tokens_of_any_length, min_size=1, max_size=4 * block_size))
    adapter = data.draw(st.none() | adapters())
    salts = texts if adapter is None else texts | st.just(adapter.lora_name)
    embeds = torch.arange(2.0 * len(prompt)).reshape(-1, 2)
    is_token = data.draw(st.none() | st.lists(st.booleans(), min_size=len(prompt)))
    request = make_request(
        prompt,
        lora_request=adapter,
        cache_salt=data.draw(st.none() | salts),
        mm_features=data.draw(images_within(len(prompt))),
        prompt_embeds=data.draw(st.none() | st.just(embeds)),
        prompt_is_token_ids=None if is_token is None else is_token[: len(prompt)],
    )
    outputs = st.lists(tokens_of_any_length, max_size=2 * block_size)
    steps = data.draw(st.lists(outputs, max_size=3))
    num_hashes = assert_base_agrees(request, block_size, get_hash_fn_by_name(algorithm), steps)
    assert num_hashes == request.num_tokens // block_size


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 100, 1000, MAX_NATIVE_BLOCK_SIZE])
def test_block_sizes(hash_fn: Callable[[Any], bytes], block_size: int) -> None:
    # At five bytes per token, the largest block just fits into one frame of a pickle.
    request = make_request([2**31 - 1 - i for i in range(2 * block_size)])
    assert assert_base_agrees(request, block_size, hash_fn, [[5] * block_size]) == 3


def test_the_longest_message(hash_fn: Callable[[Any], bytes]) -> None:
    """Tokens of five bytes with a long adapter name still make one frame of a pickle."""
    size = MAX_NATIVE_BLOCK_SIZE
    adapter = LoRARequest("n" * 16_300, 1, "/path")
    request = make_request([2**31 - 1 - i for i in range(size)], lora_request=adapter)
    with collected_log() as log:
        assert assert_base_agrees(request, size, hash_fn, [[-1] * size]) == 2
    assert log == []


REQUESTS: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "salt"},
    "adapter": {"lora_request": LoRARequest("adapter", 1, "/adapters/adapter")},
    "image at the start": {"mm_features": [image(0, 20)]},
    "adapter and image": {
        "lora_request": LoRARequest("adapter", 1, "/adapters/adapter"),
        "mm_features": [image(3, 2)],
    },
    "images": {"mm_features": [image(3, 2), image(16, 16), image(40, 7)]},
    "image in the last block": {"mm_features": [image(70, 10)]},
    "image and salt": {"mm_features": [image(3, 2)], "cache_salt": "salt"},
    "adapter and salt": {
        "lora_request": LoRARequest("adapter", 1, "/adapters/adapter"),
        "cache_salt": "salt",
    },
    "prompt embeddings": {
        "prompt_token_ids": None,
        "prompt_embeds": torch.arange(320, dtype=torch.float32).reshape(80, 4),
    },
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_extra_keys(hash_fn: Callable[[Any], bytes], kind: str) -> None:
    request = make_request(list(range(1000, 1080)), **REQUESTS[kind])
    assert assert_base_agrees(request, 16, hash_fn, [[1] * 15, [2], [3] * 40]) == 8


def test_extra_keys_matter() -> None:
    """The requests above do differ from a plain one, from their first block on or later."""
    hash_fn = get_hash_fn_by_name("sha256")
    plain = make_request(list(range(1000, 1080)))
    assert_base_agrees(plain, 16, hash_fn, [])
    for changes in REQUESTS.values():
        request = make_request(list(range(1000, 1080)), **changes)
        assert_base_agrees(request, 16, hash_fn, [])
        assert request.block_hashes[-1] != plain.block_hashes[-1]


def count_calls(hasher: Callable[[Request], Any], calls: list[int]) -> Callable[[Request], Any]:
    def counting(request: Request) -> Any:
        calls.append(len(request.block_hashes))
        return hasher(request)

    return counting


def test_base_hashes_only_what_native_code_cannot() -> None:
    hash_fn = get_hash_fn_by_name("sha256")
    base = get_request_block_hasher(16, hash_fn)
    for changes, expected in (
        ({}, []),
        (REQUESTS["salt"], []),
        (REQUESTS["adapter"], []),
        (REQUESTS["adapter and salt"], []),
        # Native code hashes what follows the image.
        (REQUESTS["images"], [0]),
        ({"prompt_token_ids": [2**40] * 80}, [0]),
    ):
        calls: list[int] = []
        ours = create_request_block_hasher(16, hash_fn, count_calls(base, calls))
        request = make_request(**({"tokens": list(range(80))} | changes_of(changes)))
        for new_tokens in ([], [7] * 16):
            request.append_output_token_ids(new_tokens)
            request.block_hashes.extend(ours(request))
        assert calls == expected
        assert len(request.block_hashes) == 6


def changes_of(changes: dict[str, Any]) -> dict[str, Any]:
    tokens = changes.get("prompt_token_ids")
    rest = {name: value for name, value in changes.items() if name != "prompt_token_ids"}
    return rest if tokens is None else rest | {"tokens": tokens}


def test_base_hashes_what_fails_and_says_so_once(hash_fn: Callable[[Any], bytes]) -> None:
    base = get_request_block_hasher(4, hash_fn)
    ours = create_request_block_hasher(4, hash_fn, base)
    # The name is too long for native code.
    long_name = {"lora_request": LoRARequest("n" * 20_000, 1, "/path")}
    with collected_log() as log:
        for changes in (long_name, {"tokens": [2**40] * 4}, {}):
            request = make_request(**({"tokens": [1, 2, 3, 4]} | changes))
            assert ours(request) == base(request) != []
    (record,) = log
    assert record.levelname == "WARNING"
    assert "base hashes the blocks of request r (reported once)" in record.getMessage()
    assert record.exc_info is not None
    assert "rest must have 1 to 16384 bytes" in str(record.exc_info[1])


def test_what_base_cannot_hash_fails_as_in_base() -> None:
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    base = get_request_block_hasher(4, hash_fn)
    ours = create_request_block_hasher(4, hash_fn, base)
    request = make_request([1, 2, 3, 4], cache_salt="\ud800")
    with pytest.raises(UnicodeEncodeError) as expected:
        base(request)
    with pytest.raises(UnicodeEncodeError) as raised:
        ours(request)
    assert str(raised.value) == str(expected.value)


class LockWatch:
    """A thread that acts as soon as the interpreter lock is released.

    Within this context Python does not switch threads by itself, so only a release does.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.gate = threading.Lock()
        self.gate.acquire()
        self.has_acted = False
        self.thread = threading.Thread(target=self._wait)

    def _wait(self) -> None:
        with self.gate:
            self.act()
            self.has_acted = True

    def __enter__(self) -> "LockWatch":
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        self.thread.start()
        self.gate.release()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self.interval)
        self.thread.join()


def test_long_work_releases_the_lock_and_has_its_own_copy_of_the_tokens() -> None:
    hashes_of = BlockHasher("sha256", 16).hash_blocks
    expected = hashes_of(b"p", list(range(1_000_000)), 0, NO_KEYS)
    assert len(expected) == 62_500
    # The system may wake the thread late. In pieces, this much work takes seconds.
    for _ in range(100):
        tokens = list(range(1_000_000))
        with LockWatch(tokens.clear) as watch:
            hashes = hashes_of(b"p", tokens, 0, NO_KEYS)
            has_acted = watch.has_acted
        assert hashes == expected
        assert tokens == []
        if has_acted:
            return
    raise AssertionError("the lock was not released")


def test_short_work_keeps_the_lock() -> None:
    """Otherwise a decode step could wait for milliseconds to get the lock back."""
    hashes_of = BlockHasher("sha256", 16).hash_blocks
    tokens = list(range(2048))
    with LockWatch(lambda: None) as watch:
        for _ in range(1000):
            hashes_of(b"p", tokens, 0, NO_KEYS)
        assert not watch.has_acted


def test_base_hashes_for_an_unknown_function_or_large_blocks() -> None:
    def unknown(_: Any) -> bytes:
        return b"hash"

    base = get_request_block_hasher(16, unknown)
    assert create_request_block_hasher(16, unknown, base) is base
    sha256 = get_hash_fn_by_name("sha256")
    assert create_request_block_hasher(MAX_NATIVE_BLOCK_SIZE + 1, sha256, base) is base


def test_base_hashes_where_pickles_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(value: Any) -> bytes:
        return get_hash_fn_by_name("sha256")((value, "written in another way"))

    algorithms = block_hasher._ALGORITHMS
    monkeypatch.setitem(algorithms, other, algorithms[get_hash_fn_by_name("sha256")])
    base = get_request_block_hasher(16, other)
    with collected_log() as log:
        assert create_request_block_hasher(16, other, base) is base
    assert "base hashes the blocks" in log[0].getMessage()


def test_sha256_without_special_instructions() -> None:
    for length in (*range(200), 1000, 4096):
        message = bytes(i * 7 % 251 for i in range(length))
        assert sha256_portable(message) == hashlib.sha256(message).digest()


def test_a_finalizer_that_empties_the_list_of_tokens_does_no_harm() -> None:
    """The finalizer runs in a garbage collection, which creating the list of hashes can start."""
    tokens = list(range(64))
    expected = hash_blocks(tokens=tokens)
    hasher = BlockHasher("sha256", 2)

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            tokens.clear()

    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        Garbage()
        # Use up the lists that Python keeps for reuse: reusing one starts no collection.
        lists: list[list[int]] = [[] for _ in range(200)]
        gc.set_threshold(1)
        gc.enable()
        hashes = hasher.hash_blocks(b"p", tokens, 0, NO_KEYS)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert hashes == expected
    assert len(hashes) == 32
    assert tokens == [], "the finalizer ran"
    assert len(lists) == 200


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockHasher("md5", 16), ValueError, "algorithm must be sha256"),
        (lambda: BlockHasher("sha256", 0), ValueError, "block_size must be from 1 to 8192, got 0"),
        (lambda: BlockHasher("sha256", 8193), ValueError, "got 8193"),
        (lambda: hash_blocks(parent=b""), ValueError, "parent must have 1 to 255 bytes"),
        (lambda: hash_blocks(parent=bytes(256)), ValueError, "got 256"),
        (lambda: hash_blocks(rest=b""), ValueError, "rest must have 1 to 16384 bytes, got 0"),
        (lambda: hash_blocks(rest=bytes(16385)), ValueError, "got 16385"),
        (lambda: hash_blocks(start=-1), ValueError, "start must be from 0 to 4, got -1"),
        (lambda: hash_blocks(start=5), ValueError, "got 5"),
        (lambda: hash_blocks(tokens=[1, 2, 3, "4"]), TypeError, "must be ints, got str"),
        (lambda: hash_blocks(tokens=[1, 2, 3, 2**31]), OverflowError, "fit in 32 bits"),
        (lambda: hash_blocks(tokens=[1, 2, 3, -(2**70)]), OverflowError, "fit in 32 bits"),
    ],
)
def test_wrong_use_raises(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def hash_blocks(
    parent: bytes = b"p", tokens: Any = (1, 2, 3, 4), start: int = 0, rest: bytes = NO_KEYS
) -> Any:
    return BlockHasher("sha256", 2).hash_blocks(parent, list(tokens), start, rest)
