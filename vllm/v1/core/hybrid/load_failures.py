# SPDX-License-Identifier: Apache-2.0
"""Requests for which a KV connector failed to load blocks. Part of the plugin ``hybrid_kv``.

Base's scheduler takes reports of two kinds: requests whose load failed as a whole, and physical
blocks that were not loaded. For blocks, base supports models with one KV cache group only. It lets
the request go on from the first of the blocks, which is wrong if the window before that block was
never loaded either. Where the hybrid manager is active, methods of ``Scheduler`` are replaced:

- ``_handle_invalid_blocks``, except for asynchronous loads of models with one group of full
  attention, which base gets right. A request that waits for its load goes on from the last position
  before the first failed block, if the blocks of all types are held there. Otherwise it is computed
  from its beginning. A request that runs is preempted.
- ``_handle_failed_recving``, by a wrapper. After `MOST_FAILED_LOADS` failed loads, a request is
  computed without the prefix cache, so that a connector that always fails cannot keep it for ever.
- ``_handle_blocked_waiting_request``, by a wrapper. A request whose load failed as a whole holds no
  blocks any more. In base it still stands before requests that hold blocks, and blocks are kept
  free for it, even from itself. If it does not fit, no request goes on.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.hybrid.activation import Patches
from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

#: Failed loads of a request, after which it is computed without the prefix cache.
MOST_FAILED_LOADS = 3

_num_failed_loads: WeakKeyDictionary[Request, int] = WeakKeyDictionary()


def apply(patches: Patches, owner: Any) -> None:
    """Replace the methods in a scheduler's class."""
    for name, ours in replacements(owner).items():
        patches.replace(owner, name, ours)


