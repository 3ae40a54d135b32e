# SPDX-License-Identifier: Apache-2.0
"""The plugin ``hybrid_kv_hashing``: requests' block hashes are computed in native code.

While it is active, ``get_request_block_hasher`` in base's utilities is replaced. The digests are
base's, so it serves any manager.
"""

import functools
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.hybrid.activation import Patches, Plugin, find_native_obstacle

logger = init_logger(__name__)


def _apply(patches: Patches) -> None:
    from vllm.v1.core import kv_cache_utils

    get_base_hasher = kv_cache_utils.get_request_block_hasher

    @functools.wraps(get_base_hasher)
    def get_request_block_hasher(hash_block_size: int, caching_hash_fn: Any) -> Any:
        base_hasher = get_base_hasher(hash_block_size, caching_hash_fn)
        try:
            from vllm.v1.core.hybrid.block_hashing import block_hasher

            return block_hasher.create_request_block_hasher(
                hash_block_size, caching_hash_fn, base_hasher
            )
        except Exception:
            logger.warning("Hybrid KV cache: base hashes the blocks", exc_info=True)
            return base_hasher

    patches.replace(kv_cache_utils, "get_request_block_hasher", get_request_block_hasher)


_plugin = Plugin(_apply, find_native_obstacle)
activate, deactivate, is_active = _plugin.activate, _plugin.deactivate, _plugin.is_active
