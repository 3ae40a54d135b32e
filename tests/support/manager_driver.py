# SPDX-License-Identifier: Apache-2.0
"""Drives one KV cache manager as base's scheduler would, and observes all that it shows.

An operation is a tuple: its name and a few small integers that pick a request (modulo the
candidates) or a size. `ManagerDriver.apply` returns what was observed as a dict that can be
compared with another manager's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from support.manager_model import ManagerModel, Observation
from support.oracle.faults import Unsafe
from support.requests import LiveRequest, make_request, token_at, tokens_of
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus, StreamingUpdate

Op = tuple[Any, ...]


def picks_from(candidates: Callable[["ManagerDriver"], list[LiveRequest]]) -> Callable[..., Any]:
    """The operation's first argument picks one of these requests, modulo their number."""

    def mark(operation: Any) -> Any:
        operation.candidates = candidates
        return operation

    return mark


class ManagerDriver(ManagerModel):
    """The operations that base's scheduler performs on its manager."""

    def apply(self, op: Op) -> Observation:
        """Perform ``op`` and return all that it shows; ``{"skipped": ...}`` if it finds nothing."""
        # A step of the scheduler, but for those that stand between two.
        self.manager.new_step_starts()
        name, *arguments = op
        operation = getattr(self, f"op_{name}")
        seen: Observation = {}
        if hasattr(operation, "candidates"):
            ready = operation.candidates(self)
            if not ready:
                return {"skipped": name} | self.audit()
            arguments[0] = ready[arguments[0] % len(ready)]
            seen["request"] = arguments[0].request_id
        return seen | operation(*arguments) | self.audit()

    # ---------------------------------------------------------------- scheduling

    def op_add(self, plan: int) -> Observation:
        """A request arrives."""
        chosen = self.plans[plan % len(self.plans)]
        request_id = f"r{self.num_requests:03d}"
        self.num_requests += 1
        self.waiting.append(make_request(chosen, request_id, self.hasher))
        return {"request": request_id}

    def can_start(self, live: LiveRequest) -> bool:
        # Output that is still to be delivered must be: resuming would sample it again.
        owed = any(step.stale and not step.dropped for step in live.steps)
        return not owed and len(live.steps) < self.max_steps

    @picks_from(lambda self: [live for live in self.waiting if self.can_start(live)])
    def op_start(self, live: LiveRequest, chunk: int, reserved: int = 0) -> Observation:
        """Try to admit a waiting or preempted request, with a first chunk."""
        seen: Observation = {"request": live.request_id}
        looked_up = live.num_computed_tokens == 0
        if looked_up:
            blocks, hit, boundary = self.look_up(live)
            live.shared_prefix_boundary = boundary
            seen |= {"hit": hit, "boundary": boundary}
            computed = hit
        else:
            blocks, hit, boundary = self.manager.empty_kv_cache_blocks, 0, 0
            computed = live.num_computed_tokens
        num_tokens = min(live.num_tokens - computed, max(1, min(chunk, self.setup.max_chunk)))
        num_tokens = self.end_at_states(live, computed, num_tokens)
        new_blocks = self.manager.allocate_slots(
            live,
            num_tokens,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self.setup.num_lookahead,
            num_external_computed_tokens=0,
            delay_cache_blocks=False,
            num_encoder_tokens=live.plan.encoder if looked_up else 0,
            full_sequence_must_fit=self.setup.full_sequence_must_fit,
            reserved_blocks=reserved,
            has_scheduled_reqs=bool(self.running),
            skip_zeroing_group_ids=(),
        )
        if new_blocks is None:
            self.check_zeroing([])
            return seen | {"admitted": False}
        if looked_up:
            self.manager.record_prefix_cache_stats(live, hit)
            self.counts.update(hits=hit > 0, hit_tokens=hit, junctions=boundary > 0)
            live.serial = self.attention.memory.admit(live.request_id)
        self.waiting.remove(live)
        self.running.append(live)
        live.status = RequestStatus.RUNNING
        live.num_computed_tokens = computed
        return seen | {"admitted": True} | self.advance(live, num_tokens, new_blocks)

    def end_at_states(self, live: LiveRequest, start: int, num_tokens: int) -> int:
        """A chunk of a prefill, cut as base's scheduler does it for models with states."""
        if not self.setup.holds_states:
            return num_tokens
        return Scheduler._mamba_block_aligned_split(
            self.scheduler, live, num_tokens, start - live.num_computed_tokens
        )

    @picks_from(lambda self: [live for live in self.running if self.num_runnable(live) > 0])
    def op_run(self, live: LiveRequest, chunk: int) -> Observation:
        """Schedule a running request: its next chunk, or one token to decode."""
        num_tokens = min(self.num_runnable(live), max(1, min(chunk, self.setup.max_chunk)))
        num_tokens = self.end_at_states(live, live.num_computed_tokens, num_tokens)
        num_drafts = self.num_drafts(live) if num_tokens == 1 else 0
        num_tokens += num_drafts
        seen: Observation = {"request": live.request_id, "preempted": []}
        while True:
            new_blocks = self.manager.allocate_slots(
                live, num_tokens, num_lookahead_tokens=self.setup.num_lookahead
            )
            if new_blocks is not None:
                return seen | self.advance(live, num_tokens, new_blocks, num_drafts)
            self.check_zeroing([])
            victim = self.running[-1]
            self.op_preempt(victim)
            seen["preempted"].append(victim.request_id)
            if victim is live:
                return seen

    @picks_from(lambda self: [live for live in self.live if live.steps])
    def op_process(self, live: LiveRequest) -> Observation:
        """The oldest step of a request with steps in flight returns its output."""
        step = live.steps.pop(0)
        seen: Observation = {"request": live.request_id}
        live.num_in_flight_tokens -= step.num_tokens
        if step.stale:
            live.num_stale_output_tokens -= step.num_tokens
        if not step.samples or step.dropped:
            return seen
        was_running = live.status == RequestStatus.RUNNING
        num_sampled = 1 + step.num_drafts - step.num_rejected
        for _ in range(num_sampled):
            live.append_output_token_ids(token_at(live.plan.output, live.num_tokens))
        if not step.stale:
            live.num_computed_tokens -= step.num_rejected
        if self.max_steps > 1:
            if not step.stale:
                live.num_output_placeholders -= num_sampled + step.num_rejected
            if was_running:
                self.manager.cache_blocks(
                    live, live.num_computed_tokens - live.num_output_placeholders
                )
        seen["cached"] = self.manager.estimate_cached_tokens(live)
        if live.num_tokens >= self.setup.max_model_len:
            self.op_finish(live)
        return seen

    def op_step(self, budget: int) -> Observation:
        """A whole step: running requests, then waiting ones in order, then due outputs."""
        # What the scheduler drains each step, of features that are not in use.
        seen: Observation = {
            "copies": self.manager.take_kv_cache_block_copies(),
            "steps": [],
        }
        offloads = self.manager.take_boundary_state_offloads()
        if not self.setup.holds_states:  # KV connectors with states are base's
            seen["offloads"] = offloads
        budget = max(1, min(budget, self.setup.max_chunk))
        preempted = False
        for live in list(self.running):
            if budget <= 0 or live not in self.running:
                continue
            if self.num_runnable(live) > 0:
                one = self.op_run(live, budget)
                budget -= one.get("scheduled", 0)
                preempted |= bool(one["preempted"])
                seen["steps"].append(one)
        while budget > 0 and self.waiting and not preempted and self.can_start(self.waiting[0]):
            one = self.op_start(self.waiting[0], budget)
            seen["steps"].append(one)
            if not one["admitted"]:
                break
            budget -= one["scheduled"]
        for live in self.live:
            if len(live.steps) >= self.max_steps:
                seen["steps"].append(self.op_process(live))
        return seen

    def op_serve(self, plan: int, num_tokens: int) -> Observation:
        """A request arrives, is admitted if possible, and runs alone for some output tokens."""
        added = self.op_add(plan)
        live = self.waiting[-1]
        started = self.op_start(live, self.setup.max_chunk)
        return added | {"steps": [started, *self.op_decode(live, num_tokens)["steps"]]}

    @picks_from(lambda self: self.running)
    def op_decode(self, live: LiveRequest, num_tokens: int) -> Observation:
        """One running request goes on alone until it has so many more output tokens."""
        steps: list[Observation] = []
        wanted = live.num_tokens + num_tokens
        while live in self.running and live.num_tokens < wanted:
            if self.num_runnable(live) > 0:
                steps.append(self.op_run(live, self.setup.max_chunk))
            else:
                steps.append(self.op_process(live))
        return {"steps": steps}

    # ---------------------------------------------------------------- leaving

    @picks_from(lambda self: self.running)
    def op_preempt(self, live: LiveRequest, drop: bool = False) -> Observation:
        self.running.remove(live)
        self.manager.free(live)
        live.status = RequestStatus.PREEMPTED
        live.num_computed_tokens = 0
        self.make_stale(live, drop)
        live.num_preemptions += 1
        self.counts["preemptions"] += 1
        self.waiting.insert(0, live)
        return {}

    @picks_from(lambda self: self.live)
    def op_finish(self, live: LiveRequest) -> Observation:
        """A request finishes or is aborted, wherever it stands."""
        self.leave(live)
        self.manager.free(live)
        return {}

    def leave(self, live: LiveRequest) -> None:
        (self.running if live in self.running else self.waiting).remove(live)
        live.status = RequestStatus.FINISHED_ABORTED

    @picks_from(lambda self: self.live)
    def op_finish_later(self, live: LiveRequest) -> Observation:
        """A request finishes, but its blocks are returned to the pool later."""
        ids = {i for table in self.manager.get_block_ids(live.request_id) for i in table if i}
        self.leave(live)
        blocks = self.manager.pop_blocks_for_free(live)
        if blocks:
            self.deferred.append((blocks, ids))
        elif ids:
            raise Unsafe(f"no blocks were popped for {live.request_id}, which held {ids}")
        return {"popped": bool(blocks)}

    def op_return_blocks(self) -> Observation:
        """The oldest blocks that were held back return to the pool."""
        if not self.deferred:
            return {"skipped": "return_blocks"}
        blocks, _ = self.deferred.pop(0)
        self.manager.block_pool.free_blocks(reversed(blocks))
        return {}

    def op_reset(self, preempt_all: int) -> Observation:
        """Reset the prefix cache, with all running requests preempted or not."""
        if preempt_all:
            while self.running:
                self.op_preempt(self.running[-1], drop=True)
        return {"reset": self.manager.reset_prefix_cache()}

    @picks_from(lambda self: [live for live in self.running if not live.is_prefill_chunk])
    def op_session(self, live: LiveRequest, plan: int) -> Observation:
        """A streaming session's turn ends with the next output, and its next input arrives.

        The request keeps its blocks. As in base, the turn ends while an output is processed:
        a step scheduled after that output could have cached the token that is dropped.
        """
        # A state cannot go back to before a token that is dropped, and how drafts in flight end
        # with a turn is not modelled.
        if self.setup.holds_states or self.setup.num_drafts:
            return {"skipped": "session"}
        path = self.plans[plan % len(self.plans)].path
        num_new = sum(length for _, length in path)
        if live.num_tokens + 1 + num_new >= self.setup.max_model_len:
            return {"skipped": "session"}
        if not any(step.samples for step in live.steps) and self.num_runnable(live) > 0:
            self.op_run(live, 1)
        num_outputs = live.num_output_tokens
        while live in self.running and live.steps and live.num_output_tokens == num_outputs:
            self.op_process(live)
        if live not in self.running or live.num_output_tokens == num_outputs:
            return {"skipped": "session"}
        live.num_computed_tokens -= live.num_output_placeholders
        self.make_stale(live, drop=True)
        tokens = tokens_of(path, start=live.num_computed_tokens)
        update = StreamingUpdate(None, tokens, live.max_tokens, 0.0, live.sampling_params)
        Scheduler._update_request_as_session(self.scheduler, live, update)
        self.running.remove(live)
        self.waiting.insert(0, live)
        return {"num_tokens": live.num_tokens}

    # ---------------------------------------------------------------- looking

    @picks_from(lambda self: self.live)
    def op_remove_skipped(self, live: LiveRequest) -> Observation:
        """Give up what no later token reads, outside of any allocation.

        Without the length of the prompt, for which the hybrid manager keeps one token more than
        base.
        """
        processed = max(0, live.num_computed_tokens - live.num_in_flight_tokens)
        self.manager.remove_skipped_blocks(
            request_id=live.request_id, processed_computed_tokens=processed
        )
        return {}

    @picks_from(lambda self: [w for w in self.waiting if w.num_computed_tokens == 0])
    def op_look_up(self, live: LiveRequest, cut: int) -> Observation:
        """A lookup that leads to nothing, and a shorter view of it."""
        blocks, hit, boundary = self.look_up(live)
        if self.setup.holds_states:  # KV connectors are base's, and there is no state before.
            shorter, for_connector = hit, (blocks, hit, boundary, False)
        else:
            shorter = min(cut * self.setup.scheduler_block_size, hit)
            for_connector = self.manager.get_computed_blocks_for_connector(live)
        view = self.manager.truncate_computed_blocks(blocks, shorter) if hit else blocks
        ids = blocks.get_block_ids()
        for table, longer in zip(view.get_block_ids(), ids, strict=True):
            if table != longer[: len(table)]:
                raise Unsafe(f"a truncated hit has {table} of {longer}")
        return {
            "hit": hit,
            "boundary": boundary,
            "for_connector": (self.block_counts(for_connector[0]), *for_connector[1:]),
            "hit_nulls": [[i for i, block_id in enumerate(t) if not block_id] for t in ids],
            "truncated": self.block_counts(view),
            "enabled": self.manager.prefix_cache_lookup_enabled(live),
        }

    @picks_from(lambda self: self.live)
    def op_observe(self, live: LiveRequest) -> Observation:
        """Read-only calls about one request, as scheduler and connectors make them."""
        manager, request_id = self.manager, live.request_id
        computed = live.num_computed_tokens
        blocks = manager.get_blocks(request_id)
        ids = blocks.get_block_ids()
        if ids != manager.get_block_ids(request_id):
            raise Unsafe("get_blocks and get_block_ids differ")
        full = min(live.num_tokens, self.setup.max_model_len)
        remaining = [
            manager.coordinator.get_num_blocks_to_allocate(
                request_id=request_id,
                num_tokens=full,
                new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
                num_encoder_tokens=num_encoder_tokens,
                total_computed_tokens=computed,
                num_local_computed_tokens=computed,
                num_tokens_main_model=full,
                apply_admission_cap=True,
                prefill_end=max(live.num_prompt_tokens, live.num_tokens - 1),
            )
            for num_encoder_tokens in (0, live.plan.encoder)
        ]
        clipped = manager.get_block_ids_for_computed_tokens(request_id, computed)
        return {
            "none_allowed": blocks.get_block_ids(allow_none=True) is None,
            "selected": [len(t) for t in blocks.get_block_ids(group_ids=[0])] if ids else [],
            "unhashed": [len(t) for t in blocks.get_unhashed_block_ids_all_groups()],
            "new_empty": self.block_counts(blocks.new_empty()),
            "added": self.block_counts(blocks + blocks),
            "clipped": [len(t) for t in clipped],
            "cached": manager.estimate_cached_tokens(live),
            # With states, base subtracts blocks of steps in flight that these tokens do not need.
            # It takes null blocks for blocks that the request has already.
            "remaining": [max(n, 0) for n in remaining] if all(map(all, ids)) else None,
            "common": manager.get_num_common_prefix_blocks(request_id),
        }

    def op_stats(self) -> Observation:
        stats = self.manager.make_prefix_cache_stats()
        return {"stats": stats and dataclasses.asdict(stats)}

    # ---------------------------------------------------------------- the end

    def op_wind_down(self) -> Observation:
        """Every request ends; the pool must be whole again, and forget on request."""
        seen = self.op_stats()
        while self.live:
            self.op_finish(self.live[-1])
        while self.deferred:
            self.op_return_blocks()
        seen["before_the_reset"] = self.audit()
        if self.manager.usage != 0:
            raise Unsafe(f"usage is {self.manager.usage} with no request alive")
        if not self.manager.reset_prefix_cache():
            raise Unsafe("the prefix cache cannot be reset with no request alive")
        return seen
