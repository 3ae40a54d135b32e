# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that both judges draw from: attention kinds, setups, and requests.

Every draw starts from its simplest value, so that a failing case shrinks to few kinds, few
groups, equal block sizes, an ample pool and short requests.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from support.identity import MultiModalItem
from support.kv_configs import AttentionKind, KVSetup, blocks_for, cross
from support.requests import RequestPlan

#: Group orders: side by side, or mixed.
layouts = st.one_of(st.none(), st.integers(0, 100))
#: Length in tokens of each known image: the same item always takes as many.
IMAGE_LENGTHS = {"cat": 5, "dog": 9, "dot": 1}


@st.composite
def attention_kinds(
    draw: st.DrawFn, max_kinds: int = 6, states: bool = False
) -> tuple[AttentionKind, ...]:
    """1 to 6 distinct attention types with 46 groups at most, few most often.

    With ``states`` one of them is Mamba, with the block size of all.
    """
    num_kinds = draw(st.one_of(st.integers(1, 2), st.integers(1, 3), st.integers(1, max_kinds)))
    # For states, base miscounts what is left to allocate where blocks of 6 pass the longest model.
    unit = draw(
        st.sampled_from([4, 2, 8, 16, 4, 8, 16, 1] if states else [4, 2, 8, 16, 4, 8, 6, 1])
    )
    # Most models have one block size; unequal ones may not even divide each other.
    multiples = draw(st.sampled_from([(1,), (1,), (1, 2), (1, 2, 4), (1, 3), (2, 3)]))
    block_sizes = [unit] if states else [unit * multiple for multiple in multiples]
    if not states and draw(st.integers(0, 19)) == 19:
        block_sizes = draw(st.lists(st.sampled_from([8, 4, 16, 2, 6, 1, 32]), min_size=2))
    mixed_dtypes = draw(st.integers(0, 9)) == 9
    kinds: list[AttentionKind] = []
    groups_left = 46
    for i in range(num_kinds):
        counts = st.one_of(st.just(1), st.integers(1, 5), st.integers(1, 5), st.integers(6, 40))
        # Groups yet to come take one each at least.
        num_groups = min(draw(counts), groups_left - (num_kinds - i - 1))
        groups_left -= num_groups
        names = ["full", "sliding", "sliding", "mla"]
        # Base takes chunks with a single block size only.
        name = draw(st.sampled_from([*names, "chunked"] if len(block_sizes) == 1 else names))
        if states and i == num_kinds - 1:
            name = "mamba"
        kinds.append(
            AttentionKind(
                name,
                block_size=draw(st.sampled_from(block_sizes)),
                num_groups=num_groups,
                window=draw(windows(name, unit)),
                # Equal specs would be one attention type, so each gets its own variant.
                variant=i,
                dtype="float32" if mixed_dtypes and i % 2 else "bfloat16",
            )
        )
    return tuple(kinds)


def windows(kind: str, unit: int) -> st.SearchStrategy[int | None]:
    """Windows or chunks, for models with blocks of about ``unit`` tokens."""
    if kind == "chunked":
        multiples = st.one_of(st.integers(1, 6), st.integers(1, 12), st.just(100))
        return multiples.map(lambda multiple: unit * multiple)
    if kind != "sliding":
        return st.none()
    around_a_block, some = st.integers(1, 3 * unit), [4 * unit, 6 * unit + 1, 10 * unit]
    all_lengths, more_than_any_prompt = st.integers(1, 192), st.just(1000)
    few_blocks = st.sampled_from(some)
    # Not one_of, which takes each of them as often as the others.
    weighted = [around_a_block, few_blocks] * 2 + [all_lengths, more_than_any_prompt]
    return st.integers(0, 5).flatmap(weighted.__getitem__)


