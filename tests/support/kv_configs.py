# SPDX-License-Identifier: Apache-2.0
"""Compact descriptions of KV cache configurations, and hypothesis strategies over them.

A `KVSetup` is plain data whose ``repr`` is valid Python, so that a failing random
case can be pasted into a regression test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True)
class AttentionKind:
    """One attention type: ``groups`` KV cache groups with the same spec.

    ``variant`` makes otherwise equal specs different, as layers of another head
    size do. ``dtype`` other than the rest of the model's makes base record new
    blocks for zeroing. ``draft`` marks the groups as a drafter's, and ``retained`` tokens
    stay before a window for one that prefills again.
    """

    kind: str  # "full", "mla", "sliding", "chunked", "cross" or "mamba"
    block_size: int
    groups: int = 1
    window: int | None = None  # of chunked local attention, the chunk
    variant: int = 0
    dtype: str = "bfloat16"
    checkpoints: bool = False  # of Mamba, whether states in the middle of a step are kept
    draft: bool = False
    retained: int = 0

    def spec(self) -> KVCacheSpec:
        if self.kind == "mamba":
            return MambaSpec(
                block_size=self.block_size,
                shapes=((1 + self.variant, 64),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_prefill_checkpoint_blocks=int(self.checkpoints),
                prefill_checkpoint_alignment=1 if self.checkpoints else None,
            )
        shape: dict[str, Any] = dict(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=64 * (1 + self.variant),
            dtype=getattr(torch, self.dtype),
        )
        if self.kind == "full":
            return FullAttentionSpec(**shape)
        if self.kind == "mla":
            return MLAAttentionSpec(**shape)
        if self.kind == "cross":
            return CrossAttentionSpec(**shape)
        assert self.window is not None
        if self.kind == "chunked":
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.window)
        assert self.kind == "sliding"
        return SlidingWindowSpec(
            **shape, sliding_window=self.window, extra_retained_tokens=self.retained
        )

    @property
    def holds_states(self) -> bool:
        """Whether a block holds a state that sums up the whole prefix."""
        return self.kind == "mamba"

    @property
    def reads_all(self) -> bool:
        """Whether a token attends to all before it."""
        return self.window is None and not self.of_encoder and not self.holds_states

    @property
    def of_encoder(self) -> bool:
        """Whether slots are for an encoder's tokens, all of which each token attends to."""
        return self.kind == "cross"

    def first_read(self, position: int) -> int:
        """The first position that a token at ``position`` attends to, or whose state it reads."""
        if self.holds_states:
            return max(0, position - 1)
        if self.window is None:
            return 0
        if self.kind == "chunked":
            return position // self.window * self.window
        return max(0, position - self.window + 1)


def full(block_size: int, groups: int = 1, **kwargs: Any) -> AttentionKind:
    return AttentionKind("full", block_size, groups, **kwargs)


def mla(block_size: int, groups: int = 1, **kwargs: Any) -> AttentionKind:
    return AttentionKind("mla", block_size, groups, **kwargs)


def sliding(window: int, block_size: int, groups: int = 1, **kwargs: Any) -> AttentionKind:
    return AttentionKind("sliding", block_size, groups, window=window, **kwargs)


def chunked(chunk: int, block_size: int, groups: int = 1, **kwargs: Any) -> AttentionKind:
    return AttentionKind("chunked", block_size, groups, window=chunk, **kwargs)


def mamba(block_size: int, groups: int = 1, **kwargs: Any) -> AttentionKind:
    return AttentionKind("mamba", block_size, groups, **kwargs)


def cross(block_size: int, groups: int = 1, **kwargs: Any) -> AttentionKind:
    return AttentionKind("cross", block_size, groups, **kwargs)


@dataclass(frozen=True)
class KVSetup:
    """A model's KV cache and the scheduler's settings that its manager sees.

    ``layout`` names the attention kind (index into ``kinds``) of each KV cache
    group in turn; None puts each kind's groups side by side. ``max_chunk`` tokens
    of a request are scheduled in a step, in at most ``max_steps`` steps at once.

    With speculative decoding a step verifies ``num_drafts`` tokens of a request, and has
    ``num_lookahead`` slots beyond. A drafter with ``use_eagle`` reads ``prefill_lookahead``
    tokens ahead of the computed ones.
    """

    kinds: tuple[AttentionKind, ...]
    num_blocks: int
    layout: tuple[int, ...] | None = None
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
    def groups(self) -> tuple[AttentionKind, ...]:
        """The attention kind of each KV cache group."""
        if self.layout is None:
            return tuple(kind for kind in self.kinds for _ in range(kind.groups))
        return tuple(self.kinds[i] for i in self.layout)

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
        """Whether base's events would tell of the end of a prompt inside a larger block.

        Ours refuses events then, and leaves such engines to base.
        """
        return self.caching and any(
            kind.reads_all and kind.block_size > self.resolved_hash_block_size
            for kind in self.kinds
        )

    def kv_cache_config(self) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer.{i}"], kind.spec(), is_eagle_group=kind.draft)
                for i, kind in enumerate(self.groups)
            ],
            prefix_cache_retention_interval=self.retention,
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


def blocks_for(kinds: Sequence[AttentionKind], num_tokens: int) -> int:
    """Physical blocks that ``num_tokens`` of one request take when none is skipped."""
    return sum(kind.groups * math.ceil(num_tokens / kind.block_size) for kind in kinds)


