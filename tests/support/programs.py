# SPDX-License-Identifier: Apache-2.0
"""Random programs for KV cache managers: a setup, request plans, and operations.

A `Program` is plain data. A failing one is printed with all that is needed to run it again:
paste it and call `support.differential.run_program`.
"""

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from support.kv_configs import AttentionKind, KVSetup
from support.manager_driver import Op
from support.requests import RequestPlan
from support.strategies import attention_kinds, encoder_decoder_kinds, plan_trees, setups

_ANY_KINDS = attention_kinds()


@dataclass(frozen=True)
class Program:
    setup: KVSetup
    plans: tuple[RequestPlan, ...]
    ops: tuple[Op, ...]


def operations() -> st.SearchStrategy[Op]:
    """One operation; the frequent ones of a serving engine most often."""
    pick, chunk = st.integers(0, 7), st.sampled_from([200, 1, 16, 33, 64])
    by_weight: list[tuple[Any, ...]] = [
        (6, "serve", pick, st.integers(0, 12)),
        (5, "step", chunk),
        (4, "add", pick),
        (4, "start", pick, chunk),
        (4, "run", pick, chunk),
        (4, "process", pick),
        (4, "finish", pick),
        (3, "decode", pick, st.integers(1, 24)),
        (2, "preempt", pick),
        (2, "session", pick, pick),
        (2, "look_up", pick, st.integers(0, 3)),
        (1, "observe", pick),
        (1, "remove_skipped", pick),
        (1, "finish_later", pick),
        (2, "return_blocks"),
        (1, "start", pick, chunk, st.integers(1, 5)),
        (1, "reset", st.sampled_from([0, 0, 0, 1])),
        (1, "stats"),
    ]
    # Not one_of: that would take each of them as often as the others.
    weighted = [
        st.tuples(st.just(name), *arguments)
        for weight, name, *arguments in by_weight
        for _ in range(weight)
    ]
    return st.integers(0, len(weighted) - 1).flatmap(weighted.__getitem__)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    tight: bool = False,
    kinds: st.SearchStrategy[tuple[AttentionKind, ...]] = _ANY_KINDS,
) -> Program:
    """``tight`` pools must evict and preempt; others hardly ever do."""
    longest = draw(st.sampled_from([40, 100, 160]))
    setup = draw(setups(kinds, tight=tight, prompt_tokens=longest))
    unit = draw(st.sampled_from([setup.scheduler_block_size, setup.resolved_hash_block_size]))
    plans = draw(plan_trees(longest, unit))
    # Drawn as a number first: lists of a free size come out short.
    num_ops = draw(st.integers(1, 70))
    ops = draw(st.lists(operations(), min_size=num_ops, max_size=num_ops))
    return Program(setup, plans, (("serve", 0, 2), *ops))


@st.composite
def encoder_decoder_programs(draw: st.DrawFn, *, tight: bool = False) -> Program:
    """Without prefix caching, which base does not have for such models."""
    program = draw(programs(tight=tight, kinds=encoder_decoder_kinds()))
    setup = replace(program.setup, caching=False, hash_block_size=None)
    # As long as prompts, for which the pool is made; rarely none.
    lengths = st.one_of(st.integers(1, 100), st.sampled_from([0, 1, 16, 48]))
    plans = tuple(replace(plan, encoder=draw(lengths)) for plan in program.plans)
    return replace(program, setup=setup, plans=plans)
