# SPDX-License-Identifier: Apache-2.0
"""How vLLM groups a model's layers, determined without its weights.

The model is built as an engine would build it, but on PyTorch's meta device, where tensors have a
shape and no memory. Its attention layers then return their KV cache specs, and base's own functions
group them.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.hybrid.attention_type import AttentionType, describe, get_attention_types
from vllm.v1.core.hybrid.coverage import EngineFacts, find_reason_for_base
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_groups,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

COLUMNS = ("manager", "attention", "block size", "group", "layers")


@dataclass(frozen=True)
class ModelReport:
    """How a model's KV cache would be managed."""

    architecture: str
    #: One row per KV cache group, as the columns `COLUMNS`. Rows of a manager are adjacent;
    #: only the first one has its name.
    rows: tuple[tuple[str, ...], ...]
    #: Why base's managers serve the model; None if the hybrid manager serves it.
    reason_for_base: str | None
    #: How the hybrid manager arranges the KV cache, if it serves the model.
    arrangement: str
    #: What of the model was not examined, and why; empty if all of it was.
    note: str = ""


def examine_model(engine_args: EngineArgs) -> ModelReport:
    """Group the layers of ``engine_args.model``, a folder with at least its configuration.

    Neither tokenizer nor weights are read. One rank is built, whatever the parallel sizes.

    Raises:
        Exception: whatever vLLM raises for a model or settings that it cannot serve.
    """
    engine_args.load_format = "dummy"
    engine_args.skip_tokenizer_init = True
    engine_args.enforce_eager = True
    vllm_config = engine_args.create_engine_config()
    with set_current_vllm_config(vllm_config), _single_rank(vllm_config):
        dtype = cast(torch.dtype, vllm_config.model_config.dtype)  # resolved by now
        with set_default_torch_dtype(dtype), torch.device("meta"):
            initialize_model(vllm_config)
        groups = _group_layers(vllm_config)
    kv_cache_config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    kv_cache_config = generate_scheduler_kv_cache_config([kv_cache_config])
    facts = _engine_facts(vllm_config, kv_cache_config)
    attention_types = get_attention_types(kv_cache_config, facts.use_eagle)
    reason = find_reason_for_base(facts)
    arrangement = describe(attention_types)
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.uses_draft_kv_cache():
        arrangement += "; and the layers of the drafter, which is not built here"
    return ModelReport(
        architecture=vllm_config.model_config.architecture,
        rows=_rows(kv_cache_config, attention_types, one_per_group=reason is not None),
        reason_for_base=reason,
        arrangement=arrangement,
    )


@contextmanager
def _single_rank(vllm_config: VllmConfig) -> Iterator[None]:
    """The process groups of one rank, which layers need when they are built."""
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = 1
    parallel.data_parallel_size = parallel.world_size = 1
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        init_distributed_environment(1, 0, store, 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _group_layers(vllm_config: VllmConfig) -> list[KVCacheGroupSpec]:
    """What the engine core does between building the model and sizing its KV cache."""
    # Aligns the block sizes of attention and Mamba layers.
    current_platform.update_block_size_for_backend(vllm_config)
    register_all_kvcache_specs(vllm_config)
    specs = get_kv_cache_spec(vllm_config)
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    resolve_kv_cache_layout(vllm_config, [[layout.name for layout in layouts]], specs.values())
    return get_kv_cache_groups(vllm_config, specs)


def _engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if specs:
        cacheable = [spec for spec in specs if spec.prefix_cacheable] or specs
        vllm_config.cache_config.block_size = min(spec.block_size for spec in cacheable)
    _, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    events = vllm_config.kv_events_config
    speculation = vllm_config.speculative_config
    return EngineFacts(
        kv_cache_config=kv_cache_config,
        hash_block_size=hash_block_size,
        enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        use_eagle=speculation is not None and speculation.use_eagle_block_drop(),
        num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
        vllm_config=vllm_config,
    )


def _rows(
    kv_cache_config: KVCacheConfig,
    attention_types: Sequence[AttentionType],
    one_per_group: bool,
) -> tuple[tuple[str, ...], ...]:
    """Our managers, one per type; or base's, one per group."""
    groups = kv_cache_config.kv_cache_groups
    if one_per_group:
        attention_types = [AttentionType(g.kv_cache_spec, (i,)) for i, g in enumerate(groups)]
    rows = []
    for t in attention_types:
        # Our classes have the names of base's.
        manager = KVCacheSpecRegistry.get_manager_class(t.spec, groups[t.group_ids[0]].role)
        head = (getattr(manager, "__name__", "none"), t.name, str(t.spec.block_size))
        for i in t.group_ids:
            rows.append((*head, str(i), _layers(groups[i].layer_names)))
            head = ("", "", "")
    return tuple(rows)


def _layers(names: Sequence[str]) -> str:
    """``"0-2, 5"`` for the layers ``model.layers.0.self_attn`` and so on."""
    found = [re.search(r"\.(\d+)\.", name) for name in names]
    if not all(found):
        return ", ".join(names)
    numbers = sorted({int(match[1]) for match in found if match})
    # Numbers that follow each other differ from their places by the same amount.
    in_turn = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in in_turn]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
