# SPDX-License-Identifier: Apache-2.0
"""Folders with nothing but a ``config.json``, of models small enough to build anywhere."""

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

_BERT = TinyModel(
    "bert",
    "bert",
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "dtype": "float32",
    },
    common={"vocab_size": 512, "type_vocab_size": 2},
)
_LAYERS = [*["sliding_attention"] * 5, "full_attention"] * 2
_WINDOW = {"sliding_window": 512}

#: Per name: the architecture, a tiny model of it, and what is different from that.
_MODELS: dict[str, tuple[str, TinyModel, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForCausalLM",
        TINY_GEMMA3,
        {"num_hidden_layers": 12, "layer_types": _LAYERS, **_WINDOW},
    ),
    "mistral": ("MistralForCausalLM", TINY_MISTRAL, {"num_hidden_layers": 2, **_WINDOW}),
    "llama4": ("Llama4ForCausalLM", TINY_LLAMA4, {"attention_chunk_size": 256}),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        TINY_GRANITE4,
        {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    ),
    "bert": ("BertModel", _BERT, {}),
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write the configuration ``name`` to its own folder below ``folder``."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    architecture, model, own = _MODELS[name]
    values: dict[str, Any] = {"architectures": [architecture], "model_type": model.model_type}
    short = {"dtype": "bfloat16", "max_position_embeddings": 2048}
    for more in (model.common, short, model.config, own, changes):
        values.update(more)
    (target / "config.json").write_text(json.dumps(values))
    return target
