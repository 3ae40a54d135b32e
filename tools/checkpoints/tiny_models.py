# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints whose greedy output depends on everything that they attend to.

Weights that are drawn in the usual way make a model that almost ignores its context and repeats
one token. Such a model shows nothing about a KV cache. In these checkpoints
- projections keep the scale of their input, so that each layer contributes to the output,
- attention scores are spread wide enough that heads pick tokens instead of averaging them,
- the output layer favours printable characters, so that generation neither stops early nor
  makes text that cannot be decoded.
"""

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
    IMAGE_TOKEN_ID,
    PAD_ID,
    VOCAB_SIZE,
    VOCAB_SIZE_WITH_IMAGES,
    printable_ids,
    save_tokenizer,
)
from tools.checkpoints.store import ensure_checkpoint

if TYPE_CHECKING:
    import torch

#: Raise it whenever the code below makes other weights or another tokenizer.
FORMAT = 1
MAX_LENGTH = 4096
WINDOW = 64

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


@dataclass(frozen=True)
class TinyModel:
    """What one tiny checkpoint is made from."""

    name: str
    model_type: str
    #: Configuration values beyond those that it shares with others.
    config: Mapping[str, object]
    seed: int = 0
    #: Standard deviation of the embeddings, small beside what the layers add to them.
    embedding_std: float = 0.3
    #: Scale of queries and of keys. With a larger scale, a head picks fewer tokens.
    attention_gain: float = 2.0
    #: Scale of what attention and feed-forward layers add to the residual stream.
    residual_gain: float = 2.0
    #: The same for single projections, by name, that would otherwise dominate the sum.
    gains: Mapping[str, float] = field(default_factory=dict)
    #: Values that tiny models share.
    common: Mapping[str, object] = field(default_factory=lambda: _COMMON)
    #: For a model with a Whisper encoder, how sound is cut up for it.
    audio: Mapping[str, int] = field(default_factory=dict)
    #: For a model with a vision tower, how its processor prepares images.
    images: Mapping[str, Any] = field(default_factory=dict)

    def origin(self) -> dict[str, object]:
        senses = {"audio": self.audio, "images": self.images}
        return {sense: how for sense, how in senses.items() if how} | {
            "format": FORMAT,
            "model_type": self.model_type,
            "config": {**self.common, **self.config},
            "seed": self.seed,
            "embedding_std": self.embedding_std,
            "attention_gain": self.attention_gain,
            "residual_gain": self.residual_gain,
            "gains": self.gains,
        }


def ensure_tiny(model: TinyModel, force: bool = False) -> Path:
    """Return the folder of `model`'s checkpoint, made first if it is missing or outdated."""
    return ensure_checkpoint(
        model.name, model.origin(), lambda folder: _make(model, folder), force=force
    )


def _make(model: TinyModel, folder: Path) -> None:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSpeechSeq2Seq,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        GenerationConfig,
        WhisperFeatureExtractor,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32
    values = {**model.common, **model.config}
    config = AutoConfig.for_model(model.model_type, dtype=dtype, **values)
    auto_model: Any = AutoModelForCausalLM
    if model.audio:
        auto_model = AutoModelForSpeechSeq2Seq
    elif model.images:
        auto_model = AutoModelForImageTextToText
    network = auto_model.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(_draw(model, name, parameter))
    network.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, END_OF_TURN_ID], pad_token_id=PAD_ID
    )
    network.save_pretrained(folder)
    tokenizer = save_tokenizer(folder, MAX_LENGTH, with_images=bool(model.images))
    if model.audio:
        WhisperFeatureExtractor(**model.audio).save_pretrained(folder)
    if model.images:
        image_processor = Gemma3ImageProcessorPil(size=model.images["size"])
        Gemma3Processor(
            image_processor, tokenizer, image_seq_length=model.images["image_seq_length"]
        ).save_pretrained(folder)
        _rename_vision_tower(folder / "model.safetensors")


def _rename_vision_tower(weights: Path) -> None:
    """Give it the names of published checkpoints, the only ones that vLLM knows."""
    from safetensors.torch import load_file, save_file

    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(published, weights, metadata={"format": "pt"})


