# SPDX-License-Identifier: Apache-2.0
"""What the engine core counts for the metrics, with values worked out by hand.

The model has one full-attention group and five of window 33, so that a window is two blocks of 16
before the query. Retention is 0, as in base's default: windows are cached before the last token of
a prompt, and before junctions.
"""

from typing import Any

import pytest

from support.by_hand import GEMMA, make_manager, prefill, request
from support.kv_configs import AttentionKind, full, sliding
from vllm.v1.core.hybrid.metrics.stats import HybridKVStats, TypeStats
from vllm.v1.request import Request, RequestStatus

FULL, WINDOW = "full_attention", "sliding_window 33"


def manager_for(num_free: int = 999, **changes: Any) -> Any:
    """A manager whose pool has ``num_free`` physical blocks to give."""
    manager = make_manager(1 + num_free, **{"retention": 0} | changes)
    manager.take_hybrid_kv_stats()  # what it looks like at first
    return manager


def admit(manager: Any, req: Request) -> bool:
    """Try to admit a request as base's scheduler does, and count its lookup if it is admitted."""
    num_hit = prefill(manager, req, full_sequence_must_fit=True)
    if num_hit is not None:
        manager.record_prefix_cache_stats(req, num_hit)
    return num_hit is not None


def finish(manager: Any, req: Request) -> None:
    req.status = RequestStatus.FINISHED_STOPPED
    manager.free(req)


def serve(manager: Any, req: Request) -> None:
    assert admit(manager, req)
    finish(manager, req)


def types_of(stats: HybridKVStats) -> dict[str, TypeStats]:
    return {type_stats.name: type_stats for type_stats in stats.types}


def test_the_first_report_shows_the_empty_pool() -> None:
    manager = make_manager(1 + 60)
    assert manager.take_hybrid_kv_stats() == HybridKVStats(
        num_blank=60, types=[TypeStats(FULL), TypeStats(WINDOW)]
    )
    assert manager.take_hybrid_kv_stats() is None


def test_blocks_by_state_and_type() -> None:
    manager = manager_for(100)
    req = request("r1", (1, 160))
    assert admit(manager, req)
    held = manager.take_hybrid_kv_stats()
    assert held.num_blank == 100 - 60
    assert [(t.num_referenced, t.num_cached) for t in held.types] == [(10, 0), (50, 0)]

    finish(manager, req)
    freed = manager.take_hybrid_kv_stats()
    # All blocks of full attention are cached, and the two before token 144 of each window group.
    assert [(t.num_referenced, t.num_cached) for t in freed.types] == [(0, 10), (0, 10)]
    assert freed.num_blank == 80
    # Only what happened since the report before counts.
    assert freed.num_lookups == 0 < held.num_lookups
    assert manager.take_hybrid_kv_stats() is None


def test_which_type_cuts_a_hit_short() -> None:
    manager = manager_for()
    serve(manager, request("new", (1, 160)))
    stats = manager.take_hybrid_kv_stats()
    # A hit could end at token 144, so that at least one token is left to compute.
    assert (stats.num_lookups, stats.num_lookup_tokens, stats.num_hit_tokens) == (1, 144, 0)
    types = types_of(stats)
    assert (types[FULL].num_cuts, types[FULL].num_cut_tokens) == (1, 144)
    assert (types[WINDOW].num_cuts, types[WINDOW].num_cut_tokens) == (0, 0)

    # Full attention has the 96 tokens that are shared. No window before a token up to 96 is cached.
    serve(manager, request("other end", (1, 96), (2, 64)))
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_lookups, stats.num_lookup_tokens, stats.num_hit_tokens) == (1, 144, 0)
    types = types_of(stats)
    assert (types[FULL].num_cuts, types[FULL].num_cut_tokens) == (1, 48)
    assert (types[WINDOW].num_cuts, types[WINDOW].num_cut_tokens) == (1, 96)
    assert (types[FULL].num_junctions_kept, types[WINDOW].num_junctions_kept) == (0, 1)

    # The junction was kept, so now both types have the 96 tokens.
    serve(manager, request("third end", (1, 96), (3, 64)))
    # And a repeated prompt is hit up to 144.
    serve(manager, request("again", (1, 160)))
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_lookups, stats.num_lookup_tokens) == (2, 288)
    assert stats.num_hit_tokens == 96 + 144
    types = types_of(stats)
    assert (types[FULL].num_cuts, types[FULL].num_cut_tokens) == (1, 48)
    assert (types[WINDOW].num_cuts, types[WINDOW].num_junctions_kept) == (0, 0)


def test_several_types_that_shorten_in_turn() -> None:
    """Windows of 1 and of 4 blocks; the types are asked in the order of their first group."""
    manager = manager_for(kinds=(full(16), sliding(17, 16), sliding(65, 16)))
    pool, hashes = manager.block_pool, [bytes([i]) for i in range(8)]
    for type_id, indices in enumerate((range(7), (2, 5), (0, 1, 2, 3))):
        for i in indices:
            table = pool.new_table(type_id)
            pool.allocate((table,), [(i + 1, 1)])
            table.cache(i, i + 1, hashes)
            table.free()
    hit = manager.coordinator.find_hit(hashes, 8 * 16 + 5)
    # Of 8 blocks, full attention has 7. The small window can end at 6 or 3, the large one at 4.
    # So the small one is asked again, and then the large one has the first 3 blocks, too.
    assert hit.num_tokens == 3 * 16
    assert list(hit.cuts) == [16, 16 + 16, 2 * 16]
    assert hit.num_tokens + sum(hit.cuts) == 8 * 16


