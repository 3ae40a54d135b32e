# SPDX-License-Identifier: Apache-2.0
"""Activation: what the plugin changes in base, when it does so, and how this is undone."""

import json
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import vllm
from support.kv_configs import KVSetup, full, sliding
from support.plugin_state import (
    activate_all,
    collected_log,
    deactivate_all,
    plugin_state_restored,
)
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.hybrid import KVCacheManager, activation, plamo2, plugin
from vllm.v1.core.hybrid.block_hashing import block_hasher
from vllm.v1.core.hybrid.block_hashing import plugin as hashing_plugin
from vllm.v1.core.hybrid.factory import EitherKVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import core
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.serial_utils import MsgpackDecoder


def state():
    """All attributes of base that the plugin replaces."""
    return [
        vars(scheduler)["KVCacheManager"],
        vars(scheduler.Scheduler)["__init__"],
        vars(EngineArgs)["create_engine_config"],
        vars(scheduler)["SchedulerStats"],
        vars(scheduler.Scheduler)["make_stats"],
        vars(MsgpackDecoder)["__init__"],
        vars(PrometheusStatLogger)["__init__"],
        vars(PrometheusStatLogger)["record"],
        vars(kv_cache_utils)["get_request_block_hasher"],
        vars(core)["get_request_block_hasher"],
        ModelRegistry.models.get("Plamo2ForCausalLM"),
        vars(Platform)["validate_environ"],
    ]


@pytest.fixture(autouse=True)
def base(monkeypatch):
    """The state of base, which must be the same after each test."""
    monkeypatch.delenv(activation.SWITCH, raising=False)
    with plugin_state_restored():
        before = state()
        assert before[0] is BaseKVCacheManager
        yield before
        deactivate_all()
        assert all(now is then for now, then in zip(state(), before, strict=True))


@pytest.fixture
def log():
    with collected_log() as records:
        yield records


# ---------------------------------------------------------------- in this process


def test_activation_makes_the_scheduler_use_the_factory(base):
    assert not plugin.is_active()
    activate_all()
    assert plugin.is_active()
    assert scheduler.KVCacheManager is EitherKVCacheManager
    assert all(now is not then for now, then in zip(state(), base, strict=True))


def test_activation_is_idempotent(base):
    activate_all()
    once = state()
    activate_all()
    assert all(now is then for now, then in zip(state(), once, strict=True))
    deactivate_all()
    assert not plugin.is_active()
    assert all(now is then for now, then in zip(state(), base, strict=True))
    deactivate_all()


def test_it_can_be_activated_again():
    activate_all()
    deactivate_all()
    activate_all()
    assert scheduler.KVCacheManager is EitherKVCacheManager


class OtherManager(BaseKVCacheManager):
    """The manager of another plugin."""


def test_a_plugin_can_subclass_what_the_scheduler_has(log):
    """The subclass is base's manager with its changes, and the log says so."""
    plugin.activate()
    setup = KVSetup((full(16), sliding(33, 16, 2)), 50)

    class Theirs(scheduler.KVCacheManager):
        def get_num_common_prefix_blocks(self, running_request_id):
            return [7]

    theirs = setup.build(Theirs)
    assert isinstance(theirs, BaseKVCacheManager)
    assert theirs.get_num_common_prefix_blocks("r") == [7]
    (record,) = log
    assert record.getMessage() == (
        "Hybrid KV cache: using base vLLM's manager, because "
        f"{Theirs.__module__}.{Theirs.__qualname__} subclasses it"
    )

    ours, bases = setup.build(scheduler.KVCacheManager), setup.build(BaseKVCacheManager)
    assert type(ours) is KVCacheManager
    for instance in (theirs, ours, bases):
        assert isinstance(instance, scheduler.KVCacheManager)
        assert issubclass(type(instance), scheduler.KVCacheManager)
    assert not isinstance(ours, Theirs) and not isinstance(bases, Theirs)
    assert not isinstance(object(), scheduler.KVCacheManager)


def test_what_another_plugin_replaces_later_stays():
    activate_all()
    scheduler.KVCacheManager = OtherManager
    try:
        deactivate_all()
        assert scheduler.KVCacheManager is OtherManager
    finally:
        scheduler.KVCacheManager = BaseKVCacheManager


