# SPDX-License-Identifier: Apache-2.0
"""When the plugin adds models to base's registry, and when it does not."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.plugin_state import plugin_state_restored
from tools import checkpoints
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_REGISTRY, get_config
from vllm.transformers_utils.configs.plamo2 import Plamo2Config
from vllm.v1.core.hybrid import activation, plamo2
from vllm.v1.core.hybrid.options import HybridKVOptions
from vllm.v1.core.hybrid.plamo2 import PLAMO2, PLAMO2_CONFIG


def registered() -> list[object]:
    # Base's registry resolves names of configurations when it is indexed, and not by get().
    return [ModelRegistry.models.get(PLAMO2), _CONFIG_REGISTRY.get(PLAMO2_CONFIG)]


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Base has no PLaMo 2, and has none again after each test."""
    monkeypatch.delenv(activation.SWITCH, raising=False)
    with plugin_state_restored():
        assert registered() == [None, None]
        yield
        plamo2.deactivate()
        assert registered() == [None, None]


def test_the_plugin_adds_plamo2_once() -> None:
    plamo2.activate()
    once = registered()
    assert None not in once
    plamo2.activate()
    assert all(now is then for now, then in zip(registered(), once, strict=True))


def test_switched_off_it_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(ModelRegistry.get_supported_archs()), set(_CONFIG_REGISTRY)
    monkeypatch.setenv(activation.SWITCH, "0")
    plamo2.activate()
    assert (set(ModelRegistry.get_supported_archs()), set(_CONFIG_REGISTRY)) == names


def test_a_registered_architecture_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(ModelRegistry.models, PLAMO2, (theirs := object()))
        plamo2.activate()
        assert registered() == [theirs, None]
        plamo2.deactivate()
        assert registered() == [theirs, None]


def test_a_registered_configuration_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Plamo2Config):
        pass

    with monkeypatch.context() as patch:
        patch.setitem(_CONFIG_REGISTRY, PLAMO2_CONFIG, Theirs)
        plamo2.activate()
        assert registered()[0] is not None
        assert registered()[1] is Theirs
        plamo2.deactivate()
        assert registered() == [None, Theirs]


def test_what_another_plugin_replaces_later_stays() -> None:
    plamo2.activate()
    theirs = copy.copy(ModelRegistry.models[PLAMO2])
    ModelRegistry.models[PLAMO2] = theirs
    try:
        plamo2.deactivate()
        assert registered()[0] is theirs
    finally:
        del ModelRegistry.models[PLAMO2]


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_a_published_configuration_is_read_without_remote_code(
    trust_remote_code: bool, tmp_path: Path
) -> None:
    """It names remote code, which does not exist here and must not be needed."""
    plamo2.activate()
    config = json.loads((checkpoints.tiny_plamo2() / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_plamo.Plamo2Config",
        "AutoModelForCausalLM": "modeling_plamo.Plamo2ForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = get_config(tmp_path, trust_remote_code=trust_remote_code)
    assert type(read) is Plamo2Config
    assert read.layers_block_type == ["mamba", "attention"] * 2


def test_base_finds_out_what_the_model_is() -> None:
    """Base inspects the file of the model in a separate process."""
    plamo2.activate()
    model = ModelConfig(str(checkpoints.tiny_plamo2()), dtype="float32")
    assert model.architecture == PLAMO2
    assert model.is_hybrid and model.has_inner_state and model.is_pp_supported
    assert model.get_head_size() == 32
    assert model.get_mamba_chunk_size() == 64
    assert model.max_model_len == 4096


def test_the_model_stays_where_base_manages_its_cache() -> None:
    """``enabled`` is an option of only the KV cache manager."""
    plamo2.activate()
    options = {"hybrid_kv": {"enabled": False}}
    args = EngineArgs(str(checkpoints.tiny_plamo2()), dtype="float32", additional_config=options)
    config = args.create_engine_config()
    assert HybridKVOptions.from_vllm_config(config).enabled is False
    assert config.model_config.architecture == PLAMO2
