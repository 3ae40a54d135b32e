# SPDX-License-Identifier: Apache-2.0
"""Folders with nothing but a ``config.json``, of models small enough to build anywhere."""

import json
from pathlib import Path
from typing import Any

from tools.checkpoints.tiny_models import MAMBA2

_DECODER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": _DECODER
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "sliding_window": 512,
    },
    "mistral": _DECODER
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": 512,
    },
    "llama4": _DECODER
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 256,
        "attention_chunk_size": 256,
        "no_rope_layers": [1, 1, 1, 0],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
    "granite4": _DECODER
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        **MAMBA2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
        "position_embedding_type": "nope",
    },
    "bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "dtype": "float32",
    },
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write the configuration ``name`` to its own folder below ``folder``."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return target
