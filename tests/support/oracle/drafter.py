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

from dataclasses import replace

import numpy as np

from support.identity import hash64
from support.kv_configs import DRAFT_LAYER
from vllm.v1.kv_cache_interface import KVCacheConfig

from .attention import Attention
from .block_tables import TypeTables
from .device_memory import DRAFT_CONTENT, DRAFT_PREFIX, Slots
from .engine_config import OracleSettings
from .faults import ReadFault
from .step import RequestState, Step

_GUESS = np.uint64(hash64("a guess"))


class Drafter:
    """Writes and checks the KV of draft layers.

    Args:
        config: The model's KV cache; its layer names tell the draft layers.
        settings: Those of the worker.
        attention: The model's layers; draft layers have a part of each block to themselves.
    """

    def __init__(
        self, config: KVCacheConfig, settings: OracleSettings, attention: Attention
    ) -> None:
        self.settings = settings
        self.attention = attention
        self.memory = attention.memory
        self.sequences = attention.sequences
        self.depth = settings.draft_depth
        #: For prefixes that have been computed, the admission that did it first.
        self._computed_by: dict[int, int] = {}
        drafting = [
            any(name.startswith(DRAFT_LAYER) for name in group.layer_names)
            for group in config.kv_cache_groups
        ]
        #: Index among the types, the places of its groups with draft layers, and tables for these.
        self.types: list[tuple[int, list[int], TypeTables]] = []
        for i, tables in enumerate(attention.tables.types):
            places = [p for p, g in enumerate(tables.group_ids) if drafting[g]]
            if places:
                tables.num_reread = max(self.depth - 1, 0)
                self.types.append((i, places, tables.only(places)))

    def run(self, step: Step) -> None:
        """The drafter's part of a step, after the model's tokens are verified.

        All requests' KV is written before any is read, as in the model's layers.
        """
        slots_of = self.attention.slots
        types = [(tables, step.tables[i][places]) for i, places, tables in self.types]
        rejected = [step.rejected.get(serial, 0) for serial in step.serials.tolist()]
        ends = step.ends - np.array(rejected, dtype=np.int64)
        ahead = np.minimum(ends + self.settings.num_slots_ahead, self.settings.max_model_len)
        # Hidden states from before a prefix hit's end are not there to start from.
        admitted = step.each("admitted_at")
        firsts = np.maximum(step.starts - max(self.depth - 1, 0), admitted)
        # Up to where the tokens that KV depends on are known.
        right = np.minimum(ends, self.sequences.known[step.rows] - self.depth)
        for tables, captured in types:
            written = slots_of(step, tables, captured, firsts, np.maximum(ahead, ends))
            self._write(step, written, written.positions < right[written.request])
        for tables, captured in types:
            lows = tables.kind.first_read(firsts)
            self._check(step, slots_of(step, tables, captured, lows, right), admitted)
            if self.depth:
                for i in np.flatnonzero((admitted > 0) & (admitted == step.starts)):
                    self._check_hit(step, tables, step.requests[i])

    def _ahead(self, step: Step, slots: Slots) -> np.ndarray:
        """The identities of the prefixes that end `depth` tokens after each position."""
        identities = self.sequences.identities
        positions = np.minimum(slots.positions + self.depth, identities.shape[1] - 1)
        return identities[step.rows[slots.request], positions]

    def _write(self, step: Step, written: Slots, known: np.ndarray) -> None:
        prefixes, serials = written.contents[known].tolist(), written.serials[known].tolist()
        for prefix, serial in zip(prefixes, serials, strict=True):
            self._computed_by.setdefault(prefix, serial)
        contents = {DRAFT_PREFIX: written.contents, DRAFT_CONTENT: self._ahead(step, written)}
        for part, right in contents.items():
            guessed = replace(written, contents=np.where(known, right, _GUESS))
            self.memory.write(guessed, f"step {step.index}: draft layers", part)

    def _check(self, step: Step, read: Slots, admitted: np.ndarray) -> None:
        # Of a hit, the last tokens of each block may come from another continuation.
        own = read.positions >= admitted[read.request]
        own |= read.offsets + self.depth < read.tables.block_size
        contents = replace(read, contents=self._ahead(step, read))
        wrong = self.memory.wrong(contents, DRAFT_CONTENT) & own
        wrong |= self.memory.wrong(read, DRAFT_PREFIX)
        self.attention.check(step, read, wrong, "draft layers")

    def _check_hit(self, step: Step, tables: TypeTables, state: RequestState) -> None:
        """The block after a hit must have been computed before, for the same tokens."""
        after = state.admitted_at + tables.block_size
        computed_by = None
        if after <= self.sequences.known[state.row]:
            prefix = int(self.sequences.identities[state.row, after - 1])
            computed_by = self._computed_by.get(prefix)
        if computed_by in (None, state.serial):
            raise ReadFault(
                f"step {step.index}: {state.req_id} hits {state.admitted_at} tokens in groups "
                f"{tables.group_ids}; nobody has computed the block after them"
            )
