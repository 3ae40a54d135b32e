# SPDX-License-Identifier: Apache-2.0
"""Answers to the scheduler's calls for features that the fork leaves to base."""

from typing import ClassVar

from vllm.v1.core.hybrid._core import GroupedKVCacheBlock
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import Request


class LeftToBase:
    """What base's scheduler asks of every manager, and what is always nothing here.

    The factory gives a model that needs any of this to base's manager.
    """

    mamba_shared_prefix_checkpoint: ClassVar[bool] = False
    retained_hit_group_ids: ClassVar[tuple[int, ...]] = ()

    def take_kv_cache_block_copies(
        self,
    ) -> tuple[list[KVCacheBlockCopy], list[GroupedKVCacheBlock]]:
        """Copies on write of partly hit blocks: none, since hits end at block boundaries."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Mamba states for a KV connector: none."""
        return {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Mamba states of a finished request for a KV connector: none."""
        return []