def test_one_type() -> None:
    manager = manager_for(kinds=(full(16),))
    serve(manager, request("r1", (1, 64)))
    serve(manager, request("r2", (1, 32), (2, 32)))
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_lookups, stats.num_lookup_tokens, stats.num_hit_tokens) == (2, 96, 32)
    (full_stats,) = stats.types
    assert (full_stats.num_cuts, full_stats.num_cut_tokens) == (2, 48 + 16)


def test_evicted_blocks() -> None:
    manager = manager_for(60)
    serve(manager, request("r1", (1, 160)))
    manager.take_hybrid_kv_stats()
    assert admit(manager, request("r2", (2, 160)))
    stats = manager.take_hybrid_kv_stats()
    # All of the pool is needed, and 10 blocks of each type were cached.
    assert [t.num_evicted for t in stats.types] == [10, 10]
    assert [t.num_referenced for t in stats.types] == [10, 50]
    assert stats.num_blank == 0


def test_a_reset_is_no_eviction() -> None:
    manager = manager_for()
    serve(manager, request("r1", (1, 160)))
    assert manager.reset_prefix_cache()
    stats = manager.take_hybrid_kv_stats()
    assert [(t.num_cached, t.num_evicted) for t in stats.types] == [(0, 0), (0, 0)]


def test_a_refused_request_counts_each_refusal_and_one_lookup() -> None:
    manager = manager_for(60)
    first, second = request("first", (1, 160)), request("second", (2, 160))
    assert admit(manager, first)
    manager.take_hybrid_kv_stats()

    assert not admit(manager, second)
    assert not admit(manager, second)
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_refused, stats.num_waited, stats.num_lookups) == (2, 0, 0)

    finish(manager, first)
    assert admit(manager, second)
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_refused, stats.num_waited) == (0, 1)
    assert (stats.num_lookups, stats.num_lookup_tokens) == (1, 144)


def test_a_refusal_without_a_check_of_the_whole_sequence() -> None:
    manager = manager_for(60)
    assert admit(manager, request("first", (1, 160)))
    manager.take_hybrid_kv_stats()
    assert prefill(manager, request("second", (2, 160))) is None
    assert manager.take_hybrid_kv_stats().num_refused == 1


def test_a_running_request_waits_for_a_block() -> None:
    manager = manager_for(4, kinds=(full(16),))
    first, second = request("first", (1, 32)), request("second", (2, 32))
    assert admit(manager, first) and admit(manager, second)
    manager.take_hybrid_kv_stats()

    first.append_output_token_ids(7)
    assert manager.allocate_slots(first, 1, num_lookahead_tokens=0) is None
    finish(manager, second)
    assert manager.allocate_slots(first, 1, num_lookahead_tokens=0) is not None
    stats = manager.take_hybrid_kv_stats()
    # It was no admission.
    assert (stats.num_refused, stats.num_waited) == (0, 1)


def test_a_request_that_ends_while_it_waits_did_not_get_blocks() -> None:
    manager = manager_for(60)
    first, second = request("first", (1, 160)), request("second", (2, 160))
    assert admit(manager, first)
    assert not admit(manager, second)
    finish(manager, second)
    finish(manager, first)
    serve(manager, request("second", (2, 160)))
    assert manager.take_hybrid_kv_stats().num_waited == 0


def test_lookups_of_preempted_requests_do_not_count() -> None:
    """As in base's metrics: a preempted request hits its own blocks."""
    manager = manager_for()
    req = request("r1", (1, 160))
    assert admit(manager, req)
    manager.take_hybrid_kv_stats()
    manager.free(req)
    req.status, req.num_computed_tokens, req.num_preemptions = RequestStatus.PREEMPTED, 0, 1
    assert admit(manager, req)
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_lookups, stats.num_hit_tokens) == (0, 0)


def test_a_state_that_is_not_written_yet_is_no_lack_of_blocks() -> None:
    manager = manager_for(kinds=(full(16), AttentionKind("mamba", 16)), retention=None)
    assert admit(manager, request("first", (1, 32)))
    second = request("second", (1, 32), (2, 16))
    assert not admit(manager, second)
    manager.new_step_starts()
    assert admit(manager, second)
    stats = manager.take_hybrid_kv_stats()
    assert (stats.num_refused, stats.num_waited) == (0, 0)
    assert stats.num_hit_tokens == 32


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        (GEMMA, [FULL, WINDOW]),
        (
            (full(16), sliding(33, 16, 2), sliding(33, 16, variant=1), sliding(49, 16)),
            [FULL, f"{WINDOW} #1", f"{WINDOW} #2", "sliding_window 49"],
        ),
        ((), []),
    ],
)
def test_labels_of_types_differ(kinds: tuple[AttentionKind, ...], labels: list[str]) -> None:
    stats = make_manager(kinds=kinds).take_hybrid_kv_stats()
    assert [type_stats.name for type_stats in stats.types] == labels
