# SPDX-License-Identifier: Apache-2.0
"""Faults that concern recurrent states, to plant like those of `planted_faults`."""

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request

from .planted_faults import Ids, Reported


def _state_groups(config: KVCacheConfig) -> list[int]:
    groups = enumerate(config.kv_cache_groups)
    return [i for i, group in groups if isinstance(group.kv_cache_spec, MambaSpec)]


def gives_out_the_state_block_of_another_request(manager_cls: type) -> type:
    """An admitted request keeps its state where the request before it does."""

    class Faulty(manager_cls):
        last_ids: Ids | None = None

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            other, self.last_ids = self.last_ids, blocks.get_block_ids()
            if other is None:
                return blocks
            group = _state_groups(self.kv_cache_config)[-1]

            def share(ids: Ids) -> Ids:
                shared = list(ids)
                shared[group] = [*ids[group][:-1], other[group][-1]]
                return tuple(shared)

            return Reported(blocks, share)

    return Faulty


def hits_the_state_of_an_earlier_boundary(manager_cls: type) -> type:
    """A prefix hit gets a state that lacks some of the prefix.

    It takes the state block that was handed out just before the right one, which is that
    of the chunk before if one request ran alone.
    """

    class Faulty(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.handed_out: list[int] = []

        def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
            blocks = super().allocate_slots(*args, **kwargs)
            if blocks is not None:
                group = _state_groups(self.kv_cache_config)[0]
                self.handed_out += [i for i in blocks.get_block_ids()[group] if i]
            return blocks

        def get_blocks(self, request_id: str) -> Any:
            def move_back(ids: Ids) -> Ids:
                moved = [list(group_ids) for group_ids in ids]
                group = moved[_state_groups(self.kv_cache_config)[0]]
                hit = [column for column, i in enumerate(group[:-1]) if i]
                if hit:
                    earlier = self.handed_out.index(group[hit[0]]) - 1
                    group[hit[0]] = self.handed_out[max(earlier, 0)]
                return tuple(moved)

            return Reported(super().get_blocks(request_id), move_back)

    return Faulty


def hits_states_of_the_same_step(manager_cls: type) -> type:
    """A request starts from a state that another one computes in the same step."""

    class Faulty(manager_cls):
        def get_computed_blocks(self, request: Request) -> Any:
            self.new_step_starts()
            return super().get_computed_blocks(request)

    return Faulty


#: Faults of any prefix cache of states.
STATE_PLANTERS: tuple[Callable[[type], type], ...] = (
    gives_out_the_state_block_of_another_request,
    hits_the_state_of_an_earlier_boundary,
    hits_states_of_the_same_step,
)
