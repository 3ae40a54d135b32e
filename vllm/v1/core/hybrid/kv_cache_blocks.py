# SPDX-License-Identifier: Apache-2.0
"""Blocks as the scheduler receives them: per attention type, with ids per KV cache group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

from vllm.v1.core.hybrid._core import BlockList
from vllm.v1.core.hybrid.attention_type import AttentionType

#: Per attention type, blocks in token order.
BlocksByType = tuple[BlockList, ...]
#: For each KV cache group: its attention type, and its place among the type's groups.
GroupLayout = tuple[tuple[int, int], ...]


def get_group_layout(attention_types: Sequence[AttentionType]) -> GroupLayout:
    """The layout of a model's groups, in the order of the KV cache config."""
    places = {
        group_id: (type_id, place)
        for type_id, attention_type in enumerate(attention_types)
        for place, group_id in enumerate(attention_type.group_ids)
    }
    return tuple(places[group_id] for group_id in range(len(places)))


class PhysicalBlock(NamedTuple):
    """What base's callers read of one block of one KV cache group."""

    block_id: int
    #: Set while the block is in the prefix cache. Its content is then complete.
    block_hash: bytes | None
    is_null: bool


class KVCacheBlocks:
    """Blocks of one request, per attention type, and their ids, per KV cache group.

    Immutable by convention. The scheduler keeps an instance within a step only. It holds no
    references: once a block has been reallocated, reading its ids raises ValueError.
    """

    __slots__ = ("_blocks", "by_type", "layout")

    def __init__(self, by_type: BlocksByType, layout: GroupLayout) -> None:
        #: ``by_type[type][i]`` is the type's ``i``-th logical block.
        self.by_type = by_type
        self.layout = layout
        self._blocks: tuple[list[PhysicalBlock], ...] | None = None

    @property
    def blocks(self) -> tuple[list[PhysicalBlock], ...]:
        """``blocks[group][i]``, as base's callers expect it. Computed when it is first read."""
        if self._blocks is None:
            ids = [blocks.block_ids() for blocks in self.by_type]
            hashes = [[block.block_hash for block in blocks] for blocks in self.by_type]
            pairs = [(ids[type_id][place], hashes[type_id]) for type_id, place in self.layout]
            self._blocks = tuple(
                [PhysicalBlock(i, block_hash, not i) for i, block_hash in zip(*pair, strict=True)]
                for pair in pairs
            )
        return self._blocks

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return type(self)(
            tuple(a + b for a, b in zip(self.by_type, other.by_type, strict=True)), self.layout
        )

    @overload
    def get_block_ids(
        self, allow_none: Literal[False] = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(
        self, allow_none: bool, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None: ...

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Physical ids, one list per KV cache group in the config's order.

        ``group_ids`` selects groups; with ``allow_none``, None instead of only empty lists.
        """
        # The common case first: most steps of most requests bring no new block.
        if allow_none and not any(map(len, self.by_type)):
            return None
        layout = self.layout
        if group_ids is not None:
            layout = tuple(layout[i] for i in group_ids)
            if allow_none and not any(len(self.by_type[type_id]) for type_id, _ in layout):
                return None
        ids = {type_id: self.by_type[type_id].block_ids() for type_id in {t for t, _ in layout}}
        return tuple([ids[type_id][place] for type_id, place in layout])

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are not in the prefix cache, for a model with one group.

        Raises:
            ValueError: if the model has another number of groups.
        """
        if len(self.layout) != 1:
            raise ValueError(f"the number of KV cache groups must be 1, got {len(self.layout)}")
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group, ids of the blocks that are not in the prefix cache, without null blocks."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """The same layout without blocks."""
        return type(self)(tuple(blocks.truncated(0) for blocks in self.by_type), self.layout)
