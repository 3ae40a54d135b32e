# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the KV cache, with the contract of base vLLM 0.32's manager."""

from typing import ClassVar

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.hybrid._core import GroupedKVCacheBlock
from vllm.v1.core.hybrid.admission import Admission
from vllm.v1.core.hybrid.attention_type import get_attention_types
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators import RequestBlocks, create_coordinator
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.core.hybrid.gates import StepGates
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType, KVCacheBlocks, get_group_layout
from vllm.v1.core.hybrid.kv_cache_events import KVCacheEventLog, wants_hits_reported
from vllm.v1.core.hybrid.metrics.stats import HybridKVStats
from vllm.v1.core.hybrid.residency import ResidencyMetrics
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.hybrid.step import WAITING_STATUSES, Step
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request


class KVCacheManager:
    """Allocates, caches and frees the KV cache blocks of all requests.

    Takes the constructor arguments of base's class, and has every method and attribute of it that
    base's scheduler, engine core and the covered KV connectors use. In addition:

    Args:
        verify_every_step: Run `check_integrity` at each scheduler step. Slow; for debugging.
        is_covered: The caller has checked `coverage` already, as the factory has.

    Raises:
        ValueError: for a feature that only base's manager covers, or a setting that does not fit
            the model.
    """

    # Features that base's manager serves: the factory leaves engines that need them to base.
    mamba_shared_prefix_checkpoint: ClassVar[bool] = False
    retained_hit_group_ids: ClassVar[tuple[int, ...]] = ()

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
        *,
        verify_every_step: bool = False,
        is_covered: bool = False,
    ) -> None:
        facts = None if is_covered else EngineFacts.from_arguments(locals())
        if facts is not None and (feature := find_uncovered_feature(facts)) is not None:
            raise ValueError(f"{feature} is not covered by the hybrid manager; use base's manager")
        if watermark < 0.0:
            raise ValueError(f"watermark must be at least 0.0, got {watermark}")
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.verify_every_step = verify_every_step
        collector = metrics_collector
        self._residency = ResidencyMetrics(collector, enable_caching) if collector else None

        if max_in_flight_tokens is None:
            max_in_flight_tokens = max_model_len
        settings = CacheSettings(
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            retention_interval=kv_cache_config.prefix_cache_retention_interval,
            needs_zeroing=kv_cache_config.needs_kv_cache_zeroing,
            num_prefill_lookahead=num_prefill_lookahead,
        )
        self.attention_types = get_attention_types(kv_cache_config, use_eagle)
        # Without prefix caching there are no events, as in base.
        event_log = KVCacheEventLog(self.attention_types) if enable_kv_cache_events else None
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks, self.attention_types, settings, event_log
        )
        self._counters = self.block_pool.counters
        self._refused = self._counters.refused_requests
        self.coordinator = create_coordinator(self.block_pool)
        self._admission = Admission(self.coordinator, self.block_pool, self._residency)

        self._group_layout = get_group_layout(self.attention_types)
        #: Shared by all calls that return no blocks.
        self.empty_kv_cache_blocks = KVCacheBlocks(self.coordinator.no_blocks, self._group_layout)
        #: Per KV cache group, its kind and sliding window, as KV cache events report them.
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.kv_cache_event_metadata = tuple(
            (get_kv_cache_spec_kind(s).value, get_kv_cache_spec_sliding_window(s)) for s in specs
        )
        self._gates = StepGates()
        self._gates.guard(self, KVCacheManager)

    # Prefix cache

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Look up the longest cached prefix of a request.

        At least one token is left to compute, for its logits.

        Returns:
            The blocks of the hit; its length in tokens; and the junction, or 0. The junction is
            how far the first type asked (full attention, if there is one) has the prefix cached,
            if that is beyond the hit. If this request keeps its blocks there, the next one can hit.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        hit = self.coordinator.find_hit(request.block_hashes, request.num_tokens - 1)
        self._counters.looked_up(request.request_id, hit)
        if not hit.num_tokens:
            return self.empty_kv_cache_blocks, 0, hit.junction
        if self.enable_kv_cache_events and wants_hits_reported(request):
            for manager, blocks in zip(self.coordinator.managers, hit.blocks, strict=True):
                span = range(len(blocks))
                manager.report_stored(request, span, span)
        return KVCacheBlocks(hit.blocks, self._group_layout), hit.num_tokens, hit.junction

    def get_computed_blocks_for_connector(
        self, request: Request
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """Like `get_computed_blocks`. The last item is False: all types have one hit length."""
        return *self.get_computed_blocks(request), False

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Enter the blocks of a request's first ``num_computed_tokens`` in the prefix cache.

        The tokens must be final: never draft tokens.
        """
        blocks = self.coordinator.requests.get(request.request_id)
        if blocks is not None and num_computed_tokens >= blocks.cache_at:
            self.coordinator.cache_blocks(request, blocks, num_computed_tokens)

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether the prefix cache may be looked up for a request."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def truncate_computed_blocks(
        self, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        """The part of a lookup's blocks that covers the first ``num_computed_tokens``.

        Raises:
            ValueError: if the count ends inside a block or beyond the lookup's hit.
        """
        cut = []
        for manager, type_blocks in zip(self.coordinator.managers, blocks.by_type, strict=True):
            num_blocks, rest = divmod(num_computed_tokens, manager.block_size)
            if rest or num_blocks > len(type_blocks):
                raise ValueError(
                    f"num_computed_tokens must be a multiple of {manager.block_size} up to "
                    f"{len(type_blocks) * manager.block_size}, got {num_computed_tokens}"
                )
            cut.append(type_blocks.truncated(num_blocks))
        return self.create_kv_cache_blocks(tuple(cut))

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens up to the last cached block of a request, at the minimum over all types."""
        blocks = self.coordinator.blocks_of(request.request_id)
        return min((table.num_cached_tokens() for table in blocks.tables), default=0)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while any request holds blocks."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self._residency is not None:
            self._residency.reset()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove the blocks that hold the given physical ids from the prefix cache."""
        self.block_pool.evict_blocks(block_ids)
        if self._residency is not None:
            self._residency.evicted(block_ids)

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
        """Allocate slots for the tokens of a request's next step.

        | computed | new_computed (hit, adopted here) | external | new (computed next) | lookahead |

        Args:
            request: The request; ``num_computed_tokens`` of it are computed.
            num_new_tokens: Tokens that the step computes.
            num_new_computed_tokens: Tokens of the prefix hit; 0 for a running request.
            new_computed_blocks: The hit's blocks, as `get_computed_blocks` returned them.
            num_lookahead_tokens: Slots beyond the new tokens.
            num_external_computed_tokens: Tokens after the hit that a KV connector loads into
                blocks that are allocated here.
            delay_cache_blocks: Leave caching to a later `cache_blocks` call. The step only begins
                a load, which cannot be preempted. So all of the request's tokens must fit, too.
            num_encoder_tokens: Slots for what the encoder computes in the step, for cross
                attention; 0 from the next step on.
            full_sequence_must_fit: Admit only if all of the request's tokens would fit.
            reserved_blocks: Physical blocks to leave free for others. A load ignores it as long as
                no other request holds blocks.
            has_scheduled_reqs: Whether other requests run. If so, a waiting request must leave the
                watermark free.
            skip_zeroing_group_ids: KV cache groups whose new blocks a load fills after this step,
                so that they must not be zeroed.

        Returns:
            The newly allocated blocks, hits excluded; None, with nothing allocated, if too few
            blocks are free.

        Raises:
            ValueError: if there is nothing to do.
        """
        has_hit_or_load = num_new_computed_tokens > 0 or num_external_computed_tokens > 0
        if num_new_tokens <= 0 and not has_hit_or_load:
            raise ValueError(
                f"num_new_tokens must be at least 1 without a hit or a load, got {num_new_tokens}"
            )
        is_waiting = request.status in WAITING_STATUSES
        blocks = self.coordinator.blocks_of(request.request_id)
        if is_waiting and not blocks.is_new:
            # Its load has arrived, or a streaming session has a new input.
            self.coordinator.resume_caching(blocks, request.num_computed_tokens)
            self._gates.wake(request.request_id)
        if delay_cache_blocks and blocks.is_new and not self.coordinator.requests:
            # Base adds blocks for draft tokens, which the smallest pool does not have.
            reserved_blocks = 0
        watermark = self.watermark_blocks if is_waiting and has_scheduled_reqs else 0
        hit_end = request.num_computed_tokens + num_new_computed_tokens
        computed_end = min(hit_end + num_external_computed_tokens, self.max_model_len)
        step_end = computed_end + num_new_tokens
        num_tokens = request.num_tokens
        step = Step(
            hit_end,
            computed_end,
            step_end,
            min(step_end + num_lookahead_tokens, self.max_model_len),
            num_tokens,
            request.num_prompt_tokens,
            num_encoder_tokens,
            reserved_blocks + watermark,
        )
        if full_sequence_must_fit or has_hit_or_load:
            hits = new_computed_blocks or self.empty_kv_cache_blocks
            must_fit = full_sequence_must_fit or delay_cache_blocks
            whole_end = min(num_tokens, self.max_model_len) if must_fit else 0
            if not self._admission.admit(request, blocks, step, hits.by_type, whole_end):
                return None
        placed = self._place(request, blocks, step, delay_cache_blocks, skip_zeroing_group_ids)
        if placed is None:
            self._counters.refused(request)
        elif self._refused:
            self._counters.allocated(request.request_id)
        return placed

    def continue_request(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> KVCacheBlocks | None:
        """`_place` for a running request, called by the gate. Makes a `Step` for new slots only."""
        coordinator = self.coordinator
        request_id = request.request_id
        blocks = coordinator.requests[request_id]
        computed_end = request.num_computed_tokens
        step_end = computed_end + num_new_tokens
        if computed_end >= blocks.release_at:
            coordinator.release_unread(request, blocks, computed_end)
        new_blocks = self.empty_kv_cache_blocks
        if step_end + num_lookahead_tokens >= blocks.allocate_at:
            slots_end = min(step_end + num_lookahead_tokens, self.max_model_len)
            num_tokens, prompt_end = request.num_tokens, request.num_prompt_tokens
            step = Step(computed_end, computed_end, step_end, slots_end, num_tokens, prompt_end)
            allocated = coordinator.allocate(request_id, blocks, step)
            if allocated is None:
                self._counters.refused(request)
                return None
            if self._refused:
                self._counters.allocated(request_id)
            if self._residency is not None:
                self._residency.allocated(allocated)
            new_blocks = KVCacheBlocks(allocated, self._group_layout)
        if step_end >= blocks.cache_at:
            final_end = min(step_end, request.num_tokens)  # drafts are not final
            if final_end >= blocks.cache_at:
                coordinator.cache_blocks(request, blocks, final_end)
        self._gates.sleep_until(request_id, blocks.next_event())
        return new_blocks

    def _place(
        self,
        request: Request,
        blocks: RequestBlocks,
        step: Step,
        delay_cache_blocks: bool,
        skip_group_ids: tuple[int, ...],
    ) -> KVCacheBlocks | None:
        """Release, allocate and cache for a step, each only if it is due."""
        coordinator = self.coordinator
        # Release first: it makes room. A step that only loads reads nothing and releases nothing.
        if step.step_end > step.computed_end:
            coordinator.release_unread(request, blocks, step.computed_end)
        new_blocks = self.empty_kv_cache_blocks
        if step.slots_end >= blocks.allocate_at or step.num_encoder_tokens:
            allocated = coordinator.allocate(request.request_id, blocks, step, skip_group_ids)
            if allocated is None:
                return None
            if self._residency is not None:
                self._residency.allocated(allocated)
            new_blocks = KVCacheBlocks(allocated, self._group_layout)
        elif step.num_kept_free and step.num_kept_free > self.block_pool.get_num_free_blocks():
            return None
        if delay_cache_blocks:
            return new_blocks
        if step.final_end >= blocks.cache_at:
            coordinator.cache_blocks(request, blocks, step.final_end)
        self._gates.sleep_until(request.request_id, blocks.next_event())
        return new_blocks

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Release the blocks that no query after ``processed_computed_tokens`` attends to.

        The count excludes tokens of steps in flight. Base calls it before a KV connector gets the
        blocks of a finished request. The receiving engine computes the last token of the prompt
        again, so the window before that token is kept.
        """
        if num_prompt_tokens is not None:
            processed_computed_tokens = min(processed_computed_tokens, num_prompt_tokens - 1)
        blocks = self.coordinator.requests.get(request_id)
        if blocks is not None:
            self.coordinator.release_skipped(blocks, processed_computed_tokens)

    def free(self, request: Request) -> None:
        """Release all blocks of a request, so that the tail of its tokens is reused first."""
        if self._refused:
            self._counters.released(request)
        self._gates.wake(request.request_id)
        self.coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[GroupedKVCacheBlock]:
        """Forget a request but keep its blocks referenced until `block_pool.free_blocks`.

        Returns:
            The blocks in the order of allocation; free them in reverse.
        """
        if self._refused:
            self._counters.released(request)
        self._gates.wake(request.request_id)
        return self.block_pool.detach(self.coordinator.forget(request.request_id))

    # Blocks

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request; empty for an unknown request."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids of a request's blocks, one list per KV cache group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """`get_block_ids`, cut to the blocks that hold the first ``num_computed_tokens``."""
        managers = self.coordinator.single_type_managers
        return tuple(
            ids[: manager.num_computed_blocks(num_computed_tokens)]
            for ids, manager in zip(self.get_block_ids(request_id), managers, strict=True)
        )

    def create_kv_cache_blocks(self, blocks: BlocksByType) -> KVCacheBlocks:
        """Wrap blocks per attention type for the scheduler."""
        if not any(map(len, blocks)):
            return self.empty_kv_cache_blocks
        return KVCacheBlocks(blocks, self._group_layout)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """0 for each group. As in base, there is no cascade attention."""
        return [0] * self.num_kv_cache_groups

    def take_new_block_ids(self) -> list[int]:
        """Physical ids that the worker must zero, allocated since the last call."""
        return [i for manager in self.coordinator.managers for i in manager.take_new_block_ids()]

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Record a request's blocks from ``start_token`` on for zeroing."""
        tables = self.coordinator.blocks_of(request_id).tables
        for manager, table in zip(self.coordinator.managers, tables, strict=True):
            manager.record_for_zeroing(table, start_token)

    def take_kv_cache_block_copies(
        self,
    ) -> tuple[list[KVCacheBlockCopy], list[GroupedKVCacheBlock]]:
        """Copies on write of partly hit blocks: none, since hits end at block boundaries."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Mamba states for a KV connector: none."""
        return {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Mamba states of a finished request for a KV connector: none."""
        return []

    # Statistics and events

    @property
    def usage(self) -> float:
        """Share of the KV cache that requests hold, 0.0 to 1.0."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None if they are off."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count an admitted request with a hit of ``num_hits`` tokens."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            preempted = request.num_preemptions > 0
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=preempted
            )
            # Like base's metrics, without the lookups of preempted requests.
            if not preempted:
                self._counters.admitted(request.request_id, num_hits)

    def take_hybrid_kv_stats(self) -> HybridKVStats | None:
        """Our statistics since the last call; None if nothing has changed. Base has no such method.

        Without ``log_stats``, prefix cache lookups are not counted.
        """
        return self._counters.take(self.block_pool)

    def take_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call; empty when they are off."""
        return self.block_pool.take_events()

    # The scheduler's step

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        self.coordinator.new_step_starts()
        if self.verify_every_step:
            self.check_integrity()

    def check_integrity(self) -> None:
        """Verify everything that bookkeeping shows.

        Raises:
            AssertionError: with the first difference.
        """
        self.coordinator.check_integrity()
        self._gates.check_integrity(self.coordinator.requests)
