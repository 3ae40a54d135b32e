# SPDX-License-Identifier: Apache-2.0
"""One manager per attention type; one file per kind of attention."""

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.base import NEVER, SingleTypeKVCacheManager
from vllm.v1.core.hybrid.managers.chunked_local import ChunkedLocalAttentionManager
from vllm.v1.core.hybrid.managers.cross_attention import CrossAttentionManager
from vllm.v1.core.hybrid.managers.full_attention import FullAttentionManager
from vllm.v1.core.hybrid.managers.mamba import MambaManager
from vllm.v1.core.hybrid.managers.sliding_window import SlidingWindowManager
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

__all__ = [
    "NEVER",
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "create_manager",
]


def create_manager(
    type_id: int, attention_type: AttentionType, block_pool: BlockPool, settings: CacheSettings
) -> SingleTypeKVCacheManager:
    """The manager for an attention type.

    Raises:
        ValueError: if the fork has no manager for the type's KV cache spec.
    """
    manager_cls: type[SingleTypeKVCacheManager]
    if isinstance(attention_type.spec, FullAttentionSpec):
        manager_cls = FullAttentionManager
    elif isinstance(attention_type.spec, SlidingWindowSpec):
        manager_cls = SlidingWindowManager
    elif isinstance(attention_type.spec, ChunkedLocalAttentionSpec):
        manager_cls = ChunkedLocalAttentionManager
    elif isinstance(attention_type.spec, MambaSpec):
        manager_cls = MambaManager
    elif isinstance(attention_type.spec, CrossAttentionSpec):
        manager_cls = CrossAttentionManager
    else:
        raise ValueError(f"no manager for {attention_type}")
    return manager_cls(type_id, attention_type, block_pool, settings)
