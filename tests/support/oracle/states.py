# SPDX-License-Identifier: Apache-2.0
"""The recurrent states (Mamba, linear attention) that a step starts from and leaves behind.

A state sums up a whole prefix, so a block holds one, not a slot per token. A step starts from
the state in the block of the last computed token, and leaves the new one in the block of its own
last token; nothing is written in between. In cache mode "none" all tokens share one block. In
mode "align" a state moves on with each block that the request enters, and what stays behind can
serve as a prefix hit. `AttentionKind.state_column` says where states are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .device_memory import DeviceMemory
from .faults import ReadFault, WriteFault

#: Where in a block of device memory its state is.
STATE_SLOT = 0


@dataclass
class StateAccess:
    """What the groups of one type read and write in a step."""

    group_ids: list[int]
    #: Blocks read and written, ``[group, request]``; a block of column -1 is not read.
    sources: np.ndarray
    targets: np.ndarray
    reads: np.ndarray
    #: Whether each request's state stays in its block.
    in_place: np.ndarray
    #: The right states before and after the step, and who writes, ``[group, request]``.
    before: np.ndarray
    after: np.ndarray
    tags: np.ndarray


class StateMemory:
    """Reads and writes states in device memory.

    Args:
        memory: The device memory, shared with attention.
        names: Request id of each serial, for messages.
        num_groups: KV cache groups; with a serial they make the tag of a block's owner.
    """

    def __init__(self, memory: DeviceMemory, names: list[str], num_groups: int) -> None:
        self.memory = memory
        self.names = names
        self.num_groups = num_groups
        self.reads_checked = 0
        self.writes_done = 0
        self.checkpoints_written = 0

    def check_reads(self, accesses: Sequence[StateAccess], where: str, req_ids: list[str]) -> None:
        """All states that the step starts from must be those of the requests' own prefixes.

        Must be called before any write of the step: states are fetched before the layers
        run, so unlike KV, what another request computes in the same step is not there yet.
        """
        for access in accesses:
            held = self.memory.slots[access.sources, STATE_SLOT]
            wrong = (held != access.before) & access.reads
            if wrong.any():
                fault = self._describe(access, wrong, req_ids)
                raise ReadFault(f"{where}: {fault}; {int(wrong.sum())} wrong states in this step")
            self.reads_checked += int(access.reads.sum()) * len(access.group_ids)

    def write(self, accesses: Sequence[StateAccess], where: str, req_ids: list[str]) -> None:
        """Leave the states after the step."""
        for access in accesses:
            try:
                self.memory.write(access.targets, STATE_SLOT, access.after, access.tags)
            except WriteFault as fault:
                raise WriteFault(
                    f"{where}: {fault}; groups {access.group_ids}, requests {req_ids}"
                ) from fault
            self.writes_done += access.targets.size

    def check_kept(self, accesses: Sequence[StateAccess], where: str, req_ids: list[str]) -> None:
        """A state that was moved on from must outlive the step that read it.

        The copies and the layers of a step run at the same time as far as a manager can
        know, so nothing else may be written there in the same step.
        """
        for access in accesses:
            held = self.memory.slots[access.sources, STATE_SLOT]
            lost = (held != access.before) & access.reads & ~access.in_place
            if lost.any():
                fault = self._describe(access, lost, req_ids)
                raise WriteFault(f"{where}: overwritten while it is read: {fault}")

    def _describe(self, access: StateAccess, wrong: np.ndarray, req_ids: list[str]) -> str:
        group, request = np.argwhere(wrong)[0]
        block = int(access.sources[group, request])
        content = self.memory.describe(block, "another state", self.names, self.num_groups)
        return (
            f"{req_ids[request]}, group {access.group_ids[group]}, starts from the state in "
            f"block {block}, which {content}"
        )
