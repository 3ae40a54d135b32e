# SPDX-License-Identifier: Apache-2.0
"""A scheduler step on its way through the simulated worker."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from .block_tables import BlockTables, TypeTables


@dataclass
class RequestState:
    """A request between its admission and its end or preemption."""

    req_id: str
    row: int
    serial: int
    #: The lists that the scheduler sent, extended in place like the V1 runner's, so that
    #: a manager that keeps using a list it has handed out is found.
    block_ids: Sequence[list[int]]
    #: Where it began to compute: the length of its prefix hit.
    admitted_at: int = 0
    #: Tokens of its input to an encoder.
    encoder_length: int = 0
    last_step: int = -1
    #: Drafts proposed, valid while the sequence has this many known tokens.
    drafts: list[int] = field(default_factory=list)
    drafts_at: int = -1


@dataclass
class Step:
    """One scheduler step on its way through the device; an entry per request in its arrays."""

    index: int
    requests: list[RequestState]
    starts: np.ndarray
    counts: np.ndarray
    block_tables: InitVar[BlockTables]
    scheduled: SchedulerOutput | None = None
    #: Rows that nothing uses once this step has run.
    retired_rows: list[int] = field(default_factory=list)
    #: Which of `requests` have ended or were preempted since: their reads do not matter.
    abandoned: set[str] = field(default_factory=set)
    #: Steps whose output the scheduler did not have yet when it made this one.
    overlapped: list["Step"] = field(default_factory=list)
    #: Draft tokens rejected, per serial, once the step has run.
    rejected: dict[int, int] = field(default_factory=dict)
    output: ModelRunnerOutput | None = None

    def __post_init__(self, block_tables: BlockTables) -> None:
        self.rows = self.each("row")
        self.serials = self.each("serial")
        self.encoder_lengths = self.each("encoder_length")
        #: Per attention type, the block tables of `rows` and their lengths, as of scheduling.
        self.tables = [tables.of_rows(self.rows) for tables in block_tables.types]
        self.table_lengths = [tables.counts[self.rows] for tables in block_tables.types]

    def each(self, attribute: str) -> np.ndarray:
        """An attribute of each of `requests`."""
        return np.array([getattr(state, attribute) for state in self.requests], dtype=np.int64)

    def ends_in(self, tables: TypeTables) -> np.ndarray:
        """One past the last position that each request reads in an attention type."""
        return self.encoder_lengths if tables.of_encoder else self.ends

    @property
    def ends(self) -> np.ndarray:
        """One past the last scheduled position of each request."""
        return self.starts + self.counts
