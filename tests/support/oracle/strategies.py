# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for cases: models, pools, ways to serve, and what clients do.

Everything shrinks towards one full-attention type in the smallest pool, the plain scheduler
and few, short requests.
"""

from hypothesis import strategies as st

from support.strategies import attention_kinds, retention_intervals

from .connector import ConnectorSettings
from .engine_config import OracleSettings
from .workload import Abort, Add, Case, Operation, Reset, Run


@st.composite
def connectors(draw: st.DrawFn, for_base: bool) -> ConnectorSettings:
    asynchronous = draw(st.booleans())
    return ConnectorSettings(
        seed=draw(st.integers(0, 1000)),
        asynchronous=asynchronous,
        most_steps=draw(st.integers(0, 5)),
        fails=draw(st.sampled_from([0, 4])) if asynchronous else 0,
        names_blocks=False if for_base else draw(st.booleans()),
        sends=draw(st.booleans()),
        whole_prompts=False if for_base else draw(st.booleans()),
    )


@st.composite
def oracle_settings(draw: st.DrawFn, for_base: bool) -> OracleSettings:
    max_num_seqs = draw(st.sampled_from([8, 3, 1, 16]))
    async_scheduling = draw(st.booleans())
    steps_in_flight = draw(st.sampled_from([1, 2] if async_scheduling else [0, 1, 2]))
    # Base does not speculate with pipeline parallelism's steps in flight.
    speculates = (async_scheduling or steps_in_flight == 0) and draw(
        st.sampled_from([False, False, True])
    )
    return OracleSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.sampled_from([128, 24, max_num_seqs, 300])),
        max_model_len=draw(st.sampled_from([96, 96, 256])),
        async_scheduling=async_scheduling,
        steps_in_flight=steps_in_flight,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        enable_prefix_caching=draw(st.sampled_from([True] * 7 + [False])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 5, 30])),
        reserve_full_sequence=draw(st.sampled_from([True, False])),
        num_spec_tokens=draw(st.integers(1, 4)) if speculates else 0,
        num_lookahead_tokens=draw(st.sampled_from([0, 3])) if speculates else 0,
        model_runner_v2=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([64, 256])),
        run_early=draw(st.booleans()),
        connector=draw(connectors(for_base))
        if draw(st.sampled_from([False, False, True]))
        else None,
    )


@st.composite
def operations(draw: st.DrawFn, max_model_len: int) -> tuple[Operation, ...]:
    # Mostly no salt, adapter or image: requests that share find more faults.
    rarely = st.sampled_from([None] * 6 + [0, 1])
    requests = st.integers(0, 15)
    lengths = st.one_of(st.integers(0, 20), st.integers(0, 20), st.integers(0, max_model_len))
    add = st.builds(
        Add,
        tail=lengths,
        parent=st.one_of(st.none(), st.integers(0, 2), st.integers(0, 2), requests),
        shared=st.one_of(st.just(max_model_len), lengths),
        follow=st.booleans(),
        max_tokens=st.integers(1, 30),
        salt=rarely,
        lora=rarely,
        priority=st.integers(0, 2),
        stops=st.booleans(),
        image=rarely,
    )
    run = st.builds(Run, steps=st.integers(1, 6), abort=st.one_of(st.none(), requests))
    # Adding and running dominate; an abort or reset needs something to disturb.
    ends = st.builds(Abort, requests), st.builds(Reset, st.booleans())
    step = st.one_of(add, run, add, run, add, run, add, *ends)
    # Lists are short unless asked to be long; the wish itself shrinks away.
    at_least = draw(st.sampled_from([0, 12, 25, 40]))
    return tuple(draw(st.lists(step, min_size=at_least, max_size=60)))


@st.composite
def cases(draw: st.DrawFn, for_base: bool = False) -> Case:
    """``for_base`` leaves out what base is known to do wrong with a KV connector."""
    kinds = draw(attention_kinds())
    settings = draw(oracle_settings(for_base))
    # In a small pool, loads can wait for each other for ever.
    hangs = for_base and settings.connector is not None
    small = st.nothing() if hangs else st.integers(0, 100)
    return Case(
        kinds=kinds,
        operations=draw(operations(settings.max_model_len)),
        settings=settings,
        extra_blocks=draw(st.one_of(small, st.just(2000))),
        retention_interval=draw(retention_intervals(kinds)),
        shuffle_groups=draw(st.sampled_from([None, None, 0, 1, 2, 3])),
    )
