# SPDX-License-Identifier: Apache-2.0
"""The worker's block tables: one per KV cache group, kept per attention type."""

import copy
from collections.abc import Sequence

import numpy as np

from support.identity import hash64
from support.kv_configs import AttentionKind, kind_of
from vllm.v1.kv_cache_interface import KVCacheConfig

from .faults import ProtocolFault


class TypeTables:
    """Block tables of the groups of one attention type, ``[group, row, block]``.

    Groups of a type hold equally many blocks, so one count per row is enough.
    """

    def __init__(
        self, group_ids: list[int], kind: AttentionKind, num_rows: int, max_model_len: int
    ) -> None:
        self.group_ids = group_ids
        self.kind = kind
        #: Tokens before a step's own that draft layers compute again.
        self.num_reread = 0
        self.block_size = kind.block_size
        #: Whether positions are those of an encoder's tokens.
        self.of_encoder = kind.of_encoder
        self.width = kind.table_width(max_model_len)
        self.table = np.zeros((len(group_ids), num_rows, self.width), dtype=np.int64)
        self.counts = np.zeros(num_rows, dtype=np.int64)
        #: Tells the content of one group from that of the others, `[group, 1]`.
        marks = [hash64("group", group_id) for group_id in group_ids]
        self.group_marks = np.array(marks, dtype=np.uint64)[:, None]
        self.group_column = np.array(group_ids, dtype=np.int64)[:, None]

    def only(self, places: list[int]) -> "TypeTables":
        """The same for some of the groups."""
        some = copy.copy(self)
        some.group_ids = [self.group_ids[place] for place in places]
        some.group_marks, some.group_column = self.group_marks[places], self.group_column[places]
        return some

    def select(self, block_ids: Sequence[Sequence[int]]) -> np.ndarray:
        """This type's share of ids per KV cache group, ``[group, block]``."""
        mine = [block_ids[group_id] for group_id in self.group_ids]
        if len({len(ids) for ids in mine}) > 1:
            raise ProtocolFault(
                f"groups {self.group_ids} of one attention type got unequal numbers of "
                f"blocks: {[len(ids) for ids in mine]}"
            )
        return np.array(mine, dtype=np.int64)

    def append(self, row: int, ids: np.ndarray) -> None:
        start = self.counts[row]
        end = start + ids.shape[1]
        if end > self.width:
            raise ProtocolFault(
                f"{end} blocks for a request in groups {self.group_ids}; "
                f"the longest sequence needs {self.width} at most"
            )
        self.table[:, row, start:end] = ids
        self.counts[row] = end

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """A copy of the tables of some rows, without the unused tail."""
        return self.table[:, rows, : self.counts[rows].max(initial=1)]


class BlockTables:
    """The tables of all KV cache groups of a model."""

    def __init__(self, config: KVCacheConfig, num_rows: int, max_model_len: int) -> None:
        self.num_blocks = config.num_blocks
        self.num_groups = len(config.kv_cache_groups)
        by_kind: dict[AttentionKind, list[int]] = {}
        for group_id, group in enumerate(config.kv_cache_groups):
            by_kind.setdefault(kind_of(group.kv_cache_spec), []).append(group_id)
        self.types = [
            TypeTables(group_ids, kind, num_rows, max_model_len)
            for kind, group_ids in by_kind.items()
        ]
        self.has_encoder = any(t.of_encoder for t in self.types)
        self.holds_states = any(t.kind.holds_states for t in self.types)
        #: Of the types with a slot per token; a state takes one slot.
        self.block_sizes = [t.block_size for t in self.types if not t.kind.holds_states]

    def append(self, row: int, block_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Append blocks to a row; returns the ids per attention type."""
        ids_by_type = self._split(block_ids)
        for tables, ids in zip(self.types, ids_by_type, strict=True):
            tables.append(row, ids)
        return ids_by_type

    def clear(self, row: int) -> None:
        for tables in self.types:
            tables.table[:, row] = 0
            tables.counts[row] = 0

    def holds(self, row: int, block_ids: Sequence[Sequence[int]]) -> bool:
        """Whether a row consists of just these blocks."""
        return all(
            ids.shape[1] == tables.counts[row]
            and np.array_equal(ids, tables.table[:, row, : tables.counts[row]])
            for tables, ids in zip(self.types, self._split(block_ids), strict=True)
        )

    def _split(self, block_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        if len(block_ids) != self.num_groups:
            raise ProtocolFault(f"{len(block_ids)} block tables for {self.num_groups} groups")
        ids_by_type = [tables.select(block_ids) for tables in self.types]
        for ids in ids_by_type:
            if ids.size and not 0 <= ids.min() <= ids.max() < self.num_blocks:
                raise ProtocolFault(
                    f"block ids {ids.min()} to {ids.max()} in a pool of {self.num_blocks}"
                )
        return ids_by_type
