# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding under the content oracle, also with drafters that have their own KV.

A drafter's KV at a position may depend on tokens after it (see `support.oracle.drafter`). So a
hit must exclude KV that depends on the next tokens of another request. Every test also runs base's
manager.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from support.kv_configs import full, make_kv_cache_config, sliding, smallest_pool
from support.oracle import InFlightFault, OracleEngine, OracleSettings, ReadFault
from vllm.v1.core.hybrid import KVCacheManager as HybridManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

#: The groups of a drafter's layers. With equal specs they join those of the model.
MODELS = {
    "one group for both": (full(16, draft=True),),
    "a full-attention group": (sliding(40, 16, 5), full(16), full(16, draft=True)),
    "a full-attention type": (sliding(40, 16, 5), full(16), full(16, dtype="float32", draft=True)),
    "a window among others": (full(16), sliding(40, 16, 4), sliding(24, 16, draft=True)),
    "all groups": (full(16, draft=True), sliding(40, 16, 5, draft=True)),
    "windows only": (sliding(40, 16, 2, draft=True), sliding(24, 16)),
    "one window": (sliding(40, 16, 1, draft=True),),
    "larger blocks": (full(32), sliding(40, 16, 2, draft=True)),
    "smaller blocks": (full(8, draft=True), sliding(40, 16, 2)),
}
PIPELINES = (
    OracleSettings(),
    OracleSettings(async_scheduling=True, steps_in_flight=1),
    OracleSettings(async_scheduling=True, steps_in_flight=2, model_runner_v2=True),
)
DRAFTERS = ("draft_model", "eagle", "mtp")


def cases() -> Iterator[Any]:
    """Each model with each drafter on the hybrid manager, and with one of them on base.

    Pipelines, retention intervals and whether draft groups are flagged take turns.
    """
    for i, (name, kinds) in enumerate(MODELS.items()):
        for j, drafter in enumerate(DRAFTERS):
            how = dict(
                settings=PIPELINES[(i + j) % 3],
                retention_interval=(None, 0, 64)[(i + 2 * j) % 3],
                flag_drafts=bool((i + j) % 2),
            )
            if how["retention_interval"] and not any(k.kind == "sliding" for k in kinds):
                how["retention_interval"] = 0
            for manager_cls in (BaseManager, HybridManager):
                side = "base" if manager_cls is BaseManager else "hybrid"
                if side == "hybrid" or i % 3 == j:
                    yield pytest.param(
                        manager_cls, kinds, drafter, how, id=f"{side}-{name}-{drafter}"
                    )


each_case = pytest.mark.parametrize(("manager_cls", "kinds", "drafter", "how"), [*cases()])


def make_engine(
    manager_cls: Any,
    kinds: tuple,
    drafter: str,
    settings: OracleSettings = PIPELINES[0],
    extra_blocks: int = 1000,
    retention_interval: int | None = None,
    flag_drafts: bool = False,
    **changes: Any,
) -> OracleEngine:
    settings = replace(settings, **({"num_spec_tokens": 3, "drafter": drafter} | changes))
    if drafter == "mtp":
        kinds = tuple(
            replace(kind, retained=settings.num_spec_tokens - 1) if kind.kind == "sliding" else kind
            for kind in kinds
        )
    num_blocks = extra_blocks + smallest_pool(
        kinds, settings.max_model_len, settings.max_in_flight_tokens
    )
    config = make_kv_cache_config(
        kinds, num_blocks, retention_interval, flag_drafts=flag_drafts and drafter != "draft_model"
    )
    return OracleEngine(manager_cls, config, settings)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(30000) for _ in range(count)]


def assert_drafts_were_judged(engine: OracleEngine) -> None:
    num_sampled = sum(len(s.outputs) for s in engine.submissions.values())
    assert engine.worker.num_drafts_accepted > num_sampled / 4
    assert engine.worker.num_drafts_rejected > num_sampled / 4
    assert engine.reads["draft layers"] > 0


