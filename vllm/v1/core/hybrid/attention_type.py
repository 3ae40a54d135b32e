# SPDX-License-Identifier: Apache-2.0
"""Attention types: the KV cache groups that one manager serves together."""

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)


@dataclass(frozen=True)
class AttentionType:
    """KV cache groups with the same KV cache spec, managed as one.

    ``group_ids`` are indices into ``KVCacheConfig.kv_cache_groups``, ascending.
    """

    spec: KVCacheSpec
    group_ids: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Physical blocks that one logical block of this type takes."""
        return len(self.group_ids)

    @property
    def is_full_attention(self) -> bool:
        return isinstance(self.spec, FullAttentionSpec)

    @property
    def holds_states(self) -> bool:
        """Whether a block holds a state that sums up the whole prefix, not its own tokens."""
        return isinstance(self.spec, MambaSpec)

    @property
    def kind(self) -> str:
        """Base's name of the spec's kind, e.g. ``"sliding_window"``."""
        return get_kv_cache_spec_kind(self.spec).value

    @property
    def name(self) -> str:
        """The kind, and how far a token sees: ``"sliding_window 512"``."""
        reach = get_kv_cache_spec_sliding_window(self.spec)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            reach = self.spec.attention_chunk_size
        return f"{self.kind} {reach}" if reach else self.kind

    def __str__(self) -> str:
        groups = "1 group" if self.num_groups == 1 else f"{self.num_groups} groups"
        return f"{self.name} ({groups}, block size {self.spec.block_size})"


def get_attention_types(kv_cache_config: KVCacheConfig) -> tuple[AttentionType, ...]:
    """The attention types of a model, in the order of their first group."""
    specs: list[KVCacheSpec] = []
    group_ids: list[list[int]] = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        # Specs are compared, not hashed: some hold unhashable fields.
        if group.kv_cache_spec not in specs:
            specs.append(group.kv_cache_spec)
            group_ids.append([])
        group_ids[specs.index(group.kv_cache_spec)].append(group_id)
    return tuple(
        AttentionType(spec, tuple(ids)) for spec, ids in zip(specs, group_ids, strict=True)
    )
