# SPDX-License-Identifier: Apache-2.0
"""Connects the metrics to base. Part of the plugin ``hybrid_kv``.

Four names of base are replaced:

- ``SchedulerStats`` in the scheduler's module, by a subclass with one more field;
- ``Scheduler.make_stats``, by a wrapper that fills it;
- ``MsgpackDecoder.__init__``, so that the front end decodes this field;
- ``PrometheusStatLogger``'s ``__init__`` and ``record``, by wrappers that make and update our
  metrics beside base's.

A logger in base's group ``vllm.stat_logger_plugins`` would not do: base would turn statistics on
where the user turned them off, remove our metrics when it makes its own, and not use it in ``LLM``.
"""

import functools
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.hybrid.activation import Patches

logger = init_logger(__name__)


def apply(patches: Patches) -> None:
    """Replace the names; one log line, and no metrics, if a report would not arrive."""
    from vllm.v1 import serial_utils
    from vllm.v1.core.hybrid.metrics.prometheus import HybridKVProm
    from vllm.v1.core.hybrid.metrics.stats import (
        HybridEngineCoreOutputs,
        HybridSchedulerStats,
        take_stats,
    )
    from vllm.v1.core.sched import scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    # The fields travel by position.
    if HybridEngineCoreOutputs.__struct_fields__ != EngineCoreOutputs.__struct_fields__:
        logger.warning("Hybrid KV cache: no metrics, because msgspec orders fields differently")
        return
    make = scheduler.Scheduler.make_stats
    decoder_init = serial_utils.MsgpackDecoder.__init__
    logger_init, record = PrometheusStatLogger.__init__, PrometheusStatLogger.record

    @functools.wraps(make)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats: Any = make(self, *args, **kwargs)
        if stats is not None:
            stats.hybrid_kv = take_stats(self.kv_cache_manager)
        return stats

    @functools.wraps(decoder_init)
    def msgpack_decoder_init(self: Any, t: Any = None, *args: Any, **kwargs: Any) -> None:
        decoded = HybridEngineCoreOutputs if t is EngineCoreOutputs else t
        decoder_init(self, decoded, *args, **kwargs)

    @functools.wraps(logger_init)
    def prometheus_init(self: Any, *args: Any, **kwargs: Any) -> None:
        logger_init(self, *args, **kwargs)
        # After base's: base's __init__ first removes all metrics of vLLM.
        self.hybrid_kv_prom = HybridKVProm(
            self._gauge_cls, self._counter_cls, self.per_engine_labelvalues
        )

    @functools.wraps(record)
    def prometheus_record(
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        stats = getattr(scheduler_stats, "hybrid_kv", None)
        if stats is not None and hasattr(self, "hybrid_kv_prom"):
            self.hybrid_kv_prom.observe(stats, engine_idx)

    patches.replace(scheduler, "SchedulerStats", HybridSchedulerStats)
    patches.replace(scheduler.Scheduler, "make_stats", make_stats)
    patches.replace(serial_utils.MsgpackDecoder, "__init__", msgpack_decoder_init)
    patches.replace(PrometheusStatLogger, "__init__", prometheus_init)
    patches.replace(PrometheusStatLogger, "record", prometheus_record)
