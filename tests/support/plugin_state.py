# SPDX-License-Identifier: Apache-2.0
"""Leaves a process's vLLM as it was, whatever a test does with the plugin."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import vllm.plugins
from vllm.v1.core.hybrid import plugin


@contextmanager
def plugin_state_restored() -> Iterator[None]:
    """Begins with the plugin not active; afterwards it is as it was before.

    Building ``EngineArgs`` is enough for vLLM to load all plugins, once a process.
    """
    was_active, were_loaded = plugin.is_active(), vllm.plugins.plugins_loaded
    plugin.deactivate()
    plugin._warned = False
    try:
        yield
    finally:
        plugin.deactivate()
        vllm.plugins.plugins_loaded = were_loaded
        if was_active:
            plugin.activate()


@contextmanager
def collected_log(level: int = logging.INFO) -> Iterator[list[logging.LogRecord]]:
    """The package's log records. vLLM's loggers do not pass them on to pytest's."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logger = logging.getLogger("vllm.v1.core.hybrid")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
