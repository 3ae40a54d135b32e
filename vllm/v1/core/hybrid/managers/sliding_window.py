# SPDX-License-Identifier: Apache-2.0
"""Sliding-window attention: a query attends to itself and the window before it."""

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.recent_blocks import RecentBlocksManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec


class SlidingWindowManager(RecentBlocksManager):
    """Keeps the blocks that the next query's window touches, and releases those before."""

    def __init__(self, type_id: int, block_pool: BlockPool) -> None:
        spec = block_pool.attention_types[type_id].spec
        assert isinstance(spec, SlidingWindowSpec)
        # The query at position p reads the keys p - window + 1 .. p.
        super().__init__(type_id, block_pool, num_tokens_before=spec.sliding_window - 1)
        self.num_reread_tokens = spec.extra_retained_tokens
        self.bound_blocks(spec)
