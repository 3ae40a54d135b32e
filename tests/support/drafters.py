# SPDX-License-Identifier: Apache-2.0
"""Draft models for tiny models, made from the tiny models themselves.

A drafter that never guesses right, or always does, would show only half of speculation.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def draft_model(target: Path, folder: Path, noise: float) -> Path:
    """A copy of a model with noise on its weights, as a share of their spread."""
    shutil.copytree(target, folder)
    weights = load_file(target / "model.safetensors")
    save_file(_with_noise(weights, noise), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def eagle_pair(llama: Path, folder: Path, noise: float) -> tuple[Path, Path]:
    """A Llama of one layer, and an EAGLE head for it that guesses well, but for the noise.

    The head computes what the model does for the next token: it looks at that token only, not at
    the hidden state. It has no norms, so the model's must change nothing.
    """
    shutil.copytree(llama, folder / "target")
    config = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 1}
    weights = load_file(llama / "model.safetensors")
    layer = "model.layers.0."
    weights = {
        name: tensor
        for name, tensor in weights.items()
        if name.startswith(layer) or ".layers." not in name
    }
    embeddings = weights["model.embed_tokens.weight"]
    embeddings /= embeddings.square().mean(dim=1, keepdim=True).sqrt()
    for norm in (f"{layer}input_layernorm.weight", "model.norm.weight"):
        weights[norm].fill_(1)
    head = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(layer) and "input_layernorm" not in name
    }
    size = config["hidden_size"]
    head["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    (folder / "head").mkdir()
    for name, tensors in (("target", weights), ("head", _with_noise(head, noise))):
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder / "target", folder / "head"


def _with_noise(weights: dict[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.ndim > 1:
            tensor += torch.randn(tensor.shape, generator=generator) * tensor.std() * noise
    return weights
