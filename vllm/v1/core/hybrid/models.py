# SPDX-License-Identifier: Apache-2.0
"""Hybrid models that base no longer has, registered with it.

A name that is registered already, by base or by another plugin, is left as it is.
"""

from collections.abc import MutableMapping
from typing import Any

PLAMO2 = "Plamo2ForCausalLM"
PLAMO2_CONFIG = "plamo2"

# What was added: (base's registry, name, ours).
_added: list[tuple[MutableMapping[str, Any], str, Any]] = []


def register() -> None:
    """Have base know PLaMo 2: its architecture, and its configuration without remote code."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.transformers_utils.configs.plamo2 import Plamo2Config

    if PLAMO2 in ModelRegistry.models:
        return
    # By name: the model is imported only where it is used, and in no process before CUDA is
    # set up.
    ModelRegistry.register_model(PLAMO2, f"vllm.model_executor.models.plamo2:{PLAMO2}")
    _added.append((ModelRegistry.models, PLAMO2, ModelRegistry.models[PLAMO2]))
    if PLAMO2_CONFIG not in _CONFIG_REGISTRY:
        _CONFIG_REGISTRY[PLAMO2_CONFIG] = Plamo2Config
        _added.append((_CONFIG_REGISTRY, PLAMO2_CONFIG, Plamo2Config))


def unregister() -> None:
    """Undo `register`, but for what somebody else has put in its place since."""
    while _added:
        registry, name, ours = _added.pop()
        if registry.get(name) is ours:
            del registry[name]
