# SPDX-License-Identifier: Apache-2.0
"""Faults of states, cross attention and KV connectors, to plant like those of `planted_faults`."""

from typing import Any

from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig, MambaSpec
from vllm.v1.request import Request

from .planted_faults import (
    AnyManager,
    Fault,
    GivesOutABlockOfAnotherRequest,
    Ids,
    ReportsOtherIds,
    with_group,
)


def _group_with(config: KVCacheConfig, spec_cls: type) -> int:
    """The last group with such a spec."""
    groups = enumerate(config.kv_cache_groups)
    return [i for i, group in groups if isinstance(group.kv_cache_spec, spec_cls)][-1]


# Recurrent states


class GivesOutTheStateBlockOfAnotherRequest(GivesOutABlockOfAnotherRequest):
    """An admitted request keeps its state where the request before it does."""

    @property
    def group(self) -> int:  # type: ignore[override]
        return _group_with(self.kv_cache_config, MambaSpec)


class HitsTheStateOfAnEarlierBoundary(ReportsOtherIds):
    """A prefix hit gets a state that lacks some of the prefix.

    It takes the state block that was handed out just before the right one, which is that
    of the chunk before if one request ran alone.
    """

    def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_slots(*args, **kwargs)
        if blocks is not None:
            group = _group_with(self.kv_cache_config, MambaSpec)
            self.noted.setdefault("handed out", []).extend(
                filter(None, blocks.get_block_ids()[group])
            )
        return blocks

    def reported(self, request_id: str, ids: Ids) -> Ids:
        group = _group_with(self.kv_cache_config, MambaSpec)
        states, handed_out = list(ids[group]), self.noted["handed out"]
        hit = [column for column, i in enumerate(states[:-1]) if i]
        if hit:
            earlier = handed_out.index(states[hit[0]]) - 1
            states[hit[0]] = handed_out[max(earlier, 0)]
        return with_group(ids, group, states)


class HitsStatesOfTheSameStep(AnyManager):
    """A request starts from a state that another one computes in the same step."""

    def get_computed_blocks(self, request: Request) -> Any:
        self.new_step_starts()
        return super().get_computed_blocks(request)


#: Faults of any prefix cache of states.
STATE_FAULTS = (
    GivesOutTheStateBlockOfAnotherRequest,
    HitsTheStateOfAnEarlierBoundary,
    HitsStatesOfTheSameStep,
)


# Cross attention


class ReportsOtherEncoderIds(ReportsOtherIds):
    """The worker gets other ids for the encoder's blocks than the manager has."""

    def reported(self, request_id: str, ids: Ids) -> Ids:
        for i, group in enumerate(self.kv_cache_config.kv_cache_groups):
            if isinstance(group.kv_cache_spec, CrossAttentionSpec):
                ids = with_group(ids, i, self.reported_group(request_id, i, ids[i]))
        return ids

    def reported_group(self, request_id: str, group: int, ids: list[int]) -> list[int]:
        raise NotImplementedError


class GivesOutTheEncoderBlocksOfAnotherRequest(ReportsOtherEncoderIds):
    """An admitted request's encoder states go where those of the request before it are."""

    def reported_group(self, request_id: str, group: int, ids: list[int]) -> list[int]:
        other, self.noted[group] = self.noted.get(group, []), ids
        return other if len(other) == len(ids) else ids


class KeepsEncoderBlocksAfterPreemption(ReportsOtherEncoderIds):
    """A request that was preempted resumes with the encoder blocks that it had."""

    def reported_group(self, request_id: str, group: int, ids: list[int]) -> list[int]:
        return self.noted.setdefault((request_id, group), ids)


class MiscountsEncoderTokens(AnyManager):
    """Cross attention gets slots for another number of tokens than the encoder makes.

    `miscounted` makes it from that number and the number of the decoder's new tokens.
    """

    miscounted: Any

    def allocate_slots(self, request: Request, num_new: int, *args: Any, **kwargs: Any) -> Any:
        if num_encoder := kwargs.get("num_encoder_tokens"):
            kwargs["num_encoder_tokens"] = self.miscounted(num_encoder, num_new)
        return super().allocate_slots(request, num_new, *args, **kwargs)


class AllocatesAnEncoderSlotTooFew(MiscountsEncoderTokens):
    """The encoder's last token has no slot, if the others fill their blocks."""

    miscounted = staticmethod(lambda num_encoder, num_new: num_encoder - 1)


class AllocatesTheEncodersBlocksByDecoderTokens(MiscountsEncoderTokens):
    """Cross attention gets slots for as many tokens as the decoder computes."""

    miscounted = staticmethod(lambda num_encoder, num_new: num_new)


class FreesTheEncodersBlocksAfterTheFirstStep(AnyManager):
    """The encoder's blocks are free as soon as the request decodes."""

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.num_computed_tokens:
            self.free_encoder(request.request_id)
        return super().allocate_slots(request, *args, **kwargs)

    def free_encoder(self, request_id: str) -> None:
        coordinator = self.coordinator
        manager = coordinator.single_type_managers[
            _group_with(self.kv_cache_config, CrossAttentionSpec)
        ]
        if hasattr(manager, "free"):  # base's
            manager.free(request_id)
        else:
            coordinator.requests[request_id].tables[manager.type_id].free()


#: Faults of any manager of cross attention.
ENCODER_FAULTS = (
    GivesOutTheEncoderBlocksOfAnotherRequest,
    KeepsEncoderBlocksAfterPreemption,
    AllocatesAnEncoderSlotTooFew,
    AllocatesTheEncodersBlocksByDecoderTokens,
    FreesTheEncodersBlocksAfterTheFirstStep,
)


# KV connectors


class CachesWhatIsStillLoaded(AnyManager):
    """Blocks are in the prefix cache before the load that fills them is done."""

    def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        return super().allocate_slots(*args, **kwargs | {"delay_cache_blocks": False})


class ZeroesWhatIsStillLoaded(AnyManager):
    """Blocks are zeroed in the step after a load has begun to fill them."""

    def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        return super().allocate_slots(*args, **kwargs | {"skip_zeroing_group_ids": ()})


class FreesARequestThatLoads(AnyManager):
    """A request's blocks are free again as soon as its load has begun."""

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


class GivesALoadTheSlotsBeforeIt(AnyManager):
    """A block too few is there for the tokens of a load."""

    def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        num_external = kwargs.get("num_external_computed_tokens", 0)
        if num_external > 16:
            kwargs["num_external_computed_tokens"] = num_external - 16
        return super().allocate_slots(*args, **kwargs)


class CachesAFailedLoad(AnyManager):
    """All blocks of a load are cached when it ends, those that it failed for included."""

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        super().cache_blocks(request, request.num_tokens)


class ReleasesWhatIsSent(Fault):
    """The blocks of a request that has ended are free before they were sent on."""

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> Any:
        self.noted[request_id] = "ended"
        return super().get_block_ids_for_computed_tokens(request_id, num_computed_tokens)

    def new_step_starts(self) -> None:
        super().new_step_starts()
        for request_id in self.noted:
            self.coordinator.free(request_id)
        self.noted.clear()
