# SPDX-License-Identifier: Apache-2.0
"""The real scheduler, a KV cache manager under test, and the simulated worker."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from unittest import mock

from support.identity import PrefixIdentity, expected_tokens
from support.requests import block_hasher, build_request
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
)
from vllm.v1.core.hybrid import load_failures
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from .connector import SimulatedConnector
from .engine_config import (
    OracleSettings,
    make_vllm_config,
    set_mamba_options,
    structured_output_manager,
)
from .faults import OutcomeFault
from .simulated_worker import SimulatedWorker
from .step import Step

_ENCODER_CACHE_SIZE = 1 << 20
_PLAIN = PrefixIdentity()


@dataclass
class Submission:
    """A request as its client sees it."""

    request: Request
    prompt: list[int]
    identity: PrefixIdentity
    outputs: list[int] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False

    @property
    def req_id(self) -> str:
        return self.request.request_id


class OracleEngine:
    """Drives a scheduler as vLLM's engine core does, and checks all that comes of it.

    Every fault of the scheduler or the manager that would corrupt an answer raises an
    `OracleFault`. If the manager has a ``check_integrity()``, it is called after every call
    of the scheduler.

    Args:
        manager_cls: The KV cache manager class (any callable with base's arguments); None
            leaves the choice to the scheduler module, plugins included.
        kv_cache_config: The model's KV cache.
        settings: How to run; the defaults if left out.
        check_integrity: Whether to call the manager's check after every call, and to compare
            the manager's block tables with what steps in flight read. Both take time, and
            without them all reads are still checked.
    """

    def __init__(
        self,
        manager_cls: Any,
        kv_cache_config: KVCacheConfig,
        settings: OracleSettings | None = None,
        check_integrity: bool = True,
    ) -> None:
        self.settings = settings = settings or OracleSettings()
        self.kv_cache_config = kv_cache_config
        groups = kv_cache_config.kv_cache_groups
        is_encoder_decoder = any(isinstance(g.kv_cache_spec, CrossAttentionSpec) for g in groups)
        vllm_config = make_vllm_config(
            settings,
            block_size=groups[0].kv_cache_spec.block_size if groups else 16,
            num_blocks=kv_cache_config.num_blocks,
            is_encoder_decoder=is_encoder_decoder,
        )
        set_mamba_options(vllm_config, kv_cache_config)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        caching = settings.enable_prefix_caching
        self._block_hasher = block_hasher(hash_block_size) if caching else None
        chosen = manager_cls or scheduler_module.KVCacheManager

        def create_manager(**kwargs: Any) -> Any:
            # The config derives it from parallel sizes, which do not reach every depth.
            kwargs["max_in_flight_tokens"] = settings.max_in_flight_tokens
            return chosen(**kwargs)

        scheduler_cls = AsyncScheduler if settings.async_scheduling else Scheduler
        with mock.patch.object(scheduler_module, "KVCacheManager", create_manager):
            self.scheduler = scheduler_cls(
                vllm_config=vllm_config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=structured_output_manager(),
                block_size=block_size,
                hash_block_size=hash_block_size,
                log_stats=settings.log_stats,
            )
        # The plugin changes the class. It is the same for base's manager.
        for name, ours in load_failures.replacements(scheduler_cls).items():
            setattr(self.scheduler, name, MethodType(ours, self.scheduler))
        self.scheduler.use_v2_model_runner = settings.model_runner_v2
        self.scheduler.num_lookahead_tokens = settings.num_slots_ahead
        # The config's model is a text model; images need a place to be encoded.
        cache_cls = EncoderDecoderCacheManager if is_encoder_decoder else EncoderCacheManager
        self.scheduler.encoder_cache_manager = cache_cls(_ENCODER_CACHE_SIZE)
        self.scheduler.is_encoder_decoder = is_encoder_decoder
        self.scheduler.max_num_encoder_input_tokens = _ENCODER_CACHE_SIZE
        self.manager = self.scheduler.kv_cache_manager
        self.connector: SimulatedConnector | None = None
        if settings.connector is not None:
            assert isinstance(self.scheduler.connector, SimulatedConnector)
            self.connector = self.scheduler.connector
            # As base's configuration finds that steps overlap.
            self.scheduler.defer_block_free = settings.steps_in_flight > 0
        self.worker = SimulatedWorker(kv_cache_config, settings)
        self.reads = self.worker.attention.reads
        self.submissions: dict[str, Submission] = {}
        self.num_schedules = 0
        self._in_flight: deque[Step] = deque()
        self._num_added = 0
        self._idle_steps = 0
        self._check_held = check_integrity
        self._check = getattr(self.manager, "check_integrity", None) if check_integrity else None

    # What clients do

    def add_request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        identity: PrefixIdentity = _PLAIN,
        *,
        stop_tokens: Sequence[int] = (),
        encoder_length: int = 0,
        req_id: str | None = None,
        **options: Any,
    ) -> str:
        """Add a request; returns its id. ``options`` are those of `build_request`."""
        self._num_added += 1
        req_id = req_id or f"r{self._num_added - 1}"
        request = build_request(
            req_id,
            prompt,
            self._block_hasher,
            identity,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            # Real time would not be repeatable.
            arrival_time=float(self._num_added),
            encoder_length=encoder_length,
            **options,
        )
        self.worker.announce(req_id, identity, encoder_length)
        self.submissions[req_id] = Submission(request, list(prompt), identity)
        self.scheduler.add_request(request)
        self._check_manager()
        return req_id

    def abort(self, *req_ids: str) -> None:
        """Abort requests, at any point. Those that have ended already are let be."""
        for req_id in req_ids:
            submission = self.submissions[req_id]
            submission.aborted = submission.aborted or not submission.finished
        self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)
        self._check_manager()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Empty the prefix cache, as after a change of weights.

        After a reset that succeeded, nothing computed before may be read any more. With a KV
        connector no requests are preempted for it, since base then fails beside a load.
        """
        reset_running = reset_running and self.connector is None
        done = self.scheduler.reset_prefix_cache(reset_running_requests=reset_running)
        self._check_manager()
        if done:
            # The device finishes what it was given; then the weights change.
            self.worker.run_all()
            self.worker.attention.memory.erase()
        return done

    # What the engine core does

    def step(self, abort_before_output: Iterable[str] = ()) -> None:
        """One iteration of the engine core.

        Schedules a step, and receives the oldest output if there are as many steps in
        flight as allowed, or nothing could be scheduled.

        Args:
            abort_before_output: Requests to abort while the device works.
        """
        scheduled = self.schedule() if self.scheduler.has_requests() else False
        full = len(self._in_flight) > self.settings.steps_in_flight
        if full or not scheduled:
            if abort_before_output:
                self.abort(*abort_before_output)
            if self._in_flight:
                self.receive()

    def schedule(self) -> bool:
        """Schedule a step and put it in flight; returns whether it has any tokens."""
        scheduled = self.scheduler.schedule()
        self.num_schedules += 1
        self._check_manager()
        step = self.worker.submit(scheduled)
        if self._check_held:
            self.worker.check_held(self.manager.get_block_ids)
        self._in_flight.append(step)
        if self.settings.run_early:
            self.worker.run(step)
        idle = not step.requests and len(self._in_flight) == 1 and not self._transfers()
        self._idle_steps = self._idle_steps + 1 if idle else 0
        return bool(step.requests)

    def receive(self) -> None:
        """Run the oldest step in flight, if it has not run, and hand in its output."""
        step = self._in_flight.popleft()
        output = self.worker.run(step)
        by_client = self.scheduler.update_from_output(step.scheduled, output)
        self.worker.settle(step)
        self._check_manager()
        if self.settings.num_spec_tokens and not self.settings.async_scheduling:
            self.scheduler.update_draft_token_ids(self.worker.take_draft_token_ids(step))
        for outputs in by_client.values():
            for request_output in outputs.outputs:
                submission = self.submissions[request_output.request_id]
                if submission.finished or submission.aborted:
                    raise OutcomeFault(f"{submission.req_id} goes on after its end")
                submission.outputs += request_output.new_token_ids
                submission.finished = request_output.finish_reason is not None

    def run_until_done(self, max_steps: int = 100_000) -> None:
        """Step until no request is left, then `check_outcome`."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self._in_flight:
                break
            self.step()
            if self._idle_steps > 3:
                raise OutcomeFault(f"stuck: {self._unfinished()} are never scheduled")
        else:
            raise OutcomeFault(f"{self._unfinished()} are not done after {max_steps} steps")
        # One more empty step tells the worker which requests have ended.
        while self.scheduler.has_requests():
            self.step()
            if not self._transfers():
                break
        self.check_outcome()

    def _transfers(self) -> bool:
        """Whether a KV connector has something under way."""
        if self.connector is None or self.worker.connector is None:
            return False
        return self.connector.is_busy or self.worker.connector.is_busy

    # Outcome

    def expected_tokens(self, req_id: str) -> list[int]:
        """The output that a request must have, from its prompt alone."""
        submission = self.submissions[req_id]
        return expected_tokens(
            submission.prompt,
            submission.request.max_tokens,
            self.settings.vocab_size,
            submission.identity,
            submission.request.sampling_params.stop_token_ids,
            self.settings.max_model_len,
        )

    def check_outcome(self) -> None:
        """All requests ended with the right output, and no blocks are left behind."""
        if self._in_flight or self.scheduler.requests:
            raise OutcomeFault(f"{self._unfinished()} have not ended")
        for submission in self.submissions.values():
            expected = self.expected_tokens(submission.req_id)
            if submission.aborted:
                expected = expected[: len(submission.outputs)]
            elif not submission.finished:
                raise OutcomeFault(f"{submission.req_id} vanished")
            if submission.outputs != expected:
                raise OutcomeFault(
                    f"{submission.req_id} answered {submission.outputs}, should be {expected}"
                )
        if self.manager.usage != 0:
            raise OutcomeFault(f"usage is {self.manager.usage} without requests")
        num_free = self.manager.block_pool.get_num_free_blocks()
        if num_free != self.kv_cache_config.num_blocks - 1:
            raise OutcomeFault(
                f"{num_free} of {self.kv_cache_config.num_blocks - 1} blocks are free "
                "without requests"
            )
        self._check_manager()

    @property
    def tokens_from_cache(self) -> int:
        """Prompt tokens that were not computed but found in the prefix cache."""
        return self.worker.tokens_from_cache

    @property
    def num_preemptions(self) -> int:
        return sum(s.request.num_preemptions for s in self.submissions.values())

    def _unfinished(self) -> list[str]:
        return sorted(self.scheduler.requests)

    def _check_manager(self) -> None:
        if self._check is not None:
            self._check()
