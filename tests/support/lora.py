# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for tiny checkpoints."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
TARGETS = {"q_proj": "self_attn", "v_proj": "self_attn", "down_proj": "mlp"}


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of all the model's layers, large enough to change what it says."""
    config = json.loads((model / "config.json").read_text())
    hidden, head_size = config["hidden_size"], config["head_dim"]
    sizes = {  # (in, out)
        "q_proj": (hidden, config["num_attention_heads"] * head_size),
        "v_proj": (hidden, config["num_key_value_heads"] * head_size),
        "down_proj": (config["intermediate_size"], hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, part in TARGETS.items():
            where = f"base_model.model.model.layers.{layer}.{part}.{name}"
            size_in, size_out = sizes[name]
            for matrix, shape in (("A", (RANK, size_in)), ("B", (size_out, RANK))):
                weights = torch.randn(shape, generator=generator) * 0.2
                tensors[f"{where}.lora_{matrix}.weight"] = weights
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    settings |= {"target_modules": list(TARGETS), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
