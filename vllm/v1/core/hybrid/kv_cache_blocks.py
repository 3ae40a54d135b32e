# SPDX-License-Identifier: Apache-2.0
"""What the scheduler receives: blocks per attention type, ids per KV cache group."""

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


class KVCacheBlocks:
    """Blocks of one request: ``blocks[type][i]`` is the type's ``i``-th logical block.

    Immutable by convention. The scheduler holds it only within a step: it has no references, and
    once a block has been given to others its ids raise ValueError.
    """

    __slots__ = ("by_type", "layout")

    def __init__(self, by_type: BlocksByType, layout: GroupLayout) -> None:
        self.by_type = by_type
        self.layout = layout

    @property
    def blocks(self) -> BlocksByType:
        """Per attention type, its blocks in token order."""
        return self.by_type

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
        # First the common case: most steps of most requests bring nothing new.
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
        """Ids of the blocks that are not in the prefix cache; for a single group only.

        Raises:
            ValueError: if the model has another number of groups than one.
        """
        if len(self.layout) != 1:
            raise ValueError(f"needs exactly one KV cache group, the model has {len(self.layout)}")
        return [block.block_ids[0] for block in self.by_type[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group, ids of the blocks that are not in the prefix cache, without null blocks."""
        return [
            [
                block.block_ids[place]
                for block in self.by_type[type_id]
                if block.block_hash is None and not block.is_null
            ]
            for type_id, place in self.layout
        ]

    def new_empty(self) -> KVCacheBlocks:
        """The same layout without blocks."""
        return type(self)(tuple(blocks.truncated(0) for blocks in self.by_type), self.layout)


class PhysicalBlock(NamedTuple):
    """What a KV connector reads of a block of one KV cache group."""

    block_id: int
    #: Whether it is in the prefix cache, and so holds what its request has computed before.
    block_hash: bytes | None
    is_null: bool


class KVCacheBlocksByGroup(KVCacheBlocks):
    """The blocks of one request as KV connectors know them: ``blocks[group][i]``, as in base."""

    __slots__ = ("_by_group",)

    def __init__(self, by_type: BlocksByType, layout: GroupLayout) -> None:
        super().__init__(by_type, layout)
        self._by_group: tuple[list[PhysicalBlock], ...] | None = None

    @property
    def blocks(self) -> tuple[list[PhysicalBlock], ...]:  # type: ignore[override]
        """Per KV cache group, its blocks in token order."""
        # Base's offloading connector asks again for each group.
        if self._by_group is None:
            ids = [blocks.block_ids() for blocks in self.by_type]
            hashes = [[block.block_hash for block in blocks] for blocks in self.by_type]
            pairs = [(ids[type_id][place], hashes[type_id]) for type_id, place in self.layout]
            self._by_group = tuple(
                [PhysicalBlock(i, block_hash, not i) for i, block_hash in zip(*pair, strict=True)]
                for pair in pairs
            )
        return self._by_group
