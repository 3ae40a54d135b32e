# SPDX-License-Identifier: Apache-2.0
"""A KV connector for the oracle: it can load any prefix, and sends what has been computed.

The scheduler's side is a real connector, made by base's factory. The worker's side writes to
the simulated device what a load brings, and checks what a transfer to elsewhere reads.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.identity import PrefixIdentity, hash64, prefix_identities
from support.short_repr import ShortRepr
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from .block_tables import BlockTables
from .device_memory import DeviceMemory, Slots
from .faults import ProtocolFault, ReadFault


@dataclass(frozen=True, repr=False)
class ConnectorSettings(ShortRepr):
    """What a connector does; which requests it does it for depends on the seed."""

    seed: int = 0
    #: Whether loads take steps of their own, or happen in the step that goes on from them.
    asynchronous: bool = True
    #: Whether asynchronous loads bring whole prompts, too, of which the last token is computed
    #: anew. Base's manager then leaves out a token that it reads, in one of `block_size` lengths.
    whole_prompts: bool = True
    #: A transfer takes up to so many steps longer than one.
    most_steps: int = 3
    #: One load in so many fails; 0: none. One within a step fails after the step has read it, which
    #: is simulated without steps in flight only.
    fails: int = 0
    #: Whether a failed asynchronous load tells which blocks it failed for, as those within a step
    #: always do. Some attention types may have all.
    names_blocks: bool = False
    #: Whether the blocks of some requests that have ended are sent elsewhere, and freed later.
    sends: bool = True

    def transfer_config(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="SimulatedConnector",
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"settings": self},
        )


@dataclass
class Transfer:
    """Some positions of a request, and the blocks of all KV cache groups that hold them."""

    req_id: str
    tokens: list[int]
    span: range
    block_ids: Sequence[Sequence[int]]
    #: Whether it is a load in the step that goes on from it.
    in_step: bool = False
    #: Steps until it is done.
    steps_left: int = 0
    #: Whether a load writes at once, or when it is done.
    early: bool = False
    #: Where a load that fails begins to, and in which attention types; empty: in all.
    fails_at: int | None = None
    fails_in: frozenset[int] = frozenset()
    #: Of a load, the owner of what it writes.
    serial: int = -1


@dataclass
class Transfers(KVConnectorMetadata):
    loads: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)


class SimulatedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side: decides what is loaded and sent."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings: ConnectorSettings = self._kv_transfer_config.get_from_extra_config(
            "settings", None
        )
        self.block_sizes = [g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups]
        self.num_tokens_loaded = 0
        self.num_sends = 0
        self._failures: Counter[str] = Counter()
        self._seen_before: set[str] = set()
        self._starts: dict[str, int] = {}
        self._loading: set[str] = set()
        self._pending = Transfers()

    @property
    def num_failed(self) -> int:
        return self._failures.total()

    @property
    def is_busy(self) -> bool:
        return bool(self._pending.loads or self._pending.sends)

    def _dice(self, request: Request, what: str) -> int:
        attempt = request.num_preemptions, self._failures[request.request_id]
        return hash64(self.settings.seed, request.request_id, attempt, what) >> 8

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        req_id = request.request_id
        if req_id not in self._seen_before:
            self._seen_before.add(req_id)
            if self._dice(request, "later") % 4 == 0:
                return None, False
        self._starts[req_id] = num_computed_tokens
        # Base looks a prompt of one token, loaded whole, up again for ever.
        whole = (
            self.settings.asynchronous and self.settings.whole_prompts and request.num_tokens > 1
        )
        most = request.num_tokens - num_computed_tokens - (not whole)
        dice = self._dice(request, "length")
        length = (0, most, dice // 4 % (most + 1), dice // 4 % (most + 1))[dice % 4]
        if dice % 4 == 3:
            unit = max(self.block_sizes)
            length = max((num_computed_tokens + length) // unit * unit - num_computed_tokens, 0)
        return length, self.settings.asynchronous and length > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        start = self._starts[request.request_id]
        span = range(start, start + num_external_tokens)
        ids = blocks.get_block_ids()
        if ids != tuple([b.block_id for b in group] for group in blocks.blocks):
            raise ProtocolFault(f"{request.request_id} has other blocks one by one")
        in_step = not self.settings.asynchronous
        dice = self._dice(request, "load")
        load = Transfer(request.request_id, list(request.all_token_ids), span, ids, in_step)
        if not in_step:
            self._check_unhashed(load, blocks.get_unhashed_block_ids_all_groups())
            load.early = bool(dice % 2)
            load.steps_left = 1 + dice // 2 % (self.settings.most_steps + 1)
            self._loading.add(request.request_id)
        if self.settings.fails and dice // 16 % self.settings.fails == 0:
            # Where blocks can be named, some are there before the load fails.
            load.fails_at = 0
            if self.settings.names_blocks or in_step:
                load.fails_at = start + dice // 256 % num_external_tokens
                load.fails_in = frozenset({dice // 65536 % 3} if dice // 32 % 2 else ())
            self._failures[request.request_id] += 1
        self._pending.loads.append(load)
        self.num_tokens_loaded += num_external_tokens if load.fails_at is None else 0

    def _check_unhashed(self, load: Transfer, unhashed: list[list[int]]) -> None:
        """What is loaded goes to the blocks that are not in the prefix cache, and fills them."""
        for size, ids, open_ids in zip(self.block_sizes, load.block_ids, unhashed, strict=True):
            fresh = [i for i in ids[load.span.start // size : -(-load.span.stop // size)] if i]
            if fresh != open_ids:
                raise ProtocolFault(
                    f"{load.req_id} loads {load.span} to blocks {fresh}, but {open_ids} are the "
                    "ones that are not in the prefix cache"
                )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        pending, self._pending = self._pending, Transfers()
        return pending

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._loading -= connector_output.finished_recving or set()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        dice = self._dice(request, "send")
        done = request.num_computed_tokens - request.num_in_flight_tokens
        # The last sampled token has no KV yet.
        done = min(done, request.num_tokens - 1)
        if not self.settings.sends or request.request_id in self._loading or dice % 2 or done <= 0:
            return False, None
        self.num_sends += 1
        self._pending.sends.append(
            Transfer(
                request.request_id,
                list(request.all_token_ids),
                range(done),
                block_ids,
                steps_left=1 + dice // 2 % (self.settings.most_steps + 1),
            )
        )
        return True, None

    def _not_here(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the worker's side is simulated")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _not_here


class ConnectorWorker:
    """The worker's side: what transfers write to the device, read from it, and report.

    Args:
        tables: Which attention types and groups there are.
        memory: The device's. A load takes a serial, which its request goes on under.
        identities: What determines the KV of a request besides its tokens.
    """

    def __init__(
        self, tables: BlockTables, memory: DeviceMemory, identities: dict[str, PrefixIdentity]
    ) -> None:
        if tables.holds_states:
            raise NotImplementedError("loads of states are not simulated")
        self.types = tables.types
        self.memory = memory
        self.identities = identities
        self.num_reads = 0
        self._active = Transfers()
        self._loaded: dict[str, Transfer] = {}
        #: Loads within the step that runs.
        self._failed_in_step: list[Transfer] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._active.loads or self._active.sends)

    def begin(self, transfers: Transfers) -> None:
        """A step brings transfers: some loads run beside the steps in flight, from now on."""
        for load in transfers.loads:
            load.serial = self.memory.admit(load.req_id)
            self._loaded[load.req_id] = load
            if not load.in_step:
                self._active.loads.append(load)
                if load.early:
                    self._write(load)

    def reach(self, transfers: Transfers) -> None:
        """The steps before the one that brings transfers have run: do its loads, begin to send."""
        for load in transfers.loads:
            if load.in_step:
                # If it fails, the step computes from what is not there, and its output is dropped.
                self._write(load, range(len(self.types)))
                if load.fails_at is not None:
                    self._failed_in_step.append(load)
        self._active.sends += transfers.sends

    def take_load(self, req_id: str) -> Transfer | None:
        """The load that a request that is admitted now goes on from, if it has one."""
        return self._loaded.pop(req_id, None)

    def finish(self) -> KVConnectorOutput | None:
        """A step has run: what transfers are done, if any."""
        output = KVConnectorOutput(finished_recving=set(), finished_sending=set())
        for load in self._done(self._active.loads):
            if not load.early:
                self._write(load)
            assert output.finished_recving is not None
            output.finished_recving.add(load.req_id)
            invalid = self._invalid_ids(load)
            if invalid:
                output.invalid_block_ids |= invalid
            elif load.fails_at is not None:
                output.failed_recving.add(load.req_id)
        for load in self._failed_in_step:
            invalid = self._invalid_ids(load)
            if invalid:
                output.invalid_block_ids |= invalid
                # What the step computed from them is as wrong.
                self.memory.erase(sorted(self._ids_from(load, range(len(self.types)))))
        self._failed_in_step.clear()
        for send in self._done(self._active.sends):
            self._check(send)
            assert output.finished_sending is not None
            output.finished_sending.add(send.req_id)
        return None if output.is_empty() else output

    def _failed_types(self, load: Transfer) -> list[int]:
        if load.fails_at is None:
            return []
        return [i for i in range(len(self.types)) if i in load.fails_in or not load.fails_in]

    def _ids_from(self, load: Transfer, type_ids: Iterable[int]) -> set[int]:
        """The blocks of some attention types from the one where a load fails on."""
        assert load.fails_at is not None
        return {
            block_id
            for tables in (self.types[i] for i in type_ids)
            for ids in tables.select(load.block_ids)
            for block_id in ids[load.fails_at // tables.block_size :].tolist()
            if block_id
        }

    def _invalid_ids(self, load: Transfer) -> set[int]:
        """Of a failed load that names its blocks, those that were not loaded."""
        names_blocks = load.fails_at or (load.in_step and load.fails_at is not None)
        return self._ids_from(load, self._failed_types(load)) if names_blocks else set()

    @staticmethod
    def _done(transfers: list[Transfer]) -> list[Transfer]:
        for transfer in transfers:
            transfer.steps_left -= 1
        done = [transfer for transfer in transfers if not transfer.steps_left]
        transfers[:] = [transfer for transfer in transfers if transfer.steps_left]
        return done

    def _write(self, load: Transfer, whole_types: Iterable[int] = ()) -> None:
        """Put what a load brings where its blocks are; null blocks are out of a window."""
        spans = [load.span] * len(self.types)
        for type_id in set(self._failed_types(load)).difference(whole_types):
            assert load.fails_at is not None
            size = self.types[type_id].block_size
            end = max(load.fails_at // size * size, load.span.start)
            spans[type_id] = range(load.span.start, end)
        for slots in self._slots(load, spans):
            self.memory.write(slots, f"a load of {load.req_id}")

    def _check(self, send: Transfer) -> None:
        for slots in self._slots(send, [send.span] * len(self.types)):
            wrong = self.memory.wrong(slots)
            if wrong.any():
                group, i = np.argwhere(wrong)[0]
                block = int(slots.blocks[group, i])
                raise ReadFault(
                    f"a transfer of {send.req_id}, group {slots.tables.group_ids[group]}, reads "
                    f"position {slots.positions[i]} from block {block}, which "
                    f"{self.memory.describe(block, 'something else')}"
                )
            self.num_reads += wrong.size

    def _slots(self, transfer: Transfer, spans: Sequence[range]) -> Iterator[Slots]:
        """Per attention type, the slots of positions that have any."""
        identities = prefix_identities(transfer.tokens, self.identities[transfer.req_id])
        for tables, span in zip(self.types, spans, strict=True):
            ids = tables.select(transfer.block_ids)
            if ids.shape[1] * tables.block_size < span.stop:
                raise ProtocolFault(
                    f"{ids.shape[1]} blocks of {transfer.req_id} in groups {tables.group_ids} "
                    f"for {span}"
                )
            positions = np.arange(span.start, span.stop)
            positions = positions[ids[:, positions // tables.block_size].any(axis=0)]
            yield Slots(
                tables,
                request=np.zeros_like(positions),
                serials=np.full_like(positions, transfer.serial),
                positions=positions,
                blocks=ids[:, positions // tables.block_size],
                offsets=positions % tables.block_size,
                contents=identities[positions],
            )