@each_case
def test_branches_of_a_prefix(
    manager_cls: Any, kinds: tuple, drafter: str, how: dict[str, Any]
) -> None:
    """Chunked prompts that diverge at every position of a block, and continued answers."""
    engine = make_engine(
        manager_cls, kinds, drafter, **how | {"retention_interval": None}, max_num_batched_tokens=40
    )
    for shared in (*range(62, 68), *range(79, 82), 96, 110):
        engine.add_request(tokens(shared) + tokens(30, seed=shared), max_tokens=20)
        engine.run_until_done()
    prompt = engine.submissions["r3"].prompt + engine.submissions["r3"].outputs
    engine.add_request(prompt + tokens(5, seed=1), max_tokens=20)
    engine.run_until_done()
    assert engine.tokens_from_cache > 100
    assert_drafts_were_judged(engine)


@each_case
def test_pressure(manager_cls: Any, kinds: tuple, drafter: str, how: dict[str, Any]) -> None:
    """Preemptions, evictions, aborts and shared prefixes at the same time."""
    engine = make_engine(
        manager_cls, kinds, drafter, extra_blocks=12, max_num_batched_tokens=50, **how
    )
    for i in range(12):
        engine.add_request(tokens(33 * (i % 4)) + tokens(20, seed=i % 6), max_tokens=110)
        engine.step(abort_before_output=["r4"] if i == 8 else [])
    engine.abort("r5")
    engine.run_until_done()
    assert engine.num_preemptions > 0
    assert engine.tokens_from_cache > 0
    assert_drafts_were_judged(engine)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_longest_sequence(manager_cls: Any, drafter: str) -> None:
    """Lookahead slots end at the longest sequence of the model."""
    engine = make_engine(
        manager_cls, MODELS["all groups"], drafter, extra_blocks=0, max_model_len=96
    )
    for seed in range(2):
        engine.add_request(tokens(80, seed), max_tokens=1000)
    engine.run_until_done()
    assert [len(s.outputs) for s in engine.submissions.values()] == [16, 16]


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_a_hit_that_keeps_its_last_block_is_found(manager_cls: Any, name: str) -> None:
    """Tests the oracle: a read of KV that depends on another request's next token is found."""

    def keeps_last_block(**kwargs: Any) -> Any:
        return manager_cls(**(kwargs | {"use_eagle": False}))

    engine = make_engine(keeps_last_block, MODELS["one group for both"], name)
    engine.add_request(tokens(64) + tokens(30, seed=1))
    engine.run_until_done()
    engine.add_request(tokens(64) + tokens(30, seed=2))
    with pytest.raises(ReadFault, match=r"hits 64 tokens .* nobody has computed the block"):
        engine.run_until_done()


def test_a_window_without_the_tokens_that_are_read_again_is_found(manager_cls: Any) -> None:
    """Tests the oracle: a chain of modules starts reading before the computed tokens."""

    def retains_nothing(kv_cache_config: Any, **kwargs: Any) -> Any:
        config = copy.deepcopy(kv_cache_config)
        for group in config.kv_cache_groups:
            object.__setattr__(group.kv_cache_spec, "extra_retained_tokens", 0)
        return manager_cls(kv_cache_config=config, **kwargs)

    engine = make_engine(retains_nothing, (sliding(33, 8, 2, draft=True),), "mtp")
    engine.add_request(tokens(60), max_tokens=100)
    with pytest.raises(InFlightFault, match="the manager holds"):
        engine.run_until_done()


def test_the_types_of_a_draft_group() -> None:
    """A draft group joins the type with its spec. Then the whole type drops the block."""
    engine = make_engine(HybridManager, MODELS["a full-attention group"], "eagle", flag_drafts=True)
    kinds = [
        (t.name, t.num_groups, t.is_eagle)
        for t in cast(HybridManager, engine.manager).attention_types
    ]
    assert kinds == [("sliding_window 40", 5, False), ("full_attention", 2, True)]
    engine = make_engine(HybridManager, MODELS["a full-attention type"], "eagle", flag_drafts=True)
    kinds = [
        (t.name, t.num_groups, t.is_eagle)
        for t in cast(HybridManager, engine.manager).attention_types
    ]
    assert kinds == [
        ("sliding_window 40", 5, False),
        ("full_attention", 1, False),
        ("full_attention", 1, True),
    ]