def replacements(owner: Any) -> dict[str, Callable[..., Any]]:
    """By name, what replaces methods of a scheduler's class."""
    handle_blocks, handle_requests = owner._handle_invalid_blocks, owner._handle_failed_recving
    handle_waiting = owner._handle_blocked_waiting_request

    @functools.wraps(handle_blocks)
    def handle_invalid_blocks(
        self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> Any:
        if not isinstance(self.kv_cache_manager, KVCacheManager):
            return handle_blocks(self, invalid_block_ids, num_scheduled_tokens)
        if not base_can_recover(self, invalid_block_ids):
            return recover(self, invalid_block_ids)
        failed_before = set(self.failed_recving_kv_req_ids)
        dropped = handle_blocks(self, invalid_block_ids, num_scheduled_tokens)
        failed = self.failed_recving_kv_req_ids - failed_before
        count_failed_loads(self.requests[req_id] for req_id in failed)
        return dropped

    @functools.wraps(handle_requests)
    def handle_failed_recving(self: Any, failed_req_ids: set[str]) -> Any:
        if isinstance(self.kv_cache_manager, KVCacheManager):
            count_failed_loads(self.requests.get(req_id) for req_id in failed_req_ids)
        return handle_requests(self, failed_req_ids)

    @functools.wraps(handle_waiting)
    def handle_blocked_waiting_request(self: Any, request: Request) -> bool:
        has_failed = request.request_id in self.failed_recving_kv_req_ids
        is_ready: bool = handle_waiting(self, request)
        if (
            not (is_ready and has_failed)
            or request.num_computed_tokens
            or not isinstance(self.kv_cache_manager, KVCacheManager)
        ):
            return is_ready
        self._inflight_prefills.discard(request)
        # If not, base moves it to the queue of requests that hold no blocks.
        return has_room(self, request)

    return {
        "_handle_blocked_waiting_request": handle_blocked_waiting_request,
        "_handle_failed_recving": handle_failed_recving,
        "_handle_invalid_blocks": handle_invalid_blocks,
    }


def base_can_recover(scheduler: Any, invalid_block_ids: set[int]) -> bool:
    """Whether base's scheduler does what is right with failed blocks.

    It does if the only KV cache group holds the whole prefix, and all loads are asynchronous.
    """
    manager: KVCacheManager = scheduler.kv_cache_manager
    if manager.num_kv_cache_groups != 1 or not manager.coordinator.managers[0].downward_closed:
        return False
    # Base lets running requests go on in place. Steps in flight then still deliver what they
    # computed from the blocks, and only the first model runner drops the token of the failed step.
    return not find_affected(manager, scheduler.running, invalid_block_ids)[0]


def has_room(scheduler: Any, request: Request) -> bool:
    """Whether a request without blocks fits beside all that is kept free for others."""
    num_needed: int = (
        scheduler._request_remaining_blocks(request)
        + scheduler._inflight_prefill_reserved_blocks()
        + scheduler._spec_decode_step_blocks
    )
    return num_needed <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def recover(scheduler: Any, invalid_block_ids: set[int]) -> set[str]:
    """Have all that was computed from blocks with these physical ids computed again.

    Returns:
        Ids of requests whose output of the step must be dropped; under the failure policy
        ``fail``, of all requests to end with an error.
    """
    manager: KVCacheManager = scheduler.kv_cache_manager
    running, waiting = list(scheduler.running), list(scheduler.kv_holding_waiting)
    first_invalid, invalid = find_affected(manager, [*running, *waiting], invalid_block_ids)
    if not first_invalid:
        return set()
    # Blocks that are loaded within a step are in the prefix cache already.
    manager.evict_blocks(invalid)
    affected_ids = {request.request_id for request in first_invalid}
    if not scheduler.recompute_kv_load_failures:
        logger.error("%d requests end, because their KV failed to load: %s",
                     len(affected_ids), ", ".join(sorted(affected_ids)))  # fmt: skip
        return affected_ids
    logger.warning("%d requests are computed again, because their KV failed to load: %s",
                   len(affected_ids), ", ".join(sorted(affected_ids)))  # fmt: skip
    count_failed_loads(first_invalid)
    for request in waiting:
        if request in first_invalid:
            end = manager.coordinator.resume_position(request.request_id, first_invalid[request])
            # A load can report blocks more than once.
            end = request.num_computed_tokens = min(end, request.num_computed_tokens)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                # Base goes on with the request once the rest of the load has ended.
                scheduler.failed_recving_kv_req_ids.add(request.request_id)
            elif not end:
                manager.free(request)
    # From the last to the first, because each goes to the front of the queue.
    preempted = [request for request in reversed(running) if request in first_invalid]
    for request in preempted:
        scheduler.running.remove(request)
        # Steps in flight read the blocks, too. Their output is dropped.
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # If it resumes in the next step, the worker needs all of its tokens and blocks again.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return {request.request_id for request in preempted}


def find_affected(
    manager: KVCacheManager, requests: Iterable[Request], invalid_block_ids: set[int]
) -> tuple[dict[Request, int], set[int]]:
    """Requests that hold invalid blocks, or blocks that were computed from invalid ones.

    Returns:
        Per request, the position where its first invalid block begins; and all invalid ids.
    """
    first_invalid: dict[Request, int] = {}
    invalid, num_known = set(invalid_block_ids), -1
    requests = list(requests)
    # What follows an invalid block was computed from it, and others may have hit it since.
    while len(invalid) > num_known:
        num_known = len(invalid)
        for request in requests:
            position = manager.coordinator.first_position(request.request_id, invalid)
            if position is not None:
                first_invalid[request] = position
                invalid |= manager.coordinator.ids_from(request.request_id, position)
    return first_invalid, invalid


def count_failed_loads(requests: Iterable[Request | None]) -> None:
    """Count a failed load of each request, and end the loads of those with too many."""
    for request in requests:
        if request is not None:
            num_failed = _num_failed_loads.get(request, 0) + 1
            _num_failed_loads[request] = num_failed
            if num_failed >= MOST_FAILED_LOADS and not request.skip_reading_prefix_cache:
                request.skip_reading_prefix_cache = True
                logger.warning(
                    "Request %s is computed without the prefix cache: its KV failed to load %d "
                    "times",
                    request.request_id,
                    num_failed,
                )
