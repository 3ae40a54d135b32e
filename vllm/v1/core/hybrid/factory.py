# SPDX-License-Identifier: Apache-2.0
"""Builds the KV cache manager that base's scheduler asks for: ours, or base's."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager
from vllm.v1.core.hybrid.options import HybridKVOptions
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SIGNATURE = inspect.signature(BaseKVCacheManager)

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
    if not options.enabled:
        return _build_base(args, kwargs, "hybrid_kv.enabled is false in --additional-config")
    feature = find_uncovered_feature(_engine_facts(args, kwargs, vllm_config))
    if feature is not None:
        if options.on_uncovered == "error":
            raise ValueError(
                "--additional-config: hybrid_kv.on_uncovered is 'error', and the hybrid KV cache "
                f"does not cover {feature} yet; with 'fallback', base vLLM's manager serves it"
            )
        return _build_base(args, kwargs, f"{feature} is not covered yet")
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


def _build_base(args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> BaseKVCacheManager:
    logger.info("Hybrid KV cache: using base vLLM's manager, because %s", reason)
    return BaseKVCacheManager(*args, **kwargs)


def _engine_facts(
    args: tuple[Any, ...], kwargs: dict[str, Any], vllm_config: VllmConfig | None
) -> EngineFacts:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    names = {field.name for field in fields(EngineFacts)} & bound.arguments.keys()
    return EngineFacts(**{name: bound.arguments[name] for name in names}, vllm_config=vllm_config)
