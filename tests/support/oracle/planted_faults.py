# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in a KV cache manager, to show that the oracle finds them.

Each is a mix-in that comes before the manager among the bases of a class; `plant` makes that
class. They use the contract with the scheduler only, so they fit base's manager and the hybrid
manager. `planted_feature_faults` has those of states, cross attention and KV connectors.
"""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

Ids = tuple[list[int], ...]

#: Stands for the manager that a fault is planted in.
AnyManager: Any = object


def plant(fault: type, manager_cls: type) -> type:
    """The manager class with a fault."""
    return type(fault.__name__, (fault, manager_cls), {})


class Fault(AnyManager):
    @functools.cached_property
    def noted(self) -> dict[Any, Any]:
        """What a fault remembers between calls."""
        return {}


class Reported:
    """Blocks of which the scheduler reads other ids than they have."""

    def __init__(self, blocks: Any, ids: Ids) -> None:
        self._blocks, self._ids = blocks, ids

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Ids | None:
        nothing = self._blocks.get_block_ids(allow_none=allow_none, **kwargs) is None
        return None if nothing else self._ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)


class ReportsOtherIds(Fault):
    """The worker gets other ids for an admitted request than the manager has."""

    def get_blocks(self, request_id: str) -> Any:
        blocks = super().get_blocks(request_id)
        return Reported(blocks, self.reported(request_id, blocks.get_block_ids()))

    def reported(self, request_id: str, ids: Ids) -> Ids:
        raise NotImplementedError


def with_group(ids: Ids, group: int, group_ids: list[int]) -> Ids:
    """The ids, with other ones for one group."""
    return (*ids[:group], group_ids, *ids[group + 1 :])


class GivesOutABlockOfAnotherRequest(ReportsOtherIds):
    """The last block of an admitted request is the one of the request before it."""

    group = 0

    def reported(self, request_id: str, ids: Ids) -> Ids:
        other, self.noted["last"] = self.noted.get("last"), ids
        group = self.group
        if other is None or not other[group]:
            return ids
        return with_group(ids, group, [*ids[group][:-1], other[group][-1]])


class FreesARequestAStepEarly(AnyManager):
    """The blocks of a request are free again while its last step is being made."""

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_slots(request, *args, **kwargs)
        if blocks is not None and request.num_output_tokens + 1 == request.max_tokens:
            blocks = Reported(blocks, blocks.get_block_ids())
            if request.num_computed_tokens >= request.num_prompt_tokens:
                super().free(request)
        return blocks


class FreesWindowBlocksAStepEarly(AnyManager):
    """Blocks leave a window although the step being made still reads them."""

    def allocate_slots(self, request: Request, num_new: int, *args: Any, **kwargs: Any) -> Any:
        if request.num_computed_tokens:
            self.remove_skipped_blocks(request.request_id, request.num_computed_tokens + num_new)
        return super().allocate_slots(request, num_new, *args, **kwargs)


class HashesOtherwise(AnyManager):
    """Block hashes are not what they should be: they leave an attribute of the request out."""

    #: The attribute, and what it is when there is none.
    left_out: tuple[str, Any]

    def hash_blocks(self, hasher: Callable[[Request], Any], request: Request) -> Any:
        with mock.patch.object(request, *self.left_out):
            return hasher(request)

    def get_computed_blocks(self, request: Request) -> Any:
        hasher: Any = request._block_hasher
        if not isinstance(hasher, functools.partial):
            request._block_hasher = functools.partial(self.hash_blocks, hasher)
            request.block_hashes.clear()
            request.update_block_hashes()
        return super().get_computed_blocks(request)


class SharesAcrossSalts(HashesOtherwise):
    """Cache salts do not count in block hashes."""

    left_out = ("cache_salt", None)


class SharesAcrossAdapters(HashesOtherwise):
    """LoRA adapters do not count in block hashes."""

    left_out = ("lora_request", None)


class SharesAcrossImages(HashesOtherwise):
    """Images do not count in block hashes."""

    left_out = ("mm_features", [])


class HashesBlocksWithoutPrefix(HashesOtherwise):
    """A block's hash covers its own tokens, not those before it."""

    def hash_blocks(self, hasher: Callable[[Request], Any], request: Request) -> Any:
        size = math.gcd(*(g.kv_cache_spec.block_size for g in self.kv_cache_config.kv_cache_groups))
        done = len(request.block_hashes)
        return [
            hash_block_tokens(sha256, None, request.all_token_ids[i * size : (i + 1) * size])
            for i in range(done, done + len(hasher(request)))
        ]


