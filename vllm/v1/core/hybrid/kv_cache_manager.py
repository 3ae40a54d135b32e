# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the KV cache, with the contract of base vLLM 0.32's manager."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.hybrid._core import (
    GroupedKVCacheBlock,
    gate_allocate_slots,
    gate_cache_blocks,
)
from vllm.v1.core.hybrid.attention_type import get_attention_types
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators import RequestBlocks, create_coordinator
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType, KVCacheBlocks, get_group_layout
from vllm.v1.core.hybrid.kv_cache_events import KVCacheEventLog, wants_hits_reported
from vllm.v1.core.hybrid.queries import KVCacheQueries
from vllm.v1.core.hybrid.residency import ResidencyMetrics
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

#: Requests that ask to be admitted, and so must leave the watermark free.
NEWCOMERS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class _Occasion(NamedTuple):
    """What a step is told beyond its tokens, where it is more than a running request's next."""

    blocks: RequestBlocks
    num_computed: int
    #: Free blocks that are left alone.
    num_kept: int
    num_encoder_tokens: int
    delay_cache_blocks: bool
    skip_zeroing_group_ids: tuple[int, ...]


class KVCacheManager(KVCacheQueries):
    """Allocates, caches and frees the KV cache blocks of all requests.

    Takes the constructor arguments of base's class and has every method and attribute
    that base's scheduler and engine core use.

    Raises:
        ValueError: for a feature that only base's manager covers, or a setting that does
            not fit the model.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        feature = find_uncovered_feature(
            EngineFacts(
                kv_cache_config=kv_cache_config,
                hash_block_size=hash_block_size,
                enable_kv_cache_events=enable_kv_cache_events,
                use_eagle=use_eagle,
                num_prefill_lookahead=num_prefill_lookahead,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
            )
        )
        if feature is not None:
            raise ValueError(f"{feature} is not covered by the hybrid KV cache; use base's manager")
        if watermark < 0.0:
            raise ValueError(f"watermark is {watermark}; accepted are values of 0.0 and above")
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self._residency = None
        if metrics_collector is not None:
            self._residency = ResidencyMetrics(metrics_collector, enable_caching)
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        #: Whether a KV connector is served, which looks at the blocks of each group.
        self.serves_connector = False
        #: Whether `new_step_starts` verifies all bookkeeping: slow, for debugging.
        self.verify_every_step = False

        settings = CacheSettings(
            max_model_len=max_model_len,
            max_in_flight_tokens=(
                max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
            ),
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            retention_interval=kv_cache_config.prefix_cache_retention_interval,
            needs_zeroing=kv_cache_config.needs_kv_cache_zeroing,
            num_prefill_lookahead=num_prefill_lookahead,
        )
        self.attention_types = get_attention_types(kv_cache_config, use_eagle)
        # Without prefix caching there is nothing to tell, as in base.
        event_log = KVCacheEventLog(self.attention_types) if enable_kv_cache_events else None
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks, self.attention_types, settings, event_log
        )
        self.coordinator = create_coordinator(self.attention_types, self.block_pool, settings)

        self._group_layout = get_group_layout(self.attention_types)
        #: Shared by all calls that return no blocks.
        self.empty_kv_cache_blocks = KVCacheBlocks(self.coordinator.no_blocks, self._group_layout)
        #: Per KV cache group, its kind and sliding window, as KV cache events report them.
        self.kv_cache_event_metadata = tuple(
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in kv_cache_config.kv_cache_groups
        )

        # Per request, the token count below which no call has anything to do (see
        # `RequestBlocks.next_event`). Most decode steps end in the gates, which compare it.
        self._next_event: dict[str, int] = {}
        # A subclass that has methods of its own is asked every time.
        cls = KVCacheManager
        if type(self).allocate_slots is cls.allocate_slots:
            self.allocate_slots = gate_allocate_slots(  # type: ignore[method-assign]
                self, cls.allocate_slots, cls._advance, self._next_event, self.empty_kv_cache_blocks
            )
        if type(self).cache_blocks is cls.cache_blocks:
            self.cache_blocks = gate_cache_blocks(  # type: ignore[method-assign]
                self, cls.cache_blocks, self._next_event
            )

    # Prefix cache

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Look up the longest cached prefix of a request.

        At least one token is left to compute, for its logits.

        Returns:
            The hit's blocks; its length in tokens; and the junction: the position up to
            which a full-attention type has the prefix cached while a type that
            caches sparsely has not, or 0. Keeping the junction lets the next request hit.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        hit = self.coordinator.find_hit(request.block_hashes, request.num_tokens - 1)
        num_tokens = hit.num_tokens
        junction = num_tokens + hit.num_uncached_shared if hit.num_uncached_shared else 0
        if not num_tokens:
            return self.empty_kv_cache_blocks, 0, junction
        if self.enable_kv_cache_events and wants_hits_reported(request):
            for manager, blocks in zip(self.coordinator.managers, hit.blocks, strict=True):
                span = range(len(blocks))
                manager.report_stored(request, span, span)
        return KVCacheBlocks(hit.blocks, self._group_layout), num_tokens, junction

    def get_computed_blocks_for_connector(
        self, request: Request
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """`get_computed_blocks`, and whether types differ in the hit: here they never do."""
        return *self.get_computed_blocks(request), False

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Enter the blocks of a request's first ``num_computed_tokens`` in the prefix cache.

        The tokens must be final: never draft tokens.
        """
        blocks = self.coordinator.requests.get(request.request_id)
        if blocks is not None and num_computed_tokens >= blocks.next_cached:
            self.coordinator.cache_blocks(request, blocks, num_computed_tokens)

    # Slots

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Give a request slots for the tokens of the next step.

        | computed | new_computed (hit, adopted here) | external | new (computed next) | lookahead |

        Args:
            request: The request; ``num_computed_tokens`` of it are computed.
            num_new_tokens: Tokens that the step computes.
            num_new_computed_tokens: Tokens of the prefix hit; 0 for a running request.
            new_computed_blocks: The hit's blocks, as `get_computed_blocks` returned them.
            num_lookahead_tokens: Slots beyond the new tokens.
            num_external_computed_tokens: Tokens after the hit that a KV connector loads, into
                blocks that they get here.
            delay_cache_blocks: Leave caching to a later `cache_blocks` call.
            num_encoder_tokens: Slots for what the encoder computes in the step, in cross
                attention; 0 from the next step on.
            full_sequence_must_fit: Admit only if all of the request's tokens would fit.
            reserved_blocks: Physical blocks to leave free for others.
            has_scheduled_reqs: Whether others run: then the watermark counts for newcomers.
            skip_zeroing_group_ids: KV cache groups whose new blocks a load fills after this
                step, so that they must not be zeroed.

        Returns:
            The newly allocated blocks, hits not included; None, with nothing allocated, if
            there are too few free blocks.

        Raises:
            ValueError: if there is nothing to do.
        """
        adopts = num_new_computed_tokens > 0 or num_external_computed_tokens > 0
        if num_new_tokens <= 0 and not adopts:
            raise ValueError(
                f"num_new_tokens is {num_new_tokens}; without computed tokens to adopt, "
                "accepted are values of 1 and above"
            )

        coordinator, pool = self.coordinator, self.block_pool
        blocks = coordinator.blocks_of(request.request_id)
        if blocks.next_cached and request.status in NEWCOMERS:
            # It kept its blocks, and comes back with the next input of a streaming session.
            coordinator.take_up_caching(blocks, request.num_computed_tokens)
            self._next_event.pop(request.request_id, None)
        num_hit = num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_read_from = num_hit
        if num_external_computed_tokens:
            num_computed = min(num_hit + num_external_computed_tokens, self.max_model_len)
            # The last token is computed even where all are loaded, and reads the window before it.
            num_read_from = min(num_computed, request.num_tokens - 1)
        # Free blocks that are not there to be allocated.
        num_kept = reserved_blocks
        if self.watermark_blocks and has_scheduled_reqs and request.status in NEWCOMERS:
            num_kept += self.watermark_blocks

        if full_sequence_must_fit or adopts:
            hits = coordinator.no_blocks
            if new_computed_blocks is not None:
                hits = new_computed_blocks.by_type
            if not coordinator.is_usable(hits):
                return None
            num_skipped = coordinator.num_skipped_blocks(num_read_from, num_hit)
            num_step = num_computed + num_new_tokens + num_lookahead_tokens
            num_all = request.num_tokens if full_sequence_must_fit else 0
            num_free = pool.get_num_free_blocks() - num_kept
            # A hit only saves blocks: where there is room without it, nothing has to be counted.
            if coordinator.max_physical_blocks(num_step, num_all, num_encoder_tokens) > num_free:
                num_evictable = pool.count_evictable_ids(hits, num_skipped)
                need = blocks, hits, num_skipped, num_encoder_tokens
                if full_sequence_must_fit:
                    states = coordinator.num_states(num_computed, num_all, request)
                    most = num_free + reserved_blocks - num_evictable
                    if not self._fits(most, num_all, *need, num_states=states, recycled=True):
                        return None
                if blocks.next_slots and num_new_tokens:
                    # It has had slots before: what it does not read any more makes room.
                    self._release(request, blocks, num_computed)
                    num_free = pool.get_num_free_blocks() - num_kept
                states = coordinator.num_states(
                    num_computed, num_computed + num_new_tokens, request
                )
                num_free -= num_evictable
                if not self._fits(num_free, num_step, *need, num_states=states):
                    return None
            # A load of a prompt's only token leaves none computed, but the request has its blocks.
            if num_new_computed_tokens or (
                num_external_computed_tokens and request.request_id not in coordinator.requests
            ):
                # All types before any allocates: that must not evict another type's hit.
                pool.adopt(blocks.tables, hits, num_skipped)
                if self._residency is not None:
                    self._residency.hit(hits, num_skipped)
        return self._advance(
            request,
            num_new_tokens,
            num_lookahead_tokens,
            _Occasion(
                blocks,
                num_computed,
                num_kept,
                num_encoder_tokens,
                delay_cache_blocks,
                skip_zeroing_group_ids,
            ),
        )

    def _fits(
        self,
        num_free: int,
        num_tokens: int,
        blocks: RequestBlocks,
        hits: BlocksByType,
        num_skipped: Sequence[int],
        num_encoder_tokens: int,
        recycled: bool = False,
        num_states: int = 1,
    ) -> bool:
        """Whether ``num_free`` blocks are enough for so many slots, ``hits`` adopted."""
        return num_free >= self.coordinator.num_physical_blocks_needed(
            blocks,
            min(num_tokens, self.max_model_len),
            hits,
            num_skipped,
            recycled,
            num_states,
            num_encoder_tokens,
        )

    def _advance(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        occasion: _Occasion | None = None,
    ) -> KVCacheBlocks | None:
        """What every step of a request does: release, allocate, cache, as far as each is due.

        For a running request the gate calls it.
        """
        coordinator = self.coordinator
        num_kept = num_encoder_tokens = 0
        delay_cache_blocks = False
        skip_zeroing_group_ids: tuple[int, ...] = ()
        if occasion is None:
            blocks = coordinator.requests[request.request_id]
            num_computed = request.num_computed_tokens
        else:
            (
                blocks,
                num_computed,
                num_kept,
                num_encoder_tokens,
                delay_cache_blocks,
                skip_zeroing_group_ids,
            ) = occasion
        # First, since it makes room. A load reads nothing yet.
        if num_new_tokens:
            self._release(request, blocks, num_computed)

        num_final = num_computed + num_new_tokens
        num_tokens = num_final + num_lookahead_tokens
        if num_tokens > self.max_model_len:
            num_tokens = self.max_model_len
        new_blocks = self.empty_kv_cache_blocks
        if num_tokens >= blocks.next_slots or num_encoder_tokens:
            num_states = coordinator.num_states(num_computed, num_final, request)
            allocated = coordinator.allocate(
                request.request_id, blocks, num_tokens, num_kept, num_states, num_encoder_tokens
            )
            if allocated is None:
                return None
            if coordinator.records_new_blocks:
                coordinator.record_new(allocated, skip_zeroing_group_ids)
            if self._residency is not None:
                self._residency.allocated(allocated)
            new_blocks = KVCacheBlocks(allocated, self._group_layout)
        elif num_kept and num_kept > self.block_pool.get_num_free_blocks():
            return None
        if delay_cache_blocks:
            return new_blocks

        if num_final >= blocks.next_cached:
            # Draft tokens are beyond the request's own tokens, and not final.
            num_final = min(num_final, request.num_tokens)
            if num_final >= blocks.next_cached:
                coordinator.cache_blocks(request, blocks, num_final)
        self._next_event[request.request_id] = blocks.next_event()
        return new_blocks

    def _release(self, request: Request, blocks: RequestBlocks, num_computed: int) -> None:
        """Release what is out of windows; steps in flight still read what is below their tokens."""
        num_processed = num_computed - request.num_in_flight_tokens
        if num_processed >= blocks.next_released:
            self.coordinator.release_skipped(blocks, num_processed)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Release the blocks that no query after ``processed_computed_tokens`` attends to.

        The count must leave out tokens of steps in flight. Base asks before a KV connector gets the
        blocks of a finished request. Who loads them computes the last token of the prompt again,
        so the window before that is kept.
        """
        if num_prompt_tokens is not None:
            processed_computed_tokens = min(processed_computed_tokens, num_prompt_tokens - 1)
        blocks = self.coordinator.requests.get(request_id)
        if blocks is not None and processed_computed_tokens >= blocks.next_released:
            self.coordinator.release_skipped(blocks, processed_computed_tokens)

    def free(self, request: Request) -> None:
        """Release all blocks of a request, so that the tail of its tokens is reused first."""
        self._next_event.pop(request.request_id, None)
        self.coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[GroupedKVCacheBlock]:
        """Forget a request but keep its blocks referenced until `block_pool.free_blocks`.

        Returns:
            The blocks in the order of allocation; free them in reverse.
        """
        self._next_event.pop(request.request_id, None)
        return self.coordinator.pop_blocks_for_free(request.request_id)
