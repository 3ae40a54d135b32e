# SPDX-License-Identifier: Apache-2.0
"""Mamba and other linear attention: a state sums up the whole prefix."""

from collections.abc import Sequence

from vllm.v1.core.hybrid._core import BlockList, BlockTable
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.recent_blocks import RecentBlocksManager
from vllm.v1.core.hybrid.settings import CacheSettings
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.request import Request


class MambaManager(RecentBlocksManager):
    """Keeps the state after the last token, in the block of that token.

    |  null  |  state after 2 blocks  |  null  |  null  |  state after the last token  |

    A step reads the state in the block of the token before it and leaves its own in the
    block of its last token. Between them nothing is written, and no ids are taken. A block
    that stays behind has the state at its end, where base's scheduler lets a step end
    (base's mode ``align``), and can serve a hit there.

    Some models also write the state at the last boundary that their step passes over, so
    that base's scheduler need not end a step there. It goes to the block before the last.

    Without prefix caching base makes a block as long as the longest sequence: then a
    request's first slot brings the block for its state, and no later one another.
    """

    def __init__(
        self,
        type_id: int,
        attention_type: AttentionType,
        block_pool: BlockPool,
        settings: CacheSettings,
    ) -> None:
        super().__init__(type_id, attention_type, block_pool, settings, num_tokens_before=1)
        #: Hashes of the states that this step writes.
        self._cached_this_step: set[bytes] = set()
        assert isinstance(self.kv_cache_spec, MambaSpec)
        self.checkpoint_alignment = (
            self.kv_cache_spec.prefill_checkpoint_alignment
            if self.kv_cache_spec.num_prefill_checkpoint_blocks
            and self.kv_cache_spec.mamba_cache_mode == "align"
            else None
        )

    def cache_blocks(
        self, request: Request, table: BlockTable, num_tokens: int, boundaries: Sequence[int]
    ) -> bool:
        begin = table.num_cached
        can_cache_more = super().cache_blocks(request, table, num_tokens, boundaries)
        if begin < table.num_cached:
            self._cached_this_step.update(
                block.block_hash for block in table.blocks(begin) if block.block_hash is not None
            )
        return can_cache_more

    def num_states(self, start: int, end: int, prefill_end: int) -> int:
        """States that a step over the tokens from ``start`` to before ``end`` leaves behind.

        The rules are base's, and the worker's: see ``compute_mamba_prefill_checkpoints``.
        """
        if self.checkpoint_alignment is None:
            return 1
        # With sparse retention only a prefill's last boundary can be worth a state.
        if self.settings.retention_interval == 0 and end < prefill_end:
            return 1
        return 1 + is_mamba_prefill_checkpoint_valid(
            query_start=start,
            query_end=end,
            checkpoint_position=get_mamba_prefill_checkpoint_position(end, self.block_size, False),
            hash_block_size=self.block_size,
            mamba_block_size=self.block_size,
            checkpoint_alignment=self.checkpoint_alignment,
        )

    def is_usable(self, hit: BlockList) -> bool:
        """Whether a hit's state will be there when this step begins.

        Layers run after the states are fetched, so unlike the keys and values of a
        prefix, a state cannot be read in the step that writes it.
        """
        return not len(hit) or hit[len(hit) - 1].block_hash not in self._cached_this_step

    def new_step_starts(self) -> None:
        """What was cached so far is written before this step begins."""
        self._cached_this_step.clear()
