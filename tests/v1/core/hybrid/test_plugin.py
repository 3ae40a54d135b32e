# SPDX-License-Identifier: Apache-2.0
"""Activation: what the plugin changes in base, when, and that it can be undone."""

import json
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import vllm
from support.plugin_state import collected_log, plugin_state_restored
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.hybrid import block_hasher, plugin
from vllm.v1.core.hybrid.factory import create_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import core


def state():
    """All attributes of base that the plugin replaces."""
    return [
        vars(scheduler)["KVCacheManager"],
        vars(scheduler.Scheduler)["__init__"],
        vars(EngineArgs)["create_engine_config"],
        vars(kv_cache_utils)["get_request_block_hasher"],
        vars(core)["get_request_block_hasher"],
        ModelRegistry.models.get("Plamo2ForCausalLM"),
        vars(Platform)["validate_environ"],
    ]


@pytest.fixture(autouse=True)
def base(monkeypatch):
    """The state of base, which must be the same after each test."""
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    with plugin_state_restored():
        before = state()
        assert before[0] is BaseKVCacheManager
        yield before
        plugin.deactivate()
        assert all(now is then for now, then in zip(state(), before, strict=True))


@pytest.fixture
def log():
    with collected_log() as records:
        yield records


# ---------------------------------------------------------------- in this process


def test_activation_makes_the_scheduler_use_the_factory(base):
    assert not plugin.is_active()
    plugin.activate()
    assert plugin.is_active()
    assert scheduler.KVCacheManager is create_kv_cache_manager
    assert all(now is not then for now, then in zip(state(), base, strict=True))


def test_activating_twice_is_activating_once(base):
    plugin.activate()
    once = state()
    plugin.activate()
    assert all(now is then for now, then in zip(state(), once, strict=True))
    plugin.deactivate()
    assert not plugin.is_active()
    assert all(now is then for now, then in zip(state(), base, strict=True))
    plugin.deactivate()


def test_it_can_be_activated_again():
    plugin.activate()
    plugin.deactivate()
    plugin.activate()
    assert scheduler.KVCacheManager is create_kv_cache_manager


class OtherManager(BaseKVCacheManager):
    """The manager of another plugin."""


def test_what_somebody_else_put_over_ours_stays():
    plugin.activate()
    scheduler.KVCacheManager = OtherManager
    try:
        plugin.deactivate()
        assert scheduler.KVCacheManager is OtherManager
    finally:
        scheduler.KVCacheManager = BaseKVCacheManager


@pytest.mark.parametrize("value", ["", "2", "off", "true", "yes", "00"])
def test_the_switch_takes_0_and_1_only(monkeypatch, value):
    monkeypatch.setenv(plugin.SWITCH, value)
    with pytest.raises(ValueError) as error:
        plugin.activate()
    assert str(error.value) == (
        f"VLLM_HYBRID_KV is {value!r}; accepted are 0 (off) and 1 (on, the default)"
    )
    assert scheduler.KVCacheManager is BaseKVCacheManager


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), (" 1 ", True)])
def test_the_switch(monkeypatch, log, value, on):
    monkeypatch.setenv(plugin.SWITCH, value)
    plugin.activate()
    assert plugin.is_active() == on
    assert log == []


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu129"])
def test_tested_versions(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.activate()
    assert plugin.is_active()


@pytest.mark.parametrize("version", ["0.31.9", "0.32.1", "0.32.0rc1", "0.32.0.dev3", "1.0", "dev"])
def test_a_version_that_was_not_tested_changes_nothing_and_warns_once(
    monkeypatch, base, log, version
):
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.activate()
    plugin.activate()
    assert not plugin.is_active()
    assert all(now is then for now, then in zip(state()[:-1], base[:-1], strict=True))
    (record,) = log
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"Hybrid KV cache: not active, because vLLM {version} has not been tested with it; "
        "tested: 0.32.0"
    )


def test_child_processes_do_not_repeat_the_warning(monkeypatch, log):
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    plugin.activate()
    assert not plugin.is_active()
    assert log == []


def test_without_the_native_core_it_warns_and_changes_nothing(monkeypatch, base, log):
    monkeypatch.setitem(sys.modules, "vllm.v1.core.hybrid._core", None)
    plugin.activate()
    assert not plugin.is_active()
    assert all(now is then for now, then in zip(state()[:-1], base[:-1], strict=True))
    (record,) = log
    assert "not active, because its native core cannot be loaded" in record.getMessage()
    assert "reinstall vllm-hybrid-kv" in record.getMessage()


def test_another_plugins_manager_is_left_alone(monkeypatch, log):
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "KVCacheManager", OtherManager)
        plugin.activate()
        assert scheduler.KVCacheManager is OtherManager
    assert not plugin.is_active()
    assert "another plugin has replaced the scheduler's KVCacheManager" in log[0].getMessage()


@pytest.mark.parametrize("args_class", [EngineArgs, AsyncEngineArgs])
def test_a_bad_option_ends_the_start_before_the_model_is_looked_at(args_class):
    plugin.activate()
    args = args_class("/no/such/model", additional_config={"hybrid_kv": {"enabled": "yes"}})
    with pytest.raises(ValueError, match=r"hybrid_kv\.enabled is 'yes'; accepted are true and"):
        args.create_engine_config()