@st.composite
def encoder_decoder_kinds(draw: st.DrawFn) -> tuple[AttentionKind, ...]:
    """Cross attention before, between or after up to three other types."""
    kinds = list(draw(attention_kinds(max_kinds=3)))
    block_size = draw(st.sampled_from([kinds[0].block_size, 4, 16, 6]))
    num_groups = draw(st.one_of(st.just(1), st.integers(1, 5)))
    dtype = draw(st.sampled_from(["bfloat16"] * 4 + ["float32"]))
    place = draw(st.integers(0, len(kinds)))
    kinds.insert(place, cross(block_size, num_groups, variant=9, dtype=dtype))
    return tuple(kinds)


def retention_intervals(kinds: Sequence[AttentionKind]) -> st.SearchStrategy[int | None]:
    """Those that base accepts for a model."""
    lcm = math.lcm(*(kind.block_size for kind in kinds))
    sparse = any(kind.kind in ("sliding", "mamba") for kind in kinds)
    return st.sampled_from([None, 0, lcm, 2 * lcm, 4 * lcm] if sparse else [None, 0])


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
    num_groups = sum(kind.num_groups for kind in chosen)
    if tight:
        percent = draw(st.sampled_from([300, 200, 150, 110, 80, 50]))
        num_blocks = 2 + max(num_groups, per_request * percent // 100)
    else:
        # Base builds an object for each block, so not without a limit.
        num_blocks = 1 + max(per_request, min(per_request * requests, 12_000))
    lcm = math.lcm(*(kind.block_size for kind in chosen))
    gcd = math.gcd(*(kind.block_size for kind in chosen))
    states = any(kind.holds_states for kind in chosen)
    finer = [None, None, None, 1, gcd // 2] if num_groups > 1 and gcd > 1 and not states else [None]
    setup = KVSetup(
        kinds=chosen,
        num_blocks=num_blocks,
        layout=draw(layouts),
        retention=draw(retention_intervals(chosen)),
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


@st.composite
def plan_trees(draw: st.DrawFn, max_tokens: int, unit: int) -> tuple[RequestPlan, ...]:
    """Several plans, most of which grow from one or two trunks, so that prefixes are shared
    and requests part where no prompt ends.
    """
    lengths = st.one_of(
        st.integers(1, max(1, max_tokens // unit // 2)).map(lambda n: n * unit),
        st.integers(1, max_tokens),
    )
    trunks = draw(st.lists(lengths, min_size=1, max_size=2))
    return tuple(draw(st.lists(plans(max_tokens, unit, trunks), min_size=1, max_size=6)))


@st.composite
def plans(draw: st.DrawFn, max_tokens: int, unit: int, trunks: Sequence[int] = ()) -> RequestPlan:
    """One plan: now and then with a salt, an adapter, images, or other extras."""
    lengths = st.one_of(
        st.integers(1, 16).map(lambda n: n * unit),
        st.integers(1, 4 * unit + 1),
        st.integers(1, max_tokens),
        st.just(1),
    )
    pieces = draw(
        st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), lengths), min_size=1, max_size=3)
    )
    if trunks and draw(st.integers(0, 3)):
        pieces.insert(0, (0, draw(st.sampled_from(trunks))))
    path: list[tuple[int, int]] = []
    left = max_tokens
    for label, length in pieces:
        if left > 0:
            path.append((label, min(length, left)))
            left -= path[-1][1]
    plan = RequestPlan(tuple(path), output=draw(st.integers(0, 3)))
    match draw(st.integers(0, 11)):
        case 7:
            return replace(plan, salt=draw(st.sampled_from(["a", "b"])))
        case 8:
            return replace(plan, lora=draw(st.integers(1, 2)))
        case 9:
            images, end = [], 0
            for identifier in draw(st.lists(st.sampled_from(sorted(IMAGE_LENGTHS)), max_size=3)):
                offset = end + draw(st.integers(0, 2 * unit))
                end = offset + IMAGE_LENGTHS[identifier]
                if end <= plan.num_prompt_tokens:
                    images.append(MultiModalItem(identifier, offset, IMAGE_LENGTHS[identifier]))
            return replace(plan, images=tuple(images))
        case 10:
            return replace(plan, skip_reading=True)
        case 11:
            return replace(plan, report_full=True)
    return plan