def _draw(model: TinyModel, name: str, parameter: "torch.Tensor") -> "torch.Tensor":
    """Random values for one parameter, the same on every machine for the same seed and name."""
    import torch

    # A generator for each parameter: the values do not depend on the order of parameters.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + model.seed)
    noise = torch.randn(parameter.shape, generator=generator)
    *_, leaf, kind = name.split(".")
    if leaf in ("q_norm", "k_norm"):
        # These undo the scale of the projections, so the gain belongs here. Gemma's norms
        # multiply by one plus the weight, and start from 0 where others start from 1.
        offset = 1 - parameter.mean()
        return (parameter + offset) * model.attention_gain - offset + 0.1 * noise
    if "norm" in leaf:
        return parameter + 0.1 * noise
    # A Mamba state that lasts for tens of tokens, and is not drowned by the token itself.
    if kind == "A_log":
        return 0.3 * noise - 1.0
    if kind == "dt_bias":
        return 0.5 * noise - 2.0
    if kind == "D":
        return 0.1 * noise
    if kind == "bias":
        return 0.1 * noise
    if leaf == "embed_tokens":
        noise = model.embedding_std * noise
        return favour_printable(noise) if model.config.get("tie_word_embeddings") else noise
    noise = noise / math.sqrt(parameter.shape[-1])
    if leaf == "lm_head":
        return favour_printable(noise)
    if leaf in ("q_proj", "k_proj"):
        return model.attention_gain * noise
    return model.gains.get(leaf, model.residual_gain) * noise


def favour_printable(rows: "torch.Tensor") -> "torch.Tensor":
    """Scale the output layer so that the likeliest token is always a printable character."""
    scale = rows.new_full((len(rows), 1), 0.1)
    scale[printable_ids()] = 1.0
    return scale * rows


TINY_GEMMA3 = TinyModel(
    "tiny-gemma3",
    "gemma3_text",
    {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
    },
    # Gemma multiplies embeddings by the square root of the hidden size.
    embedding_std=0.03,
)
#: The same with a vision tower: an image of 64 x 64 pixels makes 8 x 8 tokens.
TINY_GEMMA3_IMAGES = TinyModel(
    "tiny-gemma3-images",
    "gemma3",
    {
        "text_config": {**_COMMON, **TINY_GEMMA3.config, "vocab_size": VOCAB_SIZE_WITH_IMAGES},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "vision_use_head": False,
        },
        "image_token_index": IMAGE_TOKEN_ID,
        "boi_token_index": IMAGE_TOKEN_ID - 1,
        "eoi_token_index": IMAGE_TOKEN_ID + 1,
        "mm_tokens_per_image": 64,
        "tie_word_embeddings": False,
    },
    common={"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    images={"size": {"height": 64, "width": 64}, "image_seq_length": 64},
    embedding_std=0.03,
    # An image's tokens are no louder than those of text.
    gains={"multi_modal_projector": 0.5},
)
TINY_GEMMA2 = TinyModel(
    "tiny-gemma2",
    "gemma2",
    {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
        # vLLM's Gemma 2 has no output layer of its own.
        "tie_word_embeddings": True,
    },
    embedding_std=0.02,
)
TINY_MISTRAL = TinyModel(
    "tiny-mistral", "mistral", {"num_hidden_layers": 4, "sliding_window": WINDOW}
)
TINY_LLAMA = TinyModel("tiny-llama", "llama", {"num_hidden_layers": 4})
#: The sizes of a state, for a hidden size of 128.
MAMBA2: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
#: Three layers with a state of Mamba 2, then one with full attention.
TINY_GRANITE4 = TinyModel(
    "tiny-granite4",
    "granitemoehybrid",
    {
        "num_hidden_layers": 4,
        "layer_types": ["mamba"] * 3 + ["attention"],
        **MAMBA2,
        "attention_multiplier": 0.18,
        "position_embedding_type": "nope",
        # No experts: they would only cost time.
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 256,
    },
    gains={"o_proj": 4.0, "out_proj": 1.0, "output_linear": 0.5},
)
#: Two layers that each have both, a state of Mamba 2 and full attention.
TINY_FALCON_H1 = TinyModel(
    "tiny-falcon-h1",
    "falcon_h1",
    {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 256,
        **MAMBA2,
        "mamba_rms_norm": True,
    },
    seed=1,
    gains={"o_proj": 4.0, "out_proj": 1.0, "down_proj": 0.5},
)
TINY_LLAMA4 = TinyModel(
    "tiny-llama4",
    "llama4_text",
    {
        "num_hidden_layers": 4,
        # Chunked local attention has rotary embeddings; full attention has none.
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 256,
        # No experts: they would only cost time.
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        # Norms without weights would undo the gain of queries and keys.
        "use_qk_norm": False,
    },
    attention_gain=3.0,
)
#: Two seconds of sound make 100 encoder tokens.
TINY_WHISPER = TinyModel(
    "tiny-whisper",
    "whisper",
    {
        "d_model": 128,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "num_mel_bins": 16,
        "max_source_positions": 100,
        "max_target_positions": 448,
        "decoder_start_token_id": BOS_ID,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        # vLLM's Whisper has no output layer of its own.
        "tie_word_embeddings": True,
    },
    common={
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    },
    audio={"feature_size": 16, "chunk_length": 2, "sampling_rate": 16_000},
    # Or it would repeat its last token, whose embedding is also in the output layer.
    embedding_std=0.2,
    attention_gain=4.0,
    gains={"out_proj": 4.0},
)
