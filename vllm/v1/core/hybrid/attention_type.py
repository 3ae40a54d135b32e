# SPDX-License-Identifier: Apache-2.0
"""Attention types: the KV cache groups that one manager serves together, and which manager.

Imports no native core, so that `vllm-hybrid-kv doctor` works in an installation without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

#: The one table from KV cache spec, subclasses included, to the module in `managers` and the class
#: of the manager. The class has the name of base's class. `coverage` requires that base serves the
#: spec with its class of that name.
MANAGERS: dict[type[KVCacheSpec], tuple[str, str]] = {
    FullAttentionSpec: ("full_attention", "FullAttentionManager"),
    SlidingWindowSpec: ("sliding_window", "SlidingWindowManager"),
    ChunkedLocalAttentionSpec: ("chunked_local", "ChunkedLocalAttentionManager"),
    MambaSpec: ("mamba", "MambaManager"),
    CrossAttentionSpec: ("cross_attention", "CrossAttentionManager"),
}


def find_manager(spec: KVCacheSpec) -> tuple[str, str] | None:
    """Module and class of the manager for a spec; None if there is none."""
    return next((manager for cls, manager in MANAGERS.items() if isinstance(spec, cls)), None)


@dataclass(frozen=True)
class AttentionType:
    """KV cache groups with the same KV cache spec, managed as one.

    ``group_ids`` are indices into ``KVCacheConfig.kv_cache_groups``, ascending.

    ``is_eagle`` is true if any of the groups has layers of a drafter that reads the model's hidden
    states (EAGLE, MTP). Such a layer computes the KV at a position from the token after it, so the
    last token of a hit is right only if the block after the hit is cached too.
    """

    spec: KVCacheSpec
    group_ids: tuple[int, ...]
    is_eagle: bool = False

    @property
    def num_groups(self) -> int:
        """Physical blocks that one logical block of this type takes."""
        return len(self.group_ids)

    @property
    def name(self) -> str:
        """The spec's kind, and how many tokens a query sees if limited: ``sliding_window 512``."""
        kind = get_kv_cache_spec_kind(self.spec).value
        reach = get_kv_cache_spec_sliding_window(self.spec)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            reach = self.spec.attention_chunk_size
        return f"{kind} {reach}" if reach else kind

    def __str__(self) -> str:
        groups = _count(self.num_groups, "group")
        return f"{self.name} ({groups}, block size {self.spec.block_size})"


def get_eagle_group_ids(kv_cache_config: KVCacheConfig, use_eagle: bool) -> frozenset[int]:
    """The groups with EAGLE or MTP layers: those with the flag, or all groups if none has it."""
    groups = kv_cache_config.kv_cache_groups
    flagged = frozenset(i for i, group in enumerate(groups) if group.is_eagle_group)
    return frozenset(range(len(groups))) if use_eagle and not flagged else flagged


def get_attention_types(
    kv_cache_config: KVCacheConfig, use_eagle: bool = False
) -> tuple[AttentionType, ...]:
    """The attention types of a model, in the order of their first group.

    As in base, draft layers with the spec of other layers belong to the same type, and set its
    ``is_eagle``.
    """
    specs: list[KVCacheSpec] = []
    group_ids: list[list[int]] = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        # Specs are compared, not hashed: some have unhashable fields.
        if group.kv_cache_spec not in specs:
            specs.append(group.kv_cache_spec)
            group_ids.append([])
        group_ids[specs.index(group.kv_cache_spec)].append(group_id)
    eagle = get_eagle_group_ids(kv_cache_config, use_eagle)
    return tuple(
        AttentionType(spec, tuple(ids), is_eagle=not eagle.isdisjoint(ids))
        for spec, ids in zip(specs, group_ids, strict=True)
    )


def describe(attention_types: Sequence[AttentionType]) -> str:
    """How the hybrid manager arranges the KV cache of a model with these types, in one line."""
    if not attention_types:
        return "no KV cache groups"
    managers = _count(len(attention_types), "manager")
    groups = _count(sum(t.num_groups for t in attention_types), "KV cache group")
    return f"{managers} for {groups}: {'; '.join(map(str, attention_types))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
