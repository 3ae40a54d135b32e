# SPDX-License-Identifier: Apache-2.0
"""How the metrics get from the engine core to ``/metrics``."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from support.by_hand import make_manager
from support.plugin_state import collected_log, plugin_state_restored
from vllm.v1.core.hybrid import plugin
from vllm.v1.core.hybrid.metrics import stats as stats_module
from vllm.v1.core.hybrid.metrics.prometheus import METRICS, PREFIX, HybridKVProm
from vllm.v1.core.hybrid.metrics.stats import (
    HybridKVStats,
    HybridSchedulerStats,
    TypeStats,
    take_stats,
)
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

FULL = TypeStats("full_attention", 3, 4, 5, 6, 700, 0)
WINDOW = TypeStats("sliding_window 512", 15, 20, 25, 2, 256, 1)
#: All fields differ, so that none can stand for another.
STATS = HybridKVStats("", [FULL, WINDOW], 58, 10, 1900, 944, 9, 8)


@pytest.fixture(autouse=True)
def base() -> Iterator[None]:
    with plugin_state_restored():
        yield


# ---------------------------------------------------------------- on the way


def travel(stats: SchedulerStats) -> Any:
    """What the front end gets, in a process where the plugin is active or not."""
    outputs = EngineCoreOutputs(engine_index=3, scheduler_stats=stats, weight_version="v1")
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert isinstance(received, EngineCoreOutputs)
    assert (received.engine_index, received.weight_version) == (3, "v1")
    assert received.timestamp == outputs.timestamp
    return received.scheduler_stats


def test_a_report_arrives() -> None:
    plugin.activate()
    received = travel(
        HybridSchedulerStats(
            num_running_reqs=7, prefix_cache_stats=PrefixCacheStats(hits=5), hybrid_kv=STATS
        )
    )
    assert received.hybrid_kv == STATS
    assert (received.num_running_reqs, received.prefix_cache_stats.hits) == (7, 5)
    assert travel(HybridSchedulerStats()).hybrid_kv is None


def test_a_front_end_without_the_plugin_ignores_the_report() -> None:
    received = travel(HybridSchedulerStats(num_running_reqs=7, hybrid_kv=STATS))
    assert received == SchedulerStats(num_running_reqs=7)
    assert type(received) is SchedulerStats


def test_an_engine_core_without_the_plugin_reports_nothing() -> None:
    plugin.activate()
    received = travel(SchedulerStats(num_running_reqs=7))
    assert (received.num_running_reqs, received.hybrid_kv) == (7, None)


def test_other_types_are_decoded_as_before() -> None:
    plugin.activate()
    assert MsgpackDecoder().decode(MsgpackEncoder().encode([1, "a"])) == [1, "a"]
    assert MsgpackDecoder(list[int]).decode(MsgpackEncoder().encode([1])) == [1]


def test_there_are_no_metrics_where_a_report_would_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OtherOrder(EngineCoreOutputs, array_like=True):
        another: int = 0

    monkeypatch.setattr(stats_module, "HybridEngineCoreOutputs", OtherOrder)
    make_stats = scheduler.Scheduler.make_stats
    with collected_log() as log:
        plugin.activate()
    assert plugin.is_active()
    assert scheduler.Scheduler.make_stats is make_stats
    assert scheduler.SchedulerStats is SchedulerStats
    (record,) = log
    assert record.getMessage() == (
        "Hybrid KV cache: no metrics, because msgspec orders fields differently"
    )


# ---------------------------------------------------------------- in the engine core


class SchedulerOfBase(scheduler.Scheduler):
    """As much of a scheduler as statistics need."""

    def __init__(self, kv_cache_manager: Any, log_stats: bool = True) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.log_stats = log_stats
        self.connector_prefix_cache_stats = self.kv_metrics_collector = None
        self.deferred_waiting = set()
        self._kv_fetch_counts = {}

    def get_request_counts(self) -> tuple[int, int]:
        return 2, 3


def test_the_scheduler_reports_what_has_changed() -> None:
    plugin.activate()
    one = SchedulerOfBase(make_manager(1 + 60))
    first, second = one.make_stats(), one.make_stats()
    assert isinstance(first, HybridSchedulerStats) and isinstance(second, HybridSchedulerStats)
    assert first.hybrid_kv is not None and first.hybrid_kv.num_blank == 60
    assert first.num_running_reqs == 2
    assert second.hybrid_kv is None


def test_without_statistics_there_is_no_report() -> None:
    plugin.activate()
    manager = make_manager()
    assert SchedulerOfBase(manager, log_stats=False).make_stats() is None
    assert manager.take_hybrid_kv_stats() is not None


def test_base_reports_why_it_serves() -> None:
    class Theirs(scheduler.KVCacheManager):  # type: ignore[name-defined, misc]
        """The manager of another plugin, before ours is active."""

    assert take_stats(make_manager(manager_cls=Theirs)) is None
    plugin.activate()

    class Changed(scheduler.KVCacheManager):  # type: ignore[name-defined, misc]
        """The manager of another plugin that changes ours."""

    changed = SchedulerOfBase(make_manager(manager_cls=Changed))
    for _ in range(2):
        stats = changed.make_stats()
        assert isinstance(stats, HybridSchedulerStats) and stats.hybrid_kv is not None
        assert stats.hybrid_kv.reason_for_base.endswith("Changed subclasses it")


# ---------------------------------------------------------------- in the front end


class FrontEnd:
    """The metrics of two engines in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = HybridKVProm(
            partial(Gauge, registry=self.registry),
            partial(Counter, registry=self.registry),
            {0: ["tiny", "0"], 1: ["tiny", "1"]},
        )

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        labels = {"model_name": "tiny", "engine": str(engine)} | labels
        return self.registry.get_sample_value(PREFIX + name, labels)

    def num_series(self) -> int:
        families = self.registry.collect()
        return sum(not s.name.endswith("_created") for family in families for s in family.samples)


