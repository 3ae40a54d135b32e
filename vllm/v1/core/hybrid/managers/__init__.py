# SPDX-License-Identifier: Apache-2.0
"""The managers: one class and one file per kind of attention (see `attention_type`)."""

from importlib import import_module

from vllm.v1.core.hybrid.attention_type import AttentionType, find_manager
from vllm.v1.core.hybrid.managers.base import SingleTypeKVCacheManager

__all__ = ["SingleTypeKVCacheManager", "manager_class"]


def manager_class(attention_type: AttentionType) -> type[SingleTypeKVCacheManager]:
    """The manager class for an attention type.

    Raises:
        ValueError: if no manager serves the type's KV cache spec.
    """
    found = find_manager(attention_type.spec)
    if found is None:
        raise ValueError(f"the KV cache spec must be one with a manager, got {attention_type}")
    module = import_module(f"{__name__}.{found[0]}")
    manager_cls: type[SingleTypeKVCacheManager] = getattr(module, found[1])
    return manager_cls
