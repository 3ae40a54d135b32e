# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in a KV cache manager, to show that the oracle finds them.

Each planter takes a manager class and returns a faulty subclass. They use the contract with
the scheduler only, so they fit base's manager and the fork's.
"""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

Ids = tuple[list[int], ...]


class Reported:
    """Blocks of which the scheduler reads other ids than they have."""

    def __init__(self, blocks: Any, change: Callable[[Ids], Ids]) -> None:
        self._blocks, self._change = blocks, change

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Ids | None:
        ids = self._blocks.get_block_ids(allow_none=allow_none, **kwargs)
        return None if ids is None else self._change(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)


@contextmanager
def _replaced(owner: Any, name: str, value: Any):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def gives_out_a_block_of_another_request(manager_cls: type) -> type:
    """The last block of an admitted request is the one of the request before it."""

    class Faulty(manager_cls):
        last_ids: Ids | None = None

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            other, self.last_ids = self.last_ids, blocks.get_block_ids()
            if other is None or not other[0]:
                return blocks
            return Reported(blocks, lambda ids: ([*ids[0][:-1], other[0][-1]], *ids[1:]))

    return Faulty


def frees_a_request_a_step_early(manager_cls: type) -> type:
    """The blocks of a request are free again while its last step is being made."""

    class Faulty(manager_cls):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            blocks = super().allocate_slots(request, *args, **kwargs)
            if blocks is not None and request.num_output_tokens + 1 == request.max_tokens:
                ids = blocks.get_block_ids()
                blocks = Reported(blocks, lambda _: ids)
                if request.num_computed_tokens >= request.num_prompt_tokens:
                    super().free(request)
            return blocks

    return Faulty


def frees_window_blocks_a_step_early(manager_cls: type) -> type:
    """Blocks leave a window although the step being made still reads them."""

    class Faulty(manager_cls):
        def allocate_slots(
            self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
        ) -> Any:
            if request.num_computed_tokens:
                self.remove_skipped_blocks(
                    request.request_id, request.num_computed_tokens + num_new_tokens
                )
            return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    return Faulty


def _with_hasher(manager_cls: type, make_hasher: Callable[[Any], Any]) -> type:
    class Faulty(manager_cls):
        def get_computed_blocks(self, request: Request) -> Any:
            hasher = request._block_hasher
            if not getattr(hasher, "faulty", False):
                request._block_hasher = make_hasher(hasher)
                request._block_hasher.faulty = True
                request.block_hashes.clear()
                request.update_block_hashes()
            return super().get_computed_blocks(request)

    return Faulty


def _hash_without(manager_cls: type, attribute: str, nothing: Any) -> type:
    def make_hasher(hasher: Any) -> Any:
        def hash_blocks(request: Request) -> Any:
            with _replaced(request, attribute, nothing):
                return hasher(request)

        return hash_blocks

    return _with_hasher(manager_cls, make_hasher)


def shares_across_salts(manager_cls: type) -> type:
    """Cache salts do not count in block hashes."""
    return _hash_without(manager_cls, "cache_salt", None)


def shares_across_adapters(manager_cls: type) -> type:
    """LoRA adapters do not count in block hashes."""
    return _hash_without(manager_cls, "lora_request", None)


def shares_across_images(manager_cls: type) -> type:
    """Images do not count in block hashes."""
    return _hash_without(manager_cls, "mm_features", [])


def hashes_blocks_without_prefix(manager_cls: type) -> type:
    """A block's hash covers its own tokens, not those before it."""

    def make_hasher(hasher: Any) -> Any:
        def hash_blocks(request: Request) -> Any:
            count = len(hasher(request))
            done = len(request.block_hashes)
            size = request.num_tokens // (count + done) if count + done else 1
            # The unit is a divisor of every block size; find it from the number of hashes.
            while count and request.num_tokens // size != count + done:
                size -= 1
            return [
                hash_block_tokens(sha256, None, request.all_token_ids[i * size : (i + 1) * size])
                for i in range(done, done + count)
            ]

        return hash_blocks

    return _with_hasher(manager_cls, make_hasher)


