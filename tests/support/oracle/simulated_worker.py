# SPDX-License-Identifier: Apache-2.0
"""A worker without model or GPU that checks every KV read of every scheduled step.

It keeps block tables as vLLM's model runners do, plays each step's writes and reads on a
model of device memory, and samples tokens that depend on nothing but the request's prefix.
"""

from collections.abc import Callable, Sequence

import numpy as np

from support.identity import PrefixIdentity
from support.kv_configs import MAX_ENCODER_LENGTH
from support.requests import encoder_input
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from .attention import Attention
from .block_tables import BlockTables
from .connector import ConnectorWorker, Transfers
from .drafter import Drafter
from .engine_config import OracleSettings
from .faults import ProtocolFault
from .sequences import Sequences
from .step import RequestState, Step


class SimulatedWorker:
    """Runs the steps of one scheduler.

    A step is `submit`ted when it is scheduled (its block tables are final then), `run`
    later, in order, and `settle`d when its output reaches the scheduler.

    With ``settings.model_runner_v2`` it follows the second model runner: resumed requests arrive
    as new.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, settings: OracleSettings) -> None:
        self.settings = settings
        num_rows = settings.max_num_seqs * (settings.steps_in_flight + 2)
        self.tables = BlockTables(kv_cache_config, num_rows, settings.max_model_len)
        num_ahead = (settings.num_spec_tokens + 1) * (settings.steps_in_flight + 1)
        longest = settings.max_model_len + num_ahead
        self.sequences = Sequences(num_rows, longest, settings.vocab_size)
        self.encoder_states = Sequences(num_rows, MAX_ENCODER_LENGTH, settings.vocab_size)
        self.attention = Attention(self.tables, self.sequences, self.encoder_states)
        self.drafter = Drafter(kv_cache_config, settings, self.attention)
        self.num_steps = 0
        self.tokens_from_cache = 0
        self.num_drafts_accepted = 0
        self.num_drafts_rejected = 0

        self._identities: dict[str, PrefixIdentity] = {}
        self.connector: ConnectorWorker | None = None
        if settings.connector is not None:
            self.connector = ConnectorWorker(self.tables, self.attention.memory, self._identities)
        self._encoder_lengths: dict[str, int] = {}
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._unsettled: list[Step] = []

    def announce(self, req_id: str, identity: PrefixIdentity, encoder_length: int = 0) -> None:
        """Register what determines a request's KV besides its tokens, and what an encoder gets."""
        self._identities[req_id] = identity
        self._encoder_lengths[req_id] = encoder_length

    # Submitting: what a model runner does before the forward pass

    def submit(self, scheduled: SchedulerOutput) -> Step:
        """Take a step over from the scheduler: update the block tables and keep them."""
        retired: list[int] = []
        for req_id in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self._drop(req_id, retired)
            for step in self._unsettled:
                step.abandoned.add(req_id)

        if self.connector is not None:
            assert isinstance(scheduled.kv_connector_metadata, Transfers)
            self.connector.begin(scheduled.kv_connector_metadata)
        starts: dict[str, int] = {}
        handed_out: list[np.ndarray] = []
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            tokens = self._prefill_tokens(new)
            handed_out += self._admit(
                new.req_id, tokens, new.block_ids, new.num_computed_tokens, retired
            )
        cached = scheduled.scheduled_cached_reqs
        for req_id, new_block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[req_id] = num_computed
            if req_id not in cached.resumed_req_ids:
                handed_out += self._extend(req_id, new_block_ids)
                continue
            resumed_tokens = cached.all_token_ids.get(req_id)
            if resumed_tokens is None or new_block_ids is None:
                raise ProtocolFault(f"{req_id} is resumed without its tokens or blocks")
            handed_out += self._admit(req_id, resumed_tokens, new_block_ids, num_computed, retired)
        if starts.keys() != scheduled.num_scheduled_tokens.keys():
            raise ProtocolFault(
                f"data for {sorted(starts)}, tokens for {sorted(scheduled.num_scheduled_tokens)}"
            )
        if self._unsettled and handed_out:
            self.attention.check_not_in_flight(
                np.concatenate([ids.ravel() for ids in handed_out]), self._unsettled
            )

        states = [self._states[req_id] for req_id in scheduled.num_scheduled_tokens]
        encoded = {s.req_id for s in states if s.encoder_length and not starts[s.req_id]}
        if self.tables.has_encoder and encoded != scheduled.scheduled_encoder_inputs.keys():
            raise ProtocolFault(
                f"{sorted(encoded)} begin, but the encoder is to run for "
                f"{sorted(scheduled.scheduled_encoder_inputs)}"
            )
        step = Step(
            index=self.num_steps,
            requests=states,
            starts=np.array([starts[state.req_id] for state in states], dtype=np.int64),
            counts=np.array(list(scheduled.num_scheduled_tokens.values()), dtype=np.int64),
            block_tables=self.tables,
            scheduled=scheduled,
            retired_rows=retired,
            overlapped=list(self._unsettled),
        )
        for state in states:
            state.last_step = step.index
        self.num_steps += 1
        self._unsettled.append(step)
        return step

    def check_held(self, get_block_ids: Callable[[str], Sequence[list[int]]]) -> None:
        """The manager must hold every block that a step in flight reads."""
        for step in self._unsettled:
            self.attention.check_held(step, get_block_ids)

    def _prefill_tokens(self, new: NewRequestData) -> Sequence[int]:
        tokens = new.prefill_token_ids if self.settings.model_runner_v2 else new.prompt_token_ids
        if tokens is None:
            raise ProtocolFault(f"{new.req_id} is scheduled without tokens")
        if new.req_id in self._states:
            raise ProtocolFault(f"{new.req_id} is scheduled as new but already runs")
        return tokens

    def _drop(self, req_id: str, retired: list[int]) -> None:
        state = self._states.pop(req_id, None)
        if state is not None:
            retired.append(state.row)

    def _admit(
        self,
        req_id: str,
        tokens: Sequence[int],
        block_ids: Sequence[list[int]],
        num_computed: int,
        retired: list[int],
    ) -> list[np.ndarray]:
        """Start or restart a request; returns its blocks that are not prefix hits."""
        self._drop(req_id, retired)
        load = self.connector.take_load(req_id) if self.connector is not None else None
        serial = self.attention.memory.admit(req_id) if load is None else load.serial
        state = RequestState(req_id, self._free_rows.pop(), serial, block_ids, num_computed)
        self._states[req_id] = state
        self.sequences.start(state.row, tokens, self._identities[req_id])
        state.encoder_length = self._encoder_lengths[req_id]
        self.encoder_states.start(
            state.row, range(state.encoder_length), PrefixIdentity(encoder_input(req_id))
        )
        self.tokens_from_cache += num_computed if load is None else load.span.start
        self.tables.clear(state.row)
        ids_by_type = self.tables.append(state.row, block_ids)
        return self._filled(
            [
                ids[:, -(-num_computed // tables.block_size) :]
                for tables, ids in zip(self.tables.types, ids_by_type, strict=True)
            ]
        )

    def _filled(self, ids_by_type: list[np.ndarray]) -> list[np.ndarray]:
        """Without the null blocks in place of states that a chunk passes over."""
        return [
            ids[ids != 0] if tables.kind.holds_states else ids
            for tables, ids in zip(self.tables.types, ids_by_type, strict=True)
        ]

    def _extend(self, req_id: str, new_block_ids: Sequence[list[int]] | None) -> list[np.ndarray]:
        """Append blocks to a running request; returns them."""
        state = self._states.get(req_id)
        if state is None:
            raise ProtocolFault(f"{req_id} is scheduled as running but does not run")
        added: list[np.ndarray] = []
        if new_block_ids is not None:
            added = self._filled(self.tables.append(state.row, new_block_ids))
            if not self.settings.model_runner_v2:
                for ids, new_ids in zip(state.block_ids, new_block_ids, strict=True):
                    ids.extend(new_ids)
        # A request that was left out of a step joins the batch again from its lists.
        rejoins = state.last_step != self.num_steps - 1
        if (added or rejoins) and not self.settings.model_runner_v2:  # noqa: SIM102
            if not self.tables.holds(state.row, state.block_ids):
                raise ProtocolFault(f"the block id lists sent for {req_id} were changed later")
        return added

    # Running: the forward pass and the sampler

    def run(self, step: Step) -> ModelRunnerOutput:
        """Write the step's KV, check all that it reads, sample.

        Steps submitted before it run first.
        """
        for earlier in self._unsettled:
            if earlier.output is None and earlier.index <= step.index:
                earlier.output = self._run(earlier)
        assert step.output is not None
        return step.output

    def run_all(self) -> None:
        """Run every submitted step."""
        if self._unsettled:
            self.run(self._unsettled[-1])

    def settle(self, step: Step) -> None:
        """The scheduler has the step's output."""
        self._unsettled.remove(step)

    def take_draft_token_ids(self, step: Step) -> DraftTokenIds:
        """Drafts proposed after a step, for a scheduler that wants to see them."""
        states = [s for s in step.requests if s.drafts_at == self.sequences.known[s.row]]
        return DraftTokenIds([s.req_id for s in states], [list(s.drafts) for s in states])

    def _run(self, step: Step) -> ModelRunnerOutput:
        if step.scheduled.kv_cache_block_copies:
            raise NotImplementedError("copies of partly hit blocks are not simulated")
        if step.scheduled.new_block_ids_to_zero:
            self.attention.memory.erase(step.scheduled.new_block_ids_to_zero)
        if self.connector is not None:
            assert isinstance(step.scheduled.kv_connector_metadata, Transfers)
            self.connector.reach(step.scheduled.kv_connector_metadata)
        sampled: list[list[int]] = []
        if step.requests:
            if self.settings.num_spec_tokens or step.scheduled.scheduled_spec_decode_tokens:
                drafts = self._place_drafts(step)
                self._check_positions(step, [len(tokens) for tokens in drafts])
                self.attention.forward(step)
                sampled = self._sample_and_verify(step, drafts)
            else:
                self._check_positions(step, 0)
                self.attention.forward(step)
                sampled = self._sample(step)
            if self.drafter.types:
                self.drafter.run(step)
        req_ids = [state.req_id for state in step.requests]
        self._free_rows += step.retired_rows
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self.connector.finish() if self.connector is not None else None,
        )

    def _check_positions(self, step: Step, num_drafts: list[int] | int) -> None:
        """All scheduled positions must have tokens and slots."""
        ends = step.ends
        longest = self.settings.max_model_len
        available = np.minimum(self.sequences.known[step.rows] + num_drafts, longest)
        if (ends > available).any():
            i = int(np.argmax(ends - available))
            raise ProtocolFault(
                f"step {step.index}: {step.requests[i].req_id} is scheduled up to token "
                f"{ends[i]}; it has {available[i]}, at most {longest} are allowed"
            )
        if self.settings.num_slots_ahead:
            ends = np.minimum(ends + self.settings.num_slots_ahead, longest)
        self.attention.check_slots(step, ends)

    def _sample(self, step: Step) -> list[list[int]]:
        """A token for each request; none for one whose prompt is not done."""
        done = step.ends == self.sequences.known[step.rows]
        if done.all():
            return [[token] for token in self.sequences.extend(step.rows).tolist()]
        sampled: list[list[int]] = [[] for _ in step.requests]
        which = np.flatnonzero(done)
        if len(which):
            tokens = self.sequences.extend(step.rows[which]).tolist()
            for i, token in zip(which, tokens, strict=True):
                sampled[i] = [token]
        return sampled

    # Speculative decoding

    def _place_drafts(self, step: Step) -> list[list[int]]:
        """Draft tokens of each request of a step, put after its known tokens."""
        known = self.sequences.known
        # The scheduler counted on the acceptance of all drafts that were in flight.
        for earlier in step.overlapped:
            step.starts -= [earlier.rejected.get(state.serial, 0) for state in step.requests]
        all_drafts = []
        for state in step.requests:
            drafts = list(step.scheduled.scheduled_spec_decode_tokens.get(state.req_id, ()))
            if -1 in drafts:
                # Placeholders: the worker uses its own drafts, or any if it has none.
                own = state.drafts if state.drafts_at == known[state.row] else []
                drafts = (own + [0] * len(drafts))[: len(drafts)]
            self.sequences.put_drafts(state.row, drafts)
            all_drafts.append(drafts)
        return all_drafts

    def _sample_and_verify(self, step: Step, all_drafts: list[list[int]]) -> list[list[int]]:
        """Accepted drafts and one more token for each request, and new drafts."""
        sampled: list[list[int]] = []
        for state, end, drafts in zip(step.requests, step.ends, all_drafts, strict=True):
            if end < self.sequences.known[state.row] + len(drafts):
                sampled.append([])
                continue
            tokens = self.sequences.verify_drafts(state.row, drafts)
            step.rejected[state.serial] = len(drafts) + 1 - len(tokens)
            self.num_drafts_accepted += len(tokens) - 1
            self.num_drafts_rejected += len(drafts) + 1 - len(tokens)
            sampled.append(tokens)
            state.drafts = self.sequences.propose(state.row, self.settings.num_spec_tokens)
            state.drafts_at = int(self.sequences.known[state.row])
        return sampled
