# SPDX-License-Identifier: Apache-2.0
"""KV cache configs of made-up models, small enough to write down in a test."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from .short_repr import ShortRepr

#: Tokens of the longest input to an encoder.
MAX_ENCODER_LENGTH = 100
#: Layers of the drafter have names that begin with it.
DRAFT_LAYER = "draft."


def _heads(half_precision: bool) -> dict[str, Any]:
    dtype = torch.float16 if half_precision else torch.float32
    return {"num_kv_heads": 1, "head_size": 64, "dtype": dtype}


@dataclass(frozen=True, repr=False)
class Full(ShortRepr):
    """Full attention."""

    block_size: int = 16
    num_groups: int = 1
    #: A model with both precisions has new blocks zeroed.
    half_precision: bool = False
    #: Whether the groups have layers of a drafter, too.
    draft: bool = False

    def spec(self) -> KVCacheSpec:
        return FullAttentionSpec(block_size=self.block_size, **_heads(self.half_precision))

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return -(-max_model_len // self.block_size)


@dataclass(frozen=True, repr=False)
class Sliding(ShortRepr):
    """Sliding-window attention."""

    window: int
    block_size: int = 16
    num_groups: int = 1
    #: A model with both precisions has new blocks zeroed.
    half_precision: bool = False
    #: Whether the groups have layers of a drafter, too.
    draft: bool = False
    #: Tokens kept before the window, for a drafter that computes the last ones again.
    retained: int = 0

    def spec(self) -> SlidingWindowSpec:
        return SlidingWindowSpec(
            block_size=self.block_size,
            sliding_window=self.window,
            extra_retained_tokens=self.retained,
            **_heads(self.half_precision),
        )

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return self.spec().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)


@dataclass(frozen=True, repr=False)
class Chunked(ShortRepr):
    """Chunked local attention."""

    chunk: int
    block_size: int = 16
    num_groups: int = 1
    #: A model with both precisions has new blocks zeroed.
    half_precision: bool = False

    def spec(self) -> ChunkedLocalAttentionSpec:
        return ChunkedLocalAttentionSpec(
            block_size=self.block_size,
            attention_chunk_size=self.chunk,
            **_heads(self.half_precision),
        )

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return self.spec().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)


@dataclass(frozen=True, repr=False)
class Mamba(ShortRepr):
    """Mamba or another linear attention.

    Base's configuration leaves two ways: with prefix caching ``mode`` "align" and the block
    size of attention, without it "none" and a block for the whole sequence.
    """

    block_size: int = 16
    num_groups: int = 1
    mode: str = "align"
    #: Whether the state at the last boundary that a step passes over is written, too.
    checkpoints: bool = False

    def spec(self) -> MambaSpec:
        return MambaSpec(
            block_size=self.block_size,
            shapes=((1, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode=self.mode,
            num_prefill_checkpoint_blocks=int(self.checkpoints),
            prefill_checkpoint_alignment=1 if self.checkpoints else None,
        )

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        if self.mode == "none":
            return 1
        # The state read, and one for each block that steps in flight end in.
        in_flight = -(-max_in_flight_tokens // self.block_size)
        most = 2 + (1 + self.checkpoints) * in_flight
        return min(-(-max_model_len // self.block_size), most)


@dataclass(frozen=True, repr=False)
class Cross(ShortRepr):
    """Cross attention to an encoder's tokens."""

    block_size: int = 16
    num_groups: int = 1
    #: A model with both precisions has new blocks zeroed.
    half_precision: bool = False

    def spec(self) -> KVCacheSpec:
        return CrossAttentionSpec(block_size=self.block_size, **_heads(self.half_precision))

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return -(-MAX_ENCODER_LENGTH // self.block_size)


AttentionKind = Full | Sliding | Chunked | Mamba | Cross


def smallest_pool(
    kinds: Sequence[AttentionKind], max_model_len: int, max_in_flight_tokens: int
) -> int:
    """Blocks with which one request of the greatest length just fits, null block included."""
    return 1 + sum(
        kind.num_groups * kind.max_blocks(max_model_len, max_in_flight_tokens) for kind in kinds
    )


def make_kv_cache_config(
    kinds: Sequence[AttentionKind],
    num_blocks: int,
    retention_interval: int | None = None,
    shuffle_groups: int | None = None,
    flag_drafts: bool = False,
) -> KVCacheConfig:
    """The KV cache config of a model with these attention types.

    Args:
        kinds: The types, with their numbers of groups.
        num_blocks: Physical blocks, the null block included.
        retention_interval: Which sparse types' blocks stay cached; see base's option.
        shuffle_groups: A seed to mix the groups of all types; None keeps them together.
        flag_drafts: Whether the config says which groups have draft layers, as base's does
            where it can tell.
    """
    groups = [
        (kind.spec(), getattr(kind, "draft", False))
        for kind in kinds
        for _ in range(kind.num_groups)
    ]
    if shuffle_groups is not None:
        random.Random(shuffle_groups).shuffle(groups)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                layer_names=[f"layer.{i}"] + [f"{DRAFT_LAYER}{i}"] * draft,
                kv_cache_spec=spec,
                is_eagle_group=flag_drafts and draft,
            )
            for i, (spec, draft) in enumerate(groups)
        ],
        prefix_cache_retention_interval=retention_interval,
    )
