# SPDX-License-Identifier: Apache-2.0
"""The writes and reads of a step, KV and states, on a model of device memory."""

from collections.abc import Callable, Sequence

import numpy as np

from .block_tables import BlockTables, TypeTables
from .device_memory import DeviceMemory
from .faults import InFlightFault, ReadFault, WriteFault
from .sequences import Sequences
from .states import STATE_SLOT, StateAccess, StateMemory
from .step import Step

_total_reads = 0


def total_reads_checked() -> int:
    """KV slots and states compared so far in this process, by all workers together."""
    return _total_reads


class Attention:
    """All attention and Mamba layers of the simulated model.

    Args:
        tables: Which attention types there are; steps bring their own copies of the tables.
        sequences: What each row's positions hold.
        encoder_states: The same for what an encoder makes of each row's input.
        num_blocks: Physical blocks, the null block included.
    """

    def __init__(
        self,
        tables: BlockTables,
        sequences: Sequences,
        encoder_states: Sequences,
        num_blocks: int,
    ) -> None:
        self.types = tables.types
        self.kv_types = tables.kv_types
        self.state_types = tables.state_types
        self.num_groups = max(tables.num_groups, 1)
        self.sequences = sequences
        self.encoder_states = encoder_states
        self.memory = DeviceMemory(num_blocks, tables.max_block_size)
        self.reads_checked = 0
        self.encoder_reads_checked = 0
        self.writes_done = 0
        #: Request id of each serial, for messages.
        self.names: list[str] = []
        self.states = StateMemory(self.memory, self.names, self.num_groups)
        self._handed_out = np.zeros(num_blocks, dtype=bool)

    def forward(self, step: Step) -> None:
        """Write the KV of all scheduled tokens, then check every read.

        All layers write a step's KV before they read it, so requests of one step may read
        each other's (two that share a prefix, admitted together). States are read first.
        """
        if self.state_types:
            self._forward_with_states(step)
        else:
            self._write(step)
        for tables, captured in zip(self.kv_types, step.tables, strict=False):
            self._check_reads(step, tables, captured)

    def check_slots(self, step: Step, ends: np.ndarray) -> None:
        """Block tables must reach up to ``ends``, one per request, or to the encoder's end."""
        for tables, lengths in zip(self.types, step.table_lengths, strict=True):
            needed = step.encoder_lengths if tables.of_encoder else ends
            short = needed > lengths * tables.block_size
            if short.any():
                i = int(np.argmax(short))
                raise WriteFault(
                    f"step {step.index}: {step.requests[i].req_id} needs {needed[i]} slots, its "
                    f"{lengths[i]} blocks of groups {tables.group_ids} have "
                    f"{lengths[i] * tables.block_size}"
                )

    def check_not_in_flight(self, handed_out: np.ndarray, steps: list[Step]) -> None:
        """Blocks handed out for new tokens must not be read by any unfinished step.

        Stricter than device order, which makes a step's reads finish before a later
        step's writes: only requests that were preempted or have ended rely on that.
        """
        if not handed_out.all():
            raise WriteFault("the null block was handed out for new tokens")
        self._handed_out[handed_out] = True
        for step in steps:
            if not step.requests:
                continue
            alive = np.array([state.req_id not in step.abandoned for state in step.requests])
            for tables, captured in zip(self.types, step.tables, strict=True):
                size = tables.block_size
                ends = step.ends_in(tables)
                first = self._first_columns(step, tables)
                columns = np.arange(captured.shape[2])
                read = columns >= first[:, None]
                read &= columns * size < ends[:, None]
                read &= alive[:, None]
                clash = self._handed_out[captured] & read
                if clash.any():
                    group, request, column = np.argwhere(clash)[0]
                    raise InFlightFault(
                        f"block {captured[group, request, column]} was handed out, but step "
                        f"{step.index} in flight reads it for {step.requests[request].req_id}, "
                        f"group {tables.group_ids[group]}, block {column} of its table"
                    )
        self._handed_out[handed_out] = False

    def _first_columns(self, step: Step, tables: TypeTables) -> np.ndarray:
        """The lowest columns of the block tables that a step uses, its drafting included."""
        starts = step.starts
        if tables.num_reread:
            admitted = np.array([state.admitted_at for state in step.requests])
            starts = np.maximum(starts - tables.num_reread, admitted)
        return tables.kind.first_column(starts, step.ends_in(tables))

    def check_held(self, step: Step, get_block_ids: Callable[[str], Sequence[list[int]]]) -> None:
        """The manager must hold every block that a step reads, at the same place.

        A block released too early is found at once, not only when someone overwrites it.
        """
        all_ends = [step.ends_in(tables) for tables in self.types]
        firsts = [self._first_columns(step, tables) for tables in self.types]
        for i, state in enumerate(step.requests):
            if state.req_id in step.abandoned:
                continue
            block_ids = get_block_ids(state.req_id)
            for tables, captured, first, ends in zip(
                self.types, step.tables, firsts, all_ends, strict=True
            ):
                span = slice(first[i], -(-ends[i] // tables.block_size))
                held = tables.select(block_ids)[:, span]
                read = captured[:, i, span]
                if held.shape != read.shape or (held != read).any():
                    raise InFlightFault(
                        f"step {step.index} reads blocks {read.tolist()} for {state.req_id} in "
                        f"groups {tables.group_ids}, the manager holds {held.tolist()}"
                    )

    def _forward_with_states(self, step: Step) -> None:
        where, req_ids = f"step {step.index}", [state.req_id for state in step.requests]
        accesses = [
            self._state_access(step, tables, captured)
            for tables, captured in zip(
                self.state_types, step.tables[len(self.kv_types) :], strict=True
            )
        ]
        before = self.states.reads_checked
        self.states.check_reads(accesses, where, req_ids)
        global _total_reads
        _total_reads += self.states.reads_checked - before
        self._write(step)
        self.states.write(accesses, where, req_ids)
        for tables, captured in zip(
            self.state_types, step.tables[len(self.kv_types) :], strict=True
        ):
            self._write_checkpoints(step, tables, captured)
        self.states.check_kept(accesses, where, req_ids)

    def _state_access(self, step: Step, tables: TypeTables, captured: np.ndarray) -> StateAccess:
        read, written = map(tables.kind.state_column, (step.starts, step.ends))
        requests = np.arange(len(step.rows))
        identities = self.sequences.identities
        marks = tables.group_marks[:, None]
        return StateAccess(
            group_ids=tables.group_ids,
            sources=captured[:, requests, read],
            targets=captured[:, requests, written],
            reads=read >= 0,
            in_place=read == written,
            before=identities[step.rows, step.starts - 1] ^ marks,
            after=identities[step.rows, step.ends - 1] ^ marks,
            tags=step.serials * self.num_groups + tables.group_column,
        )

    def _write_checkpoints(self, step: Step, tables: TypeTables, captured: np.ndarray) -> None:
        """Second states, for which the manager need not have given a block."""
        if tables.kind.checkpoint_alignment is None:
            return
        positions, columns = tables.kind.checkpoints(step.starts, step.ends)
        blocks = captured[:, np.arange(len(step.rows)), columns]
        [written] = np.nonzero((positions > 0) & blocks.any(axis=0))
        if not len(written):
            return
        after = self.sequences.identities[step.rows[written], positions[written] - 1]
        tags = step.serials[written] * self.num_groups + tables.group_column
        self.memory.write(blocks[:, written], STATE_SLOT, after ^ tables.group_marks[:, None], tags)
        self.states.checkpoints_written += len(written) * len(tables.group_ids)

    def _write(self, step: Step) -> None:
        both = list(zip(self.kv_types, step.tables, strict=False))
        own = [(tables, captured) for tables, captured in both if not tables.of_encoder]
        self._write_positions(step, own, self.sequences, step.starts, step.counts)
        # As in base's runner, the encoder's states are written in a request's first step.
        new = np.where(step.starts == 0, step.encoder_lengths, 0)
        if len(own) < len(both) and new.any():
            encoder = [(tables, captured) for tables, captured in both if tables.of_encoder]
            self._write_positions(step, encoder, self.encoder_states, np.zeros_like(new), new)

    def _write_positions(
        self,
        step: Step,
        types: list[tuple[TypeTables, np.ndarray]],
        sequences: Sequences,
        starts: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        if counts.max() == 1 == counts.min():
            index, positions = np.arange(len(counts)), starts
        else:
            index = np.repeat(np.arange(len(counts)), counts)
            before = np.cumsum(counts) - counts
            positions = np.arange(len(index)) + (starts - before)[index]
        contents = sequences.identities[step.rows[index], positions]
        # The tag of a block: which admission of which request, and which group.
        tags = step.serials[index] * self.num_groups
        for tables, captured in types:
            columns = positions // tables.block_size
            try:
                self.memory.write(
                    captured[:, index, columns],
                    positions - columns * tables.block_size,
                    contents ^ tables.group_marks[:, None],
                    tags + tables.group_column,
                )
            except WriteFault as fault:
                names = [state.req_id for state in step.requests]
                raise WriteFault(
                    f"step {step.index}: {fault}; groups {tables.group_ids}, requests {names}"
                ) from fault
            self.writes_done += len(positions) * len(tables.group_ids)

    def _check_reads(self, step: Step, tables: TypeTables, captured: np.ndarray) -> None:
        """Compare all that one attention type reads with the requests' own prefixes."""
        size = tables.block_size
        ends = step.ends_in(tables)
        lows = tables.kind.first_read(step.starts)
        first = lows // size
        sequences = self.encoder_states if tables.of_encoder else self.sequences
        identities = sequences.identities
        by_block = identities.reshape(len(identities), -1, size)
        if first.any():
            width = int(((ends - 1) // size - first).max()) + 1
            columns = first[:, None] + np.arange(width)
            request = np.arange(len(ends))[:, None]
            blocks = captured[:, request, np.minimum(columns, captured.shape[2] - 1)]
            own = by_block[step.rows[:, None], np.minimum(columns, by_block.shape[1] - 1)]
        else:
            # All read from their first block on, as in full attention: no need to gather.
            width = (int(ends.max()) - 1) // size + 1
            columns = np.arange(width)[None, :]
            blocks = captured[:, :, :width]
            own = by_block[step.rows, :width]
        held = self.memory.read(blocks, size)
        held ^= tables.group_marks[:, None, None, None]
        wrong = held != own
        positions = columns[:, :, None] * size + np.arange(size)
        wrong &= positions < ends[:, None, None]
        if lows.any():
            wrong &= positions >= lows[:, None, None]
        if wrong.any():
            positions = np.broadcast_to(positions, wrong.shape[1:])
            raise ReadFault(self._describe(step, tables, blocks, positions, wrong))
        global _total_reads
        num_reads = int((ends - lows).sum()) * len(tables.group_ids)
        self.reads_checked += num_reads
        self.encoder_reads_checked += num_reads if tables.of_encoder else 0
        _total_reads += num_reads

    def _describe(
        self,
        step: Step,
        tables: TypeTables,
        blocks: np.ndarray,
        positions: np.ndarray,
        wrong: np.ndarray,
    ) -> str:
        group, request, column, slot = np.argwhere(wrong)[0]
        block = int(blocks[group, request, column])
        position = positions[request, column, slot]
        where = f"encoder position {position}" if tables.of_encoder else f"position {position}"
        written = "a wrong prefix" if self.memory.slots[block, slot] else "nothing at that slot"
        content = self.memory.describe(block, written, self.names, self.num_groups)
        return (
            f"step {step.index}: {step.requests[request].req_id}, group "
            f"{tables.group_ids[group]}, reads {where} "
            f"(computing {step.starts[request]} to {step.ends[request] - 1}) from block {block}, "
            f"which {content}; {int(wrong.sum())} wrong reads in this step"
        )
