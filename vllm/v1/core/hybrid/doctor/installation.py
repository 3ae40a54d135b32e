# SPDX-License-Identifier: Apache-2.0
"""What is installed here, and whether the plugin activates in it."""

import os
from dataclasses import dataclass
from importlib.metadata import distributions, entry_points

from vllm.v1.core.hybrid import activation, plugin
from vllm_hybrid_kv import BASE_DISTRIBUTIONS

_ENTRY_POINT = "hybrid_kv"


@dataclass(frozen=True)
class Check:
    """A condition for the hybrid manager to activate, and what was found."""

    name: str
    ok: bool
    found: str


def examine_installation() -> list[Check]:
    """All checks; the last one loads vLLM's plugins as an engine would."""
    return [
        _base_version(),
        _native_core(),
        _entry_point(),
        _switch(),
        _plugin_filter(),
        _activation(),
    ]


def _base_version() -> Check:
    from vllm import __version__

    supported = activation.is_supported(__version__)
    installed = [name for name in BASE_DISTRIBUTIONS if any(distributions(name=name))]
    name = installed[0] if installed else "vllm, not from a wheel,"
    tested = ", ".join(activation.SUPPORTED_BASE_VERSIONS)
    note = "supported" if supported else f"tested: {tested}"
    return Check("base vLLM", supported, f"{name} {__version__} ({note})")


def _native_core() -> Check:
    obstacle = activation.find_native_obstacle()
    return Check("native core", obstacle is None, obstacle or "built")


def _entry_point() -> Check:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    found = entry_points(group=DEFAULT_PLUGINS_GROUP, name=_ENTRY_POINT)
    if not found:
        return Check(
            "plugin", False, f"no entry point {_ENTRY_POINT}; install vllm-hybrid-kv with pip"
        )
    distribution = next(iter(found)).dist
    name = "" if distribution is None else f" of {distribution.name} {distribution.version}"
    return Check("plugin", True, f"{_ENTRY_POINT}{name}")


def _switch() -> Check:
    try:
        on = activation.is_switched_on()
    except ValueError as error:
        return Check(activation.SWITCH, False, str(error))
    value = os.environ.get(activation.SWITCH, "not set")
    return Check(activation.SWITCH, on, f"{value} ({'on' if on else 'off'})")


def _plugin_filter() -> Check:
    from vllm import envs

    names = envs.VLLM_PLUGINS
    if names is None:
        return Check("VLLM_PLUGINS", True, "not set (all plugins)")
    listed = _ENTRY_POINT in names
    return Check(
        "VLLM_PLUGINS", listed, f"{','.join(names)!r} {'has' if listed else 'lacks'} {_ENTRY_POINT}"
    )


def _activation() -> Check:
    from vllm.plugins import load_general_plugins

    try:
        load_general_plugins()
    except Exception as error:
        return Check("activation", False, str(error))
    if plugin.is_active():
        return Check("activation", True, "active once vLLM has loaded its plugins")
    return Check("activation", False, plugin.find_obstacle() or "not active, see above")
