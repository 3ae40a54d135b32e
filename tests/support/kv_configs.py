# SPDX-License-Identifier: Apache-2.0
"""Attention kinds, and the KV cache configurations of made-up models that consist of them.

Both judges use them: the kinds say what a model's layers read and write, and how many blocks
they take. All are plain data whose ``repr`` is valid Python, so that a failing random case can
be pasted into a regression test.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from support.short_repr import ShortRepr
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

#: Tokens of the longest input to an encoder.
MAX_ENCODER_LENGTH = 100
#: Layers of the drafter have names that begin with it.
DRAFT_LAYER = "draft."

#: A position in a sequence, or one for each of several requests.
Positions = TypeVar("Positions", int, np.ndarray)


@dataclass(frozen=True, repr=False)
class AttentionKind(ShortRepr):
    """One attention type: ``num_groups`` KV cache groups with the same spec.

    ``first_read``, ``state_column`` and ``first_column`` take integers and numpy arrays.
    """

    kind: str  # "full", "mla", "sliding", "chunked", "cross" or "mamba"
    block_size: int = 16
    num_groups: int = 1
    #: The window in tokens; the chunk for chunked local attention.
    window: int | None = None
    #: Makes otherwise equal specs different, as layers of another head size do.
    variant: int = 0
    #: With two types in a model, base records new blocks for zeroing.
    dtype: str = "bfloat16"
    #: Whether the groups have layers of a drafter, too.
    draft: bool = False
    #: Tokens kept before the window, for a drafter that computes the last ones again.
    retained: int = 0
    #: Mamba: with prefix caching "align" and the block size of attention, without it "none" and
    #: a block for the whole sequence.
    mode: str = "align"
    #: Mamba: a step also writes the state at the last block boundary that it passes, if that is a
    #: multiple of so many tokens from its beginning.
    checkpoint_alignment: int | None = None

    def spec(self) -> KVCacheSpec:
        if self.holds_states:
            return MambaSpec(
                block_size=self.block_size,
                shapes=((1 + self.variant, 64),),
                dtypes=(torch.float32,),
                mamba_cache_mode=self.mode,
                num_prefill_checkpoint_blocks=int(self.checkpoint_alignment is not None),
                prefill_checkpoint_alignment=self.checkpoint_alignment,
            )
        shape: dict[str, Any] = dict(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=64 * (1 + self.variant),
            dtype=getattr(torch, self.dtype),
        )
        if self.kind == "chunked":
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.window)
        if self.kind == "sliding":
            shape |= {"sliding_window": self.window, "extra_retained_tokens": self.retained}
            return SlidingWindowSpec(**shape)
        others = {
            "full": FullAttentionSpec,
            "mla": MLAAttentionSpec,
            "cross": CrossAttentionSpec,
        }
        return others[self.kind](**shape)

    @property
    def holds_states(self) -> bool:
        """Whether a block holds a state that sums up the whole prefix."""
        return self.kind == "mamba"

    @property
    def of_encoder(self) -> bool:
        """Whether slots are for an encoder's tokens, all of which each token attends to."""
        return self.kind == "cross"

    def first_read(self, position: Positions) -> Positions:
        """The first position that a token at ``position`` attends to, or whose state it reads.

        A step reads from that of its first token on. The content of a position does not depend
        on who reads it, so this is all that there is to know.
        """
        if self.holds_states:
            return (position > 0) * (position - 1)
        if self.window is None:
            return position * 0
        if self.kind == "chunked":
            return position // self.window * self.window
        return (position >= self.window) * (position - self.window + 1)

    def state_column(self, num_tokens: Positions) -> Positions:
        """The index of the block with the state after so many tokens, -1 for none.

        Base's runner starts from the state of the last computed token, and leaves the new one in
        the block of the step's last token. See ``mamba_get_block_table_tensor`` and
        ``preprocess_mamba`` in base 0.32.
        """
        if self.mode == "none":
            return (num_tokens > 0) * 1 - 1
        return (num_tokens - 1) // self.block_size

    def first_column(self, start: Positions, end: Positions) -> Positions:
        """The lowest column of its block table that a step over ``[start, end)`` uses.

        Columns between the state read and the one written are null and need no care.
        """
        if self.holds_states:
            return self.state_column(start + (start == 0) * end)
        return self.first_read(start) // self.block_size

    def checkpoints(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each request, after how many tokens a step writes a second state (0: it does not),
        and the column where.
        """
        offsets, columns = compute_mamba_prefill_checkpoints(
            ends.tolist(),
            (ends - starts).tolist(),
            hash_block_size=self.block_size,
            mamba_block_size=self.block_size,
            checkpoint_alignment=self.checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self.block_size,
        )
        positions = np.array(offsets)
        return np.where(positions > 0, starts + positions, 0), np.array(columns)

    def table_width(self, max_model_len: int) -> int:
        """Blocks in the block table of the longest sequence."""
        if self.holds_states and self.mode == "none":
            return 1
        longest = MAX_ENCODER_LENGTH if self.of_encoder else max_model_len
        return -(-longest // self.block_size)

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks that one group holds at most for one request."""
        width = self.table_width(max_model_len)
        if self.holds_states:
            # The state read, and one or two for each block that steps in flight end in.
            in_flight = -(-max_in_flight_tokens // self.block_size)
            return min(width, 2 + (1 + (self.checkpoint_alignment is not None)) * in_flight)
        if self.window is None:
            return width
        spec: Any = self.spec()
        return spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)


full, mla = partial(AttentionKind, "full"), partial(AttentionKind, "mla")
mamba, cross = partial(AttentionKind, "mamba"), partial(AttentionKind, "cross")


def _windowed(kind: str, window: int, *shape: int, **kwargs: Any) -> AttentionKind:
    """``shape`` is the block size and the number of groups, as for other kinds."""
    return AttentionKind(kind, *shape, window=window, **kwargs)


sliding, chunked = partial(_windowed, "sliding"), partial(_windowed, "chunked")


def kind_of(spec: KVCacheSpec) -> AttentionKind:
    """What a KV cache spec of base means to a worker: what layers read and write, and where.

    Raises:
        NotImplementedError: for specs with another meaning of a slot (compressed MLA, windows
            that rebuild themselves after a hit) and for states of draft tokens.
    """
    size = spec.block_size
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {kind_of(layer) for layer in spec.kv_cache_specs.values()}
        if len(kinds) == 1:
            return kinds.pop()
    elif isinstance(spec, MambaSpec):
        mode = spec.mamba_cache_mode
        if mode in ("none", "align") and not spec.num_speculative_blocks:
            aligned = mode == "align"
            alignment = spec.prefill_checkpoint_alignment if aligned else None
            return mamba(size, mode=mode, checkpoint_alignment=alignment)
    elif isinstance(spec, SlidingWindowSpec):
        # Its MLA variant may rebuild its window after a hit, and so read what it has not written.
        if not (isinstance(spec, SlidingWindowMLASpec) and spec.bounded_replay):
            return sliding(spec.sliding_window, size)
    elif isinstance(spec, CrossAttentionSpec):
        return cross(size)
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        return chunked(spec.attention_chunk_size, size)
    elif isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        compressed = isinstance(spec, MLAAttentionSpec) and spec.tokens_per_state != 1
        if not compressed:
            # With base's hybrid manager disabled, windows and chunks are kept as full.
            if spec.sliding_window is not None:
                return sliding(spec.sliding_window, size)
            if spec.attention_chunk_size is not None:
                return chunked(spec.attention_chunk_size, size)
            return full(size)
    raise NotImplementedError(f"no read rule for {type(spec).__name__}")


def blocks_for(kinds: Sequence[AttentionKind], num_tokens: int) -> int:
    """Physical blocks that ``num_tokens`` of one request take when none is skipped."""
    return sum(kind.num_groups * math.ceil(num_tokens / kind.block_size) for kind in kinds)


def smallest_pool(
    kinds: Sequence[AttentionKind], max_model_len: int, max_in_flight_tokens: int
) -> int:
    """Blocks with which one request of the greatest length just fits, null block included."""
    limits = max_model_len, max_in_flight_tokens
    return 1 + sum(kind.num_groups * kind.max_blocks(*limits) for kind in kinds)


def make_kv_cache_config(
    kinds: Sequence[AttentionKind],
    num_blocks: int,
    retention_interval: int | None = None,
    *,
    shuffle_groups: int | None = None,
    flag_drafts: bool = False,
) -> KVCacheConfig:
    """The KV cache config of a model with these attention types.

    ``num_blocks`` includes the null block. ``shuffle_groups`` is that of `groups_of`. With
    ``flag_drafts`` the config says which groups have draft layers, as base's does where it can
    tell.
    """
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                layer_names=[f"layer.{i}"] + [f"{DRAFT_LAYER}{i}"] * kind.draft,
                kv_cache_spec=kind.spec(),
                is_eagle_group=flag_drafts and kind.draft,
            )
            for i, kind in enumerate(groups_of(kinds, shuffle_groups))
        ],
        prefix_cache_retention_interval=retention_interval,
    )


