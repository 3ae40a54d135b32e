# SPDX-License-Identifier: Apache-2.0
"""Mamba and other linear attention: a state sums up the whole prefix."""

from collections.abc import Sequence
from typing import ClassVar

from vllm.v1.core.hybrid._core import BlockList, BlockTable
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.managers.recent_blocks import RecentBlocksManager
from vllm.v1.core.hybrid.step import Step, Target
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.request import Request


class MambaManager(RecentBlocksManager):
    """Keeps the state after the last token, in the block of that token.

    |  null  |  state after 2 blocks  |  null  |  null  |  state after the last token  |

    A step reads the state in the block of the token before it, and leaves its own state in the
    block of its last token. The blocks between them get no ids. Base's scheduler (mode ``align``)
    ends prefill steps at block boundaries. Each earlier block then holds the state at its end, and
    can serve a hit there.

    Some models also write the state at the last boundary that their step passes over, so that
    base's scheduler need not end a step there. This state goes to the block before the last.

    Without prefix caching, base makes a block as long as the longest sequence. A request then has
    one block, allocated with its first slot.
    """

    has_gaps: ClassVar[bool] = True
    delays_hits: ClassVar[bool] = True

    def __init__(self, type_id: int, block_pool: BlockPool) -> None:
        super().__init__(type_id, block_pool, num_tokens_before=1)
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
    ) -> int:
        begin = table.num_decided
        cache_at = super().cache_blocks(request, table, num_tokens, boundaries)
        if begin < table.num_decided:
            self._cached_this_step.update(
                block.block_hash for block in table.blocks(begin) if block.block_hash is not None
            )
        return cache_at

    def target(self, step: Step) -> Target:
        """The blocks up to the step's last token; only the blocks of its states are written."""
        return -(-step.slots_end // self.block_size), self.num_states(step)

    def num_states(self, step: Step) -> int:
        """States that a step leaves behind.

        The rules are those of base and its worker: see ``compute_mamba_prefill_checkpoints``.
        """
        if self.checkpoint_alignment is None:
            return 1
        end = step.step_end
        # With sparse retention, only the last boundary of a prefill can be worth a state.
        if self.settings.retention_interval == 0 and end < step.prefill_end:
            return 1
        return 1 + is_mamba_prefill_checkpoint_valid(
            query_start=step.computed_end,
            query_end=end,
            checkpoint_position=get_mamba_prefill_checkpoint_position(end, self.block_size, False),
            hash_block_size=self.block_size,
            mamba_block_size=self.block_size,
            checkpoint_alignment=self.checkpoint_alignment,
        )

    def can_resume(self, table: BlockTable, end: int) -> bool:
        """Only from the beginning: the block of an earlier token may hold a later state."""
        return end == 0

    def is_usable(self, hit: BlockList) -> bool:
        """Whether the state of a hit exists when this step begins.

        Layers run after the states are fetched. So unlike the keys and values of a prefix, a
        state cannot be read in the step that writes it.
        """
        return not len(hit) or hit[len(hit) - 1].block_hash not in self._cached_this_step

    def new_step_starts(self) -> None:
        """All states that were cached so far are written before this step begins."""
        self._cached_this_step.clear()
