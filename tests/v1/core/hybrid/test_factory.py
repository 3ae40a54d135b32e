# SPDX-License-Identifier: Apache-2.0
"""The factory: which manager it builds, and the one line it logs about it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.kv_configs import KVSetup, full, sliding
from support.plugin_state import collected_log, plugin_state_restored
from vllm.config import VllmConfig
from vllm.v1.core.hybrid import KVCacheManager, factory, plugin
from vllm.v1.core.hybrid.factory import create_kv_cache_manager, current_engine
from vllm.v1.core.hybrid.metrics.stats import take_stats
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.core.sched import scheduler

GEMMA = KVSetup((full(128), sliding(512, 128, 5)), num_blocks=100)


@pytest.fixture
def log():
    with collected_log() as records:
        yield records


@pytest.fixture
def engine():
    """Sets the options of the engine whose scheduler is being built."""
    token = current_engine.set(None)

    def configure(**options):
        current_engine.set(VllmConfig(additional_config={"hybrid_kv": options}))

    yield configure
    current_engine.reset(token)


def only_line(log: list[logging.LogRecord]) -> str:
    (record,) = log
    assert record.levelno == logging.INFO
    return record.getMessage()


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        (
            GEMMA.kinds,
            "2 managers for 6 KV cache groups: full_attention (1 group, block size 128); "
            "sliding_window 512 (5 groups, block size 128)",
        ),
        ((full(16),), "1 manager for 1 KV cache group: full_attention (1 group, block size 16)"),
        ((), "no KV cache groups"),
    ],
)
def test_active(log, kinds, line):
    manager = replace(GEMMA, kinds=kinds).build(create_kv_cache_manager)
    assert type(manager) is KVCacheManager
    assert only_line(log) == f"Hybrid KV cache: active, {line}"


def test_base_serves_what_is_not_covered(log):
    manager = GEMMA.build(create_kv_cache_manager, enable_kv_cache_events=True, hash_block_size=8)
    assert type(manager) is BaseKVCacheManager
    assert only_line(log) == (
        "Hybrid KV cache: using base vLLM's manager, because publishing KV cache events for parts "
        "of blocks is not covered yet"
    )


def test_the_engines_configuration_counts_too(log, engine):
    engine()
    current_engine.get().parallel_config.decode_context_parallel_size = 2
    assert type(GEMMA.build(create_kv_cache_manager)) is BaseKVCacheManager
    assert "decode context parallelism (world size 2) is not covered yet" in only_line(log)


def test_off_for_an_engine(log, engine):
    engine(enabled=False, on_uncovered="error")
    manager = GEMMA.build(create_kv_cache_manager)
    assert type(manager) is BaseKVCacheManager
    reason = "hybrid_kv.enabled is false in additional_config"
    assert only_line(log).endswith(f"because {reason}")
    # Each report says so, because a front end may start later.
    assert [take_stats(manager).reason_for_base for _ in range(2)] == [reason] * 2


def test_an_uncovered_feature_can_be_made_an_error(log, engine):
    engine(on_uncovered="error")
    assert type(GEMMA.build(create_kv_cache_manager)) is KVCacheManager
    log.clear()
    with pytest.raises(ValueError) as error:
        GEMMA.build(create_kv_cache_manager, dcp_world_size=2)
    assert str(error.value) == (
        "additional_config: hybrid_kv.on_uncovered is 'error', and the hybrid manager does not "
        "cover decode context parallelism (world size 2) yet; with 'fallback', base vLLM's manager "
        "serves it"
    )
    assert log == []


@pytest.mark.parametrize("check", [False, True])
def test_integrity_checks_are_an_option(monkeypatch, engine, check):
    engine(check_integrity=check)
    manager = GEMMA.build(create_kv_cache_manager)
    calls = []
    monkeypatch.setattr(manager, "check_integrity", lambda: calls.append(1))
    manager.new_step_starts()
    assert len(calls) == check


def test_arguments_may_be_positional(log):
    config = GEMMA.kv_cache_config()
    assert type(create_kv_cache_manager(config, 512, 128, 128)) is KVCacheManager
    # Argument 7 is use_eagle, and argument 10 is enable_kv_cache_events.
    positional = create_kv_cache_manager(config, 512, 128, 128, 64, True, True)
    assert type(positional) is KVCacheManager and positional.use_eagle
    rest = (False, 0, False, True)
    positional = create_kv_cache_manager(config, 512, 128, 64, 64, True, *rest)
    assert type(positional) is BaseKVCacheManager


def test_arguments_that_base_does_not_take_are_an_error():
    with pytest.raises(TypeError):
        GEMMA.build(create_kv_cache_manager, unheard_of=1)


def test_an_unexpected_error_in_our_manager_is_not_hidden(monkeypatch, log):
    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(factory, "KVCacheManager", broken)
    with pytest.raises(RuntimeError, match="broken"):
        GEMMA.build(create_kv_cache_manager)
    assert log == []


def test_the_scheduler_tells_the_factory_its_engine(monkeypatch):
    """Tests the wrapper around Scheduler.__init__ with all ways to pass the configuration."""
    seen = []

    def init(self, vllm_config, kv_cache_config=None, **kwargs):
        seen.append((current_engine.get(), vllm_config, kv_cache_config))
        if kv_cache_config == "fail":
            raise ValueError("no")

    monkeypatch.setattr(scheduler.Scheduler, "__init__", init)
    with plugin_state_restored():
        plugin.activate()
        first, second = SimpleNamespace(), SimpleNamespace()
        build: Callable[..., object] = scheduler.Scheduler
        build(first, "positional")
        build(vllm_config=second, kv_cache_config="keyword")
        with pytest.raises(ValueError):
            build(first, "fail")
    assert seen == [
        (first, first, "positional"),
        (second, second, "keyword"),
        (first, first, "fail"),
    ]
    assert current_engine.get() is None
