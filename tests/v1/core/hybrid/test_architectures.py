# SPDX-License-Identifier: Apache-2.0
"""Every hybrid architecture in base's registry: what its layers are, and that their KV is right.

Models of these architectures cannot all run on a CPU. Their KV cache specs can, through base's
scheduler.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from support.base_with_states import BaseWithStates
from support.kv_configs import AttentionKind, chunked, cross, full, mamba, mla, sliding
from support.oracle import OracleSettings
from support.oracle.workload import Add, Case, Run, random_operations, run_case
from tools.compatibility import facts
from tools.compatibility.architectures import CHECKPOINTS, all_architectures, examine
from tools.compatibility.page import PAGE, WITH_CONTENT, kinds_with_content, served_together
from vllm.v1.core.hybrid import KVCacheManager as HybridManager

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

SETTINGS = OracleSettings(
    async_scheduling=True, steps_in_flight=1, max_model_len=facts.MAX_MODEL_LEN, vocab_size=256
)


# ------------------------------------------------------------------- what the enumeration finds


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("Qwen2ForCausalLM", {"full"}),
        ("DeepseekV3ForCausalLM", {"full", "MLA"}),
        ("BertModel", set()),
        ("Gemma2ForCausalLM", {"full", "sliding"}),
        ("Gemma3ForConditionalGeneration", {"full", "sliding"}),
        ("Gemma3nForCausalLM", {"full", "sliding"}),
        ("GptOssForCausalLM", {"full", "sliding"}),
        # On the code of the library transformers, and one without windows there.
        ("Olmo3ForCausalLM", {"full", "MLA", "sliding"}),
        ("GPTNeoXForCausalLM", {"full", "MLA"}),
        ("Cohere2ForCausalLM", {"full", "sliding"}),
        ("Llama4ForConditionalGeneration", {"chunked", "full"}),
        ("JambaForCausalLM", {"full", "Mamba"}),
        ("Lfm2ForCausalLM", {"full", "Mamba"}),
        ("Qwen3NextForCausalLM", {"full", "Mamba"}),
        ("MambaForCausalLM", {"Mamba"}),
        ("GraniteMoeHybridForCausalLM", {"full", CHECKPOINTS}),
        ("FalconH1ForCausalLM", {"full", CHECKPOINTS}),
        ("Zamba2ForCausalLM", {"full", CHECKPOINTS}),
        # With code of their own for each platform.
        ("KimiLinearForCausalLM", {"MLA", "Mamba", CHECKPOINTS}),
        ("DeepseekV4ForCausalLM", {"MLA", "sliding MLA"}),
        ("InklingForCausalLM", {"full", "sliding"}),
        ("Dots3NoteForCausalLM", {"MLA", "sliding MLA"}),
        ("WhisperForConditionalGeneration", {"cross", "full"}),
        # Not base's, but ours.
        ("Plamo2ForCausalLM", {"full", "Mamba", "sliding"}),
    ],
)
def test_kinds(name: str, kinds: set[str]) -> None:
    assert examine(name).kinds == kinds


def test_language_models_that_a_checkpoint_names() -> None:
    assert examine("LlavaNextForConditionalGeneration").wraps_any_model
    assert not examine("Gemma3ForConditionalGeneration").wraps_any_model


def test_every_kind_is_known_to_the_tables() -> None:
    kinds = {kind for architecture in all_architectures() for kind in architecture.kinds}
    assert kinds >= {"full", "MLA", "sliding", "sliding MLA", "chunked", "Mamba", "cross", "sink"}
    for kind in kinds:
        assert facts.facts_of_kinds({kind}).kv_cache_config.kv_cache_groups


# ------------------------------------------------------------------------ what requests read


@dataclass(frozen=True, repr=False)
class SlidingMLA(AttentionKind):
    def spec(self) -> Any:
        spec: Any = facts.spec_of("sliding MLA")
        return replace(spec, sliding_window=self.window)


def states(caching: bool, checkpoint_alignment: int | None = None) -> AttentionKind:
    size, mode = (16, "align") if caching else (facts.MAX_MODEL_LEN, "none")
    return mamba(size, 3, mode=mode, checkpoint_alignment=checkpoint_alignment)


KINDS: dict[str, Callable[[bool], Any]] = {
    "full": lambda _: full(16),
    "MLA": lambda _: mla(16),
    "sliding": lambda _: sliding(40, 16, 3),
    "sliding MLA": lambda _: SlidingMLA("sliding", 16, 2, window=33),
    "chunked": lambda _: chunked(48, 16, 3),
    "Mamba": states,
    CHECKPOINTS: lambda caching: states(caching, checkpoint_alignment=1),
    "cross": lambda _: cross(16, 2),
}


def test_content_has_a_model_of_what_the_tables_say_it_has() -> None:
    assert KINDS.keys() == WITH_CONTENT
    for kind, make in KINDS.items():
        assert type(make(True).spec()) is type(facts.spec_of(kind))


@pytest.mark.parametrize("manager_cls", [BaseWithStates, HybridManager], ids=["base", "hybrid"])
@pytest.mark.parametrize(
    "kinds", kinds_with_content(PAGE.read_text()), ids=lambda kinds: ", ".join(sorted(kinds))
)
def test_content(kinds: frozenset[str], manager_cls: Any) -> None:
    """What the hybrid manager serves of these kinds, with prefix caching and without."""
    num_played = 0
    for caching in (True, False):
        for served in served_together(kinds, caching):
            # Base turns prefix caching off for encoder-decoder models.
            if not (caching and "cross" in served):
                play(manager_cls, served, caching)
                num_played += 1
    assert num_played > 0


def play(manager_cls: Any, kinds: frozenset[str], caching: bool) -> None:
    """Prompts and their continuations in a roomy pool, and a random mix in a small one."""
    model = tuple(KINDS[kind](caching) for kind in sorted(kinds))
    settings = replace(SETTINGS, enable_prefix_caching=caching)
    encoder = 60 if "cross" in kinds else 0
    if encoder:  # Prompts are not cut into chunks.
        settings = replace(settings, max_num_batched_tokens=settings.max_model_len)
    operations: list[Any] = [Add(tail=90, max_tokens=20, encoder=encoder), Run(8)]
    for shared in (90, 64, 33):
        again = Add(tail=40, parent=0, shared=shared, max_tokens=20, encoder=encoder)
        operations += [again, Run(4)]
    for i in range(4):
        operations.append(Add(parent=i, shared=500, follow=True, max_tokens=9, encoder=encoder))
    engine = run_case(manager_cls, Case(model, tuple(operations), settings, 4000, layout=1))
    assert (engine.tokens_from_cache >= 64) == caching

    rng = random.Random(f"{model}")
    mix = [
        replace(operation, encoder=encoder) if isinstance(operation, Add) else operation
        for operation in random_operations(rng, 30, settings.max_model_len, not encoder)
    ]
    num_groups = sum(kind.num_groups for kind in model)
    engine = run_case(manager_cls, Case(model, tuple(mix), settings, 2 * num_groups))
    assert engine.reads["kv"] + engine.reads["states"] > 0
