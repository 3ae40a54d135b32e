# SPDX-License-Identifier: Apache-2.0
"""Counts what the metrics show, in the engine core.

Python counts events: lookups, refusals, junctions. The native pool counts blocks. A step without an
event costs one comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.metrics.stats import HybridKVStats, TypeStats
from vllm.v1.core.hybrid.step import WAITING_STATUSES
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.hybrid.block_pool import BlockPool
    from vllm.v1.core.hybrid.coordinators.base import Hit

#: Per type, the physical blocks that are referenced, evictable, and evicted since start-up.
BlockCounts = tuple[tuple[int, int, int], ...]


class Counters:
    """Events of one KV cache since the last report."""

    def __init__(self, attention_types: Sequence[AttentionType]) -> None:
        self._names = type_labels(attention_types)
        #: Of the last report; None before the first.
        self._block_counts: BlockCounts | None = None
        self._num_evicted = (0,) * len(self._names)
        #: The last lookup, until its request is admitted: the request, the hit and the cuts.
        self._lookup: tuple[str, int, Sequence[int]] | None = None
        #: Requests that were refused, and have not got blocks since. Usually empty, so callers look
        #: at it before they call `allocated` or `released`.
        self.refused_requests: set[str] = set()
        self._start_anew()

    def _start_anew(self) -> None:
        self._changed = False
        self._events = HybridKVStats(types=[TypeStats(name) for name in self._names])

    def looked_up(self, request_id: str, hit: Hit) -> None:
        """A request was looked up in the prefix cache.

        Base's scheduler looks up a waiting request in every step until it is admitted. So only the
        last lookup counts, in `admitted`.
        """
        self._lookup = request_id, hit.num_tokens, hit.cuts

    def admitted(self, request_id: str, num_hit_tokens: int) -> None:
        """The request of the last lookup was admitted with a hit of ``num_hit_tokens``."""
        if self._lookup is None or self._lookup[0] != request_id:
            return
        events, (_, num_found, cuts) = self._events, self._lookup
        events.num_lookups += 1
        events.num_lookup_tokens += num_found + sum(cuts)
        events.num_hit_tokens += num_hit_tokens
        # A coordinator without prefix cache makes no cuts.
        for type_stats, num_tokens in zip(events.types, cuts, strict=False):
            if num_tokens:
                type_stats.num_cuts += 1
                type_stats.num_cut_tokens += num_tokens
        self._lookup, self._changed = None, True

    def refused(self, request: Request) -> None:
        """A request did not get blocks, because too few are free."""
        self.refused_requests.add(request.request_id)
        if request.status in WAITING_STATUSES:
            self._events.num_refused += 1
            self._changed = True

    def allocated(self, request_id: str) -> None:
        """A request got what it asked for."""
        if request_id in self.refused_requests:
            self.refused_requests.remove(request_id)
            self._events.num_waited += 1
            self._changed = True

    def released(self, request: Request) -> None:
        """A request gave back its blocks. If it is preempted, it goes on to wait."""
        if request.is_finished():
            self.refused_requests.discard(request.request_id)

    def junction_kept(self, type_id: int) -> None:
        """The blocks of a type before a junction were cached."""
        self._events.types[type_id].num_junctions_kept += 1
        self._changed = True

    def take(self, pool: BlockPool) -> HybridKVStats | None:
        """What happened since the last call; None if nothing did. The first answer is a report."""
        block_counts = pool.type_counts()
        if block_counts == self._block_counts and not self._changed:
            return None
        stats = self._events
        self._start_anew()
        for type_stats, counts, before in zip(
            stats.types, block_counts, self._num_evicted, strict=True
        ):
            type_stats.num_referenced, type_stats.num_cached, num_evicted = counts
            type_stats.num_evicted = num_evicted - before
        self._num_evicted = tuple(num_evicted for _, _, num_evicted in block_counts)
        stats.num_blank = pool.get_num_free_blocks() - pool.num_evictable_ids
        self._block_counts = block_counts
        return stats


def type_labels(attention_types: Sequence[AttentionType]) -> list[str]:
    """A label per type: its name, numbered if several types have the same name."""
    names = [t.name for t in attention_types]
    return [
        f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]
