# SPDX-License-Identifier: Apache-2.0
"""Hashes of a request's blocks, the same as base's, many at a time in native code."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.utils.hashing import sha256, sha256_cbor, xxhash, xxhash_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.hybrid._core import BlockHasher
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.request import Request

logger = init_logger(__name__)

#: Computes the hashes that a request still lacks.
RequestBlockHasher = Callable[[Request], list[BlockHash]]

_ALGORITHMS: dict[Callable[[Any], bytes], str] = {
    sha256: "sha256",
    sha256_cbor: "sha256_cbor",
    xxhash: "xxhash",
    xxhash_cbor: "xxhash_cbor",
}
#: Above it pickle writes in another form.
MAX_NATIVE_BLOCK_SIZE = 8192


def create_request_block_hasher(
    hash_block_size: int,
    caching_hash_fn: Callable[[Any], bytes],
    base_hasher: RequestBlockHasher,
) -> RequestBlockHasher:
    """A replacement of base's hasher with the same digests.

    Args:
        hash_block_size: Tokens per hash.
        caching_hash_fn: The function that base would call for each block.
        base_hasher: Base's hasher for the same two. It hashes what native code cannot:
            blocks with images or prompt embeddings, and requests with a LoRA adapter.
    """
    algorithm = _ALGORITHMS.get(caching_hash_fn)
    if algorithm is None or hash_block_size > MAX_NATIVE_BLOCK_SIZE:
        return base_hasher
    hash_blocks = BlockHasher(algorithm, hash_block_size).hash_blocks
    # Pickles are Python's own affair: another interpreter may write them in another way.
    sample = (bytes(range(32)), tuple(range(-1, hash_block_size - 1)), None)
    if hash_blocks(sample[0], list(sample[1]), 0) != [caching_hash_fn(sample)]:
        logger.warning("Hybrid KV cache: base hashes the blocks, because pickles differ here")
        return base_hasher

    def request_block_hasher(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        start = len(known) * hash_block_size
        if start + hash_block_size > request.num_tokens:
            return []
        if _has_extra_keys(request, start):
            return base_hasher(request)
        first: list[BlockHash] = []
        if not known and request.cache_salt:
            # The salt is a key of the first block only; the others have it through the chain.
            keys, _ = generate_block_hash_extra_keys(request, 0, hash_block_size, 0)
            tokens = request.all_token_ids[:hash_block_size]
            first = [hash_block_tokens(caching_hash_fn, None, tokens, keys)]
            start = hash_block_size
        # Base sets the hash before the first one when an engine starts.
        parent = (first or known or [kv_cache_utils.NONE_HASH])[-1]
        try:
            # The list itself: the request's view of it can only be copied.
            hashes = hash_blocks(parent, request._all_token_ids, start)
        except (OverflowError, TypeError):
            # Tokens that are no 32-bit ints.
            return base_hasher(request)
        return first + hashes

    return request_block_hasher


def _has_extra_keys(request: Request, start: int) -> bool:
    """Whether blocks from token ``start`` on have keys that native code does not know."""
    if request.lora_request or request.prompt_embeds is not None:
        return True
    if not request.mm_features:
        return False
    last = request.mm_features[-1].mm_position
    return last.offset + last.length > start
