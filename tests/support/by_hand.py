# SPDX-License-Identifier: Apache-2.0
"""What tests with values worked out by hand do again and again, with either manager.

Unless said otherwise a model is Gemma-like: one full-attention group and five of window 33 (two
blocks of 16 before the query), so that a token position costs six physical blocks.
"""

from typing import Any

from support.kv_configs import AttentionKind, KVSetup, full, sliding
from support.requests import RequestPlan, block_hasher, make_request
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.hybrid.coordinators import KVCacheCoordinator
from vllm.v1.core.hybrid.step import ALL, Step
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

GEMMA = (full(16), sliding(33, 16, 5))
#: Hashes of the blocks of a prompt, in order.
HASHES = [BlockHash(bytes([i])) for i in range(64)]


def make_manager(num_blocks: int = 1000, manager_cls: Any = KVCacheManager, **changes: Any) -> Any:
    """A manager; ``changes`` are those of a `KVSetup`."""
    return KVSetup(**{"kinds": GEMMA, "num_blocks": num_blocks} | changes).build(manager_cls)


def make_coordinator(*kinds: AttentionKind, **changes: Any) -> KVCacheCoordinator:
    return make_manager(kinds=kinds, **changes).coordinator


def request(name: str, *path: tuple[int, int], **changes: Any) -> Request:
    """A request with hashes of blocks of 16 tokens; ``changes`` are those of a `RequestPlan`."""
    return make_request(RequestPlan(path, **changes), name, block_hasher(16))


def prefill(manager: Any, req: Request, **changes: Any) -> int | None:
    """Admit a request with all its tokens; the length of its hit, or None if refused."""
    blocks, num_hit, req.shared_prefix_boundary = manager.get_computed_blocks(req)
    new = manager.allocate_slots(req, req.num_tokens - num_hit, num_hit, blocks, **changes)
    check(manager)
    if new is None:
        return None
    req.num_computed_tokens, req.status = req.num_tokens, RequestStatus.RUNNING
    return num_hit


def decode(manager: Any, req: Request, num_tokens: int = 1) -> list[list[int]]:
    """Decode steps; for each the number of new blocks per KV cache group."""
    counts: list[list[int]] = []
    num_free = manager.block_pool.get_num_free_blocks()
    for _ in range(num_tokens):
        req.append_output_token_ids(7)
        new = manager.allocate_slots(req, 1, num_lookahead_tokens=0)
        assert new is not None
        counts.append([len(ids) for ids in new.get_block_ids()])
        req.num_computed_tokens += 1
        check(manager)
    assert manager.block_pool.get_num_free_blocks() >= num_free - sum(map(sum, counts))
    return counts


def check(manager: Any) -> None:
    """The hybrid manager's own check; base's manager has none."""
    if isinstance(manager, KVCacheManager):
        manager.check_integrity()


def step_to(end: int) -> Step:
    """A step that computes the tokens before ``end``, of a prompt that is as long."""
    return Step(0, 0, step_end=end, final_end=end, slots_end=end, prefill_end=end)


def cache(
    coordinator: KVCacheCoordinator, type_id: int, *indices: int, num_blocks: int = ALL
) -> None:
    """Put the blocks with these indices in the prefix cache, evictable."""
    pool = coordinator.block_pool
    table = pool.new_table(type_id)
    pool.allocate((table,), [(max(indices) + 1, num_blocks)])
    for i in indices:
        table.cache(i, i + 1, HASHES)
    table.free()


def cache_states(coordinator: KVCacheCoordinator, type_id: int, *indices: int) -> None:
    """The same for a type with states: a step leaves one behind, in its last block."""
    for i in indices:
        cache(coordinator, type_id, i, num_blocks=1)


def hit_pattern(coordinator: KVCacheCoordinator, max_tokens: int) -> tuple[int, list[str]]:
    """The hit's length, and per type its blocks: x for a block, . for the null block."""
    hit = coordinator.find_hit(HASHES, max_tokens)
    return hit.num_tokens, [
        "".join("." if block.is_null else "x" for block in blocks) for blocks in hit.blocks
    ]


def held_pattern(manager: Any, request: Request) -> list[str]:
    """What a request holds per KV cache group, drawn alike for either manager."""
    return [
        "".join("." if block_id == 0 else "x" for block_id in ids)
        for ids in manager.get_block_ids(request.request_id)
    ]