# --------------------------------------------------------------------------------------
# Strategies. Every draw starts from its simplest value, so that a failing case shrinks
# to few kinds, few groups, equal block sizes and an ample pool.


def group_counts() -> st.SearchStrategy[int]:
    return st.one_of(st.just(1), st.integers(1, 5), st.integers(1, 5), st.integers(6, 40))


@st.composite
def attention_kinds(
    draw: st.DrawFn, max_kinds: int = 6, states: bool = False
) -> tuple[AttentionKind, ...]:
    """1 to 6 distinct attention types with 46 groups at most, few most often.

    With ``states`` one of them is Mamba, with the block size of all.
    """
    num_kinds = draw(st.one_of(st.integers(1, 2), st.integers(1, 3), st.integers(1, max_kinds)))
    unit = draw(st.sampled_from([4, 2, 8, 16, 4, 8, 16, 1]))
    multiples = draw(st.sampled_from([(1,), (1,), (1, 2), (1, 2, 4), (1, 3), (2, 3)]))
    if states:
        multiples = (1,)
    mixed_dtypes = draw(st.integers(0, 9)) == 9
    kinds: list[AttentionKind] = []
    groups_left = 46
    for i in range(num_kinds):
        # Groups yet to come take one each at least.
        groups = min(draw(group_counts()), groups_left - (num_kinds - i - 1))
        groups_left -= groups
        names = ["full", "sliding", "sliding", "mla"]
        # Base takes chunks with a single block size only.
        kind = draw(st.sampled_from([*names, "chunked"] if multiples == (1,) else names))
        if states and i == num_kinds - 1:
            kind = "mamba"
        window = None
        if kind == "chunked":
            window = unit * draw(st.one_of(st.integers(1, 6), st.just(100)))
        if kind == "sliding":
            window = draw(
                st.one_of(
                    st.integers(1, 3 * unit),  # around a block
                    st.sampled_from([4 * unit, 6 * unit + 1, 10 * unit]),
                    st.just(1000),  # more than any prompt
                )
            )
        kinds.append(
            AttentionKind(
                kind,
                block_size=unit * draw(st.sampled_from(multiples)),
                groups=groups,
                window=window,
                # Equal specs would be one attention type, so each gets its own variant.
                variant=i,
                dtype="float32" if mixed_dtypes and i % 2 else "bfloat16",
            )
        )
    return tuple(kinds)


@st.composite
def layouts(draw: st.DrawFn, kinds: Sequence[AttentionKind]) -> tuple[int, ...] | None:
    """Group orders: side by side, interleaved as a model's layers are, or any."""
    in_turn = [i for i, kind in enumerate(kinds) for _ in range(kind.groups)]
    how = draw(st.sampled_from(["side by side", "side by side", "reversed", "shuffled"]))
    if how == "side by side" or len(kinds) == 1:
        return None
    if how == "reversed":
        return tuple(reversed(in_turn))
    return tuple(draw(st.permutations(in_turn)))


@st.composite
def setups(
    draw: st.DrawFn,
    *,
    tight: bool = False,
    prompt_tokens: int = 160,
    requests: int = 40,
    kinds: st.SearchStrategy[tuple[AttentionKind, ...]] | None = None,
) -> KVSetup:
    """Whole setups, for prompts of up to ``prompt_tokens``.

    ``tight`` draws pools from barely one request to a few; otherwise the pool
    holds ``requests`` whole requests, so that hardly ever anything is evicted.
    """
    chosen = draw(kinds if kinds is not None else attention_kinds())
    per_request = blocks_for(chosen, prompt_tokens)
    if tight:
        percent = draw(st.sampled_from([300, 200, 150, 110, 80, 50]))
        num_blocks = 2 + max(sum(kind.groups for kind in chosen), per_request * percent // 100)
    else:
        # Base builds an object for each block, so not without a limit.
        num_blocks = 1 + max(per_request, min(per_request * requests, 12_000))
    lcm = math.lcm(*(kind.block_size for kind in chosen))
    gcd = math.gcd(*(kind.block_size for kind in chosen))
    sparse = any(kind.kind in ("sliding", "mamba") for kind in chosen)
    states = any(kind.holds_states for kind in chosen)
    intervals = [None, 0, lcm, 2 * lcm, 4 * lcm] if sparse else [None, 0]
    several_groups = sum(kind.groups for kind in chosen) > 1
    finer = [None, None, None, 1, gcd // 2] if several_groups and gcd > 1 and not states else [None]
    setup = KVSetup(
        kinds=chosen,
        num_blocks=num_blocks,
        layout=draw(layouts(chosen)),
        retention=draw(st.sampled_from(intervals)),
        caching=states or draw(st.sampled_from([True] * 9 + [False])),
        events=draw(st.sampled_from([True, True, False])),
        log_stats=draw(st.sampled_from([True, True, False])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3])),
        max_model_len=draw(st.sampled_from([512, prompt_tokens + 3])),
        max_chunk=draw(st.sampled_from([64, 2 * lcm, lcm + 1, 7, 200])),
        max_steps=draw(st.sampled_from([1, 2, 1, 3])),
        full_sequence_must_fit=draw(st.sampled_from([True, False])),
        hash_block_size=draw(st.sampled_from(finer)),
    )
    return replace(setup, events=setup.events and not setup.publishes_parts_of_blocks)
