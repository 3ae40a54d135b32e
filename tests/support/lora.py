# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters for tiny checkpoints."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8
TARGETS = ("q_proj", "v_proj", "down_proj")


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter for all of the model's layers, large enough to change its output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            size_out, size_in = weight.shape
            for matrix, shape in (("A", (RANK, size_in)), ("B", (size_out, RANK))):
                weights = torch.randn(shape, generator=generator) * 0.2
                tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = weights
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    settings |= {"target_modules": list(TARGETS), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
