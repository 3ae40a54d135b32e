# SPDX-License-Identifier: Apache-2.0
"""The writes and reads of a step, KV and recurrent states, on a model of device memory.

A state (Mamba, linear attention) sums up a whole prefix, so a block holds one, not a slot per
token. A step starts from the state in the block of the last computed token, and leaves the new one
in the block of its own last token; nothing is written in between. In cache mode "none" all tokens
share one block. In mode "align" a state moves on with each block that the request enters, and what
stays behind can serve as a prefix hit. `AttentionKind.state_column` says where states are.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .block_tables import BlockTables, TypeTables
from .device_memory import MODEL, DeviceMemory, Slots
from .faults import InFlightFault, ReadFault, WriteFault
from .sequences import Sequences
from .step import RequestState, Step

#: `Attention.reads` of all workers in this process together.
TOTAL_READS: Counter[str] = Counter()


class Attention:
    """All attention and Mamba layers of the simulated model.

    Args:
        tables: Which attention types there are; steps bring their own copies of the tables.
        sequences: What each row's positions hold.
        encoder_states: The same for what an encoder makes of each row's input.
    """

    def __init__(
        self, tables: BlockTables, sequences: Sequences, encoder_states: Sequences
    ) -> None:
        self.tables = tables
        self.sequences = sequences
        self.encoder_states = encoder_states
        width = max(tables.block_sizes, default=1)
        self.memory = DeviceMemory(tables.num_blocks, width, tables.num_groups)
        #: Slots that were read and compared, of "kv", "encoder", "states" and "draft layers".
        self.reads: Counter[str] = Counter()
        self.states_written = 0
        self.checkpoints_written = 0
        self._handed_out = np.zeros(tables.num_blocks, dtype=bool)

    def forward(self, step: Step) -> None:
        """Write the KV of all scheduled tokens, then check every read.

        All layers write a step's KV before they read it, so requests of one step may read
        each other's (two that share a prefix, admitted together). States are fetched before
        the layers run: what another request computes in the same step is not there yet.
        """
        fetched = self.fetch_states(step)
        for tables, captured in zip(self.tables.types, step.tables, strict=True):
            self._write(step, tables, captured)
        for states in fetched:
            self._check_kept(step, states)
        self.check_kv(step)

    def fetch_states(self, step: Step) -> list[Slots]:
        """The states that the step starts from, compared with those of the requests' prefixes."""
        fetched = [
            self.states(step, tables, captured, step.starts)
            for tables, captured in zip(self.tables.types, step.tables, strict=True)
            if tables.kind.holds_states
        ]
        for states in fetched:
            self.check(step, states, self.memory.wrong(states), "states")
        return fetched

    def check_kv(self, step: Step) -> None:
        """Compare all KV that the step reads with the requests' own prefixes."""
        for tables, captured in zip(self.tables.types, step.tables, strict=True):
            if not tables.kind.holds_states:
                firsts = tables.kind.first_read(step.starts)
                read = self.slots(step, tables, captured, firsts, step.ends_in(tables))
                what = "encoder" if tables.of_encoder else "kv"
                self.check(step, read, self.memory.wrong(read), what)

    def slots(
        self,
        step: Step,
        tables: TypeTables,
        captured: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
    ) -> Slots:
        """The slots of positions ``[start, end)`` of each request of a step."""
        counts = np.maximum(ends - starts, 0)
        index = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(index)) + (starts - np.cumsum(counts) + counts)[index]
        columns = positions // tables.block_size
        offsets = positions - columns * tables.block_size
        return self._slots(step, tables, captured, index, positions, columns, offsets)

    def states(
        self, step: Step, tables: TypeTables, captured: np.ndarray, ends: np.ndarray
    ) -> Slots:
        """The state after the first ``end`` tokens of each request, where there is one."""
        [index] = np.nonzero(ends)
        columns = tables.kind.state_column(ends[index])
        return self._slots(step, tables, captured, index, ends[index] - 1, columns)

    def _slots(
        self,
        step: Step,
        tables: TypeTables,
        captured: np.ndarray,
        index: np.ndarray,
        positions: np.ndarray,
        columns: np.ndarray,
        offsets: np.ndarray | None = None,
    ) -> Slots:
        sequences = self.encoder_states if tables.of_encoder else self.sequences
        return Slots(
            tables,
            request=index,
            serials=step.serials[index],
            positions=positions,
            blocks=captured[:, index, columns],
            offsets=np.zeros_like(index) if offsets is None else offsets,
            contents=sequences.identities[step.rows[index], positions],
        )

    def _write(self, step: Step, tables: TypeTables, captured: np.ndarray) -> None:
        """What the layers of one type leave behind."""
        where, starts, ends = f"step {step.index}", step.starts, step.ends
        if not tables.kind.holds_states:
            if tables.of_encoder:
                # As in base's runner, in a request's first step.
                starts, ends = 0 * starts, np.where(starts == 0, step.encoder_lengths, 0)
            self.memory.write(self.slots(step, tables, captured, starts, ends), where)
            return
        written = self.states(step, tables, captured, ends)
        self.memory.write(written, where)
        self.states_written += written.blocks.size
        if tables.kind.checkpoint_alignment is not None:
            # Second states, for which the manager need not have given a block.
            lengths, columns = tables.kind.checkpoints(starts, ends)
            blocks = captured[:, np.arange(len(starts)), columns]
            [index] = np.nonzero((lengths > 0) & blocks.any(axis=0))
            second = self._slots(step, tables, captured, index, lengths[index] - 1, columns[index])
            self.memory.write(second, where)
            self.checkpoints_written += second.blocks.size

    def _check_kept(self, step: Step, states: Slots) -> None:
        """A state that was moved on from must outlive the step that read it.

        The copies and the layers of a step run at the same time as far as a manager can
        know, so nothing else may be written there in the same step.
        """
        column = states.tables.kind.state_column
        moves_on = (column(step.starts) != column(step.ends))[states.request]
        lost = self.memory.wrong(states) & moves_on
        if lost.any():
            fault = self._describe(step, states, lost)
            raise WriteFault(f"step {step.index}: overwritten while it is read: {fault}")

    def check(self, step: Step, read: Slots, wrong: np.ndarray, what: str) -> None:
        """Raise for the first of the slots that are wrong, or count them all as read."""
        if wrong.any():
            raise ReadFault(
                f"step {step.index}: {self._describe(step, read, wrong)}; "
                f"{int(wrong.sum())} wrong {'states' if what == 'states' else 'reads'} in this step"
            )
        self.reads[what] += wrong.size
        TOTAL_READS[what] += wrong.size

    def _describe(self, step: Step, read: Slots, wrong: np.ndarray) -> str:
        group, slot = np.argwhere(wrong)[0]
        tables, request = read.tables, read.request[slot]
        block = int(read.blocks[group, slot])
        if tables.kind.holds_states:
            what, written = "starts from the state in", "another state"
        else:
            is_written = self.memory.slots[MODEL, block, read.offsets[slot]]
            written = "a wrong prefix" if is_written else "nothing at that slot"
            what = (
                f"reads {'encoder ' * tables.of_encoder}position {read.positions[slot]} "
                f"(computing {step.starts[request]} to {step.ends[request] - 1}) from"
            )
        return (
            f"{step.requests[request].req_id}, group {tables.group_ids[group]}, {what} "
            f"block {block}, which {self.memory.describe(block, written)}"
        )

    def check_slots(self, step: Step, ends: np.ndarray) -> None:
        """Block tables must reach up to ``ends``, one per request, or to the encoder's end."""
        for tables, lengths in zip(self.tables.types, step.table_lengths, strict=True):
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
            for tables, captured, state, span in self._used(step):
                clash = self._handed_out[captured[:, span]]
                if clash.any():
                    group, column = np.argwhere(clash)[0]
                    column += span.start
                    raise InFlightFault(
                        f"block {captured[group, column]} was handed out, but step "
                        f"{step.index} in flight reads it for {state.req_id}, "
                        f"group {tables.group_ids[group]}, block {column} of its table"
                    )
        self._handed_out[handed_out] = False

    def check_held(self, step: Step, get_block_ids: Callable[[str], Sequence[list[int]]]) -> None:
        """The manager must hold every block that a step reads, at the same place.

        A block released too early is found at once, not only when someone overwrites it.
        """
        get_block_ids = functools.cache(get_block_ids)
        for tables, captured, state, span in self._used(step):
            held = tables.select(get_block_ids(state.req_id))[:, span]
            read = captured[:, span]
            if held.shape != read.shape or (held != read).any():
                raise InFlightFault(
                    f"step {step.index} reads blocks {read.tolist()} for {state.req_id} in "
                    f"groups {tables.group_ids}, the manager holds {held.tolist()}"
                )

    def _used(self, step: Step) -> Iterator[tuple[TypeTables, np.ndarray, RequestState, slice]]:
        """What block tables a step uses, and which columns of them, its drafting included."""
        for tables, captured in zip(self.tables.types, step.tables, strict=True):
            starts, ends = step.starts, step.ends_in(tables)
            if tables.num_reread:
                starts = np.maximum(starts - tables.num_reread, step.each("admitted_at"))
            firsts = tables.kind.first_column(starts, ends)
            for i, state in enumerate(step.requests):
                if state.req_id not in step.abandoned:
                    span = slice(firsts[i], -(-ends[i] // tables.block_size))
                    yield tables, captured[:, i], state, span
