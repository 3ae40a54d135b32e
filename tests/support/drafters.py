# SPDX-License-Identifier: Apache-2.0
"""Draft models for tiny models, made from the tiny models themselves.

A drafter that never guesses right, or always does, would show only half of speculation.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYER = "model.layers.0."


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
    config, weights = _one_layer_of(llama)
    head = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(LAYER) and "input_layernorm" not in name
    }
    head["fc.weight"] = _select_token(config["hidden_size"], token_first=True)
    shutil.copytree(llama, folder / "target")
    (folder / "head").mkdir()
    for name, tensors in (("target", weights), ("head", _with_noise(head, noise))):
        _write(folder / name, config, tensors)
    return folder / "target", folder / "head"


def mtp_model(llama: Path, folder: Path, noise: float) -> Path:
    """The same for a model that comes with its drafter: a MiMo, which is a Llama with biases
    in its attention and one layer more, for multi-token prediction.
    """
    config, weights = _one_layer_of(llama)
    sizes = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    sizes["v"] = sizes["k"]
    for which, num_heads in sizes.items():
        zeros = torch.zeros(num_heads * config["head_dim"])
        weights[f"{LAYER}self_attn.{which}_proj.bias"] = zeros
    drafter = {
        name.replace(LAYER, "model.mtp_layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(LAYER)
    }
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        drafter[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(config["hidden_size"])
    drafter["model.mtp_layers.0.input_proj.weight"] = _select_token(
        config["hidden_size"], token_first=False
    )
    config |= {
        "architectures": ["MiMoForCausalLM"],
        # Transformers does not know MiMo's own configuration; its values are these.
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    shutil.copytree(llama, folder)
    _write(folder, config, weights | _with_noise(drafter, noise))
    return folder


def _one_layer_of(llama: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a model's first layer alone, with norms around it that change
    nothing.
    """
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


def _select_token(size: int, token_first: bool) -> torch.Tensor:
    """The projection of a token's embedding and a hidden state that looks at the first only."""
    parts = [torch.eye(size), torch.zeros(size, size)]
    return torch.cat(parts if token_first else parts[::-1], dim=1)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _with_noise(weights: dict[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.ndim > 1:
            tensor += torch.randn(tensor.shape, generator=generator) * tensor.std() * noise
    return weights