def test_engine_configurations_are_otherwise_as_before(monkeypatch):
    calls, made = [], VllmConfig()

    def create_engine_config(self, usage_context=None, headless=False):
        calls.append((self, usage_context, headless))
        return made

    args = EngineArgs("/no/such/model", additional_config={"hybrid_kv": {"enabled": False}})
    plugin.deactivate()  # Building arguments has loaded vLLM's plugins.
    with monkeypatch.context() as patch:
        patch.setattr(EngineArgs, "create_engine_config", create_engine_config)
        plugin.activate()
        assert args.create_engine_config("context", headless=True) is made
        assert calls == [(args, "context", True)]
        plugin.deactivate()
        assert EngineArgs.create_engine_config is create_engine_config


@pytest.mark.parametrize("value", ["0", "1"])
def test_base_does_not_take_the_switch_for_a_mistake(monkeypatch, value):
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(plugin.SWITCH, value)
    known = dict(vllm.envs.environment_variables)
    with pytest.raises(ValueError, match="Unknown vLLM environment variable"):
        current_platform.validate_environ(True)
    plugin.activate()
    current_platform.validate_environ(True)
    assert vllm.envs.environment_variables == known
    monkeypatch.setenv("VLLM_HYBRID_KVS", "0")
    with pytest.raises(ValueError, match="Unknown vLLM environment variable detected: VLLM_H"):
        current_platform.validate_environ(True)


def test_an_engine_core_that_is_imported_later_hashes_natively_too(monkeypatch):
    base_factory = kv_cache_utils.get_request_block_hasher
    monkeypatch.delitem(sys.modules, plugin.ENGINE_CORE)
    plugin.activate()
    assert plugin.ENGINE_CORE not in sys.modules
    later = SimpleNamespace(get_request_block_hasher=kv_cache_utils.get_request_block_hasher)
    monkeypatch.setitem(sys.modules, plugin.ENGINE_CORE, later)
    assert later.get_request_block_hasher(16, sha256).__module__ == block_hasher.__name__
    plugin.deactivate()
    assert later.get_request_block_hasher is base_factory


def test_another_plugins_hasher_in_the_engine_core_is_left_alone(monkeypatch):
    def theirs(hash_block_size, caching_hash_fn):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(core, "get_request_block_hasher", theirs)
        plugin.activate()
        assert core.get_request_block_hasher is theirs
        plugin.deactivate()
        assert core.get_request_block_hasher is theirs


def test_base_hashes_where_a_native_hasher_cannot_be_made(monkeypatch, log):
    def fail(*args):
        raise RuntimeError("no hasher today")

    monkeypatch.setattr(block_hasher, "create_request_block_hasher", fail)
    plugin.activate()
    hasher = core.get_request_block_hasher(16, sha256)
    assert hasher.__module__ == kv_cache_utils.__name__
    (record,) = log
    assert record.levelname == "WARNING"
    assert record.getMessage() == "Hybrid KV cache: base hashes the blocks"
    assert "no hasher today" in str(record.exc_info[1])


# ---------------------------------------------------------------- in processes of their own

LOAD_AS_AN_ENGINE_DOES = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
early = "vllm.v1.engine.core" in sys.modules
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.core.hybrid import plugin
from vllm.v1.engine import core
print(json.dumps({
    "base": scheduler.KVCacheManager is KVCacheManager,
    "wrapped": [
        hasattr(f, "__wrapped__")
        for f in (
            scheduler.Scheduler.__init__,
            EngineArgs.create_engine_config,
            core.get_request_block_hasher,
        )
    ],
    "active": plugin.is_active(),
    "PLaMo 2": "Plamo2ForCausalLM" in ModelRegistry.get_supported_archs(),
    "model imported early": "vllm.model_executor.models.plamo2" in sys.modules,
    "engine core imported early": early,
}))
"""


def load_plugins(**environment: str) -> dict[str, object]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    result = subprocess.run(
        [sys.executable, "-c", LOAD_AS_AN_ENGINE_DOES],
        env=clean | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_vllm_finds_and_loads_the_plugin():
    assert load_plugins() == {
        "base": False,
        "wrapped": [True, True, True],
        "active": True,
        "PLaMo 2": True,
        "model imported early": False,
        "engine core imported early": False,
    }


@pytest.mark.parametrize("environment", [{"VLLM_HYBRID_KV": "0"}, {"VLLM_PLUGINS": "another"}])
def test_switched_off_base_is_base(environment):
    assert load_plugins(**environment) == {
        "base": True,
        "wrapped": [False, False, False],
        "active": False,
        "PLaMo 2": False,
        "model imported early": False,
        "engine core imported early": False,
    }


def test_importing_the_plugin_is_cheap():
    """vLLM imports it in every process, most of which never build a scheduler."""
    code = (
        "import sys, vllm.v1.core.hybrid.plugin\n"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('vllm.v1.core.')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = eval(result.stdout.splitlines()[-1])
    assert set(loaded) - {"torch"} == {"vllm.v1.core.hybrid", "vllm.v1.core.hybrid.plugin"}
