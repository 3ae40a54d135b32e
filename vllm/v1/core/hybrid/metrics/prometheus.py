# SPDX-License-Identifier: Apache-2.0
"""The metrics, as base's Prometheus logger of a front-end process makes and updates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.hybrid.metrics.stats import HybridKVStats, TypeStats

PREFIX = "vllm:hybrid_kv_"
#: The attention type of blank blocks, which belong to no type.
ANY_TYPE = "any"


class Metric(NamedTuple):
    """A metric. Counters have the suffix ``_total`` on ``/metrics``."""

    name: str
    is_counter: bool
    #: Besides ``model_name`` and ``engine``.
    labels: tuple[str, ...]
    documentation: str


ACTIVE = Metric(
    "active",
    False,
    ("reason",),
    "1 if the hybrid manager serves the engine. 0 if base's manager does, for this reason.",
)
BLOCKS = Metric(
    "blocks",
    False,
    ("attention_type", "state"),
    "Physical KV cache blocks by state: 'referenced' (held by requests), 'cached' (in the prefix "
    "cache and held by no request) and 'blank' (nothing reusable; of no attention type).",
)
#: With the field of `HybridKVStats`.
PER_ENGINE = {
    "num_lookups": Metric(
        "prefix_lookups", True, (), "Prefix cache lookups of requests that were then admitted."
    ),
    "num_lookup_tokens": Metric(
        "prefix_lookup_tokens",
        True,
        (),
        "Tokens that these lookups could have hit: up to the last position where a hit can end.",
    ),
    "num_hit_tokens": Metric("prefix_hit_tokens", True, (), "Tokens that these lookups hit."),
    "num_refused": Metric(
        "admissions_refused",
        True,
        (),
        "How often a waiting request was not admitted because too few blocks were free. A request "
        "that is refused in several steps counts in each.",
    ),
    "num_waited": Metric(
        "allocations_waited",
        True,
        (),
        "Requests, waiting or running, that got blocks after they had been refused.",
    ),
}
#: With the field of `TypeStats`.
PER_TYPE = {
    "num_cuts": Metric(
        "prefix_cuts",
        True,
        ("attention_type",),
        "Lookups in which the attention type shortened what the types asked before it accept.",
    ),
    "num_cut_tokens": Metric(
        "prefix_cut_tokens",
        True,
        ("attention_type",),
        "Tokens by which the attention type shortened these lookups. What the first type cuts, it "
        "does not have cached: new text, above all.",
    ),
    "num_evicted": Metric(
        "evicted_blocks", True, ("attention_type",), "Physical blocks evicted from the cache."
    ),
    "num_junctions_kept": Metric(
        "junctions_kept",
        True,
        ("attention_type",),
        "Junctions of shared prefixes whose blocks were cached, so that later requests can hit.",
    ),
}
METRICS = (ACTIVE, BLOCKS, *PER_ENGINE.values(), *PER_TYPE.values())

#: Sets a gauge or increments a counter.
_Update = Callable[[float], None]


class HybridKVProm:
    """Our metrics of all engines of a front-end process.

    Args:
        gauge_cls: prometheus_client's or Ray's, as base's logger has it.
        counter_cls: likewise.
        engine_labels: Per engine, the values of ``model_name`` and ``engine``.
    """

    def __init__(
        self, gauge_cls: Any, counter_cls: Any, engine_labels: Mapping[int, Sequence[object]]
    ) -> None:
        self._engine_labels = engine_labels
        self._metrics: dict[Metric, Any] = {}
        for metric in METRICS:
            arguments = {
                "name": PREFIX + metric.name,
                "documentation": metric.documentation,
                "labelnames": ["model_name", "engine", *metric.labels],
            }
            if metric.is_counter:
                self._metrics[metric] = counter_cls(**arguments)
            else:
                # As base's: with several API servers, the newest value of any process counts.
                self._metrics[metric] = gauge_cls(**arguments, multiprocess_mode="mostrecent")
        self._updates: dict[tuple[int, Metric, tuple[str, ...]], _Update] = {}

    def observe(self, stats: HybridKVStats, engine_idx: int) -> None:
        """Update the metrics of an engine."""
        is_active = not stats.reason_for_base
        self._update(engine_idx, ACTIVE, (stats.reason_for_base,), float(is_active))
        if not is_active:
            return
        self._update(engine_idx, BLOCKS, (ANY_TYPE, "blank"), stats.num_blank)
        for field, metric in PER_ENGINE.items():
            self._update(engine_idx, metric, (), getattr(stats, field))
        for type_stats in stats.types:
            self._observe_type(type_stats, engine_idx)

    def _observe_type(self, stats: TypeStats, engine_idx: int) -> None:
        name = stats.name
        self._update(engine_idx, BLOCKS, (name, "referenced"), stats.num_referenced)
        self._update(engine_idx, BLOCKS, (name, "cached"), stats.num_cached)
        for field, metric in PER_TYPE.items():
            self._update(engine_idx, metric, (name,), getattr(stats, field))

    def _update(
        self, engine_idx: int, metric: Metric, labels: tuple[str, ...], value: float
    ) -> None:
        key = engine_idx, metric, labels
        update = self._updates.get(key)
        if update is None:
            # The first report creates all series, counters at 0.
            child = self._metrics[metric].labels(*self._engine_labels[engine_idx], *labels)
            update = self._updates[key] = child.inc if metric.is_counter else child.set
        if value or not metric.is_counter:
            update(value)
