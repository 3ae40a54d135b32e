# SPDX-License-Identifier: Apache-2.0
"""A vLLM configuration for a scheduler without an engine."""

import copy
import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.short_repr import ShortRepr
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.structured_output import StructuredOutputManager

from .connector import ConnectorSettings

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 1 << 20,
}


@dataclass(frozen=True, repr=False)
class OracleSettings(ShortRepr):
    """How the scheduler and the simulated worker run.

    ``steps_in_flight`` steps have been scheduled, and their outputs not been received, when
    the next one is scheduled: 0 as the plain engine does, 1 as with async scheduling.
    Without ``async_scheduling`` more than 0 is what pipeline parallelism does.
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    max_model_len: int = 256
    async_scheduling: bool = False
    steps_in_flight: int = 0
    policy: str = "fcfs"
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_sequence: bool = True
    num_spec_tokens: int = 0
    num_lookahead_tokens: int = 0
    #: ``"ngram"`` needs no KV; ``"draft_model"``, ``"eagle"`` and ``"mtp"`` (one module for each
    #: draft token) have layers in the groups that the model marks.
    drafter: str = "ngram"
    model_runner_v2: bool = False
    #: Tokens are sampled from ``range(vocab_size)``.
    vocab_size: int = 32000
    #: Whether a step runs as soon as it is scheduled, or only when its output is due.
    run_early: bool = False
    log_stats: bool = False
    connector: ConnectorSettings | None = None

    @property
    def num_slots_ahead(self) -> int:
        """Slots that must exist beyond a step's tokens."""
        return self.num_lookahead_tokens if self.drafter == "ngram" else self.num_spec_tokens

    @property
    def draft_depth(self) -> int:
        """Tokens after a position that its KV in draft layers depends on."""
        return {"eagle": 1, "mtp": self.num_spec_tokens}.get(self.drafter, 0)

    @property
    def max_in_flight_tokens(self) -> int:
        return (self.steps_in_flight + 1) * self.max_num_batched_tokens


@functools.cache
def _base_config() -> VllmConfig:
    # Building one takes seconds the first time on a machine, so there is one per process.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
    # A block size that no platform warns about; each engine has its own.
    return VllmConfig(model_config=model_config, cache_config=CacheConfig(block_size=32))


@functools.cache
def structured_output_manager() -> StructuredOutputManager:
    """Without structured output requests it holds no state, so one serves all engines."""
    return StructuredOutputManager(_base_config())


def make_vllm_config(
    settings: OracleSettings, block_size: int, num_blocks: int, is_encoder_decoder: bool = False
) -> VllmConfig:
    """A configuration with these settings; no model is loaded and nothing is downloaded.

    Prompts of an encoder-decoder model are not cut into chunks.
    """
    config = copy.copy(_base_config())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = settings.max_model_len
    config.scheduler_config = SchedulerConfig(
        max_model_len=settings.max_model_len,
        is_encoder_decoder=is_encoder_decoder,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        policy=settings.policy,
        watermark=settings.watermark,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        scheduler_reserve_full_isl=settings.reserve_full_sequence,
        async_scheduling=settings.async_scheduling,
    )
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = settings.enable_prefix_caching
    config.cache_config.num_gpu_blocks = num_blocks
    if settings.connector is not None:
        config.kv_transfer_config = settings.connector.transfer_config()
    if settings.num_spec_tokens:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=settings.num_spec_tokens,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        # Another drafter, without the model that base would load.
        drafter: Any = config.speculative_config
        drafter.method = settings.drafter
        modules = SimpleNamespace(num_nextn_predict_layers=settings.draft_depth)
        drafter.draft_model_config = SimpleNamespace(hf_config=modules)
    return config


def set_mamba_options(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Set what base derives for a model with Mamba layers, if it is one.

    Raises:
        ValueError: for combinations that base's configuration does not allow.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    mambas = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if not mambas:
        return
    options = {(spec.mamba_cache_mode, spec.block_size) for spec in mambas}
    if len(options) > 1:
        raise ValueError(f"all Mamba groups have one mode and block size, not {options}")
    cache_config = config.cache_config
    mode, block_size = options.pop()
    if cache_config.enable_prefix_caching != (mode == "align"):
        raise ValueError(f"Mamba cache mode {mode!r} is not for this prefix caching")
    if mode == "none" and block_size < config.model_config.max_model_len:
        raise ValueError("without prefix caching one Mamba block holds the longest sequence")
    if config.speculative_config is not None:
        raise NotImplementedError("Mamba states of draft tokens are not simulated")
    cache_config.mamba_block_size = block_size
    if mode == "align":
        cache_config.mamba_cache_mode = "align"
        # The scheduler ends chunks at multiples of it.
        cache_config.block_size = block_size
