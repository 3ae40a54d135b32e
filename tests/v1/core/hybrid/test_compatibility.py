# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md agrees with the factory, and the tests that it names exist."""

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.auto import modeling_auto

from tools.checkpoints import CHECKPOINTS, tiny_models
from tools.compatibility.architectures import all_architectures, registered
from tools.compatibility.facts import EngineFacts, facts_of_kinds
from tools.compatibility.features import FEATURES, Feature
from tools.compatibility.page import (
    DIFFUSION,
    ENGINE_TESTS,
    PAGE,
    fill,
    managed_by,
)
from vllm.v1.core.hybrid import factory
from vllm.v1.core.hybrid.attention_type import get_attention_types

TESTS = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    """If it is not, run ``python -m tools.compatibility``."""
    page = PAGE.read_text()
    assert fill(page) == page


def test_a_page_without_a_part_is_refused() -> None:
    page = PAGE.read_text().replace("<!-- generated: counts -->", "")
    with pytest.raises(ValueError, match="the parts of the page must be"):
        fill(page)


def test_the_tables_list_all_features_and_hybrid_architectures() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert [f.name for f in FEATURES] == [row for row in rows if row in {f.name for f in FEATURES}]
    listed = {row.strip("`") for row in rows} & registered().keys()
    assert listed == {a.name for a in all_architectures() if a.is_hybrid}
    assert len(listed) > 100


# ------------------------------------------------------------------------- tests that are named


@cache
def functions(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_named_tests_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text()))
    assert len(named) > 20
    for path, function in named:
        assert function in functions(TESTS / path), f"{path} has no {function}"


def test_every_tiny_checkpoint_has_the_test_that_runs_it() -> None:
    assert ENGINE_TESTS.keys() == {name for name in CHECKPOINTS if name.startswith("tiny-")}
    shared = (TESTS / "v1/e2e/conftest.py").read_text()
    for name, (_, test) in ENGINE_TESTS.items():
        source = (TESTS.parent / test.partition("::")[0]).read_text()
        assert f"checkpoints.{name.replace('-', '_')}" in source + shared


def test_architectures_of_the_tiny_checkpoints() -> None:
    """The architectures in the page are those in the saved ``config.json``."""
    model_types = {m.name: m.model_type for m in vars(tiny_models).values() if is_tiny(m)}
    assert ENGINE_TESTS.keys() - model_types.keys() == {"tiny-plamo2"}
    for name, model_type in model_types.items():
        assert ENGINE_TESTS[name][0] in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type),
            modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(model_type),
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type),
        )


def is_tiny(value: Any) -> bool:
    return isinstance(value, tiny_models.TinyModel)


# --------------------------------------------------------------------- what the factory builds


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the name of the manager that the factory builds; stand-ins replace both managers."""

    def manager(name: str) -> Any:
        def build(**kwargs: Any) -> SimpleNamespace:
            types = get_attention_types(kwargs["kv_cache_config"])
            return SimpleNamespace(name=name, attention_types=types)

        return build

    monkeypatch.setattr(factory, "KVCacheManager", manager("hybrid"))
    monkeypatch.setattr(factory, "BaseKVCacheManager", manager("base"))

    def decide(facts: EngineFacts) -> str:
        arguments = {f.name: getattr(facts, f.name) for f in fields(facts)}
        token = factory.current_engine.set(arguments.pop("vllm_config"))
        try:
            manager = factory.create_kv_cache_manager(
                max_model_len=256,
                scheduler_block_size=16,
                max_in_flight_tokens=64,
                **arguments,
            )
            return manager.name  # type: ignore[union-attr]
        finally:
            factory.current_engine.reset(token)

    return decide


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f"{f.section}: {f.name}")
def test_the_factory_decides_as_the_table_says(feature: Feature, built: Any) -> None:
    section = PAGE.read_text().partition(f"### {feature.section}\n")[2].partition("###")[0]
    [said] = re.findall(rf"^\| {re.escape(feature.name)} \| (\w+)", section, flags=re.MULTILINE)
    assert built(feature.facts()) == said


def test_the_factory_decides_as_the_table_of_architectures_says(built: Any) -> None:
    checked = set()
    for architecture in all_architectures():
        is_diffusion = architecture.name in DIFFUSION
        for caching in (True, False):
            question = (architecture.kinds, caching, is_diffusion)
            if architecture.is_hybrid and question not in checked:
                checked.add(question)
                said = managed_by(architecture, caching)
                assert said.startswith(built(facts_of_kinds(*question))), architecture
    assert len(checked) > 20
