# SPDX-License-Identifier: Apache-2.0
"""Drafters for tiny models, made from the tiny models themselves.

Noise on their weights makes them guess right only sometimes: a drafter that never does, or always,
would show only half of speculation.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYER = "model.layers.0."
Weights = dict[str, torch.Tensor]


def draft_model(target: Path, folder: Path, noise: float) -> Path:
    """A copy of a model with noise on its weights, relative to their standard deviation."""
    shutil.copytree(target, folder)
    _save(folder, _with_noise(load_file(target / "model.safetensors"), noise))
    return folder


def eagle_pair(llama: Path, folder: Path, noise: float) -> tuple[Path, Path]:
    """A Llama of one layer, and an EAGLE head for it that guesses well, but for the noise.

    The head computes what the model does for the next token: it reads that token only, and not
    the hidden state. It has no norms, so those of the model must change nothing.
    """
    config, weights = _one_layer_of(llama)
    head = _copy_of_layer(weights, "layers.0.")
    del head["layers.0.input_layernorm.weight"]
    size = config["hidden_size"]
    head["fc.weight"] = torch.eye(size, 2 * size)  # The token's embedding comes first.
    shutil.copytree(llama, folder / "target")
    (folder / "head").mkdir()
    for name, tensors in (("target", weights), ("head", _with_noise(head, noise))):
        _save(folder / name, tensors, config)
    return folder / "target", folder / "head"


def mtp_model(llama: Path, folder: Path, noise: float) -> Path:
    """A model that contains such a drafter: a MiMo, which is a Llama with biases in its attention
    and one more layer for multi-token prediction.
    """
    config, weights = _one_layer_of(llama)
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = weights[f"{LAYER}self_attn.{name}.weight"]
        weights[f"{LAYER}self_attn.{name}.bias"] = torch.zeros(len(projection))
    prefix = "model.mtp_layers.0."
    drafter = _copy_of_layer(weights, prefix)
    size = config["hidden_size"]
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        drafter[f"{prefix}{norm}.weight"] = torch.ones(size)
    # The token's embedding comes last.
    drafter[f"{prefix}input_proj.weight"] = torch.eye(size, 2 * size).roll(size, dims=1)
    # Transformers does not have MiMo's own configuration class; Qwen 2's has the same values.
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    config["num_nextn_predict_layers"] = 1
    shutil.copytree(llama, folder)
    _save(folder, weights | _with_noise(drafter, noise), config)
    return folder


def _one_layer_of(llama: Path) -> tuple[dict[str, Any], Weights]:
    """Configuration and weights of a model's first layer, with norms that change nothing."""
    config = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 1}
    weights = {
        name: tensor
        for name, tensor in load_file(llama / "model.safetensors").items()
        if name.startswith(LAYER) or ".layers." not in name
    }
    embeddings = weights["model.embed_tokens.weight"]
    embeddings /= embeddings.square().mean(dim=1, keepdim=True).sqrt()
    for norm in (f"{LAYER}input_layernorm.weight", "model.norm.weight"):
        weights[norm].fill_(1)
    return config, weights


def _copy_of_layer(weights: Weights, prefix: str) -> Weights:
    """The first layer's weights, under names with another prefix."""
    return {
        name.replace(LAYER, prefix): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(LAYER)
    }


def _save(folder: Path, weights: Weights, config: dict[str, Any] | None = None) -> None:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _with_noise(weights: Weights, noise: float) -> Weights:
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.ndim > 1:
            tensor += torch.randn(tensor.shape, generator=generator) * tensor.std() * noise
    return weights
