# SPDX-License-Identifier: Apache-2.0
"""What the plugins of this package share: the switch, the tested versions, reversible patches.

vLLM loads each entry point of its group ``vllm.general_plugins`` in every process. This package
has three: the KV cache manager (`plugin`), block hashing (`block_hashing.plugin`) and PLaMo 2
(`plamo2`). ``VLLM_PLUGINS`` can leave each one out, and ``VLLM_HYBRID_KV=0`` turns all of them off.
"""

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.logger import init_logger

logger = init_logger(__name__)

SUPPORTED_BASE_VERSIONS = ("0.32.0",)
SWITCH = "VLLM_HYBRID_KV"
ENGINE_CORE = "vllm.v1.engine.core"


def is_switched_on() -> bool:
    """Whether ``VLLM_HYBRID_KV`` is 1, or not set.

    Raises:
        ValueError: for a value other than 0 and 1.
    """
    value = os.environ.get(SWITCH, "1").strip()
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 (off) or 1 (on, the default), got {value!r}")
    return value == "1"


def is_supported(base_version: str) -> bool:
    """Whether the package was tested with a vLLM version. Suffixes such as ``+cpu`` are ignored."""
    return base_version.split("+")[0] in SUPPORTED_BASE_VERSIONS


def find_version_obstacle() -> str | None:
    """Why the package cannot activate on the installed vLLM, or None."""
    from vllm import __version__

    if is_supported(__version__):
        return None
    tested = ", ".join(SUPPORTED_BASE_VERSIONS)
    return f"vLLM {__version__} has not been tested with it; tested: {tested}"


def find_native_obstacle() -> str | None:
    """Why the native core cannot be used, or None."""
    try:
        import vllm.v1.core.hybrid._core  # noqa: F401
    except ImportError as error:
        return f"its native core cannot be loaded ({error}); reinstall vllm-hybrid-kv"
    return None


class Patches:
    """Replacements in base that can be undone."""

    def __init__(self) -> None:
        #: What undoes each change.
        self.undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Put ``ours`` under ``name`` in a module or class of base.

        Also replaces the engine core's own reference if that module is loaded. Importing it here
        would take 0.3 s in every process. A later import finds the replacement.
        """
        base = vars(owner)[name]

        def exchange(old: Any, new: Any) -> None:
            for holder in (owner, sys.modules.get(ENGINE_CORE)):
                # If someone else has replaced ours since then, theirs stays.
                if holder is not None and vars(holder).get(name) is old:
                    setattr(holder, name, new)

        exchange(base, ours)
        self.undo.append(lambda: exchange(ours, base))

    def restore(self) -> None:
        """Undo all replacements, the latest first, except those that were replaced again."""
        while self.undo:
            self.undo.pop()()


class Plugin:
    """A feature that changes base while it is active.

    Args:
        apply: Makes the changes.
        find_obstacle: Why the feature cannot activate in this installation, or None.
    """

    _active: ClassVar["set[Plugin]"] = set()
    _warned: ClassVar[set[str]] = set()
    _switch_patches = Patches()

    def __init__(
        self, apply: Callable[[Patches], None], find_obstacle: Callable[[], str | None]
    ) -> None:
        self._apply = apply
        self._find_obstacle = find_obstacle
        self._patches = Patches()

    def is_active(self) -> bool:
        """Whether the changes are in effect in this process."""
        return self in self._active

    def activate(self) -> None:
        """Entry point in vLLM's group ``vllm.general_plugins``. Idempotent.

        Raises:
            ValueError: for a bad value of ``VLLM_HYBRID_KV``.
        """
        self._register_switch()
        if self.is_active() or not is_switched_on():
            return
        obstacle = self.find_obstacle()
        if obstacle is not None:
            self._warn_once(obstacle)
            return
        self._apply(self._patches)
        self._active.add(self)

    def find_obstacle(self) -> str | None:
        """Why the plugin cannot activate in this installation, or None."""
        if self.is_active():
            return None
        return find_version_obstacle() or self._find_obstacle()

    def deactivate(self) -> None:
        """Undo `activate`."""
        self._active.discard(self)
        self._patches.restore()
        if not self._active:
            self._switch_patches.restore()

    def _warn_once(self, obstacle: str) -> None:
        """Log the reason, once and only in the main process."""
        if obstacle not in self._warned and multiprocessing.parent_process() is None:
            logger.warning("Hybrid KV cache: not active, because %s", obstacle)
        self._warned.add(obstacle)

    def _register_switch(self) -> None:
        """Register our variable with vLLM's environment check.

        The check treats every ``VLLM_`` variable as vLLM's own. It warns about unknown ones, or
        refuses to start (``--fail-on-environ-validation``).
        """
        from vllm.platforms.interface import Platform

        validate = vars(Platform)["validate_environ"].__func__
        if hasattr(validate, "knows_hybrid_kv"):
            return

        @functools.wraps(validate)
        def validate_environ(cls: type[Platform], hard_fail: bool) -> None:
            from vllm import envs

            # Only for this check: known variables are part of the key of compiled graphs.
            envs.environment_variables[SWITCH] = lambda: os.environ.get(SWITCH)
            try:
                validate(cls, hard_fail)
            finally:
                del envs.environment_variables[SWITCH]

        vars(validate_environ)["knows_hybrid_kv"] = True
        self._switch_patches.replace(Platform, "validate_environ", classmethod(validate_environ))
