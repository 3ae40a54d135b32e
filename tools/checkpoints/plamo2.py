# SPDX-License-Identifier: Apache-2.0
"""A tiny random PLaMo 2, with the weight names and the `config.json` of published checkpoints.

Transformers has no PLaMo 2, so the weights are listed here instead of taken from a network.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.checkpoints.byte_tokenizer import (
    BOS_ID,
    END_OF_TURN_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    save_tokenizer,
)
from tools.checkpoints.store import ensure_checkpoint
from tools.checkpoints.tiny_models import MAX_LENGTH, WINDOW, favour_printable

if TYPE_CHECKING:
    import torch

#: Raise it whenever the code below makes other weights or another tokenizer.
FORMAT = 1

#: Stored norm weights are smaller than the effective weights by this much.
NORM_OFFSETS = {
    "pre_mixer_norm": 1.0,
    "post_mixer_norm": 1 / 5,
    "pre_mlp_norm": 1.0,
    "post_mlp_norm": 1 / 5**1.5,
    "norm": 1.0,
}

CONFIG: dict[str, Any] = {
    "architectures": ["Plamo2ForCausalLM"],
    "model_type": "plamo2",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_head": 32,
    # A query's own token is not counted.
    "attention_window_size": WINDOW - 1,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "mamba_step": 2,
    "mamba_num_heads": 8,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


@dataclass(frozen=True)
class TinyPlamo2:
    """What one tiny checkpoint is made from."""

    name: str
    #: Configuration values in place of those of `CONFIG`.
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def origin(self) -> dict[str, object]:
        return {"format": FORMAT, "config": {**CONFIG, **self.config}, "seed": self.seed}


#: Layers with a Mamba state and layers with a sliding window, by turns.
TINY_PLAMO2 = TinyPlamo2("tiny-plamo2")


def ensure_tiny_plamo2(model: TinyPlamo2, force: bool = False) -> Path:
    """Return the folder of `model`'s checkpoint, made first if it is missing or outdated."""
    return ensure_checkpoint(
        model.name, model.origin(), lambda folder: _make(model, folder), force=force
    )


def _make(model: TinyPlamo2, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config = {**CONFIG, **model.config}
    weights = {name: _draw(model, name, shape) for name, shape in _shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, END_OF_TURN_ID], pad_token_id=PAD_ID
    ).save_pretrained(folder)
    save_tokenizer(folder, MAX_LENGTH)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by its published name."""
    hidden, head = config["hidden_size"], config["hidden_size_per_head"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    mamba_heads, state = config["mamba_num_heads"], config["mamba_d_state"]
    width, dt_rank = mamba_heads * head, max(64, hidden // 16)
    mamba: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (2 * width, hidden),
        "conv1d.weight": (width, 1, config["mamba_d_conv"]),
        "bcdt_proj.weight": (2 * state + dt_rank, width),
        "B_norm_weight": (state,),
        "C_norm_weight": (state,),
        "dt_norm_weight": (dt_rank,),
        "dt_proj.weight": (mamba_heads, dt_rank),
        "A_log": (mamba_heads,),
        "D": (mamba_heads,),
        "dt_bias": (mamba_heads,),
        "out_proj.weight": (hidden, width),
    }
    attention: dict[str, tuple[int, ...]] = {
        "qkv_proj.weight": ((heads + 2 * kv_heads) * head, hidden),
        "q_weight": (heads, head),
        "k_weight": (kv_heads, head),
        "o_proj.weight": (hidden, heads * head),
    }
    rest: dict[str, tuple[int, ...]] = {
        "mlp.gate_up_proj.weight": (2 * config["intermediate_size"], hidden),
        "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        **{f"{norm}.weight": (hidden,) for norm in NORM_OFFSETS if norm != "norm"},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        # As published: padded to a multiple of 16.
        shapes["lm_head.weight"] = (-(-config["vocab_size"] // 16) * 16, hidden)
    for layer in range(config["num_hidden_layers"]):
        is_mamba = layer % config["mamba_step"] != config["mamba_step"] // 2
        mixer = {f"mixer.{k}": shape for k, shape in (mamba if is_mamba else attention).items()}
        shapes |= {f"model.layers.layers.{layer}.{k}": s for k, s in {**mixer, **rest}.items()}
    return shapes


def _draw(model: TinyPlamo2, name: str, shape: tuple[int, ...]) -> "torch.Tensor":
    """Random values for one weight, the same on every machine for the same seed and name."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + model.seed)
    noise = torch.randn(shape, generator=generator)
    *_, leaf, kind = name.split(".")
    if leaf in NORM_OFFSETS:
        return 1 - NORM_OFFSETS[leaf] + 0.1 * noise
    if kind in ("q_weight", "k_weight"):  # Wide enough that heads pick tokens.
        return 2 + 0.3 * noise
    if kind in ("B_norm_weight", "C_norm_weight", "dt_norm_weight"):
        return 1 + 0.2 * noise
    # Mamba states that last for tens of tokens, some for hundreds.
    if kind == "A_log":
        return noise - 2.0
    if kind == "dt_bias":
        return 0.5 * noise - 2.0
    if kind == "D":
        return 0.1 * noise
    if leaf == "embed_tokens":
        return favour_printable(0.3 * noise)
    noise = noise / math.sqrt(shape[-1])
    if leaf == "lm_head":
        noise[:VOCAB_SIZE] = favour_printable(noise[:VOCAB_SIZE])
        # Must never be read. If it is, it is always the likeliest token.
        noise[VOCAB_SIZE:] = 100.0
    return noise
