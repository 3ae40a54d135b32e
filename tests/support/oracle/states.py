# SPDX-License-Identifier: Apache-2.0
"""The recurrent states (Mamba, linear attention) that a step starts from and leaves behind.

A state sums up a whole prefix, so a block holds one, not a slot per token. Base's runner
finds the state to start from in the block of the last computed token, and leaves the new
one in the block of the step's last token; nothing is written in between. In cache mode
"none" all tokens share one block, in mode "align" a state moves on with each block that
the request enters, and what stays behind can serve as a prefix hit. See
``mamba_get_block_table_tensor`` and ``preprocess_mamba`` in base 0.32, which has no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from .device_memory import DeviceMemory
from .faults import ReadFault, WriteFault

#: Where in a block of device memory its state is.
STATE_SLOT = 0


@dataclass(frozen=True)
class StateRule:
    """Which columns of its block table a request's states are in.

    ``one_block`` is cache mode "none": one column for a sequence of any length. With a
    ``checkpoint_alignment`` a step also writes the state at the last block boundary that it
    passes over, if that is a multiple of so many tokens from its beginning.
    """

    one_block: bool
    checkpoint_alignment: int | None = None

    def read_columns(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Where the states after ``starts`` tokens are, -1 for the empty one."""
        if self.one_block:
            return np.where(starts > 0, 0, -1)
        return (starts - 1) // block_size

    def write_columns(self, ends: np.ndarray, block_size: int) -> np.ndarray:
        """Where the states after ``ends`` tokens go."""
        return np.zeros_like(ends) if self.one_block else (ends - 1) // block_size

    def checkpoints(
        self, starts: np.ndarray, ends: np.ndarray, block_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of each request, how many tokens a second state is after, 0 for none; its column."""
        offsets, columns = compute_mamba_prefill_checkpoints(
            ends.tolist(),
            (ends - starts).tolist(),
            hash_block_size=block_size,
            mamba_block_size=block_size,
            checkpoint_alignment=self.checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=block_size,
        )
        positions = np.array(offsets)
        return np.where(positions > 0, starts + positions, 0), np.array(columns)

    def first_column(self, starts: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
        """The lowest column that a step over ``[start, end)`` uses.

        Columns between the one read and the one written are null and need no care.
        """
        read = self.read_columns(starts, block_size)
        return np.where(read < 0, self.write_columns(ends, block_size), read)


def state_rule(spec: KVCacheSpec) -> StateRule | None:
    """The rule of a spec whose blocks hold states; None for all other specs.

    Raises:
        NotImplementedError: for states of draft tokens.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        rules = {state_rule(layer) for layer in spec.kv_cache_specs.values()}
        if len(rules) > 1:
            raise NotImplementedError("layers of one group with different state rules")
        return rules.pop()
    if not isinstance(spec, MambaSpec):
        return None
    if spec.num_speculative_blocks:
        raise NotImplementedError("more than one state of a request in a step")
    if spec.mamba_cache_mode not in ("none", "align"):
        raise NotImplementedError(f"Mamba cache mode {spec.mamba_cache_mode!r}")
    if spec.mamba_cache_mode == "none":
        return StateRule(one_block=True)
    return StateRule(False, spec.prefill_checkpoint_alignment)


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
