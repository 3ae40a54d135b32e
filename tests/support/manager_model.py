# SPDX-License-Identifier: Apache-2.0
"""The model that a KV cache manager is checked against after every operation.

It knows, independent of the manager, what memory holds, which blocks the requests own, and
which of them steps in flight still read.
"""

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from support.kv_configs import KVSetup
from support.kv_content import KVContent, Unsafe
from support.requests import LiveRequest, RequestPlan, StepInFlight, block_hasher
from vllm.distributed.kv_events import AllBlocksCleared, KVCacheEvent

Observation = dict[str, Any]
Tables = tuple[list[int], ...]


def normal_events(events: Sequence[KVCacheEvent], num_groups: int) -> tuple[Any, ...]:
    """Events per KV cache group, in order: how groups alternate is of no meaning."""
    per_group: list[list[Any]] = [[] for _ in range(num_groups)]
    for event in events:
        if isinstance(event, AllBlocksCleared):
            for one_group in per_group:
                one_group.append("cleared")
        else:
            fields = msgspec.structs.asdict(event)
            per_group[fields["group_idx"]].append((type(event).__name__, fields))
    return tuple(map(tuple, per_group))


class ManagerModel:
    """One manager, its requests in base's queues, and what must be true of them."""

    def __init__(
        self, manager_class: Any, setup: KVSetup, plans: Sequence[RequestPlan] = ()
    ) -> None:
        self.setup = setup
        self.plans = list(plans)
        self.groups = setup.groups
        self.manager = setup.build(manager_class)
        self.hasher = block_hasher(setup.resolved_hash_block_size) if setup.caching else None
        self.content = KVContent(self.groups)
        self.waiting: list[LiveRequest] = []
        self.running: list[LiveRequest] = []
        # Popped with pop_blocks_for_free, not yet returned: the blocks, their ids.
        self.deferred: list[tuple[list[Any], set[int]]] = []
        self.num_requests = 0
        #: Of hits, hit tokens, junctions, preemptions, and of drafts accepted and rejected.
        self.counts: Counter[str] = Counter()
        self.max_steps = setup.max_steps
        #: What base's scheduler looks at where it cuts prefills for states, and in sessions. It
        #: has no limit on chunks, so that a block may always be longer than one.
        size = setup.scheduler_block_size
        self.scheduler: Any = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=size),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            max_num_scheduled_tokens=0,
            block_size=size,
            hash_block_size=setup.resolved_hash_block_size,
            use_eagle_block_drop=False,
            mamba_partial_cache_hit=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_shared_prefix_checkpoint=False,
            log_stats=False,
        )

    @property
    def live(self) -> list[LiveRequest]:
        return [*self.running, *self.waiting]

    def audit(self) -> Observation:
        """Check the manager's state against the model and return what can be compared."""
        tables = {
            live.request_id: self.manager.get_block_ids(live.request_id) for live in self.live
        }
        owners: dict[int, tuple[int, int]] = {}
        names: dict[int, int] = {0: 0}
        shape = []
        for request_id in sorted(tables):
            for group, table in enumerate(tables[request_id]):
                for index, block_id in enumerate(table):
                    if block_id and owners.setdefault(block_id, (group, index)) != (group, index):
                        raise Unsafe(
                            f"id {block_id} is block {index} of group {group} for {request_id}, "
                            f"and block {owners[block_id][1]} of group {owners[block_id][0]}"
                        )
                shape.append([names.setdefault(block_id, len(names)) for block_id in table])
        used = set(owners).union(*(ids for _, ids in self.deferred))
        free = self.manager.block_pool.get_num_free_blocks()
        usable, usage = self.setup.num_blocks - 1, self.manager.usage
        if free != usable - len(used):
            raise Unsafe(f"{free} blocks are free, but {len(used)} of {usable} are in use")
        if usable and abs(usage - len(used) / usable) > 1e-9:
            raise Unsafe(f"usage is {usage}, but {len(used)} of {usable} blocks are in use")
        for live in self.running:
            self.check_steps_in_flight(live, tables[live.request_id])
        if hasattr(self.manager, "check_integrity"):
            self.manager.check_integrity()
        seen: Observation = {"free": free, "usage": round(usage, 9)}
        # Nulls first: of two that differ, they are easier to understand.
        seen["nulls"] = [[i for i, name in enumerate(table) if not name] for table in shape]
        seen["blocks"] = shape
        if self.setup.events:
            seen["events"] = normal_events(self.manager.take_events(), len(self.groups))
        elif self.manager.take_events():
            raise Unsafe("events although they are off")
        return seen

    def check_steps_in_flight(self, live: LiveRequest, tables: Tables) -> None:
        """Blocks that a step in flight reads or writes are still in the request's tables."""
        start = min((step.start for step in live.steps if not step.stale), default=None)
        if start is None:
            return
        for group, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
            first = kind.first_column(start, start)
            num_tokens = live.plan.encoder if kind.of_encoder else live.num_computed_tokens
            end = -(-num_tokens // kind.block_size)
            if kind.of_encoder and len(table) < end:
                raise Unsafe(f"{live.request_id} group {group} lost blocks: {table}")
            if kind.holds_states:
                end = first + 1  # the states between are null
            if 0 in table[max(first, 0) : end]:
                raise Unsafe(
                    f"{live.request_id} group {group}: a block that the step at token {start} "
                    f"reads was given up: {table}"
                )

    def block_counts(self, blocks: Any) -> list[int]:
        return [len(ids) for ids in blocks.get_block_ids()]

    def look_up(self, live: LiveRequest) -> tuple[Any, int, int]:
        """The manager's prefix hit, each block of it verified."""
        blocks, hit, boundary = self.manager.get_computed_blocks(live)
        if not 0 <= hit < live.num_tokens:
            raise Unsafe(f"{live.request_id} hits {hit} of {live.num_tokens} tokens")
        self.content.check_hit(blocks.get_block_ids(), live.identities(hit), hit)
        return blocks, hit, boundary

    def num_runnable(self, live: LiveRequest) -> int:
        """Tokens of a running request that can be scheduled now."""
        if len(live.steps) >= self.max_steps:
            return 0
        num_tokens = live.num_tokens + live.num_output_placeholders - live.num_computed_tokens
        return min(num_tokens, self.setup.max_model_len - live.num_computed_tokens - 1)

    def num_drafts(self, live: LiveRequest) -> int:
        """Draft tokens to verify beside the next token of a request: none before its first."""
        num_known = live.num_tokens + live.num_output_placeholders
        if num_known == live.num_prompt_tokens or live.num_computed_tokens != num_known - 1:
            return 0
        return min(self.setup.num_drafts, self.setup.max_model_len - 1 - num_known)

    def advance(
        self, live: LiveRequest, num_tokens: int, new_blocks: Any, num_drafts: int = 0
    ) -> Observation:
        """A step with ``num_tokens`` of the request is on its way; play its writes and reads.

        The last ``num_drafts`` of them are drafts, of which some are wrong.
        """
        # The scheduler counts on drafts in flight; the step starts where they turn out wrong.
        start = live.num_computed_tokens - sum(
            step.num_rejected for step in live.steps if not step.stale
        )
        end = start + num_tokens
        num_rejected = random.Random(start).randint(0, num_drafts)
        tables = self.manager.get_block_ids(live.request_id)
        new_ids = new_blocks.get_block_ids()
        # There are slots for the step's tokens and for what the drafter looks ahead.
        slots_end = live.num_computed_tokens + num_tokens + self.setup.num_lookahead
        slots_end = min(slots_end, self.setup.max_model_len)
        groups = zip(self.groups, tables, new_ids, strict=True)
        for group, (kind, table, ids) in enumerate(groups):
            where = f"{live.request_id} group {group}"
            if ids and table[-len(ids) :] != ids:
                raise Unsafe(f"{where}: {ids} is not the end of {table}")
            if not kind.of_encoder and len(table) * kind.block_size < slots_end:
                raise Unsafe(f"{where}: {len(table)} blocks for {slots_end} tokens")
        self.check_zeroing(new_ids)
        identities = live.identities(end)
        identities[end - num_rejected :] = [-live.num_tokens] * num_rejected
        self.counts.update(accepted=num_drafts - num_rejected, rejected=num_rejected)
        step = identities, start, end, live.encoder_identities()
        self.content.check_states(tables, identities, start)
        self.content.write(tables, *step)
        self.content.check_step(tables, *step)
        live.num_computed_tokens += num_tokens
        live.num_in_flight_tokens += num_tokens
        samples = live.num_computed_tokens >= live.num_tokens + live.num_output_placeholders
        live.is_prefill_chunk = not samples
        # Base's synchronous scheduler keeps no placeholders: it waits for each output.
        if samples and self.max_steps > 1:
            live.num_output_placeholders += 1 + num_drafts
        live.steps.append(StepInFlight(start, num_tokens, samples, num_drafts, num_rejected))
        return {"scheduled": num_tokens, "new_blocks": [len(ids) for ids in new_ids]}

    def check_zeroing(self, new_ids: Sequence[list[int]]) -> None:
        """The blocks to zero are exactly the new ones, where base zeroes at all."""
        to_zero = self.manager.take_new_block_ids()
        expected: list[int] = []
        if self.setup.holds_states or len({kind.dtype for kind in self.groups}) > 1:
            zeroed = zip(self.groups, new_ids, strict=False)
            expected = sorted(i for kind, ids in zeroed if not kind.holds_states for i in ids)
        if sorted(to_zero) != expected:
            raise Unsafe(f"{to_zero} would be zeroed instead of {expected}")

    def make_stale(self, live: LiveRequest, drop: bool) -> None:
        """Steps in flight no longer advance the request; some still deliver their output."""
        drop = drop or any(step.dropped for step in live.steps)
        for step in live.steps:
            step.stale, step.dropped = True, step.dropped or drop
        live.drop_stale_output = drop
        live.num_stale_output_tokens = live.num_in_flight_tokens
        live.num_output_placeholders = 0
