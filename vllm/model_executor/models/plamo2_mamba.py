# SPDX-License-Identifier: Apache-2.0
"""The Mamba layers of PLaMo 2, on vLLM's kernels; see `plamo2`."""

import torch
from torch import nn
from torch.nn.functional import silu

# Not used by name below: importing it registers the operation `vllm::mamba_mixer2`.
import vllm.model_executor.layers.mamba.mamba_mixer2  # noqa: F401
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.distributed import divide, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)
from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import selective_state_update
from vllm.model_executor.model_loader.weight_utils import (
    composed_weight_loader,
    sharded_weight_loader,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.configs.plamo2 import Plamo2Config
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

StateShapes = tuple[tuple[int, int], tuple[int, int, int]]


def plamo2_config(vllm_config: VllmConfig) -> Plamo2Config:
    """Of the model to serve.

    Raises:
        TypeError: its configuration was read by another class, such as that of remote code.
    """
    config = vllm_config.model_config.hf_config
    if not isinstance(config, Plamo2Config):
        raise TypeError(
            f"PLaMo 2: the configuration must be a {Plamo2Config}, got a {type(config)}"
        )
    return config


def state_shapes(config: Plamo2Config, tp_size: int) -> StateShapes:
    """Shapes of a rank's convolution state and of its recurrent state, for one request."""
    return MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=tp_size,
        intermediate_size=config.mamba_num_heads * config.hidden_size_per_head,
        n_groups=0,  # B and C do not pass through the convolution.
        num_heads=config.mamba_num_heads,
        head_dim=config.hidden_size_per_head,
        state_size=config.mamba_d_state,
        conv_kernel=config.mamba_d_conv,
    )


def state_dtypes(model: ModelConfig, cache: CacheConfig) -> tuple[torch.dtype, torch.dtype]:
    """Of both states. The recurrent one is float32 unless asked otherwise, as published."""
    conv, recurrent = MambaStateDtypeCalculator.mamba2_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return conv, torch.float32 if cache.mamba_ssm_cache_dtype == "auto" else recurrent


