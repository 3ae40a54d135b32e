# SPDX-License-Identifier: Apache-2.0
"""A model of the KV cache in device memory: what was last written to every slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .block_tables import TypeTables
from .faults import WriteFault

_NOBODY = -1
#: Parts of a block: the model's layers, and draft layers, which have slots of their own with what
#: their KV depends on, and with the prefix that ends at its position.
MODEL, DRAFT_CONTENT, DRAFT_PREFIX = range(3)


@dataclass
class Slots:
    """Slots of the groups of one attention type; all arrays but ``blocks`` are ``[slot]``.

    A recurrent state has the first slot of its block, and the position of its last token.
    """

    tables: TypeTables
    #: Whose they are: an index among the requests of a step, and the serial of its admission.
    request: np.ndarray
    serials: np.ndarray
    positions: np.ndarray
    #: Physical blocks, ``[group, slot]``.
    blocks: np.ndarray
    offsets: np.ndarray
    #: The identities of the prefixes that they are for.
    contents: np.ndarray


class DeviceMemory:
    """Physical blocks, shared by all KV cache groups.

    A slot holds the identity of the prefix whose KV was written there, combined with the
    group that wrote it, or 0. Groups and requests that write have a tag. The first write
    under a new tag empties the whole block: the groups' pages overlay each other, with
    other layouts, so a block that changes hands holds nothing of its former owner.

    Args:
        num_blocks: Physical blocks, the null block 0 included.
        max_block_size: Slots of a block under the group with the largest block size.
        num_groups: KV cache groups; a tag is ``serial * num_groups + group``.
    """

    def __init__(self, num_blocks: int, max_block_size: int, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.slots = np.zeros((3, num_blocks, max_block_size), dtype=np.uint64)
        self.owner = np.full(num_blocks, _NOBODY, dtype=np.int64)
        #: Request id of each serial, for messages.
        self.names: list[str] = []

    def admit(self, req_id: str) -> int:
        """A serial, which tells an admission's writes from all others'."""
        self.names.append(req_id)
        return len(self.names) - 1

    def write(self, slots: Slots, where: str, part: int = MODEL) -> None:
        """Write what slots are for; ``where`` begins the message of a fault."""
        tables = slots.tables
        contents = slots.contents ^ tables.group_marks
        tags = slots.serials * self.num_groups + tables.group_column
        try:
            self.put(slots.blocks, slots.offsets, contents, tags, part)
        except WriteFault as fault:
            names = sorted({self.names[serial] for serial in slots.serials.tolist()})
            raise WriteFault(
                f"{where}: {fault}; groups {tables.group_ids}, requests {names}"
            ) from fault

    def put(
        self,
        blocks: np.ndarray,
        offsets: np.ndarray | int,
        contents: np.ndarray,
        tags: np.ndarray,
        part: int = MODEL,
    ) -> None:
        """Write to slots; all arguments broadcast to ``blocks``.

        Raises:
            WriteFault: for a write to the null block, or if two tags write to one block.
        """
        if not blocks.all():
            raise WriteFault("a step writes to the null block")
        taken = self.owner[blocks] != tags
        if taken.any():
            self.slots[:, blocks[taken]] = 0
            self.owner[blocks] = tags
            shared = self.owner[blocks] != tags
            if shared.any():
                raise WriteFault(
                    f"two owners write to block {int(blocks[shared][0])} in the same step"
                )
        self.slots[part, blocks, offsets] = contents

    def wrong(self, slots: Slots, part: int = MODEL) -> np.ndarray:
        """Which slots hold something else than what they are for, ``[group, slot]``."""
        _, _, width = self.slots.shape
        held = self.slots[part].ravel().take(slots.blocks * width + slots.offsets)
        held ^= slots.tables.group_marks
        return held != slots.contents

    def describe(self, block: int, written: str) -> str:
        """What a block is, or that it holds what was ``written``, for messages."""
        owner = int(self.owner[block])
        if block == 0:
            return "is the null block"
        if owner == _NOBODY:
            return "holds nothing"
        serial, group = divmod(owner, self.num_groups)
        return f"holds {written}, last owner {self.names[serial]} in group {group}"

    def erase(self, blocks: Sequence[int] | None = None) -> None:
        """Empty some blocks, or all."""
        where = slice(None) if blocks is None else blocks
        self.slots[:, where] = 0
        self.owner[where] = _NOBODY
