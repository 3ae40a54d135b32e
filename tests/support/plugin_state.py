# SPDX-License-Identifier: Apache-2.0
"""Leaves a process's vLLM as it was, whatever a test does with the plugin."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import vllm.plugins
from vllm.v1.core.hybrid import plamo2, plugin
from vllm.v1.core.hybrid.activation import Plugin
from vllm.v1.core.hybrid.block_hashing import plugin as hashing_plugin

#: All of the package's, in the order in which vLLM loads them.
PLUGINS = (plugin, hashing_plugin, plamo2)


@contextmanager
def plugin_state_restored() -> Iterator[None]:
    """Begins with no plugin active. Afterwards all are as before.

    Building ``EngineArgs`` is enough for vLLM to load all plugins, once a process.
    """
    were_active = [one for one in PLUGINS if one.is_active()]
    were_loaded = vllm.plugins.plugins_loaded
    deactivate_all()
    Plugin._warned.clear()
    try:
        yield
    finally:
        deactivate_all()
        vllm.plugins.plugins_loaded = were_loaded
        for one in were_active:
            one.activate()


def activate_all() -> None:
    """What vLLM does when it loads plugins."""
    for one in PLUGINS:
        one.activate()


def deactivate_all() -> None:
    for one in reversed(PLUGINS):
        one.deactivate()


@contextmanager
def collected_log() -> Iterator[list[logging.LogRecord]]:
    """The package's log records. vLLM's loggers do not pass them on to pytest's."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logger = logging.getLogger("vllm.v1.core.hybrid")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
