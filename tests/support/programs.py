# SPDX-License-Identifier: Apache-2.0
"""Random programs for KV cache managers: a setup, request plans, and operations.

A `Program` is plain data. A failing one is printed with all that is needed to run it again:
paste it and call `support.differential.run_program`.
"""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from support.kv_configs import AttentionKind, KVSetup
from support.manager_driver import Op
from support.requests import RequestPlan
from support.strategies import encoder_decoder_kinds, plan_trees, setups


@dataclass(frozen=True)
class Program:
    setup: KVSetup
    plans: tuple[RequestPlan, ...]
    ops: tuple[Op, ...]


def _picks() -> st.SearchStrategy[int]:
    return st.integers(0, 7)


def _op(name: str, *arguments: st.SearchStrategy[int]) -> st.SearchStrategy[Op]:
    return st.tuples(st.just(name), *arguments)


def operations() -> st.SearchStrategy[Op]:
    """One operation; the frequent ones of a serving engine most often."""
    chunks = st.sampled_from([200, 1, 16, 33, 64])
    by_weight = [
        (6, _op("serve", _picks(), st.integers(0, 12))),
        (5, _op("step", chunks)),
        (4, _op("add", _picks())),
        (4, _op("start", _picks(), chunks)),
        (4, _op("run", _picks(), chunks)),
        (4, _op("process", _picks())),
        (4, _op("finish", _picks())),
        (3, _op("decode", _picks(), st.integers(1, 24))),
        (2, _op("preempt", _picks())),
        (2, _op("session", _picks(), _picks())),
        (2, _op("look_up", _picks(), st.integers(0, 3))),
        (1, _op("observe", _picks())),
        (1, _op("remove_skipped", _picks())),
        (1, _op("finish_later", _picks())),
        (2, _op("return_blocks")),
        (1, _op("start", _picks(), chunks, st.integers(1, 5))),
        (1, _op("reset", st.sampled_from([0, 0, 0, 1]))),
        (1, _op("stats")),
    ]
    # Not one_of: that would take each of them as often as the others.
    weighted = [op for weight, op in by_weight for _ in range(weight)]
    return st.integers(0, len(weighted) - 1).flatmap(weighted.__getitem__)


@st.composite
def op_lists(draw: st.DrawFn, max_ops: int) -> tuple[Op, ...]:
    # Drawn as a number first: lists of a free size come out short.
    num_ops = draw(st.integers(1, max_ops))
    ops = draw(st.lists(operations(), min_size=num_ops, max_size=num_ops))
    return (("serve", 0, 2), *ops)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    tight: bool = False,
    max_ops: int = 70,
    kinds: st.SearchStrategy[tuple[AttentionKind, ...]] | None = None,
) -> Program:
    """``tight`` pools must evict and preempt; others hardly ever do."""
    longest = draw(st.sampled_from([40, 100, 160]))
    setup = draw(setups(tight=tight, prompt_tokens=longest, kinds=kinds))
    unit = draw(st.sampled_from([setup.scheduler_block_size, setup.resolved_hash_block_size]))
    return Program(setup, draw(plan_trees(longest, unit)), draw(op_lists(max_ops)))


@st.composite
def encoder_decoder_programs(draw: st.DrawFn, *, tight: bool = False) -> Program:
    """Without prefix caching, which base does not have for such models."""
    program = draw(programs(tight=tight, kinds=encoder_decoder_kinds()))
    setup = replace(program.setup, caching=False, hash_block_size=None)
    # As long as prompts, for which the pool is made; rarely none.
    lengths = st.one_of(st.integers(1, 100), st.sampled_from([0, 1, 16, 48]))
    plans = tuple(replace(plan, encoder=draw(lengths)) for plan in program.plans)
    return replace(program, setup=setup, plans=plans)