class Plamo2Mamba(MambaBase, nn.Module):
    """Mixes tokens through a state of ``[heads, head size, mamba_d_state]`` a request."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = plamo2_config(vllm_config)
        quant_config = vllm_config.quant_config
        tp_size = get_tensor_model_parallel_world_size()
        self.prefix = prefix
        self.head_size = config.hidden_size_per_head
        self.num_heads = divide(config.mamba_num_heads, tp_size)
        self.state_size = config.mamba_d_state
        self.dt_rank = max(64, config.hidden_size // 16)
        self.state_shapes = state_shapes(config, tp_size)
        self.state_dtypes = state_dtypes(vllm_config.model_config, vllm_config.cache_config)
        self.kv_cache = (torch.empty(0), torch.empty(0))

        # For each head, the gate and then the input: cut between heads, a rank has both of its own.
        width = config.mamba_num_heads * self.head_size
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            2 * width,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.in_proj",
        )
        local_width = self.num_heads * self.head_size
        self.conv1d = nn.Conv1d(
            local_width, local_width, config.mamba_d_conv, groups=local_width, bias=False
        )
        self.bcdt_proj = RowParallelLinear(
            width,
            2 * self.state_size + self.dt_rank,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.bcdt_proj",
        )
        self.B_norm = RMSNorm(self.state_size, eps=config.rms_norm_eps)
        self.C_norm = RMSNorm(self.state_size, eps=config.rms_norm_eps)
        self.dt_norm = RMSNorm(self.dt_rank, eps=config.rms_norm_eps)
        self.dt_proj = ColumnParallelLinear(
            self.dt_rank,
            config.mamba_num_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.dt_proj",
        )
        self.A = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.out_proj = RowParallelLinear(
            width,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.out_proj",
        )

        shard = sharded_weight_loader(0)
        for parameter in (self.conv1d.weight, self.D, self.dt_bias):
            set_weight_attrs(parameter, {"weight_loader": shard})
        negative_exp = composed_weight_loader(shard, lambda a_log: -torch.exp(a_log))
        set_weight_attrs(self.A, {"weight_loader": negative_exp})

        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"PLaMo 2: layer names must be unique, got {prefix} twice")
        layers[prefix] = self

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden size]`` to the same."""
        gates_and_inputs, _ = self.in_proj(hidden_states)
        gates = self._halves(gates_and_inputs)[:, :, 0].flatten(1)
        mixed = torch.empty_like(gates)
        # Base's operation, for what must not be compiled: it finds this layer by its name and
        # calls `conv_ssm_forward`.
        torch.ops.vllm.mamba_mixer2(gates_and_inputs, mixed, _encode_layer_name(self.prefix))
        output, _ = self.out_proj((mixed * silu(gates.float())).to(hidden_states.dtype))
        return output

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """Convolve and scan the batch in flight; called by base's operation.

        Args:
            projected_states: ``[tokens, heads x 2 x head size]``: gates and inputs.
            output: ``[tokens, heads x head size]``, written here.
        """
        batch = self._batch()
        if batch is None:  # A run that measures memory, before there are states.
            output.zero_()
            return
        num_decode, num_prefill = batch.num_decode_tokens, batch.num_prefill_tokens
        # Decodes come first; behind the tokens there may be padding.
        num_tokens = num_decode + num_prefill
        # A copy, since it is not contiguous: convolved in place.
        x = self._halves(projected_states[:num_tokens])[:, :, 1].flatten(1)
        self._convolve(x, batch)
        B, C, dt = self._project(x)
        x = x.view(num_tokens, self.num_heads, self.head_size)
        out = output[:num_tokens].view_as(x)
        if num_prefill > 0:
            rows = slice(num_decode, num_tokens)
            self._scan(x[rows], B[rows], C[rows], dt[rows], out[rows], batch)
        if num_decode > 0:
            rows = slice(0, num_decode)
            self._step(x[rows], B[rows], C[rows], dt[rows], out[rows], batch)

    def _batch(self) -> Mamba2AttentionMetadata | None:
        of_layers = get_forward_context().attn_metadata
        if of_layers is None:
            return None
        assert isinstance(of_layers, dict)
        batch = of_layers.get(self.prefix)
        assert batch is None or isinstance(batch, Mamba2AttentionMetadata)
        return batch

    def _halves(self, gates_and_inputs: torch.Tensor) -> torch.Tensor:
        return gates_and_inputs.view(-1, self.num_heads, 2, self.head_size)

    def _convolve(self, x: torch.Tensor, batch: Mamba2AttentionMetadata) -> None:
        """Causal convolution over time and SiLU, in place: ``[tokens, heads x head size]``."""
        weight = self.conv1d.weight.squeeze(1)
        states = self.kv_cache[0]
        if not is_conv_state_dim_first():
            states = states.transpose(-1, -2)
        num_decode = batch.num_decode_tokens
        if batch.num_prefill_tokens > 0:
            assert batch.query_start_loc_p is not None
            x[num_decode:] = causal_conv1d_fn(
                x[num_decode:].T,
                weight,
                None,
                activation="silu",
                conv_states=states,
                has_initial_state=batch.has_initial_states_p,
                cache_indices=batch.state_indices_tensor_p,
                metadata=batch,
                query_start_loc=batch.query_start_loc_p,
            ).T
        if num_decode > 0:
            x[:num_decode] = causal_conv1d_update(
                x[:num_decode],
                states,
                weight,
                None,
                "silu",
                conv_state_indices=batch.state_indices_tensor_d,
            )

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """B and C, ``[tokens, 1, state size]`` for all heads, and dt, ``[tokens, heads]``."""
        projected, _ = self.bcdt_proj(x)
        sizes = [self.state_size, self.state_size, self.dt_rank]
        B, C, dt = (part.contiguous() for part in projected.split(sizes, dim=-1))
        dt, _ = self.dt_proj(self.dt_norm(dt))
        return self.B_norm(B).unsqueeze(1), self.C_norm(C).unsqueeze(1), dt

    def _scan(
        self,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        out: torch.Tensor,
        batch: Mamba2AttentionMetadata,
    ) -> None:
        """Prompts, or chunks of them: many tokens a request."""
        states, indices = self.kv_cache[1], batch.state_indices_tensor_p
        assert indices is not None
        initial_states = None
        if batch.prep_initial_states:
            assert batch.has_initial_states_p is not None
            continued = batch.has_initial_states_p[:, None, None, None]
            initial_states = torch.where(continued, states[indices], 0)
        states[indices] = mamba_chunk_scan_combined_varlen(
            x,
            dt,
            self.A,
            B,
            C,
            chunk_size=batch.chunk_size,
            cu_seqlens=batch.query_start_loc_p,
            cu_chunk_seqlens=batch.cu_chunk_seqlen_p,
            last_chunk_indices=batch.last_chunk_indices_p,
            seq_idx=batch.seq_idx_p,
            out=out,
            D=self.D,
            dt_bias=self.dt_bias,
            initial_states=initial_states,
            dt_softplus=True,
            state_dtype=states.dtype,
        )

    def _step(
        self,
        x: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dt: torch.Tensor,
        out: torch.Tensor,
        batch: Mamba2AttentionMetadata,
    ) -> None:
        """Decodes: one token a request."""
        # The kernel takes a value for each channel; expanded views, which it recognizes.
        per_channel = (self.num_heads, self.head_size)
        selective_state_update(
            self.kv_cache[1],
            x,
            dt[:, :, None].expand(-1, *per_channel),
            self.A[:, None, None].expand(*per_channel, self.state_size),
            B,
            C,
            self.D[:, None].expand(per_channel),
            self.dt_bias[:, None].expand(per_channel),
            dt_softplus=True,
            state_batch_indices=batch.state_indices_tensor_d,
            dst_state_batch_indices=batch.state_indices_tensor_d,
            out=out,
        )

    def get_state_shape(self) -> StateShapes:
        return self.state_shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.state_dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.MAMBA2
