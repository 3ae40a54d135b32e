# SPDX-License-Identifier: Apache-2.0
"""Builds the KV cache manager that base's scheduler asks for: ours, or base's."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.hybrid.coverage import EngineFacts
from vllm.v1.core.hybrid.decision import describe, find_reason_for_base
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
    reason = find_reason_for_base(_engine_facts(args, kwargs, vllm_config))
    if reason is not None:
        logger.info("Hybrid KV cache: using base vLLM's manager, because %s", reason)
        return BaseKVCacheManager(*args, **kwargs)
    manager = KVCacheManager(*args, **kwargs)
    manager.serves_connector = (
        vllm_config is not None and vllm_config.kv_transfer_config is not None
    )
    manager.verify_every_step = HybridKVOptions.from_vllm_config(vllm_config).check_integrity
    logger.info("Hybrid KV cache: active, %s", describe(manager.attention_types))
    return manager


def _engine_facts(
    args: tuple[Any, ...], kwargs: dict[str, Any], vllm_config: VllmConfig | None
) -> EngineFacts:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    names = {field.name for field in fields(EngineFacts)} & bound.arguments.keys()
    return EngineFacts(**{name: bound.arguments[name] for name in names}, vllm_config=vllm_config)
