# SPDX-License-Identifier: Apache-2.0
"""Hashes of a request's blocks, equal to base's, many at a time in native code.

A block's hash is the hash of a serialized ``(parent, tokens, keys)``. Native code writes parent and
tokens. The extra keys that follow are the same for all blocks of a request, and Python serializes
them. This keeps details such as pickle's back references equal to base's.
"""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cbor2

from vllm.logger import init_logger
from vllm.utils.hashing import sha256, sha256_cbor, xxhash, xxhash_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.hybrid._core import BlockHasher
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys
from vllm.v1.request import Request

logger = init_logger(__name__)

#: Computes the hashes of a request's full blocks that have no hash yet.
RequestBlockHasher = Callable[[Request], list[BlockHash]]
HashFunction = Callable[[Any], bytes]

#: Pickle uses another format for longer tuples.
MAX_NATIVE_BLOCK_SIZE = 8192


class _Algorithm(NamedTuple):
    name: str
    serialize: Callable[[Any], bytes]
    front: int
    """Bytes of a serialized ``(b"p", (0,), keys)`` before its keys."""

    def write_rest(self, keys: tuple[Any, ...] | None) -> bytes:
        """What follows the tokens in a serialized ``(parent, tokens, keys)``."""
        return self.serialize((b"p", (0,), keys))[self.front :]


_pickle = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
_cbor = partial(cbor2.dumps, canonical=True)
_ALGORITHMS: dict[HashFunction, _Algorithm] = {
    sha256: _Algorithm("sha256", _pickle, 19),
    sha256_cbor: _Algorithm("sha256_cbor", _cbor, 5),
    xxhash: _Algorithm("xxhash", _pickle, 19),
    xxhash_cbor: _Algorithm("xxhash_cbor", _cbor, 5),
}


def create_request_block_hasher(
    hash_block_size: int, caching_hash_fn: HashFunction, base_hasher: RequestBlockHasher
) -> RequestBlockHasher:
    """A hasher with the digests of base's hasher.

    Args:
        hash_block_size: Tokens per hash.
        caching_hash_fn: The function that base would call for each block.
        base_hasher: Base's hasher for the same block size and function. It hashes what native code
            does not: blocks with images or prompt embeddings, and tokens that do not fit in 32
            bits.
    """
    algorithm = _ALGORITHMS.get(caching_hash_fn)
    if algorithm is None or hash_block_size > MAX_NATIVE_BLOCK_SIZE:
        return base_hasher
    hash_blocks = BlockHasher(algorithm.name, hash_block_size).hash_blocks
    write_rest = algorithm.write_rest
    no_keys = write_rest(None)
    # The bytes of a pickle may differ between Python versions, so compare two samples.
    for keys in (None, (("lora", "name", "name"),)):
        sample = (bytes(range(32)), tuple(range(-1, hash_block_size - 1)), keys)
        if hash_blocks(sample[0], list(sample[1]), 0, write_rest(keys)) != [
            caching_hash_fn(sample)
        ]:
            logger.warning("Hybrid KV cache: base hashes the blocks, because native digests differ")
            return base_hasher
    has_failed = False

    def hash_natively(request: Request, start: int) -> list[BlockHash]:
        # The private list, because the request's public view would have to be copied.
        tokens = request._all_token_ids
        known = request.block_hashes
        # Base sets the hash before the first block when an engine starts.
        parent = known[-1] if known else kv_cache_utils.NONE_HASH
        first: list[BlockHash] = []
        if start == 0 and request.cache_salt:
            # The salt is a key of the first block only. It reaches the others through the chain.
            keys, _ = generate_block_hash_extra_keys(request, 0, hash_block_size, 0)
            first = hash_blocks(parent, tokens[:hash_block_size], 0, write_rest(keys))
            parent = first[0]
            start = hash_block_size
        rest = no_keys
        if request.lora_request:
            keys, _ = generate_block_hash_extra_keys(request, start, start + hash_block_size, 0)
            rest = write_rest(keys)
        hashes = hash_blocks(parent, tokens, start, rest)
        return first + hashes if first else hashes

    def request_block_hasher(request: Request) -> list[BlockHash]:
        start = len(request.block_hashes) * hash_block_size
        if start + hash_block_size > request.num_tokens:
            return []
        if _is_for_base(request, start):
            return base_hasher(request)
        try:
            return hash_natively(request, start)
        except Exception:
            nonlocal has_failed
            if not has_failed:
                logger.warning(
                    "Hybrid KV cache: base hashes the blocks of request %s (reported once)",
                    request.request_id,
                    exc_info=True,
                )
            has_failed = True
            return base_hasher(request)

    return request_block_hasher


def _is_for_base(request: Request, start: int) -> bool:
    """Whether blocks from token ``start`` on have extra keys that differ from block to block."""
    if request.prompt_embeds is not None:
        return True
    if not request.mm_features:
        return False
    last = request.mm_features[-1].mm_position
    return last.offset + last.length > start
