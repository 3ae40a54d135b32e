# SPDX-License-Identifier: Apache-2.0
"""Builds the KV cache manager that base's scheduler asks for: ours, or base's."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager
from vllm.v1.core.hybrid.options import HybridKVOptions
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

#: The configuration of the engine whose scheduler is being built.
current_engine: ContextVar[VllmConfig | None] = ContextVar("current_engine", default=None)


def create_kv_cache_manager(*args: Any, **kwargs: Any) -> KVCacheManager | BaseKVCacheManager:
    """Takes the arguments of base's KVCacheManager; logs one line that says what it built.

    Raises:
        ValueError: for a bad option, or where ``on_uncovered`` is ``"error"`` and
            something is not covered.
    """
    vllm_config = current_engine.get()
    options = HybridKVOptions.from_vllm_config(vllm_config)
    reason = (
        _find_uncovered(args, kwargs, vllm_config)
        if options.enabled
        else "additional_config hybrid_kv.enabled is false"
    )
    if reason is not None:
        if options.enabled and options.on_uncovered == "error":
            raise ValueError(
                f"the hybrid KV cache cannot serve this engine: {reason}; accepted with "
                'hybrid_kv.on_uncovered = "fallback"'
            )
        logger.info("Hybrid KV cache: using base vLLM's manager, because %s", reason)
        return BaseKVCacheManager(*args, **kwargs)
    manager = KVCacheManager(*args, **kwargs)
    manager.verify_every_step = options.check_integrity
    logger.info("Hybrid KV cache: active, %s", describe(manager))
    return manager


def describe(manager: KVCacheManager) -> str:
    """How a manager arranges the KV cache, in a line."""
    types, num_groups = manager.attention_types, manager.num_kv_cache_groups
    if not types:
        return "no KV cache groups"
    managers = "1 manager" if len(types) == 1 else f"{len(types)} managers"
    groups = "1 KV cache group" if num_groups == 1 else f"{num_groups} KV cache groups"
    return f"{managers} for {groups}: {'; '.join(map(str, types))}"


def _find_uncovered(
    args: tuple[Any, ...], kwargs: dict[str, Any], vllm_config: VllmConfig | None
) -> str | None:
    bound = inspect.signature(KVCacheManager).bind(*args, **kwargs)
    bound.apply_defaults()
    names = set(EngineFacts.__dataclass_fields__) - {"vllm_config"}
    facts = EngineFacts(
        **{name: bound.arguments[name] for name in names}, vllm_config=vllm_config
    )
    feature = find_uncovered_feature(facts)
    return None if feature is None else f"{feature} is not covered yet"
