# SPDX-License-Identifier: Apache-2.0
"""What an engine core reports to the front end about its KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats


class TypeStats(msgspec.Struct, array_like=True, gc=False):
    """One attention type. Blocks are physical blocks."""

    #: The label of its metrics.
    name: str
    #: Now in blocks that requests hold.
    num_referenced: int = 0
    #: Now in cached blocks that no request holds.
    num_cached: int = 0
    # Since the last report.
    num_evicted: int = 0
    num_cuts: int = 0
    num_cut_tokens: int = 0
    num_junctions_kept: int = 0


class HybridKVStats(msgspec.Struct, array_like=True, gc=False):
    """The state of an engine's KV cache, and what happened since the last report."""

    #: Why base's manager serves the engine; empty if the hybrid manager does.
    reason_for_base: str = ""
    types: Sequence[TypeStats] = ()
    #: Physical blocks that hold nothing reusable now. Any type can take them.
    num_blank: int = 0
    # Since the last report.
    num_lookups: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_refused: int = 0
    num_waited: int = 0


@dataclass
class HybridSchedulerStats(SchedulerStats):
    """Base's statistics of a step, with ours."""

    #: None if nothing has changed since the last report.
    hybrid_kv: HybridKVStats | None = None


class HybridEngineCoreOutputs(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):
    """What the front end decodes. A field of base has a type with one more field.

    A decoder for base's class ignores that field, so either side may lack the plugin.
    """

    scheduler_stats: HybridSchedulerStats | None = None


def take_stats(manager: Any) -> HybridKVStats | None:
    """The report of a KV cache manager; None if nothing has changed, or for another plugin's."""
    take = getattr(manager, "take_hybrid_kv_stats", None)
    return None if take is None else take()


def report_base(manager: Any, reason: str) -> None:
    """Let a manager of base report why it serves the engine."""
    stats = HybridKVStats(reason_for_base=reason)
    manager.take_hybrid_kv_stats = lambda: stats
