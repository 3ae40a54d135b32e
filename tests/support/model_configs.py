# SPDX-License-Identifier: Apache-2.0
"""Folders with nothing but a ``config.json``: tiny models, with windows of real ones."""

import json
from pathlib import Path
from typing import Any

from tools.checkpoints.tiny_models import (
    TINY_GEMMA3,
    TINY_GRANITE4,
    TINY_LLAMA4,
    TINY_MISTRAL,
    TinyModel,
)

#: What a model is made from, its architecture, and other values than the tiny checkpoint has.
CONFIGS: dict[str, tuple[TinyModel, str, dict[str, Any]]] = {
    "gemma3": (
        TINY_GEMMA3,
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 12,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
            "sliding_window": 512,
        },
    ),
    "mistral": (
        TINY_MISTRAL,
        "MistralForCausalLM",
        {"num_hidden_layers": 2, "sliding_window": 512},
    ),
    "llama4": (TINY_LLAMA4, "Llama4ForCausalLM", {"attention_chunk_size": 256}),
    "granite4": (
        TINY_GRANITE4,
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    ),
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write the configuration ``name`` to its own folder below ``folder``."""
    model, architecture, other = CONFIGS[name]
    config = {"architectures": [architecture], "model_type": model.model_type, "dtype": "bfloat16"}
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    values = config | {**model.common, **model.config} | other | changes
    (target / "config.json").write_text(json.dumps(values))
    return target


#: The shapes of published multimodal models: Gemma 3 4B and Llama 4 Scout.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "llama-4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "text_config": {
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "hidden_size": 5120,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "num_attention_heads": 40,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "vocab_size": 202048,
        },
        "vision_config": {
            "hidden_size": 1408,
            "image_size": 336,
            "intermediate_size": 5632,
            "model_type": "llama4_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 34,
            "patch_size": 14,
            "vision_output_dim": 4096,
        },
    },
}


def write_published(folder: Path, name: str) -> Path:
    """Write the configuration ``name`` of `PUBLISHED` to its own folder below ``folder``."""
    target = folder / name
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return target
