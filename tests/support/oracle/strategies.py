# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for cases: models, pools, ways to serve, and what clients do.

Everything shrinks towards one full-attention type in the smallest pool, the plain scheduler
and few, short requests.
"""

import math

from hypothesis import strategies as st

from .connector import ConnectorSettings
from .engine_config import OracleSettings
from .models import AttentionKind, Chunked, Full, Sliding
from .workload import Abort, Add, Case, Operation, Reset, Run

_MAX_MODEL_LEN = 96


@st.composite
def attention_kinds(draw: st.DrawFn) -> tuple[AttentionKind, ...]:
    """1 to 6 attention types with 1 to 46 groups in all."""
    # Most models have one block size; unequal ones may not even divide each other.
    sizes = st.sampled_from([8, 4, 16, 2, 6, 1])
    one_size = sizes.map(lambda size: [size])
    block_sizes = draw(st.one_of(one_size, one_size, st.lists(sizes, min_size=2)))
    num_types = draw(st.integers(1, 6))
    kinds: list[AttentionKind] = []
    for _ in range(num_types):
        size = draw(st.sampled_from(block_sizes))
        groups = draw(st.one_of(st.integers(1, 3), st.integers(1, 40)))
        kind: AttentionKind
        name = draw(st.sampled_from(["full", "sliding", "full", "sliding", "chunked"]))
        if name == "chunked" and len(block_sizes) == 1:  # base takes no other
            kind = Chunked(size * draw(st.integers(1, 12)), size, groups)
        elif name != "full":
            # From smaller than a block to larger than any prompt.
            window = draw(st.one_of(st.integers(1, 40), st.integers(1, 2 * _MAX_MODEL_LEN)))
            kind = Sliding(window, size, groups)
        else:
            kind = Full(size, groups)
        room = 46 - sum(k.num_groups for k in kinds)
        if room and all(type(k) is not type(kind) or k.spec() != kind.spec() for k in kinds):
            if groups > room:
                kind = type(kind)(**{**vars(kind), "num_groups": room})
            kinds.append(kind)
    return tuple(kinds)


@st.composite
def connectors(draw: st.DrawFn) -> ConnectorSettings:
    asynchronous = draw(st.booleans())
    return ConnectorSettings(
        seed=draw(st.integers(0, 1000)),
        asynchronous=asynchronous,
        most_steps=draw(st.integers(0, 5)),
        fails=draw(st.sampled_from([0, 4])) if asynchronous else 0,
        sends=draw(st.booleans()),
        whole_prompts=False,  # base gets them wrong
    )


@st.composite
def oracle_settings(draw: st.DrawFn) -> OracleSettings:
    max_num_seqs = draw(st.sampled_from([8, 3, 1]))
    async_scheduling = draw(st.booleans())
    steps_in_flight = draw(st.sampled_from([1, 2] if async_scheduling else [0, 1]))
    # Base does not speculate with pipeline parallelism's steps in flight.
    speculates = (async_scheduling or steps_in_flight == 0) and draw(
        st.sampled_from([False, False, True])
    )
    return OracleSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.sampled_from([128, 24, max_num_seqs])),
        max_model_len=_MAX_MODEL_LEN,
        async_scheduling=async_scheduling,
        steps_in_flight=steps_in_flight,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        enable_prefix_caching=draw(st.sampled_from([True] * 7 + [False])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 5])),
        reserve_full_sequence=draw(st.sampled_from([True, False])),
        num_spec_tokens=draw(st.integers(1, 4)) if speculates else 0,
        num_lookahead_tokens=draw(st.sampled_from([0, 3])) if speculates else 0,
        model_runner_v2=draw(st.booleans()),
        vocab_size=64,
        run_early=draw(st.booleans()),
        connector=draw(connectors()) if draw(st.sampled_from([False, False, True])) else None,
    )


@st.composite
def operations(draw: st.DrawFn) -> tuple[Operation, ...]:
    # Mostly no salt, adapter or image: requests that share find more faults.
    rarely = st.sampled_from([None] * 6 + [0, 1])
    requests = st.integers(0, 15)
    lengths = st.one_of(st.integers(0, 20), st.integers(0, 20), st.integers(0, _MAX_MODEL_LEN))
    add = st.builds(
        Add,
        tail=lengths,
        parent=st.one_of(st.none(), st.integers(0, 2), st.integers(0, 2), requests),
        shared=st.one_of(st.just(_MAX_MODEL_LEN), lengths),
        follow=st.booleans(),
        max_tokens=st.integers(1, 30),
        salt=rarely,
        lora=rarely,
        priority=st.integers(0, 2),
        stops=st.booleans(),
        image=rarely,
    )
    run = st.builds(Run, steps=st.integers(1, 6), abort=st.one_of(st.none(), requests))
    abort = st.builds(Abort, requests)
    reset = st.builds(Reset, st.booleans())
    # Adding and running dominate; an abort or reset needs something to disturb.
    step = st.one_of(add, run, add, run, add, run, add, abort, reset)
    # Lists are short unless asked to be long; the wish itself shrinks away.
    at_least = draw(st.sampled_from([0, 12, 25, 40]))
    return tuple(draw(st.lists(step, min_size=at_least, max_size=60)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = draw(attention_kinds())
    retention = None
    if any(isinstance(kind, Sliding) for kind in kinds):
        unit = math.lcm(*(kind.block_size for kind in kinds))
        retention = draw(st.sampled_from([None, 0, unit, 4 * unit]))
    settings = draw(oracle_settings())
    # In a small pool loads can wait for each other for ever, with either manager.
    small = st.nothing() if settings.connector else st.integers(0, 40)
    return Case(
        kinds=kinds,
        operations=draw(operations()),
        settings=settings,
        extra_blocks=draw(st.one_of(small, st.just(2000))),
        retention_interval=retention,
        shuffle_groups=draw(st.one_of(st.none(), st.integers(0, 3))),
    )
