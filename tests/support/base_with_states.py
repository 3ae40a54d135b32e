# SPDX-License-Identifier: Apache-2.0
"""Base's manager as a reference for models with Mamba states."""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import MambaManager


class BaseWithStates(KVCacheManager):
    """Base's manager, but a state counts as written in this step only in the step that writes it.

    While a request still holds the state at the end of its prompt, base enters it in the prefix
    cache again in each step, and each time whoever hits it waits for another step. Where blocks are
    as long as a hash, as in all models that the hybrid manager serves, nothing else is done there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for manager in self.coordinator.single_type_managers:
            if isinstance(manager, MambaManager):
                assert manager.block_size == self.block_pool.hash_block_size
                manager._cache_partial_tail_block = lambda *_, **__: None  # type: ignore[method-assign]
