# SPDX-License-Identifier: Apache-2.0
"""The one list of what the hybrid manager does not cover, so that base's manager serves it.

Imports no native core, so that the doctor works in an installation without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.core import single_type_kv_cache_manager as base_managers
from vllm.v1.core.hybrid.attention_type import find_manager, get_eagle_group_ids
from vllm.v1.core.hybrid.options import HybridKVOptions
from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpecKind,
    MambaSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Kinds without any covered spec. For an uncovered spec of another kind, such as R-SWA, which is a
#: kind of full attention, the message uses the spec's class name.
_NAMED_KINDS = {
    KVCacheSpecKind.ENCODER_ONLY_ATTENTION: "encoder-only attention",
    KVCacheSpecKind.SINK_FULL_ATTENTION: "full attention with a sink",
}

#: Speculative methods that draft from another model, or from tokens alone, with a KV cache that
#: grows token by token. DFlash and DSpark write many tokens at once, and hidden states are
#: extracted through a KV connector.
_COVERED_SPECULATION = {
    "draft_model",
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "mtp",
    "ngram",
    "ngram_gpu",
    "suffix",
}

#: KV connectors of base that read only the ids of a request's blocks, and which of them are in the
#: prefix cache. Other connectors reach into base's block pool (SimpleCPUOffloadConnector,
#: MooncakeStoreConnector, HiSparseConnector) or pass the blocks to a library of their own, as
#: LMCache's connectors do.
_COVERED_CONNECTORS = {
    "DecodeBenchConnector",
    "ExampleConnector",
    "HF3FSKVConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "MultiConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
}


@dataclass(frozen=True)
class EngineFacts:
    """What decides whether the hybrid manager can serve an engine.

    All fields but the last are arguments of base's KVCacheManager. ``vllm_config`` is None if a
    manager is built without an engine.
    """

    kv_cache_config: KVCacheConfig
    hash_block_size: int
    enable_kv_cache_events: bool = False
    use_eagle: bool = False
    num_prefill_lookahead: int = 0
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    vllm_config: VllmConfig | None = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **others: Any) -> EngineFacts:
        """The facts among the arguments of base's KVCacheManager."""
        names = {field.name for field in fields(cls)} & arguments.keys()
        return cls(**{name: arguments[name] for name in names}, **others)


def _speculative_decoding(facts: EngineFacts) -> str | None:
    config = None if facts.vllm_config is None else facts.vllm_config.speculative_config
    if config is None:
        return None
    if config.method not in _COVERED_SPECULATION:
        return f"speculative decoding with {config.method}"
    if config.parallel_drafting:
        return "speculative decoding with parallel drafting"
    if config.num_speculative_tokens_per_batch_size:
        return "speculative decoding with a number of drafts that depends on the batch size"
    return None


def _model(facts: EngineFacts) -> str | None:
    model_config = None if facts.vllm_config is None else facts.vllm_config.model_config
    return "a diffusion model" if model_config is not None and model_config.is_diffusion else None


def _kv_connector(facts: EngineFacts) -> str | None:
    config = None if facts.vllm_config is None else facts.vllm_config.kv_transfer_config
    if config is None:
        return None
    reason = _named_connector(
        config.kv_connector, config.kv_connector_module_path, config.kv_connector_extra_config
    )
    groups = facts.kv_cache_config.kv_cache_groups
    if reason is None and any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups):
        # A load brings the state at its end, which need not be the end of a block.
        return f"Mamba with KV connector {config.kv_connector}"
    return reason


def _named_connector(
    name: str | None, module_path: str | None, options: Mapping[str, Any]
) -> str | None:
    if name is None:
        return "a KV connector"
    if module_path is not None or name not in _COVERED_CONNECTORS:
        return f"KV connector {name}"
    for child in options.get("connectors", ()) if name == "MultiConnector" else ():
        reason = _named_connector(
            child.get("kv_connector"),
            child.get("kv_connector_module_path"),
            child.get("kv_connector_extra_config", {}),
        )
        if reason is not None:
            return f"{reason} (in a MultiConnector)"
    return None


def _context_parallelism(facts: EngineFacts) -> str | None:
    sizes = [("decode", facts.dcp_world_size), ("prefill", facts.pcp_world_size)]
    if facts.vllm_config is not None:
        # Base's scheduler always builds its manager with a prefill size of 1.
        parallel = facts.vllm_config.parallel_config
        sizes.append(("decode", parallel.decode_context_parallel_size))
        sizes.append(("prefill", parallel.prefill_context_parallel_size))
    for kind, size in sizes:
        if size > 1:
            return f"{kind} context parallelism (world size {size})"
    return None


