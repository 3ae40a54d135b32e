# SPDX-License-Identifier: Apache-2.0
"""Attention types: the KV cache groups that one manager serves together."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)


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
    def kind(self) -> str:
        """Base's name of the spec's kind, e.g. ``"sliding_window"``."""
        return get_kv_cache_spec_kind(self.spec).value

    @property
    def name(self) -> str:
        """The kind, and how many tokens a query sees: ``"sliding_window 512"``."""
        reach = get_kv_cache_spec_sliding_window(self.spec)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            reach = self.spec.attention_chunk_size
        return f"{self.kind} {reach}" if reach else self.kind

    def __str__(self) -> str:
        groups = "1 group" if self.num_groups == 1 else f"{self.num_groups} groups"
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

    As in base, draft layers with the spec of other layers join their type, which then is one of
    EAGLE.
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
