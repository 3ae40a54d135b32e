# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: makes base's scheduler build its KV cache manager through our factory.

vLLM loads the entry point in every process. Two names of base are replaced, and
`deactivate` puts them back:

- ``KVCacheManager`` in the scheduler's module, by `factory.create_kv_cache_manager`;
- ``Scheduler.__init__``, by a wrapper that lets the factory see the engine's configuration.

A third, ``EngineArgs.create_engine_config``, is wrapped so that a bad option is an error
before a model is loaded.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

SUPPORTED_BASE_VERSIONS = ("0.32.0",)
SWITCH = "VLLM_HYBRID_KV"

# What was replaced: (owner, name, base's value, ours).
_replaced: list[tuple[Any, str, Any, Any]] = []
_warned = False


def is_switched_on() -> bool:
    """Whether ``VLLM_HYBRID_KV`` allows the fork; it does when it is not set.

    Raises:
        ValueError: for a value other than 0 and 1.
    """
    value = os.environ.get(SWITCH, "1").strip()
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {value!r}; accepted are 0 (off) and 1 (on, the default)")
    return value == "1"


def find_obstacle() -> str | None:
    """Why the plugin cannot activate in this installation, or None."""
    from vllm import __version__

    if __version__.split("+")[0] not in SUPPORTED_BASE_VERSIONS:
        return (
            f"vLLM {__version__} has not been tested with it; tested: "
            f"{', '.join(SUPPORTED_BASE_VERSIONS)}"
        )
    try:
        import vllm.v1.core.hybrid._core  # noqa: F401
    except ImportError as error:
        return f"its native core cannot be loaded ({error}); reinstall vllm-hybrid-kv"
    return None


def is_active() -> bool:
    """Whether schedulers built in this process use the factory."""
    return bool(_replaced)


def activate() -> None:
    """Entry point in vLLM's group ``vllm.general_plugins``. Once has the effect of many times.

    Raises:
        ValueError: for a bad value of ``VLLM_HYBRID_KV``.
    """
    global _warned
    if is_active() or not is_switched_on():
        return
    obstacle = find_obstacle()
    if obstacle is not None:
        if not _warned:
            logger.warning("Hybrid KV cache: not active, because %s", obstacle)
            _warned = True
        return

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.hybrid.factory import create_kv_cache_manager
    from vllm.v1.core.sched import scheduler

    _replace(scheduler, "KVCacheManager", create_kv_cache_manager)
    _replace(scheduler.Scheduler, "__init__", _with_engine(scheduler.Scheduler.__init__))
    _replace(
        EngineArgs, "create_engine_config", _with_checked_options(EngineArgs.create_engine_config)
    )


def deactivate() -> None:
    """Put back everything of base that `activate` replaced."""
    while _replaced:
        owner, name, base, ours = _replaced.pop()
        # Somebody else may have replaced ours since; theirs is not ours to remove.
        if getattr(owner, name) is ours:
            setattr(owner, name, base)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name), ours))
    setattr(owner, name, ours)


def _with_engine(init: Callable[..., None]) -> Callable[..., None]:
    from vllm.v1.core.hybrid.factory import current_engine

    @functools.wraps(init)
    def scheduler_init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        token = current_engine.set(vllm_config)
        try:
            init(self, vllm_config, *args, **kwargs)
        finally:
            current_engine.reset(token)

    return scheduler_init


def _with_checked_options(create: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.core.hybrid.options import HybridKVOptions

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        HybridKVOptions.from_additional_config(self.additional_config)
        return create(self, *args, **kwargs)

    return create_engine_config
