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
