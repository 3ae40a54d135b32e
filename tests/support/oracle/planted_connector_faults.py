# SPDX-License-Identifier: Apache-2.0
"""Faults that concern KV connectors, to plant like those of `planted_faults`."""

from typing import Any

from vllm.v1.request import Request


def caches_what_is_still_loaded(manager_cls: type) -> type:
    """Blocks are in the prefix cache before the load that fills them is done."""

    class Faulty(manager_cls):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            return super().allocate_slots(request, *args, **kwargs | {"delay_cache_blocks": False})

    return Faulty


def zeroes_what_is_still_loaded(manager_cls: type) -> type:
    """Blocks are zeroed in the step after a load has begun to fill them."""

    class Faulty(manager_cls):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            return super().allocate_slots(request, *args, **kwargs | {"skip_zeroing_group_ids": ()})

    return Faulty


def frees_a_request_that_loads(manager_cls: type) -> type:
    """A request's blocks are free again as soon as its load has begun."""

    class Faulty(manager_cls):
        loading: Request | None = None

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            if self.loading is not None and self.loading.request_id == request_id:
                super().free(self.loading)
                self.loading = None
            return blocks

        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("delay_cache_blocks"):
                self.loading = request
            return super().allocate_slots(request, *args, **kwargs)

    return Faulty


def gives_a_load_the_slots_before_it(manager_cls: type) -> type:
    """A block too few is there for the tokens of a load."""

    class Faulty(manager_cls):
        def allocate_slots(
            self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
        ) -> Any:
            num_external = kwargs.get("num_external_computed_tokens", 0)
            if num_external > 16:
                kwargs["num_external_computed_tokens"] = num_external - 16
            return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    return Faulty


def caches_a_failed_load(manager_cls: type) -> type:
    """All blocks of a load are cached when it ends, those that it failed for included."""

    class Faulty(manager_cls):
        def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
            super().cache_blocks(request, request.num_tokens)

    return Faulty


def releases_what_is_sent(manager_cls: type) -> type:
    """The blocks of a request that has ended are free before they were sent on."""

    class Faulty(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.ended: set[str] = set()

        def get_block_ids_for_computed_tokens(
            self, request_id: str, num_computed_tokens: int
        ) -> Any:
            ids = super().get_block_ids_for_computed_tokens(request_id, num_computed_tokens)
            self.ended.add(request_id)
            return ids

        def new_step_starts(self) -> None:
            super().new_step_starts()
            for request_id in self.ended:
                self.coordinator.free(request_id)
            self.ended.clear()

    return Faulty