def _kv_cache_groups(facts: EngineFacts) -> str | None:
    eagle_group_ids = get_eagle_group_ids(facts.kv_cache_config, facts.use_eagle)
    for group_id, group in enumerate(facts.kv_cache_config.kv_cache_groups):
        reason = _kv_cache_group(group, group_id in eagle_group_ids)
        if reason is not None:
            return f"{reason} (KV cache group {group_id})"
    return None


def _kv_cache_group(group: KVCacheGroupSpec, is_eagle: bool) -> str | None:
    spec = group.kv_cache_spec
    if group.host_resident:
        return "a KV cache on the host"
    if group.role != KVCacheGroupRole.DEFAULT:
        return f"the role {KVCacheGroupRole(group.role).value}"
    if not group.enable_kv_transfer:
        return "a KV cache that is left out of KV transfer"
    # A platform may have registered the spec with a manager of its own, which then serves it.
    base_manager = KVCacheSpecRegistry.get_manager_class(spec, group.role)
    ours = find_manager(spec)
    if ours is None or base_manager is not getattr(base_managers, ours[1]):
        kind = get_kv_cache_spec_kind(spec)
        return _NAMED_KINDS.get(kind, f"KV cache spec {type(spec).__name__}")
    if not spec.prefix_cacheable:
        return f"{type(spec).__name__} that opts out of prefix caching"
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode not in ("none", "align"):
            return f"the Mamba cache mode {spec.mamba_cache_mode}"
        if spec.num_speculative_blocks > 0:
            return "Mamba with speculative decoding"
    # Base raises in the first lookup of such a model.
    if is_eagle and isinstance(spec, ChunkedLocalAttentionSpec):
        return "speculative decoding from hidden states with chunked local attention"
    return None


def _partial_block_events(facts: EngineFacts) -> str | None:
    # In this case base also publishes the partial last block of a prompt.
    if facts.enable_kv_cache_events and any(
        isinstance(group.kv_cache_spec, FullAttentionSpec)
        and group.kv_cache_spec.block_size > facts.hash_block_size
        for group in facts.kv_cache_config.kv_cache_groups
    ):
        return "publishing KV cache events for parts of blocks"
    return None


def _states(facts: EngineFacts) -> str | None:
    specs = [group.kv_cache_spec for group in facts.kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    config = None if facts.vllm_config is None else facts.vllm_config.speculative_config
    # This also covers specs without speculative blocks, such as RecoverSSM's.
    if states and (config is not None or facts.use_eagle or facts.num_prefill_lookahead):
        return "Mamba with speculative decoding"
    # Base keeps this state at a multiple of the hit alignment, which may lie inside of a larger
    # block.
    hit_alignment = math.lcm(*(spec.block_size for spec in specs if spec.prefix_cacheable))
    for spec in states:
        if spec.mamba_cache_mode != "align" or not spec.num_prefill_checkpoint_blocks:
            continue
        if spec.block_size != hit_alignment:
            return (
                "keeping Mamba states in the middle of a step with unequal block sizes "
                f"({spec.block_size} and, for hits, {hit_alignment})"
            )
    if len({(s.num_prefill_checkpoint_blocks, s.prefill_checkpoint_alignment) for s in states}) > 1:
        return "Mamba layers that differ in whether they keep states in the middle of a step"
    return None


def _hits_inside_a_block(facts: EngineFacts) -> str | None:
    # Base copies the hit's state before writing (copy on write).
    if partial_hash_hits_enabled(facts.kv_cache_config.kv_cache_groups, facts.hash_block_size):
        return f"prefix hits inside of a Mamba block (prefix match unit {facts.hash_block_size})"
    return None


CHECKS: tuple[Callable[[EngineFacts], str | None], ...] = (
    _speculative_decoding,
    _model,
    _kv_connector,
    _context_parallelism,
    _kv_cache_groups,
    _partial_block_events,
    _states,
    _hits_inside_a_block,
)


def find_uncovered_feature(facts: EngineFacts) -> str | None:
    """The first feature of an engine that only base's manager covers, or None.

    The text fits into "... is not covered".
    """
    return next((reason for check in CHECKS if (reason := check(facts)) is not None), None)


def find_reason_for_base(facts: EngineFacts) -> str | None:
    """Why base's manager must serve an engine, or None if the hybrid manager serves it.

    The text fits after "because". The factory and the doctor both use it.

    Raises:
        ValueError: for a bad option, or where ``on_uncovered`` is ``"error"`` and something is not
            covered.
    """
    options = HybridKVOptions.from_vllm_config(facts.vllm_config)
    if not options.enabled:
        return "hybrid_kv.enabled is false in additional_config"
    feature = find_uncovered_feature(facts)
    if feature is None:
        return None
    if options.on_uncovered == "error":
        raise ValueError(
            "additional_config: hybrid_kv.on_uncovered is 'error', and the hybrid manager "
            f"does not cover {feature} yet; with 'fallback', base vLLM's manager serves it"
        )
    return f"{feature} is not covered yet"
