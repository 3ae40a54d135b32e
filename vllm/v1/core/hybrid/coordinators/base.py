# SPDX-License-Identifier: Apache-2.0
"""What all coordinators share."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm.utils.math_utils import round_down
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock
from vllm.v1.core.hybrid.managers import SingleTypeKVCacheManager, create_manager
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

#: Per attention type, blocks in token order.
BlocksByType = tuple[Sequence[GroupedKVCacheBlock], ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix-cache hit that every attention type accepts. Lengths are in tokens."""

    blocks: BlocksByType
    num_tokens: int
    #: How much longer the hit would be if the types that cache sparsely had kept up.
    num_uncached_shared: int = 0


class KVCacheCoordinator(ABC):
    """Moves one request through the managers of all attention types."""

    # What base's scheduler and connectors ask of a coordinator, for features that the
    # fork leaves to base: EAGLE groups, hits within a block, multi-token prediction.
    enable_partial_hash_hits: ClassVar[bool] = False
    eagle_group_ids: ClassVar[frozenset[int]] = frozenset()
    num_reprefillable_tokens: ClassVar[int] = 0

    def __init__(
        self,
        attention_types: tuple[AttentionType, ...],
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        settings.validate(attention_types)
        self.settings = settings
        self.block_pool = block_pool
        self.managers = tuple(
            create_manager(type_id, attention_type, block_pool, settings)
            for type_id, attention_type in enumerate(attention_types)
        )
        of_group = {g: m for m in self.managers for g in m.attention_type.group_ids}
        #: For base's callers: one entry per KV cache group, in the config's order.
        self.single_type_managers: tuple[SingleTypeKVCacheManager, ...] = tuple(
            of_group[group_id] for group_id in range(len(of_group))
        )
        self.group_block_sizes = tuple(m.block_size for m in self.single_type_managers)
        self.scheduler_block_size = settings.scheduler_block_size
        self.hash_block_size = settings.hash_block_size
        self.retention_interval = settings.retention_interval

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Hit:
        """The longest prefix of at most ``max_tokens`` that every type can resume from."""

    def num_physical_blocks_needed(
        self,
        request_id: str,
        num_tokens: int,
        hits: BlocksByType,
        num_computed_tokens: int,
        recycled: bool = False,
    ) -> int:
        """Physical blocks that must be free to give a request ``num_tokens`` slots.

        See `SingleTypeKVCacheManager.num_new_blocks`.
        """
        return sum(
            manager.num_groups
            * manager.num_new_blocks(request_id, num_tokens, blocks, num_computed_tokens, recycled)
            for manager, blocks in zip(self.managers, hits, strict=True)
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: BlocksByType,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """`num_physical_blocks_needed` under the name and arguments of base's callers."""
        return self.num_physical_blocks_needed(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            recycled=apply_admission_cap,
        )

    def adopt_hits(self, request_id: str, hits: BlocksByType, num_computed_tokens: int) -> None:
        """Reference the hit blocks of every type, before any type allocates: an allocation
        for one type must not evict another's hit.
        """
        for manager, blocks in zip(self.managers, hits, strict=True):
            manager.adopt_hits(request_id, blocks, num_computed_tokens)

    def allocate(self, request_id: str, num_tokens: int) -> BlocksByType:
        """Give a request ``num_tokens`` slots in every type; returns the new blocks."""
        return tuple(manager.allocate(request_id, num_tokens) for manager in self.managers)

    def release_skipped(self, request_id: str, num_processed_tokens: int) -> None:
        """Release what no query after ``num_processed_tokens`` attends to."""
        for manager in self.managers:
            manager.release_skipped(request_id, num_processed_tokens)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Enter the blocks of the first ``num_tokens`` tokens, all final, in the prefix cache.

        Hits end at multiples of the scheduler block size, so blocks after the last one
        are of no use yet.
        """
        if not self.settings.enable_caching:
            return
        # A request with the same prompt leaves one token to compute, so it resumes at or
        # before the last token; one with the same prefix where the lookup saw it end.
        boundaries = [request.num_prompt_tokens - 1]
        if request.shared_prefix_boundary:
            boundaries.append(request.shared_prefix_boundary)
        num_tokens = round_down(num_tokens, self.settings.scheduler_block_size)
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens, boundaries)

    def next_event(self, request_id: str) -> int:
        """The smallest token count at which any type has work for a request."""
        return min((m.next_event(request_id) for m in self.managers), default=0)

    def pop_blocks_for_free(self, request_id: str) -> list[GroupedKVCacheBlock]:
        """Forget a request; its blocks are the caller's until `BlockPool.free_blocks`."""
        blocks = [block for manager in self.managers for block in manager.pop(request_id)]
        self.block_pool.detach(blocks)
        return blocks

    def free(self, request_id: str) -> None:
        """Release all blocks of a request."""
        for manager in self.managers:
            manager.free(request_id)

    def get_blocks(self, request_id: str) -> BlocksByType:
        """A request's blocks per type; the managers' own lists, not to be changed."""
        return tuple(manager.get_blocks(request_id) for manager in self.managers)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while any block is referenced."""
        return self.block_pool.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise AssertionError with the first broken invariant of tables, index and pool."""
        references: Counter[GroupedKVCacheBlock] = Counter()
        for manager in self.managers:
            manager.check_integrity()
            for table in manager.tables.values():
                references.update(block for block in table.blocks if not block.is_null)
        requests = [set(manager.tables) for manager in self.managers]
        assert all(ids == requests[0] for ids in requests), "types know different requests"
        self.block_pool.check_integrity(references)