def _with_window(manager_cls: type, shorten: Callable[[SlidingWindowSpec], int]) -> type:
    class Faulty(manager_cls):
        def __init__(self, kv_cache_config: Any, **kwargs: Any) -> None:
            config = copy.deepcopy(kv_cache_config)
            for group in config.kv_cache_groups:
                spec = group.kv_cache_spec
                if isinstance(spec, SlidingWindowSpec):
                    object.__setattr__(spec, "sliding_window", max(shorten(spec), 1))
            super().__init__(kv_cache_config=config, **kwargs)

    return Faulty


def window_short_by_a_token(manager_cls: type) -> type:
    """Sliding windows are kept one token short."""
    return _with_window(manager_cls, lambda spec: spec.sliding_window - 1)


def window_short_by_a_block(manager_cls: type) -> type:
    """Sliding windows are kept one block short."""
    return _with_window(manager_cls, lambda spec: spec.sliding_window - spec.block_size)


def forgets_steps_in_flight(manager_cls: type) -> type:
    """Blocks leave a window although a step in flight still reads them."""

    class Faulty(manager_cls):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            with _replaced(request, "num_in_flight_tokens", 0):
                return super().allocate_slots(request, *args, **kwargs)

    return Faulty


def reset_keeps_the_cache(manager_cls: type) -> type:
    """A reset of the prefix cache claims success and does nothing."""

    class Faulty(manager_cls):
        def reset_prefix_cache(self) -> bool:
            return True

    return Faulty


def allocates_a_slot_too_few(manager_cls: type) -> type:
    """A chunk of a prompt gets slots for all but its last token."""

    class Faulty(manager_cls):
        def allocate_slots(
            self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
        ) -> Any:
            few = max(num_new_tokens - 1, 1)
            return super().allocate_slots(request, few, *args, **kwargs)

    return Faulty


def hands_out_its_own_lists(manager_cls: type) -> type:
    """The lists of block ids sent to the worker are the manager's, which it extends."""

    class Faulty(manager_cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.lists: dict[str, Ids] = {}

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            own = self.lists[request_id] = blocks.get_block_ids()
            return Reported(blocks, lambda ids: own)

        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            blocks = super().allocate_slots(request, *args, **kwargs)
            if blocks is not None and request.num_computed_tokens:
                for own, new in zip(
                    self.lists[request.request_id], blocks.get_block_ids(), strict=True
                ):
                    own.extend(new)
            return blocks

    return Faulty


def mixes_up_two_groups(manager_cls: type) -> type:
    """After a prefix hit, two groups of a type have each other's blocks."""

    class Faulty(manager_cls):
        hits = 0

        def get_computed_blocks(self, request: Request) -> Any:
            found = super().get_computed_blocks(request)
            self.hits = found[1]
            return found

        def get_blocks(self, request_id: str) -> Any:
            blocks = super().get_blocks(request_id)
            specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
            pairs = [(0, i) for i in range(1, len(specs)) if specs[i] == specs[0]]
            if not self.hits or not pairs:
                return blocks
            other = pairs[0][1]

            def swap(ids: Ids) -> Ids:
                swapped = list(ids)
                swapped[0], swapped[other] = swapped[other], swapped[0]
                return tuple(swapped)

            return Reported(blocks, swap)

    return Faulty


def forgets_null_padding(manager_cls: type) -> type:
    """Of a hit in a sliding window, the blocks before the window are left out."""

    class Faulty(manager_cls):
        def get_blocks(self, request_id: str) -> Any:
            def strip(ids: Ids) -> Ids:
                return tuple([i for i in group_ids if i != 0] for group_ids in ids)

            return Reported(super().get_blocks(request_id), strip)

    return Faulty


def never_frees(manager_cls: type) -> type:
    """Ended requests keep their blocks."""

    class Faulty(manager_cls):
        def free(self, request: Request) -> None:
            pass

    return Faulty


#: All planters that the oracle must find in any manager.
PLANTERS: tuple[Callable[[type], type], ...] = (
    gives_out_a_block_of_another_request,
    frees_a_request_a_step_early,
    frees_window_blocks_a_step_early,
    shares_across_salts,
    shares_across_adapters,
    shares_across_images,
    hashes_blocks_without_prefix,
    window_short_by_a_token,
    window_short_by_a_block,
    forgets_steps_in_flight,
    reset_keeps_the_cache,
    allocates_a_slot_too_few,
    hands_out_its_own_lists,
    mixes_up_two_groups,
    forgets_null_padding,
    never_frees,
)
