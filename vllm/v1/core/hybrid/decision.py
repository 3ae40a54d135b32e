# SPDX-License-Identifier: Apache-2.0
"""Which manager an engine gets, and the words for it, for both the factory and the doctor.

Imports no native core, so that the doctor works in an installation without one.
"""

from collections.abc import Sequence

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.core.hybrid.options import HybridKVOptions


def find_reason_for_base(facts: EngineFacts) -> str | None:
    """Why base's manager must serve an engine, or None if the hybrid manager serves it.

    The reason reads well after "because".

    Raises:
        ValueError: for a bad option, or where ``on_uncovered`` is ``"error"`` and
            something is not covered.
    """
    options = HybridKVOptions.from_vllm_config(facts.vllm_config)
    if not options.enabled:
        return "hybrid_kv.enabled is false in --additional-config"
    feature = find_uncovered_feature(facts)
    if feature is None:
        return None
    if options.on_uncovered == "error":
        raise ValueError(
            "--additional-config: hybrid_kv.on_uncovered is 'error', and the hybrid KV cache "
            f"does not cover {feature} yet; with 'fallback', base vLLM's manager serves it"
        )
    return f"{feature} is not covered yet"


def describe(attention_types: Sequence[AttentionType]) -> str:
    """How the hybrid manager arranges the KV cache of a model with these types, in one line."""
    if not attention_types:
        return "no KV cache groups"
    managers = _count(len(attention_types), "manager")
    groups = _count(sum(t.num_groups for t in attention_types), "KV cache group")
    return f"{managers} for {groups}: {'; '.join(map(str, attention_types))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
