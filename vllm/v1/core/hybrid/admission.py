# SPDX-License-Identifier: Apache-2.0
"""Decides whether requests with a hit, a load or a full-sequence check get their slots."""

from msgspec.structs import replace

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators import KVCacheCoordinator, RequestBlocks
from vllm.v1.core.hybrid.kv_cache_blocks import BlocksByType
from vllm.v1.core.hybrid.residency import ResidencyMetrics
from vllm.v1.core.hybrid.step import Step
from vllm.v1.request import Request


class Admission:
    """Counts what a request needs, and adopts its hit if that much is free.

    Every type adopts before any type allocates. Otherwise the allocation for one type could evict
    another type's hit.
    """

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        block_pool: BlockPool,
        residency: ResidencyMetrics | None,
    ) -> None:
        self.coordinator = coordinator
        self.block_pool = block_pool
        self._residency = residency

    def admit(
        self,
        request: Request,
        blocks: RequestBlocks,
        step: Step,
        hits: BlocksByType,
        whole_end: int = 0,
    ) -> bool:
        """Adopt ``hits`` (per type, maybe empty) if ``step`` can be allocated afterwards.

        Slots up to ``whole_end`` must fit, too, beside the ``step.num_kept_free`` blocks. Then all
        requests in flight can end, whichever goes on first. In base, the kept blocks count as free
        for this check, so that the request can wait for others that wait for it.

        Returns:
            Whether the request is admitted. If not, nothing is adopted, but blocks that are no
            longer read may have been released.
        """
        coordinator, pool = self.coordinator, self.block_pool
        if not coordinator.is_usable(hits):
            return False
        # If all tokens are loaded, the last one is computed again and reads the window before it.
        resume_at = min(step.computed_end, request.num_tokens - 1)
        num_skipped = coordinator.num_skipped_blocks(step.hit_end, resume_at)
        # If everything fits without the hit, which only saves blocks, no exact count is made.
        num_free = pool.get_num_free_blocks()
        max_slots = max(step.slots_end, step.num_encoder_tokens, whole_end)
        if coordinator.max_physical_blocks(max_slots) > num_free - step.num_kept_free:
            # These ids count as free now, and not once the hit is adopted.
            num_hit_free = pool.count_evictable_ids(hits, num_skipped)
            if whole_end:
                whole = replace(step, step_end=whole_end, slots_end=whole_end)
                targets = coordinator.peak_targets(whole, blocks.tables, num_skipped)
                num_missing = pool.num_missing_ids(blocks.tables, targets, hits, num_skipped)
                if num_missing > num_free - num_hit_free - step.num_kept_free:
                    return self._refuse(request)
            if not blocks.is_new and step.step_end > step.computed_end:
                # What the request does not read any more makes room.
                coordinator.release_unread(request, blocks, step.computed_end)
                num_free = pool.get_num_free_blocks()
            num_missing = pool.num_missing_ids(
                blocks.tables, coordinator.targets(step), hits, num_skipped
            )
            if num_missing > num_free - num_hit_free - step.num_kept_free:
                return self._refuse(request)
        has_hit = step.hit_end > request.num_computed_tokens
        # A load without a hit adopts an empty hit, so that null blocks stand for what the load
        # skips. A request with blocks, whose load has arrived, adopts nothing: base looks up a
        # prompt of one token again.
        if has_hit or (blocks.is_new and step.computed_end > step.hit_end):
            pool.adopt(blocks.tables, hits, num_skipped)
            if self._residency is not None:
                self._residency.hit(hits, num_skipped)
        return True

    def _refuse(self, request: Request) -> bool:
        self.block_pool.counters.refused(request)
        return False
