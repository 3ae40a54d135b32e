# SPDX-License-Identifier: Apache-2.0
"""Configuration of PLaMo 2, so that its checkpoints load without remote code.

Names and defaults are those of the published checkpoints' ``config.json`` and of the class
that comes with them (https://huggingface.co/pfnet/plamo-2-8b).
"""

from typing import Any

from transformers import PreTrainedConfig


class Plamo2Config(PreTrainedConfig):
    """PLaMo 2: layers with a Mamba state and layers with attention, by turns.

    Args:
        hidden_size_per_head: Width of a head, of attention and of Mamba alike.
        attention_window_size: Tokens before its own that a query sees in a windowed layer.
        full_attention_idx: Layers (of those with attention) whose attention has no window.
        rope_local_theta: Base of the rotary embedding in windowed layers; None: ``rope_theta``.
        mamba_step: One layer in so many has attention, the middle one.
        mamba_enabled: False: all layers have attention.

    Raises:
        ValueError: for a ``mamba_step`` below 2.
    """

    model_type = "plamo2"

    def __init__(
        self,
        hidden_size: int = 4096,
        num_hidden_layers: int = 32,
        rms_norm_eps: float = 1e-6,
        tie_word_embeddings: bool = True,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 4,
        hidden_size_per_head: int = 128,
        max_position_embeddings: int = 10 * 1024 * 1024,
        attention_window_size: int = 2048,
        full_attention_idx: list[int] | None = None,
        rope_theta: float = 10_000.0,
        rope_local_theta: float | None = None,
        mamba_d_state: int = 64,
        mamba_d_conv: int = 4,
        mamba_num_heads: int = 64,
        mamba_step: int = 2,
        mamba_chunk_size: int = 256,
        mamba_enabled: bool = True,
        intermediate_size: int = 13312,
        vocab_size: int = 32000,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        **kwargs: Any,
    ) -> None:
        if mamba_enabled and mamba_step < 2:
            raise ValueError(f"PLaMo 2: mamba_step must be at least 2, got {mamba_step}")
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.rms_norm_eps = rms_norm_eps
        self.tie_word_embeddings = tie_word_embeddings
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_size_per_head = hidden_size_per_head
        self.max_position_embeddings = max_position_embeddings
        self.attention_window_size = attention_window_size
        self.full_attention_idx = full_attention_idx or []
        self.rope_theta = rope_theta
        self.rope_local_theta = rope_local_theta
        self.mamba_d_state = mamba_d_state
        self.mamba_d_conv = mamba_d_conv
        self.mamba_num_heads = mamba_num_heads
        self.mamba_step = mamba_step
        self.mamba_chunk_size = mamba_chunk_size
        self.mamba_enabled = mamba_enabled
        self.intermediate_size = intermediate_size
        self.vocab_size = vocab_size
        self.use_cache = use_cache
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        # What vLLM reads; published files repeat it under this name.
        kwargs["sliding_window"] = attention_window_size
        super().__init__(**kwargs)

    def is_mamba(self, layer: int) -> bool:
        """Whether a layer (from 0) has a Mamba state; if not, it has attention."""
        if not self.mamba_enabled:
            return False
        middle = self.mamba_step // 2
        if self.num_hidden_layers <= middle:
            return layer != self.num_hidden_layers - 1
        return layer % self.mamba_step != middle

    @property
    def layers_block_type(self) -> list[str]:
        """``mamba`` or ``attention`` for each layer: by this vLLM counts them."""
        return ["mamba" if self.is_mamba(i) else "attention" for i in range(self.num_hidden_layers)]

    @property
    def layer_types(self) -> list[str]:
        """The same in transformers' words; vLLM then gives no window to layers that have none."""
        return [self._layer_type(layer) for layer in range(self.num_hidden_layers)]

    def _layer_type(self, layer: int) -> str:
        if self.is_mamba(layer):
            return "linear_attention"
        return "full_attention" if layer in self.full_attention_idx else "sliding_attention"
