# SPDX-License-Identifier: Apache-2.0
"""The one list of what the fork does not cover, and leaves to base's manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Base's managers whose groups the fork serves. Asked of base's registry, so that a spec
#: that a platform has registered with a manager of its own stays with that manager.
COVERED_BASE_MANAGERS = (FullAttentionManager, SlidingWindowManager)


@dataclass(frozen=True)
class EngineFacts:
    """What decides whether the fork can serve an engine.

    The first fields are arguments of base's KVCacheManager; ``vllm_config`` is None
    where a manager is built without an engine.
    """

    kv_cache_config: KVCacheConfig
    hash_block_size: int
    enable_kv_cache_events: bool = False
    use_eagle: bool = False
    num_prefill_lookahead: int = 0
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    metrics_collector: Any = None
    vllm_config: VllmConfig | None = None


def _speculative_decoding(facts: EngineFacts) -> str | None:
    config = facts.vllm_config
    if (
        facts.use_eagle
        or facts.num_prefill_lookahead > 0
        or (config is not None and config.speculative_config is not None)
    ):
        return "speculative decoding"
    return None


def _diffusion(facts: EngineFacts) -> str | None:
    config = facts.vllm_config
    if config is not None and config.model_config is not None and config.model_config.is_diffusion:
        return "a diffusion model"
    return None


def _kv_connector(facts: EngineFacts) -> str | None:
    config = facts.vllm_config
    if config is None or config.kv_transfer_config is None:
        return None
    return f"KV connector {config.kv_transfer_config.kv_connector}"


def _context_parallelism(facts: EngineFacts) -> str | None:
    sizes = {"decode": facts.dcp_world_size, "prefill": facts.pcp_world_size}
    for kind, size in sizes.items():
        if size > 1:
            return f"{kind} context parallelism (world size {size})"
    return None


def _residency_metrics(facts: EngineFacts) -> str | None:
    return "KV cache residency metrics" if facts.metrics_collector is not None else None


def _kv_cache_groups(facts: EngineFacts) -> str | None:
    for group_id, group in enumerate(facts.kv_cache_config.kv_cache_groups):
        reason = _kv_cache_group(group)
        if reason is not None:
            return f"{reason} (KV cache group {group_id})"
    return None


def _kv_cache_group(group: KVCacheGroupSpec) -> str | None:
    spec = group.kv_cache_spec
    if group.host_resident or group.role != KVCacheGroupRole.DEFAULT:
        return f"a group with role {KVCacheGroupRole(group.role).value}"
    if group.is_eagle_group:
        return "speculative decoding"
    if not group.enable_kv_transfer:
        return "a group that is left out of KV transfer"
    kind = get_kv_cache_spec_kind(spec).value.replace("_", " ")
    if kind == "unknown":
        kind = type(spec).__name__
    manager_class = KVCacheSpecRegistry.get_manager_class(spec, group.role)
    if manager_class not in COVERED_BASE_MANAGERS:
        return kind
    if not spec.prefix_cacheable:
        return f"{kind} that opts out of prefix caching"
    if isinstance(spec, SlidingWindowSpec) and spec.extra_retained_tokens > 0:
        return "speculative decoding"
    return None


def _partial_block_events(facts: EngineFacts) -> str | None:
    # Base then publishes the end of a prompt as a block of its own, inside a larger one.
    if facts.enable_kv_cache_events and any(
        isinstance(group.kv_cache_spec, FullAttentionSpec)
        and group.kv_cache_spec.block_size > facts.hash_block_size
        for group in facts.kv_cache_config.kv_cache_groups
    ):
        return "KV cache events of parts of blocks"
    return None


CHECKS: tuple[Callable[[EngineFacts], str | None], ...] = (
    _speculative_decoding,
    _diffusion,
    _kv_connector,
    _context_parallelism,
    _residency_metrics,
    _kv_cache_groups,
    _partial_block_events,
)


def find_uncovered_feature(facts: EngineFacts) -> str | None:
    """The first feature of an engine that only base's manager covers, or None.

    The answer reads well in "... is not covered".
    """
    return next((reason for check in CHECKS if (reason := check(facts)) is not None), None)
