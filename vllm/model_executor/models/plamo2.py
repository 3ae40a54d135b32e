# SPDX-License-Identifier: Apache-2.0
"""PLaMo 2: Mamba and sliding-window attention by turns, on vLLM's layers and kernels.

Base vLLM has not had it since 0.26. Written from the published architecture
(https://huggingface.co/pfnet/plamo-2-8b, PLaMo 2 Technical Report, arXiv:2509.04897), with the
weight names of published checkpoints. What sets it apart from other hybrid models:

- Mamba's convolution is over the input alone; B, C and dt are projected from what comes out of
  it, normalized, and dt is projected once more, to one number a head.
- A query sees ``attention_window_size`` tokens before its own, so vLLM's window, which counts
  the query's own, is one more.
- Norms stand before and after each mixer and MLP; their weights are stored less an offset.
"""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import nn

from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFunc,
    MambaStateCopyFuncCalculator,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import (
    composed_weight_loader,
    default_weight_loader,
    sharded_weight_loader,
)
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsPP, SupportsQuant
from vllm.model_executor.models.plamo2_mamba import (
    Plamo2Mamba,
    StateShapes,
    plamo2_config,
    state_dtypes,
    state_shapes,
)
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.configs.plamo2 import Plamo2Config

#: Of the norms of queries and keys, whatever ``rms_norm_eps`` is.
QK_NORM_EPS = 1e-6


class Plamo2Attention(nn.Module):
    """Grouped-query attention, with or without a window, on normalized queries and keys."""

    def __init__(self, vllm_config: VllmConfig, layer: int, prefix: str) -> None:
        super().__init__()
        config = plamo2_config(vllm_config)
        quant_config = vllm_config.quant_config
        self.head_size = config.hidden_size_per_head
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.num_heads = self.qkv_proj.num_heads
        self.num_kv_heads = self.qkv_proj.num_kv_heads

        # One vector a head, which base's norm does not know.
        self.qk_norm = RMSNorm(self.head_size, eps=QK_NORM_EPS, has_weight=False)
        self.q_weight = nn.Parameter(torch.empty(self.num_heads, self.head_size))
        self.k_weight = nn.Parameter(torch.empty(self.num_kv_heads, self.head_size))
        set_weight_attrs(self.q_weight, {"weight_loader": sharded_weight_loader(0)})
        set_weight_attrs(self.k_weight, {"weight_loader": self._load_k_weight})

        has_window = layer not in config.full_attention_idx
        rope_parameters = config.rope_parameters
        if has_window and config.rope_local_theta is not None:
            rope_parameters = {"rope_type": "default", "rope_theta": config.rope_local_theta}
        self.rotary_emb = get_rope(
            self.head_size,
            # Published configurations allow ten million positions: 5 GB of sines and cosines.
            max_position=min(
                config.max_position_embeddings, vllm_config.model_config.max_model_len
            ),
            rope_parameters=rope_parameters,
        )
        # None with --disable-sliding-window, where no request is longer than the window.
        window = config.sliding_window if has_window else None
        self.attn = Attention(
            self.num_heads,
            self.head_size,
            self.head_size**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=None if window is None else window + 1,
            prefix=f"{prefix}.attn",
        )

    def _load_k_weight(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        """With more ranks than heads, several ranks have the same head, as in `qkv_proj`."""
        rank = get_tensor_model_parallel_rank() // self.qkv_proj.num_kv_head_replicas
        default_weight_loader(
            parameter, loaded.narrow(0, rank * self.num_kv_heads, self.num_kv_heads)
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden size]`` to the same."""
        qkv, _ = self.qkv_proj(hidden_states)
        sizes = [n * self.head_size for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = qkv.split(sizes, dim=-1)
        q = self.qk_norm(q.unflatten(-1, self.q_weight.shape).contiguous()) * self.q_weight
        k = self.qk_norm(k.unflatten(-1, self.k_weight.shape).contiguous()) * self.k_weight
        q, k = self.rotary_emb(positions, q.flatten(1), k.flatten(1))
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class Plamo2MLP(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = plamo2_config(vllm_config)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden_states)
        output, _ = self.down_proj(self.act_fn(gate_up))
        return output


def offset_norm(config: Plamo2Config, offset: float) -> RMSNorm:
    """A norm whose weight is stored less ``offset``."""
    norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    loader = composed_weight_loader(default_weight_loader, lambda weight: weight + offset)
    set_weight_attrs(norm.weight, {"weight_loader": loader})
    return norm


class Plamo2DecoderLayer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = plamo2_config(vllm_config)
        layer = extract_layer_index(prefix)
        self.is_mamba = config.is_mamba(layer)
        self.mixer = (
            Plamo2Mamba(vllm_config, f"{prefix}.mixer")
            if self.is_mamba
            else Plamo2Attention(vllm_config, layer, f"{prefix}.mixer")
        )
        self.mlp = Plamo2MLP(vllm_config, f"{prefix}.mlp")
        self.pre_mixer_norm = offset_norm(config, 1.0)
        self.post_mixer_norm = offset_norm(config, 1 / 5)
        self.pre_mlp_norm = offset_norm(config, 1.0)
        self.post_mlp_norm = offset_norm(config, 1 / 5**1.5)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds and what it adds it to, both ``[tokens, hidden size]``."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.pre_mixer_norm(hidden_states)
        else:
            hidden_states, residual = self.pre_mixer_norm(hidden_states, residual)
        if self.is_mamba:
            hidden_states = self.mixer(hidden_states)
        else:
            hidden_states = self.mixer(positions, hidden_states)
        hidden_states = self.post_mixer_norm(hidden_states)
        hidden_states, residual = self.pre_mlp_norm(hidden_states, residual)
        return self.post_mlp_norm(self.mlp(hidden_states)), residual


@support_torch_compile
class Plamo2Model(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = plamo2_config(vllm_config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: Plamo2DecoderLayer(vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = offset_norm(config, 1.0)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        residual = None
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        elif inputs_embeds is not None:
            hidden_states = inputs_embeds
        else:
            assert input_ids is not None
            hidden_states = self.embed_input_ids(input_ids)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        assert residual is not None
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Plamo2ForCausalLM(nn.Module, HasInnerState, SupportsPP, IsHybrid, SupportsQuant):
    """The model that `config.json` of a PLaMo 2 checkpoint names.

    Raises:
        ValueError: for speculative decoding, of which nothing here has been tried.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.layers.layers.": "model.layers."},
        orig_to_new_suffix={
            ".A_log": ".A",
            ".B_norm_weight": ".B_norm.weight",
            ".C_norm_weight": ".C_norm.weight",
            ".dt_norm_weight": ".dt_norm.weight",
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        if vllm_config.num_speculative_tokens > 0:
            raise ValueError("PLaMo 2: speculative decoding is not supported")
        self.config = plamo2_config(vllm_config)
        self.model = Plamo2Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> StateShapes:
        return state_shapes(
            plamo2_config(vllm_config), vllm_config.parallel_config.tensor_parallel_size
        )

    @classmethod
    def get_mamba_state_dtype_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[torch.dtype, torch.dtype]:
        return state_dtypes(vllm_config.model_config, vllm_config.cache_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, MambaStateCopyFunc]:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(self._unpadded(weights), mapper=self.hf_to_vllm_mapper)

    def _unpadded(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """An output layer of its own is stored with its rows padded to a multiple of 16."""
        for name, weight in weights:
            is_padded = name == "lm_head.weight"
            yield name, weight[: self.config.vocab_size] if is_padded else weight