@pytest.mark.parametrize("value", ["", "2", "off", "true", "yes", "00"])
def test_the_switch_takes_0_and_1_only(monkeypatch, value):
    monkeypatch.setenv(activation.SWITCH, value)
    with pytest.raises(ValueError) as error:
        activate_all()
    assert str(error.value) == (
        f"VLLM_HYBRID_KV must be 0 (off) or 1 (on, the default), got {value!r}"
    )
    assert scheduler.KVCacheManager is BaseKVCacheManager


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), (" 1 ", True)])
def test_the_switch(monkeypatch, log, value, on):
    monkeypatch.setenv(activation.SWITCH, value)
    activate_all()
    assert plugin.is_active() == on
    assert log == []


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu129"])
def test_tested_versions(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    activate_all()
    assert plugin.is_active()


@pytest.mark.parametrize("version", ["0.31.9", "0.32.1", "0.32.0rc1", "0.32.0.dev3", "1.0", "dev"])
def test_a_version_that_was_not_tested_changes_nothing_and_warns_once(
    monkeypatch, base, log, version
):
    monkeypatch.setattr(vllm, "__version__", version)
    activate_all()
    activate_all()
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
    activate_all()
    assert not plugin.is_active()
    assert log == []


def test_without_the_native_core_it_warns_and_changes_nothing(monkeypatch, base, log):
    monkeypatch.setitem(sys.modules, "vllm.v1.core.hybrid._core", None)
    plugin.activate()
    hashing_plugin.activate()
    assert not plugin.is_active() and not hashing_plugin.is_active()
    assert all(now is then for now, then in zip(state()[:-1], base[:-1], strict=True))
    (record,) = log
    assert "not active, because its native core cannot be loaded" in record.getMessage()
    assert "reinstall vllm-hybrid-kv" in record.getMessage()


def test_plamo2_needs_no_native_core(monkeypatch, log):
    monkeypatch.setitem(sys.modules, "vllm.v1.core.hybrid._core", None)
    plamo2.activate()
    assert plamo2.is_active() and "Plamo2ForCausalLM" in ModelRegistry.models
    assert log == []


def test_another_plugins_manager_is_left_alone(monkeypatch, log):
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "KVCacheManager", OtherManager)
        activate_all()
        assert scheduler.KVCacheManager is OtherManager
    assert not plugin.is_active()
    assert "another plugin has replaced the scheduler's KVCacheManager" in log[0].getMessage()


@pytest.mark.parametrize("args_class", [EngineArgs, AsyncEngineArgs])
def test_a_bad_option_is_refused_before_the_model_is_examined(args_class):
    activate_all()
    args = args_class("/no/such/model", additional_config={"hybrid_kv": {"enabled": "yes"}})
    with pytest.raises(ValueError, match=r"hybrid_kv\.enabled must be true or false, got 'yes'"):
        args.create_engine_config()


def test_engine_configurations_are_otherwise_as_before(monkeypatch):
    calls, made = [], VllmConfig()

    def create_engine_config(self, usage_context=None, headless=False):
        calls.append((self, usage_context, headless))
        return made

    args = EngineArgs("/no/such/model", additional_config={"hybrid_kv": {"enabled": False}})
    deactivate_all()  # Creating the arguments has loaded vLLM's plugins.
    with monkeypatch.context() as patch:
        patch.setattr(EngineArgs, "create_engine_config", create_engine_config)
        activate_all()
        assert args.create_engine_config("context", headless=True) is made
        assert calls == [(args, "context", True)]
        deactivate_all()
        assert EngineArgs.create_engine_config is create_engine_config


@pytest.mark.parametrize("value", ["0", "1"])
def test_base_accepts_the_switch_in_its_environment_check(monkeypatch, value):
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(activation.SWITCH, value)
    known = dict(vllm.envs.environment_variables)
    with pytest.raises(ValueError, match="Unknown vLLM environment variable"):
        current_platform.validate_environ(True)
    activate_all()
    current_platform.validate_environ(True)
    assert vllm.envs.environment_variables == known
    monkeypatch.setenv("VLLM_HYBRID_KVS", "0")
    with pytest.raises(ValueError, match="Unknown vLLM environment variable detected: VLLM_H"):
        current_platform.validate_environ(True)


def test_an_engine_core_that_is_imported_later_hashes_natively_too(monkeypatch):
    base_factory = kv_cache_utils.get_request_block_hasher
    monkeypatch.delitem(sys.modules, activation.ENGINE_CORE)
    activate_all()
    assert activation.ENGINE_CORE not in sys.modules
    later = SimpleNamespace(get_request_block_hasher=kv_cache_utils.get_request_block_hasher)
    monkeypatch.setitem(sys.modules, activation.ENGINE_CORE, later)
    assert later.get_request_block_hasher(16, sha256).__module__ == block_hasher.__name__
    deactivate_all()
    assert later.get_request_block_hasher is base_factory


def test_another_plugins_hasher_in_the_engine_core_is_left_alone(monkeypatch):
    def theirs(hash_block_size, caching_hash_fn):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(core, "get_request_block_hasher", theirs)
        activate_all()
        assert core.get_request_block_hasher is theirs
        deactivate_all()
        assert core.get_request_block_hasher is theirs


def test_base_hashes_where_a_native_hasher_cannot_be_made(monkeypatch, log):
    def fail(*args):
        raise RuntimeError("no hasher today")

    monkeypatch.setattr(block_hasher, "create_request_block_hasher", fail)
    activate_all()
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
def test_switched_off_the_plugin_changes_nothing(environment):
    assert load_plugins(**environment) == {
        "base": True,
        "wrapped": [False, False, False],
        "active": False,
        "PLaMo 2": False,
        "model imported early": False,
        "engine core imported early": False,
    }


@pytest.mark.parametrize(
    ("names", "manager", "hashing", "model"),
    [
        ("hybrid_kv", True, False, False),
        ("hybrid_kv_hashing", False, True, False),
        ("hybrid_kv_plamo2", False, False, True),
        ("hybrid_kv,hybrid_kv_plamo2", True, False, True),
    ],
)
def test_each_feature_can_be_left_out_on_its_own(names, manager, hashing, model):
    assert load_plugins(VLLM_PLUGINS=names) == {
        "base": not manager,
        "wrapped": [manager, manager, hashing],
        "active": manager,
        "PLaMo 2": model,
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
    assert set(loaded) - {"torch"} == {
        "vllm.v1.core.hybrid",
        "vllm.v1.core.hybrid.activation",
        "vllm.v1.core.hybrid.plugin",
    }
