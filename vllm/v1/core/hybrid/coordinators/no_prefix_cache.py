# SPDX-License-Identifier: Apache-2.0
"""Models without prefix caching."""

from collections.abc import Sequence

from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.coordinators.base import Hit, KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of attention types, zero included; no block is ever cached."""

    def __init__(self, block_pool: BlockPool) -> None:
        super().__init__(block_pool)
        self._caching = ()

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        return Hit(self.no_blocks, 0)
