# SPDX-License-Identifier: Apache-2.0
"""Engines as the factory sees them, made up to query ``coverage.py``."""

import copy
import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from tools.compatibility.architectures import CHECKPOINTS
from vllm.config import (
    KVTransferConfig,
    ModelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
_WINDOW = 64

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
}
_HEADS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.bfloat16,
}


def _mamba(caching: bool, **changes: Any) -> MambaSpec:
    # Base keeps one state per request without prefix caching, and one per block with it.
    return MambaSpec(
        block_size=BLOCK_SIZE if caching else MAX_MODEL_LEN,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align" if caching else "none",
        **changes,
    )


def spec_of(kind: str, caching: bool = True) -> KVCacheSpec:
    """The spec of base's layers of one kind; kinds are those of ``architectures.py``."""
    if kind == "Mamba":
        return _mamba(caching)
    if kind == CHECKPOINTS:
        # As base's Mamba 2 layers in every mode.
        return _mamba(caching, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    spec_cls, arguments = {
        "full": (FullAttentionSpec, {}),
        "MLA": (MLAAttentionSpec, {}),
        "sliding": (SlidingWindowSpec, {"sliding_window": _WINDOW}),
        "sliding MLA": (SlidingWindowMLASpec, {"sliding_window": _WINDOW}),
        "chunked": (ChunkedLocalAttentionSpec, {"attention_chunk_size": _WINDOW}),
        "cross": (CrossAttentionSpec, {}),
        "sink": (SinkFullAttentionSpec, {"sink_len": BLOCK_SIZE}),
        "R-SWA": (RSWASpec, {"rswa_window": _WINDOW}),
        "circular buffer": (CircularBufferSpec, {}),
    }[kind]
    return cast(KVCacheSpec, spec_cls(**_HEADS, **arguments))


@cache
def _base_config() -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
    return VllmConfig(model_config=model_config)


def make_engine_config(
    *,
    caching: bool = True,
    model: dict[str, Any] | None = None,
    speculation: str | None = None,
    connector: str | None = None,
    **changes: Any,
) -> VllmConfig:
    """The engine configuration of a small model.

    Args:
        caching: Whether prefix caching is on.
        model: Values that differ from `_MODEL` in the model's ``config.json``.
        speculation: A speculative method.
        connector: The name of a KV connector.
        changes: Values of ``part__name``, such as ``scheduler_config__policy``.

    Raises:
        AttributeError: if the part of the configuration has no such name.
    """
    config = copy.copy(_base_config())
    config.model_config = copy.copy(config.model_config)
    config.model_config.hf_config = copy.copy(config.model_config.hf_config)
    for name, value in (model or {}).items():
        setattr(config.model_config.hf_config, name, value)
    for cached in ("is_encoder_decoder", "is_diffusion"):
        config.model_config.__dict__.pop(cached, None)
    if connector is not None:
        config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    if speculation is not None:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=2,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        # Most other methods need a checkpoint of their own, which coverage does not look at.
        config.speculative_config.method = speculation  # type: ignore[assignment]
    changes = {"cache_config__enable_prefix_caching": caching} | changes
    for path, value in changes.items():
        part, _, name = path.partition("__")
        values = copy.copy(getattr(config, part))
        getattr(values, name)
        setattr(values, name, value)
        setattr(config, part, values)
    return config


def facts_of(
    groups: Iterable[KVCacheGroupSpec | KVCacheSpec], vllm_config: VllmConfig, **changes: Any
) -> EngineFacts:
    """An engine whose model has these KV cache groups, with one layer each."""
    config = KVCacheConfig(
        num_blocks=1000,
        kv_cache_tensors=[],
        kv_cache_groups=[
            group
            if isinstance(group, KVCacheGroupSpec)
            else KVCacheGroupSpec([f"layer.{i}"], group)
            for i, group in enumerate(groups)
        ],
    )
    speculation = vllm_config.speculative_config
    use_eagle = speculation is not None and speculation.use_eagle()
    facts = EngineFacts(
        config,
        hash_block_size=BLOCK_SIZE,
        use_eagle=use_eagle,
        num_prefill_lookahead=int(use_eagle),
        vllm_config=vllm_config,
    )
    return replace(facts, **changes)


def facts_of_kinds(
    kinds: Iterable[str], caching: bool = True, is_diffusion: bool = False
) -> EngineFacts:
    """An engine whose model has one KV cache group of each of these kinds."""
    kinds = sorted(kinds)
    model: dict[str, Any] = {"is_encoder_decoder": True} if "cross" in kinds else {}
    if is_diffusion:
        model["canvas_length"] = 32
    # Base turns prefix caching off for encoder-decoder models.
    caching = caching and "cross" not in kinds
    config = make_engine_config(caching=caching, model=model)
    return facts_of([spec_of(kind, caching) for kind in kinds], config)


def reason_for_base(facts: EngineFacts) -> str | None:
    """Why base serves an engine, without the id of a group; None if the hybrid manager does."""
    reason = find_uncovered_feature(facts)
    return reason and re.sub(r" \(KV cache group \d+\)$", "", reason)