def groups_of(kinds: Sequence[AttentionKind], shuffle_groups: int | None) -> list[AttentionKind]:
    """The attention kind of each KV cache group: each kind's side by side, or mixed by a seed."""
    groups = [kind for kind in kinds for _ in range(kind.num_groups)]
    if shuffle_groups is not None:
        random.Random(shuffle_groups).shuffle(groups)
    return groups


@dataclass(frozen=True, repr=False)
class KVSetup(ShortRepr):
    """A model's KV cache and the scheduler's settings that its manager sees.

    ``shuffle_groups`` is that of `groups_of`. ``max_chunk`` tokens of a request are
    scheduled in a step, in at most ``max_steps`` steps at once.

    With speculative decoding a step verifies ``num_drafts`` tokens of a request, and has
    ``num_lookahead`` slots beyond. A drafter with ``use_eagle`` reads ``prefill_lookahead``
    tokens ahead of the computed ones.
    """

    kinds: tuple[AttentionKind, ...]
    num_blocks: int
    shuffle_groups: int | None = None
    retention: int | None = None
    caching: bool = True
    events: bool = False
    log_stats: bool = True
    watermark: float = 0.0
    max_model_len: int = 512
    max_chunk: int = 64
    max_steps: int = 1
    full_sequence_must_fit: bool = True
    hash_block_size: int | None = None
    num_drafts: int = 0
    num_lookahead: int = 0
    use_eagle: bool = False
    prefill_lookahead: int = 0

    @property
    def groups(self) -> list[AttentionKind]:
        """The attention kind of each KV cache group."""
        return groups_of(self.kinds, self.shuffle_groups)

    @property
    def scheduler_block_size(self) -> int:
        return math.lcm(*(kind.block_size for kind in self.kinds)) if self.kinds else 16

    @property
    def resolved_hash_block_size(self) -> int:
        """Tokens per block hash, as base resolves it."""
        if not self.caching or not self.kinds:
            return self.scheduler_block_size
        return self.hash_block_size or math.gcd(*(kind.block_size for kind in self.kinds))

    @property
    def holds_states(self) -> bool:
        return any(kind.holds_states for kind in self.kinds)

    @property
    def publishes_parts_of_blocks(self) -> bool:
        """Whether base's events would report the end of a prompt inside a larger block.

        The hybrid manager refuses events then, and the plugin leaves such engines to base.
        """
        return self.caching and any(
            kind.kind in ("full", "mla") and kind.block_size > self.resolved_hash_block_size
            for kind in self.kinds
        )

    def kv_cache_config(self) -> KVCacheConfig:
        return make_kv_cache_config(
            self.kinds,
            self.num_blocks,
            self.retention,
            shuffle_groups=self.shuffle_groups,
            flag_drafts=True,
        )

    def build(self, manager_class: Callable[..., Any], **kwargs: Any) -> Any:
        """A manager for this setup, built with the arguments that base's scheduler passes."""
        arguments = dict(
            kv_cache_config=self.kv_cache_config(),
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_chunk * self.max_steps,
            enable_caching=self.caching,
            use_eagle=self.use_eagle,
            num_prefill_lookahead=self.prefill_lookahead,
            log_stats=self.log_stats,
            enable_kv_cache_events=self.events,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.scheduler_block_size,
            hash_block_size=self.resolved_hash_block_size,
            metrics_collector=None,
            watermark=self.watermark,
            enable_mamba_shared_prefix_checkpoint=False,
        )
        return manager_class(**(arguments | kwargs))
