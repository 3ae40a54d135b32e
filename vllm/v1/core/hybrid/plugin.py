# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: makes base's scheduler build its KV cache manager through our factory.

vLLM loads the entry point in every process. Four names of base are replaced, and
`deactivate` puts them back:

- ``KVCacheManager`` in the scheduler's module, by `factory.create_kv_cache_manager`;
- ``Scheduler.__init__``, by a wrapper that lets the factory see the engine's configuration;
- ``EngineArgs.create_engine_config``, by a wrapper that makes a bad option an error before a
  model is loaded;
- ``get_request_block_hasher`` in base's utilities, by one whose hashers run in native code.

Models that base no longer has are added to its registry (`models`).

The fork is on unless ``VLLM_HYBRID_KV`` is 0. On or off, base's check of environment variables
is told of that name.
"""

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

SUPPORTED_BASE_VERSIONS = ("0.32.0",)
SWITCH = "VLLM_HYBRID_KV"
ENGINE_CORE = "vllm.v1.engine.core"

# What was replaced: (owner, name, base's value, ours).
_replaced: list[tuple[Any, str, Any, Any]] = []
_active = False
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

    if not is_supported(__version__):
        return (
            f"vLLM {__version__} has not been tested with it; tested: "
            f"{', '.join(SUPPORTED_BASE_VERSIONS)}"
        )
    try:
        import vllm.v1.core.hybrid._core  # noqa: F401
    except ImportError as error:
        return f"its native core cannot be loaded ({error}); reinstall vllm-hybrid-kv"

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import scheduler

    if not is_active() and scheduler.KVCacheManager is not KVCacheManager:
        return "another plugin has replaced the scheduler's KVCacheManager"
    return None


def is_supported(base_version: str) -> bool:
    """Whether the fork was tested with a vLLM version; ``+cpu`` and the like do not matter."""
    return base_version.split("+")[0] in SUPPORTED_BASE_VERSIONS


def is_active() -> bool:
    """Whether schedulers built in this process use the factory."""
    return _active


def activate() -> None:
    """Entry point in vLLM's group ``vllm.general_plugins``. Many times has the effect of once.

    Raises:
        ValueError: for a bad value of ``VLLM_HYBRID_KV``.
    """
    global _active
    _announce_switch()
    if is_active() or not is_switched_on():
        return
    obstacle = find_obstacle()
    if obstacle is not None:
        _warn_once(obstacle)
        return

    # These cost nothing (0.1 s at most) where vLLM loads plugins: what they import
    # is already there or comes with the model.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.hybrid import models
    from vllm.v1.core.hybrid.factory import create_kv_cache_manager
    from vllm.v1.core.sched import scheduler

    models.register()
    _replace(scheduler, "KVCacheManager", create_kv_cache_manager)
    _replace(scheduler.Scheduler, "__init__", _with_engine(scheduler.Scheduler.__init__))
    _replace(
        EngineArgs, "create_engine_config", _with_checked_options(EngineArgs.create_engine_config)
    )
    _replace(
        kv_cache_utils,
        "get_request_block_hasher",
        _with_native_code(kv_cache_utils.get_request_block_hasher),
    )
    _active = True


def deactivate() -> None:
    """Put back everything of base that `activate` replaced, and take out what it added."""
    global _active
    _active = False
    from vllm.v1.core.hybrid import models

    models.unregister()
    while _replaced:
        owner, name, base, ours = _replaced.pop()
        # Somebody else may have replaced ours since; theirs is not ours to remove.
        _exchange(owner, name, ours, base)


def _replace(owner: Any, name: str, ours: Any) -> None:
    base = vars(owner)[name]
    _replaced.append((owner, name, base, ours))
    _exchange(owner, name, base, ours)


def _exchange(owner: Any, name: str, old: Any, new: Any) -> None:
    # The engine core has names of its own for what it imports. It is not imported for that:
    # that takes 0.3 s in every process, and later it finds ours by itself.
    for holder in (owner, sys.modules.get(ENGINE_CORE)):
        if holder is not None and vars(holder).get(name) is old:
            setattr(holder, name, new)


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


def _with_native_code(get_base_hasher: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_base_hasher)
    def get_request_block_hasher(hash_block_size: int, caching_hash_fn: Any) -> Any:
        base_hasher = get_base_hasher(hash_block_size, caching_hash_fn)
        try:
            from vllm.v1.core.hybrid.block_hasher import create_request_block_hasher

            return create_request_block_hasher(hash_block_size, caching_hash_fn, base_hasher)
        except Exception:
            logger.warning("Hybrid KV cache: base hashes the blocks", exc_info=True)
            return base_hasher

    return get_request_block_hasher


def _warn_once(obstacle: str) -> None:
    """Once for all processes of an engine: the others are children of the first."""
    global _warned
    if not _warned and multiprocessing.parent_process() is None:
        logger.warning("Hybrid KV cache: not active, because %s", obstacle)
    _warned = True


def _announce_switch() -> None:
    """Have base's check of environment variables know ours.

    Base takes each one that begins with ``VLLM_`` for its own, and warns of those that it
    does not know, or refuses to start (``--fail-on-environ-validation``).
    """
    from vllm.platforms.interface import Platform

    if any(owner is Platform for owner, *_ in _replaced):
        return
    validate = vars(Platform)["validate_environ"].__func__

    @functools.wraps(validate)
    def validate_environ(cls: type[Platform], hard_fail: bool) -> None:
        from vllm import envs

        # Only for this check: known variables are part of the key of compiled graphs.
        envs.environment_variables[SWITCH] = lambda: os.environ.get(SWITCH)
        try:
            validate(cls, hard_fail)
        finally:
            del envs.environment_variables[SWITCH]

    _replace(Platform, "validate_environ", classmethod(validate_environ))
