# SPDX-License-Identifier: Apache-2.0
"""The plugin ``hybrid_kv_plamo2``: registers PLaMo 2, which base dropped after 0.26.

The model's files lie beside base's models. A name that is registered already, by base or by
another plugin, is left as it is.
"""

from collections.abc import Callable, MutableMapping
from typing import Any

from vllm.v1.core.hybrid.activation import Patches, Plugin

PLAMO2 = "Plamo2ForCausalLM"
PLAMO2_CONFIG = "plamo2"


def _apply(patches: Patches) -> None:
    """Register the architecture, and its configuration without remote code."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.transformers_utils.configs.plamo2 import Plamo2Config

    if PLAMO2 in ModelRegistry.models:
        return
    # By name, so that the model is imported only where it is used, after CUDA setup.
    ModelRegistry.register_model(PLAMO2, f"vllm.model_executor.models.plamo2:{PLAMO2}")
    patches.undo.append(_remove(ModelRegistry.models, PLAMO2))
    if PLAMO2_CONFIG not in _CONFIG_REGISTRY:
        _CONFIG_REGISTRY[PLAMO2_CONFIG] = Plamo2Config
        patches.undo.append(_remove(_CONFIG_REGISTRY, PLAMO2_CONFIG))


def _remove(registry: MutableMapping[str, Any], name: str) -> Callable[[], None]:
    """A function that removes a registered entry, unless the entry has been replaced by then."""
    ours = registry[name]

    def remove() -> None:
        if registry.get(name) is ours:
            del registry[name]

    return remove


_plugin = Plugin(_apply, lambda: None)
activate, deactivate, is_active = _plugin.activate, _plugin.deactivate, _plugin.is_active
