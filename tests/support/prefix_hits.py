# SPDX-License-Identifier: Apache-2.0
"""Fills a coordinator's prefix cache by hand, and draws what is hit of it, and what is held."""

from typing import Any

from vllm.v1.core.hybrid.coordinators import KVCacheCoordinator
from vllm.v1.core.hybrid.step import NEVER, Step
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

#: Of the blocks of a prompt, in order.
HASHES = [BlockHash(bytes([i])) for i in range(64)]


def step_to(end: int) -> Step:
    """A step that computes the tokens before ``end``, of a prompt that is as long."""
    return Step(0, 0, step_end=end, final_end=end, slots_end=end, prefill_end=end)


def cache(coordinator: KVCacheCoordinator, type_id: int, *indices: int) -> None:
    """Put the blocks with these indices in the prefix cache, evictable."""
    pool = coordinator.block_pool
    table = pool.new_table(type_id)
    pool.allocate((table,), [(max(indices) + 1, NEVER)])
    for i in indices:
        table.cache(i, i + 1, HASHES)
    table.free()


def cache_states(coordinator: KVCacheCoordinator, type_id: int, *indices: int) -> None:
    """The same for a type with states, of which a step leaves one behind, in its last block."""
    pool = coordinator.block_pool
    for i in indices:
        table = pool.new_table(type_id)
        pool.allocate((table,), [(i + 1, 1)])
        table.cache(i, i + 1, HASHES)
        table.free()


def hit_pattern(coordinator: KVCacheCoordinator, max_tokens: int) -> tuple[int, list[str]]:
    """The hit's length, and per type its blocks: x for a block, . for the null block."""
    hit = coordinator.find_hit(HASHES, max_tokens)
    return hit.num_tokens, [
        "".join("." if block.is_null else "x" for block in blocks) for blocks in hit.blocks
    ]


def held_pattern(manager: Any, request: Request) -> list[str]:
    """Of either manager: per KV cache group what a request holds, drawn alike."""
    return [
        "".join("." if block_id == 0 else "x" for block_id in ids)
        for ids in manager.get_block_ids(request.request_id)
    ]
