# SPDX-License-Identifier: Apache-2.0
"""Builds the KV cache manager for base's scheduler: the hybrid manager, or base's."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.hybrid.attention_type import describe
from vllm.v1.core.hybrid.coverage import EngineFacts, find_reason_for_base
from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager
from vllm.v1.core.hybrid.metrics.stats import report_base
from vllm.v1.core.hybrid.options import HybridKVOptions
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SIGNATURE = inspect.signature(BaseKVCacheManager)
_BASE = "Hybrid KV cache: using base vLLM's manager, because %s"

#: The configuration of the engine whose scheduler is being built.
current_engine: ContextVar[VllmConfig | None] = ContextVar("current_engine", default=None)


def create_kv_cache_manager(*args: Any, **kwargs: Any) -> KVCacheManager | BaseKVCacheManager:
    """Takes the arguments of base's KVCacheManager. Logs one line that says what it built.

    Raises:
        ValueError: for a bad option, or where ``on_uncovered`` is ``"error"`` and something is not
            covered.
    """
    vllm_config = current_engine.get()
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    facts = EngineFacts.from_arguments(bound.arguments, vllm_config=vllm_config)
    reason = find_reason_for_base(facts)
    if reason is not None:
        logger.info(_BASE, reason)
        base = BaseKVCacheManager(*args, **kwargs)
        report_base(base, reason)
        return base
    options = HybridKVOptions.from_vllm_config(vllm_config)
    manager = KVCacheManager(
        *args, **kwargs, verify_every_step=options.check_integrity, is_covered=True
    )
    logger.info("Hybrid KV cache: active, %s", describe(manager.attention_types))
    return manager


class _Either(ABCMeta):
    """Metaclass: calling the class builds one of the managers; isinstance accepts both."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is EitherKVCacheManager:
            return create_kv_cache_manager(*args, **kwargs)
        reason = f"{cls.__module__}.{cls.__qualname__} subclasses it"
        logger.info(_BASE, reason)
        manager = super().__call__(*args, **kwargs)
        report_base(manager, reason)
        return manager

    def __subclasscheck__(cls, subclass: type) -> bool:
        either = KVCacheManager | BaseKVCacheManager
        if cls is EitherKVCacheManager and issubclass(subclass, either):
            return True
        return super().__subclasscheck__(subclass)


class EitherKVCacheManager(BaseKVCacheManager, metaclass=_Either):
    """What base's scheduler module has under the name ``KVCacheManager``.

    Other plugins import, subclass and check against that name. A subclass relies on base's
    internals, so it is base's manager with the subclass's changes.
    """
