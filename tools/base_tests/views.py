# SPDX-License-Identifier: Apache-2.0
"""Read-only views of the hybrid manager, in the shape of base's manager.

Base's own tests read these attributes, so the names are base's. Only `plugin` installs the views.
Each access is recorded, which shows the tests that needed a view.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager

#: Names that were read since the list was last cleared.
looked_at: list[str] = []

_NULL = SimpleNamespace(block_id=0, is_null=True, ref_cnt=0, block_hash=None, _block_hash=None)


def show(manager: KVCacheManager) -> None:
    """Replace the type managers of a coordinator by one view per KV cache group."""
    coordinator = manager.coordinator
    views: Any = tuple(
        GroupView(coordinator, of_type, of_type.attention_type.group_ids.index(group_id))
        for group_id, of_type in enumerate(coordinator.single_type_managers)
    )
    coordinator.single_type_managers = views


class GroupView:
    """The manager of an attention type, seen as the manager of one of its groups."""

    def __init__(self, coordinator: Any, manager: Any, place: int) -> None:
        self._coordinator, self._manager, self._place = coordinator, manager, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    @property
    def req_to_blocks(self) -> Mapping[str, list[Any]]:
        looked_at.append("req_to_blocks")
        return RequestsView(self._coordinator, self._manager.type_id, self._place)

    @property
    def num_cached_block(self) -> dict[str, int]:
        looked_at.append("num_cached_block")
        requests = self._coordinator.requests.items()
        return {name: blocks.tables[self._manager.type_id].num_decided for name, blocks in requests}

    @property
    def _null_block(self) -> Any:
        return _NULL


class RequestsView(Mapping[str, list[Any]]):
    """The blocks of one group that each request holds now."""

    def __init__(self, coordinator: Any, type_id: int, place: int) -> None:
        self._coordinator, self._type_id, self._place = coordinator, type_id, place

    def __getitem__(self, request_id: str) -> list[Any]:
        table = self._coordinator.requests[request_id].tables[self._type_id]
        return [BlockView.of(block, self._place) for block in table.blocks()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._coordinator.requests)

    def __len__(self) -> int:
        return len(self._coordinator.requests)


class BlockView:
    """One physical block of a grouped block; its id stays after the grouped block is freed."""

    is_null = False

    def __init__(self, block: Any, place: int) -> None:
        self.block_id, self._block = block.block_ids[place], block

    @classmethod
    def of(cls, block: Any, place: int) -> Any:
        return _NULL if block.is_null else cls(block, place)

    @property
    def ref_cnt(self) -> int:
        return self._now("ref_cnt") or 0

    @property
    def block_hash(self) -> bytes | None:
        return self._now("block_hash")

    _block_hash = block_hash

    def _now(self, name: str) -> Any:
        try:
            return getattr(self._block, name)
        except ValueError:
            # The block is neither referenced nor cached any more.
            return None


class BlocksView(Sequence[Any]):
    """All physical blocks of a pool, by id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.num_gpu_blocks

    def __getitem__(self, block_id: Any) -> Any:
        return list(self)[block_id]

    def __iter__(self) -> Iterator[Any]:
        # The hybrid manager has no object for a blank id.
        views: list[Any] = [
            SimpleNamespace(block_id=i, is_null=False, ref_cnt=0, block_hash=None)
            for i in range(len(self))
        ]
        views[0] = _NULL
        for block in self._pool.live_blocks():
            for place, block_id in enumerate(block.block_ids):
                views[block_id] = BlockView(block, place)
        return iter(views)


def _blocks(pool: BlockPool) -> BlocksView:
    looked_at.append("blocks")
    return BlocksView(pool)


def _cached(pool: BlockPool) -> list[Any]:
    looked_at.append("cached_block_hash_to_block")
    return [block for t in range(len(pool.attention_types)) for block in pool.cached_blocks(t)]


class QueueView:
    """The number of free blocks of a pool, which has no single free queue."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        looked_at.append("free_block_queue")
        return self._pool.get_num_free_blocks()


for name, view in (
    ("blocks", _blocks),
    ("cached_block_hash_to_block", _cached),
    ("free_block_queue", QueueView),
):
    setattr(BlockPool, name, property(view))
