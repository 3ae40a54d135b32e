# SPDX-License-Identifier: Apache-2.0
"""A model of the KV cache in device memory: what was last written to every slot."""

from collections.abc import Sequence

import numpy as np

from .faults import WriteFault

_NOBODY = -1


class DeviceMemory:
    """Physical blocks, shared by all KV cache groups.

    A slot holds the identity of the prefix whose KV was written there, combined with the
    group that wrote it, or 0. Groups and requests that write have a tag. The first write
    under a new tag empties the whole block: the groups' pages overlay each other, with
    other layouts, so a block that changes hands holds nothing of its former owner.
    Draft layers have slots of their own in the blocks of their groups.

    Args:
        num_blocks: Physical blocks, the null block 0 included.
        max_block_size: Slots of a block under the group with the largest block size.
    """

    def __init__(self, num_blocks: int, max_block_size: int) -> None:
        self.num_blocks = num_blocks
        self.slots = np.zeros((num_blocks, max_block_size), dtype=np.uint64)
        #: What the KV of draft layers depends on, and the prefix that ends at its position.
        self.draft_slots = np.zeros((2, *self.slots.shape), dtype=np.uint64)
        self.owner = np.full(num_blocks, _NOBODY, dtype=np.int64)

    def write(
        self,
        blocks: np.ndarray,
        offsets: np.ndarray,
        contents: np.ndarray,
        tags: np.ndarray,
        draft: int | None = None,
    ) -> None:
        """Write slots, or one of `draft_slots`; all arguments broadcast to ``blocks``.

        Raises:
            WriteFault: for a write to the null block, or if two tags write to one block.
        """
        if not blocks.all():
            raise WriteFault("a step writes to the null block")
        taken = self.owner[blocks] != tags
        if taken.any():
            self.slots[blocks[taken]] = 0
            self.draft_slots[:, blocks[taken]] = 0
            self.owner[blocks] = tags
            shared = self.owner[blocks] != tags
            if shared.any():
                raise WriteFault(
                    f"two owners write to block {int(blocks[shared][0])} in the same step"
                )
        slots = self.slots if draft is None else self.draft_slots[draft]
        slots[blocks, offsets] = contents

    def read(self, blocks: np.ndarray, block_size: int) -> np.ndarray:
        """Slots of blocks, ``[*blocks.shape, block_size]``."""
        if block_size == self.slots.shape[1]:
            # The same, but faster.
            return self.slots.take(blocks, axis=0)
        return self.slots[:, :block_size][blocks]

    def describe(self, block: int, written: str, names: Sequence[str], num_groups: int) -> str:
        """What a block is or holds, for messages.

        Tags are ``serial * num_groups + group``; ``names`` are the request ids of the serials.
        """
        owner = int(self.owner[block])
        if block == 0:
            return "is the null block"
        if owner == _NOBODY:
            return "holds nothing"
        serial, group = divmod(owner, num_groups)
        return f"holds {written}, last owner {names[serial]} in group {group}"

    def erase(self, blocks: list[int] | None = None) -> None:
        """Empty some blocks, or all."""
        where = slice(None) if blocks is None else blocks
        self.slots[where] = 0
        self.draft_slots[:, where] = 0
        self.owner[where] = _NOBODY
