# SPDX-License-Identifier: Apache-2.0
"""The gates: native functions that return at once if a step has no work for the manager."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.hybrid._core import gate_allocate_slots, gate_cache_blocks
from vllm.v1.core.hybrid.coordinators import RequestBlocks

if TYPE_CHECKING:
    from vllm.v1.core.hybrid.kv_cache_manager import KVCacheManager


class StepGates:
    """Which requests sleep, and until how many tokens.

    Most decode steps cross no block boundary, so most calls of `allocate_slots` and `cache_blocks`
    have nothing to do. A gate stands before each of the two methods. It compares the end of the
    step, lookahead included, with one number, and below that number no Python runs. A request that
    sleeps too long stalls silently, so this class is the only place that sets the number.
    """

    def __init__(self) -> None:
        self._next_events: dict[str, int] = {}

    def guard(self, manager: "KVCacheManager", cls: type["KVCacheManager"]) -> None:
        """Replace the two methods of ``manager`` by gates.

        A method that a subclass of ``cls`` overrides is called every time.
        """
        if type(manager).allocate_slots is cls.allocate_slots:
            manager.allocate_slots = gate_allocate_slots(  # type: ignore[method-assign]
                manager,
                cls.allocate_slots,
                cls.continue_request,
                self._next_events,
                manager.empty_kv_cache_blocks,
            )
        if type(manager).cache_blocks is cls.cache_blocks:
            manager.cache_blocks = gate_cache_blocks(  # type: ignore[method-assign]
                manager, cls.cache_blocks, self._next_events
            )

    def sleep_until(self, request_id: str, num_tokens: int) -> None:
        """Let the gates answer all steps of a request that end before ``num_tokens``."""
        self._next_events[request_id] = num_tokens

    def wake(self, request_id: str) -> None:
        """Call the methods again for each step of a request. No-op for an unknown request."""
        self._next_events.pop(request_id, None)

    def check_integrity(self, requests: Mapping[str, RequestBlocks]) -> None:
        """Raise AssertionError if a request sleeps past its next event."""
        for request_id, event in self._next_events.items():
            actual = requests[request_id].next_event()
            assert event <= actual, (
                f"request {request_id} sleeps until {event} tokens, but has work at {actual}"
            )