class ShortensWindows(AnyManager):
    """Sliding windows are kept too short, by what `num_short` says for a block size."""

    num_short: Any

    def __init__(self, kv_cache_config: Any, **kwargs: Any) -> None:
        config = copy.deepcopy(kv_cache_config)
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            if isinstance(spec, SlidingWindowSpec):
                window = spec.sliding_window - self.num_short(spec.block_size)
                object.__setattr__(spec, "sliding_window", max(window, 1))
        super().__init__(kv_cache_config=config, **kwargs)


class WindowShortByAToken(ShortensWindows):
    """Sliding windows are kept one token short."""

    num_short = staticmethod(lambda block_size: 1)


class WindowShortByABlock(ShortensWindows):
    """Sliding windows are kept one block short."""

    num_short = staticmethod(lambda block_size: block_size)


class ForgetsStepsInFlight(AnyManager):
    """Blocks leave a window although a step in flight still reads them."""

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(request, "num_in_flight_tokens", 0):
            return super().allocate_slots(request, *args, **kwargs)


class ResetKeepsTheCache(AnyManager):
    """A reset of the prefix cache claims success and does nothing."""

    def reset_prefix_cache(self) -> bool:
        return True


class AllocatesASlotTooFew(AnyManager):
    """A chunk of a prompt gets slots for all but its last token."""

    def allocate_slots(self, request: Request, num_new: int, *args: Any, **kwargs: Any) -> Any:
        return super().allocate_slots(request, max(num_new - 1, 1), *args, **kwargs)


class HandsOutItsOwnLists(ReportsOtherIds):
    """The lists of block ids sent to the worker are the manager's, which it extends."""

    def reported(self, request_id: str, ids: Ids) -> Ids:
        self.noted[request_id] = ids
        return ids

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_slots(request, *args, **kwargs)
        if blocks is not None and request.num_computed_tokens:
            own = self.noted[request.request_id]
            for mine, new in zip(own, blocks.get_block_ids(), strict=True):
                mine.extend(new)
        return blocks


class MixesUpTwoGroups(ReportsOtherIds):
    """After a prefix hit, two groups of a type have each other's blocks."""

    hits = 0

    def get_computed_blocks(self, request: Request) -> Any:
        found = super().get_computed_blocks(request)
        self.hits = found[1]
        return found

    def reported(self, request_id: str, ids: Ids) -> Ids:
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        others = [i for i in range(1, len(specs)) if specs[i] == specs[0]]
        if not self.hits or not others:
            return ids
        return with_group(with_group(ids, 0, ids[others[0]]), others[0], ids[0])


class ForgetsNullPadding(ReportsOtherIds):
    """A hit in a sliding window leaves out the blocks before the window."""

    def reported(self, request_id: str, ids: Ids) -> Ids:
        return tuple([i for i in group_ids if i != 0] for group_ids in ids)


class NeverFrees(AnyManager):
    """Ended requests keep their blocks."""

    def free(self, request: Request) -> None:
        pass


#: All that the oracle must find in any manager.
FAULTS = (
    GivesOutABlockOfAnotherRequest,
    FreesARequestAStepEarly,
    FreesWindowBlocksAStepEarly,
    SharesAcrossSalts,
    SharesAcrossAdapters,
    SharesAcrossImages,
    HashesBlocksWithoutPrefix,
    WindowShortByAToken,
    WindowShortByABlock,
    ForgetsStepsInFlight,
    ResetKeepsTheCache,
    AllocatesASlotTooFew,
    HandsOutItsOwnLists,
    MixesUpTwoGroups,
    ForgetsNullPadding,
    NeverFrees,
)
