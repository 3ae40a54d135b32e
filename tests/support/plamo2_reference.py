# SPDX-License-Identifier: Apache-2.0
"""PLaMo 2 in plain PyTorch, from its formulas: one sequence, token by token, in float64.

It shares no code with the model that the engine runs, so that it can show that one wrong.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu, softplus


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary embedding of ``[tokens, heads, size]`` from position 0.

    Channel i pairs with channel i + size / 2.
    """
    half = x.shape[-1] // 2
    speeds = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (torch.arange(len(x), dtype=x.dtype)[:, None] * speeds)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def weights_below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with a prefix, under the rest of their names."""
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


class Plamo2Reference:
    """The model of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.eps = self.config["rms_norm_eps"]

    def log_probabilities(self, token_ids: Sequence[int]) -> Tensor:
        """Those of the token that follows each token: ``[tokens, vocabulary]``."""
        embeddings = self.weights["model.embed_tokens.weight"]
        x = embeddings[torch.tensor(token_ids)]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(x, layer)
        x = rms_norm(x, 1 + self.weights["model.norm.weight"], self.eps)
        tied = self.config["tie_word_embeddings"]
        output = embeddings if tied else self.weights["lm_head.weight"]
        return (x @ output[: self.config["vocab_size"]].T).log_softmax(-1)

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        own = weights_below(self.weights, f"model.layers.layers.{layer}.")

        def norm(x: Tensor, name: str, offset: float) -> Tensor:
            return rms_norm(x, own[f"{name}.weight"] + offset, self.eps)

        mixer = weights_below(own, "mixer.")
        mixed = norm(x, "pre_mixer_norm", 1)
        mixed = self._mamba(mixed, mixer) if "A_log" in mixer else self._attend(mixed, mixer, layer)
        x = x + norm(mixed, "post_mixer_norm", 1 / 5)
        gate, up = (norm(x, "pre_mlp_norm", 1) @ own["mlp.gate_up_proj.weight"].T).chunk(2, -1)
        return x + norm((silu(gate) * up) @ own["mlp.down_proj.weight"].T, "post_mlp_norm", 5**-1.5)

    def _attend(self, x: Tensor, mixer: dict[str, Tensor], layer: int) -> Tensor:
        size = self.config["hidden_size_per_head"]
        num_q, num_kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        is_full = layer in self.config.get("full_attention_idx", [])
        base = self.config.get("rope_theta", 10_000.0)
        if not is_full:
            base = self.config.get("rope_local_theta", base)
        qkv = (x @ mixer["qkv_proj.weight"].T).unflatten(-1, (-1, size))
        q, k, v = qkv.split([num_q, num_kv, num_kv], dim=1)
        q = rotate(rms_norm(q, mixer["q_weight"], 1e-6), base)
        k = rotate(rms_norm(k, mixer["k_weight"], 1e-6), base)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = distance >= 0
        if not is_full:
            seen &= distance <= self.config["attention_window_size"]
        heads_first = (part.transpose(0, 1) for part in (q, k, v))
        outputs = scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
        return outputs.transpose(0, 1).flatten(1) @ mixer["o_proj.weight"].T

    def _mamba(self, x: Tensor, mixer: dict[str, Tensor]) -> Tensor:
        size, num_heads = self.config["hidden_size_per_head"], self.config["mamba_num_heads"]
        num_states, width = self.config["mamba_d_state"], self.config["mamba_d_conv"]
        gates, inputs = (x @ mixer["in_proj.weight"].T).view(-1, num_heads, 2, size).unbind(dim=2)
        inputs = inputs.flatten(1)
        kernel = mixer["conv1d.weight"].squeeze(1)
        padded = torch.cat([inputs.new_zeros(width - 1, inputs.shape[1]), inputs])
        A, dt_rank = -mixer["A_log"].exp(), len(mixer["dt_norm_weight"])
        state = x.new_zeros(num_heads, size, num_states)
        outputs = []
        for t in range(len(x)):
            u = silu((padded[t : t + width] * kernel.T).sum(0))
            B, C, dt = (mixer["bcdt_proj.weight"] @ u).split([num_states, num_states, dt_rank])
            B = rms_norm(B, mixer["B_norm_weight"], self.eps)
            C = rms_norm(C, mixer["C_norm_weight"], self.eps)
            dt = rms_norm(dt, mixer["dt_norm_weight"], self.eps)
            dt = softplus(mixer["dt_proj.weight"] @ dt + mixer["dt_bias"])
            u = u.view(num_heads, size)
            state = (dt * A).exp()[:, None, None] * state
            state = state + dt[:, None, None] * u[:, :, None] * B
            y = state @ C + mixer["D"][:, None] * u
            outputs.append((y * silu(gates[t])).flatten())
        return torch.stack(outputs) @ mixer["out_proj.weight"].T