def test_all_values_get_to_their_series() -> None:
    front = FrontEnd()
    assert front.num_series() == 0
    front.metrics.observe(STATS, 0)
    full, window = {"attention_type": FULL.name}, {"attention_type": WINDOW.name}
    expected = [
        ("active", {"reason": ""}, 1),
        ("blocks", {"attention_type": "any", "state": "blank"}, 58),
        ("blocks", full | {"state": "referenced"}, 3),
        ("blocks", full | {"state": "cached"}, 4),
        ("blocks", window | {"state": "referenced"}, 15),
        ("blocks", window | {"state": "cached"}, 20),
        ("prefix_lookups_total", {}, 10),
        ("prefix_lookup_tokens_total", {}, 1900),
        ("prefix_hit_tokens_total", {}, 944),
        ("admissions_refused_total", {}, 9),
        ("allocations_waited_total", {}, 8),
        ("evicted_blocks_total", full, 5),
        ("evicted_blocks_total", window, 25),
        ("prefix_cuts_total", full, 6),
        ("prefix_cuts_total", window, 2),
        ("prefix_cut_tokens_total", full, 700),
        ("prefix_cut_tokens_total", window, 256),
        ("junctions_kept_total", full, 0),
        ("junctions_kept_total", window, 1),
    ]
    assert [(n, labels, front.value(n, **labels)) for n, labels, _ in expected] == expected
    assert front.num_series() == len(expected)


def test_counters_add_up_and_gauges_do_not() -> None:
    front = FrontEnd()
    for _ in range(3):
        front.metrics.observe(STATS, 0)
    assert front.value("prefix_lookups_total") == 30
    assert front.value("evicted_blocks_total", attention_type=WINDOW.name) == 75
    assert front.value("blocks", attention_type=WINDOW.name, state="cached") == 20


def test_engines_have_their_own_series() -> None:
    """Data parallel engines, one of which base serves."""
    front = FrontEnd()
    front.metrics.observe(STATS, 0)
    front.metrics.observe(HybridKVStats(reason_for_base="X is not covered yet"), 1)
    assert front.value("active", engine=0, reason="") == 1
    assert front.value("active", engine=1, reason="X is not covered yet") == 0
    assert front.value("prefix_lookups_total", engine=0) == 10
    assert front.value("prefix_lookups_total", engine=1) is None


def test_names_are_vllms_and_differ() -> None:
    """Base removes what begins with ``vllm:`` before it makes its metrics anew."""
    assert PREFIX.startswith("vllm:")
    assert len({metric.name for metric in METRICS}) == len(METRICS) == 11
