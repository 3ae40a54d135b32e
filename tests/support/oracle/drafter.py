# SPDX-License-Identifier: Apache-2.0
"""The KV of draft layers, which share blocks with the model's own layers.

A drafter runs after each step, once it is known which tokens are right. It computes the KV of
the step's positions, and then guesses on in the slots beyond, whose KV is worth nothing. What
the KV at a position depends on is the drafter's *depth*, tokens after the position:

- 0, a draft model: it reads tokens, as any model;
- 1, EAGLE and a single MTP module: a hidden state, and the token after it;
- n, a chain of n MTP modules: each reads one token further ahead than the one before. The last
  n - 1 positions of a step lack tokens that are sampled later, and are computed again then.

So the KV of the last tokens of a cached block may be that of another continuation, and guesses
get worse. A drafter that reads ahead therefore drops the last block of a hit: what is left is
followed by a block that has been computed before. That does not rule out a block from another
continuation where several requests have computed the same tokens: base takes the first of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from support.identity import hash64
from support.kv_configs import DRAFT_LAYER
from vllm.v1.kv_cache_interface import KVCacheConfig

from .block_tables import BlockTables, TypeTables
from .device_memory import DeviceMemory
from .engine_config import OracleSettings
from .faults import ReadFault, WriteFault
from .sequences import Sequences
from .step import RequestState, Step

_GUESS = np.uint64(hash64("a guess"))
#: Parts of `DeviceMemory.draft_slots`.
_CONTENT, _PREFIX = 0, 1


def draft_group_ids(config: KVCacheConfig) -> list[int]:
    """The KV cache groups that have layers of the drafter."""
    return [
        group_id
        for group_id, group in enumerate(config.kv_cache_groups)
        if any(name.startswith(DRAFT_LAYER) for name in group.layer_names)
    ]


@dataclass
class Span:
    """Positions that the drafter computes for one request in the groups of one type."""

    step_index: int
    state: RequestState
    tables: TypeTables
    #: The places of the type's groups with draft layers, and the request's block tables in them.
    places: np.ndarray
    table: np.ndarray
    first: int
    end: int
    #: Whether the request starts with a prefix hit in this step.
    is_hit: bool


class Drafter:
    """Writes and checks the KV of draft layers.

    Args:
        config: The model's KV cache; its layer names tell the draft layers.
        settings: Those of the worker.
        tables: Block tables of all groups.
        sequences: What each row's positions hold.
        memory: Device memory; draft layers have a part of each block to themselves.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        settings: OracleSettings,
        tables: BlockTables,
        sequences: Sequences,
        memory: DeviceMemory,
    ) -> None:
        self.settings = settings
        self.sequences = sequences
        self.memory = memory
        self.depth = depth = settings.draft_depth
        self.num_groups = tables.num_groups
        self.reads_checked = 0
        self.hits_checked = 0
        #: For prefixes that have been computed, the admission that did it first.
        self._computed_by: dict[int, int] = {}
        drafting = set(draft_group_ids(config))
        #: Index among the types, the type, and the places of its groups with draft layers.
        self.types: list[tuple[int, TypeTables, np.ndarray]] = []
        for i, type_tables in enumerate(tables.kv_types):
            places = [p for p, g in enumerate(type_tables.group_ids) if g in drafting]
            if places:
                self.types.append((i, type_tables, np.array(places)))
                type_tables.num_reread = max(depth - 1, 0)

    def run(self, step: Step) -> None:
        """The drafter's part of a step, after the model's tokens are verified.

        All requests' KV is written before any is read, as in the model's layers.
        """
        spans = list(self._spans(step))
        for span in spans:
            self._write(span)
        for span in spans:
            self._check(span)

    def _spans(self, step: Step) -> Iterator[Span]:
        for type_index, tables, places in self.types:
            captured = step.tables[type_index][places]
            for i, state in enumerate(step.requests):
                start = int(step.starts[i])
                end = int(step.ends[i]) - step.rejected.get(state.serial, 0)
                # Hidden states from before a prefix hit's end are not there to start from.
                first = max(start - max(self.depth - 1, 0), state.admitted_at)
                is_hit = 0 < state.admitted_at == start
                yield Span(step.index, state, tables, places, captured[:, i], first, end, is_hit)

    def _contents(self, row: int, first: int, end: int) -> np.ndarray:
        """What both parts of the slots of positions should be, as far as tokens are known."""
        identities = self.sequences.identities[row]
        right = max(min(end, int(self.sequences.known[row]) - self.depth), first)
        ahead = slice(first + self.depth, right + self.depth)
        return np.stack([identities[ahead], identities[first:right]])

    def _write(self, span: Span) -> None:
        state, tables, places = span.state, span.tables, span.places
        first, end = span.first, span.end
        contents = self._contents(state.row, first, end)
        last = max(min(end + self.settings.num_slots_ahead, self.settings.max_model_len), end)
        for prefix in contents[_PREFIX].tolist():
            self._computed_by.setdefault(prefix, state.serial)
        guesses = np.full((2, last - first - contents.shape[1]), _GUESS)
        contents = np.concatenate([contents, guesses], axis=1)
        positions = np.arange(first, last)
        columns = positions // tables.block_size
        tags = state.serial * self.num_groups + tables.group_column[places]
        try:
            for part in (_CONTENT, _PREFIX):
                self.memory.write(
                    span.table[:, columns],
                    positions - columns * tables.block_size,
                    contents[part] ^ tables.group_marks[places, None],
                    np.broadcast_to(tags, (len(places), len(positions))),
                    draft=part,
                )
        except WriteFault as fault:
            where = f"step {span.step_index}: {state.req_id}, draft layers"
            raise WriteFault(f"{where}: {fault}") from fault

    def _check(self, span: Span) -> None:
        state, tables, places, end = span.state, span.tables, span.places, span.end
        low = int(tables.kind.first_read(span.first))
        contents = self._contents(state.row, low, end)
        positions = np.arange(low, low + contents.shape[1])
        columns = positions // tables.block_size
        blocks = span.table[:, columns]
        held = self.memory.draft_slots[:, blocks, positions - columns * tables.block_size]
        held ^= tables.group_marks[places, None]
        # Of a hit, the last tokens of each block may come from another continuation.
        own = positions >= state.admitted_at
        own |= positions + self.depth < (columns + 1) * tables.block_size
        wrong = (held[_CONTENT] != contents[_CONTENT]) & own | (held[_PREFIX] != contents[_PREFIX])
        if wrong.any():
            place, at = np.argwhere(wrong)[0]
            raise ReadFault(
                f"step {span.step_index}: {state.req_id}, draft layers of group "
                f"{tables.group_ids[places[place]]}, reads position {positions[at]} (drafting "
                f"after {end} tokens, admitted at {state.admitted_at}) from block "
                f"{blocks[place, at]}, which holds something else"
            )
        self.reads_checked += wrong.size
        if self.depth and span.is_hit:
            self._check_hit(span)

    def _check_hit(self, span: Span) -> None:
        """The block after a hit must have been computed before, for the same tokens."""
        state, tables = span.state, span.tables
        after = state.admitted_at + tables.block_size
        computed_by = None
        if after <= self.sequences.known[state.row]:
            prefix = int(self.sequences.identities[state.row, after - 1])
            computed_by = self._computed_by.get(prefix)
        if computed_by in (None, state.serial):
            raise ReadFault(
                f"step {span.step_index}: {state.req_id} hits {state.admitted_at} tokens in groups "
                f"{tables.group_ids}; nobody has computed the block after them"
            )
        self.hits_checked += 1
