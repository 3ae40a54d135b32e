# SPDX-License-Identifier: Apache-2.0
"""Faults that concern cross attention, to plant like those of `planted_faults`."""

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig
from vllm.v1.request import Request

from .planted_faults import Ids, Reported


def _encoder_groups(config: KVCacheConfig) -> list[int]:
    groups = enumerate(config.kv_cache_groups)
    return [i for i, group in groups if isinstance(group.kv_cache_spec, CrossAttentionSpec)]


def _with_encoder_ids(manager: Any, blocks: Any, other: Ids) -> Any:
    groups = _encoder_groups(manager.kv_cache_config)
    return Reported(
        blocks, lambda ids: tuple(other[i] if i in groups else ids[i] for i in range(len(ids)))
    )


def gives_out_the_encoder_blocks_of_another_request(manager_cls: type) -> type:
    """An admitted request's encoder states go where those of the request before it are."""

    class Faulty(manager_cls):
        last_ids: Ids | None = None

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            other, self.last_ids = self.last_ids, blocks.get_block_ids()
            group = _encoder_groups(self.kv_cache_config)[0]
            if other is None or len(other[group]) != len(self.last_ids[group]):
                return blocks
            return _with_encoder_ids(self, blocks, other)

    return Faulty


def keeps_encoder_blocks_after_preemption(manager_cls: type) -> type:
    """A request that was preempted resumes with the encoder blocks that it had."""

    class Faulty(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.first_ids: dict[str, Ids] = {}

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            first = self.first_ids.setdefault(request_id, blocks.get_block_ids())
            return _with_encoder_ids(self, blocks, first)

    return Faulty


def _with_encoder_tokens(manager_cls: type, change: Callable[[int, int], int]) -> type:
    class Faulty(manager_cls):
        def allocate_slots(
            self,
            request: Request,
            num_new_tokens: int,
            *args: Any,
            num_encoder_tokens: int = 0,
            **kwargs: Any,
        ) -> Any:
            if num_encoder_tokens:
                kwargs["num_encoder_tokens"] = change(num_encoder_tokens, num_new_tokens)
            return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    return Faulty


def allocates_an_encoder_slot_too_few(manager_cls: type) -> type:
    """The encoder's last token has no slot, if the others fill their blocks."""
    return _with_encoder_tokens(manager_cls, lambda encoder, new: encoder - 1)


def allocates_the_encoders_blocks_by_decoder_tokens(manager_cls: type) -> type:
    """Cross attention gets slots for as many tokens as the decoder computes."""
    return _with_encoder_tokens(manager_cls, lambda encoder, new: new)


def frees_the_encoders_blocks_after_the_first_step(manager_cls: type) -> type:
    """The encoder's blocks are free as soon as the request decodes."""

    class Faulty(manager_cls):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.num_computed_tokens:
                self.free_encoder(request.request_id)
            return super().allocate_slots(request, *args, **kwargs)

        def free_encoder(self, request_id: str) -> None:
            coordinator = self.coordinator
            for group in _encoder_groups(self.kv_cache_config):
                manager = coordinator.single_type_managers[group]
                if hasattr(manager, "free"):  # base's
                    manager.free(request_id)
                else:
                    coordinator.requests[request_id].tables[manager.type_id].free()

    return Faulty


#: Faults of any manager of cross attention.
ENCODER_PLANTERS: tuple[Callable[[type], type], ...] = (
    gives_out_the_encoder_blocks_of_another_request,
    keeps_encoder_blocks_after_preemption,
    allocates_an_encoder_slot_too_few,
    allocates_the_encoders_blocks_by_decoder_tokens,
    frees_the_encoders_blocks_after_the_first_step,
)
