# SPDX-License-Identifier: Apache-2.0
"""The content oracle finds planted faults, and its parts are right."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from support.identity import MultiModalItem, PrefixIdentity, expected_tokens
from support.kv_configs import (
    AttentionKind,
    chunked,
    cross,
    full,
    kind_of,
    make_kv_cache_config,
    mamba,
    sliding,
    smallest_pool,
)
from support.oracle import (
    InFlightFault,
    OracleFault,
    OracleSettings,
    OutcomeFault,
    ReadFault,
    WriteFault,
)
from support.oracle.device_memory import MODEL, DeviceMemory
from support.oracle.engine import OracleEngine
from support.oracle.planted_faults import (
    FAULTS,
    ForgetsStepsInFlight,
    FreesWindowBlocksAStepEarly,
    WindowShortByAToken,
    plant,
)
from support.oracle.sequences import Sequences
from support.oracle.workload import Abort, Add, Case, Reset, Run, random_operations, run_case
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")


def exposing_case(seed: int) -> Case:
    """A random case with all features. A few dozen of them show each fault at least once."""
    rng = random.Random(seed)
    async_scheduling = rng.random() < 0.5
    settings = OracleSettings(
        vocab_size=256,
        max_num_batched_tokens=rng.choice((40, 200)),
        async_scheduling=async_scheduling,
        steps_in_flight=int(async_scheduling),
    )
    return Case(
        (sliding(34, 16, 2), full(16), sliding(5, 16)),
        tuple(random_operations(rng, 60, settings.max_model_len)),
        settings,
        extra_blocks=rng.choice((0, 20, 200)),
        retention_interval=rng.choice((None, 0, 64)),
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_found(manager_cls: Any, fault: type) -> None:
    faulty_cls = plant(fault, manager_cls)
    for seed in range(40):
        try:
            # The manager's own check is off, so the oracle alone must find the fault.
            run_case(faulty_cls, exposing_case(seed), check_integrity=False)
        except OracleFault:
            return
        except Exception:
            # The manager or the scheduler raised first.
            continue
    pytest.fail(f"{fault.__doc__} The oracle does not notice.")


@pytest.mark.parametrize(
    "fault",
    [WindowShortByAToken, FreesWindowBlocksAStepEarly, ForgetsStepsInFlight],
    ids=lambda fault: fault.__name__,
)
def test_early_release_is_found_before_reuse(manager_cls: Any, fault: type) -> None:
    """In a pool so large that the released blocks are not handed out again."""
    settings = OracleSettings(async_scheduling=True, steps_in_flight=1, max_num_batched_tokens=20)
    case = Case(
        (full(16), sliding(17, 16, 2)), (Add(tail=60, max_tokens=60),), settings, extra_blocks=5000
    )
    run_case(manager_cls, case)
    with pytest.raises(InFlightFault, match="the manager holds"):
        run_case(plant(fault, manager_cls), case)


def test_no_false_alarm(manager_cls: Any) -> None:
    for seed in range(8):
        assert run_case(manager_cls, exposing_case(seed)).reads["kv"] > 0


def test_a_fault_is_described() -> None:
    """The message names the step, request, group, position, block and former owner."""

    class Faulty(BaseManager):
        def get_blocks(self, request_id: str) -> Any:
            # The second request gets the first one's only block.
            return super().get_blocks("r0")

    kinds = (full(4),)
    config = make_kv_cache_config(kinds, smallest_pool(kinds, 8, 8) + 4)
    engine = OracleEngine(Faulty, config, OracleSettings(max_model_len=8, max_num_batched_tokens=8))
    engine.add_request([1, 2], max_tokens=2)
    engine.step()
    engine.add_request([3, 4], max_tokens=2)
    with pytest.raises(WriteFault, match=r"step 1: two owners write to block 1"):
        engine.step()

    engine = OracleEngine(Faulty, config, OracleSettings(max_model_len=8, max_num_batched_tokens=8))
    engine.add_request([1, 2], max_tokens=3)
    engine.step()
    engine.add_request([3, 4], max_tokens=3)
    # Only the second request runs, so that it is the first to read foreign content.
    first = engine.scheduler.running.pop(0)
    engine.step()
    engine.scheduler.running = [first]
    with pytest.raises(
        ReadFault,
        match=r"step 2: r0, group 0, reads position 0 \(computing 2 to 2\) from block 1, which "
        r"holds nothing at that slot, last owner r0 in group 0; 2 wrong reads in this step",
    ):
        engine.step()


def test_a_request_that_never_fits_is_stuck() -> None:
    class Faulty(BaseManager):
        def allocate_slots(self, *args: Any, **kwargs: Any) -> None:
            return None

    with pytest.raises(OutcomeFault, match="stuck"):
        run_case(Faulty, Case(operations=(Add(tail=3),)))


def test_cases_print_as_programs() -> None:
    case = Case(
        kinds=(full(8), sliding(9, 8, 2)),
        operations=(Add(tail=5, salt=1), Run(2, abort=0), Abort(1), Reset(True)),
        settings=OracleSettings(max_num_seqs=3),
        extra_blocks=7,
    )
    assert eval(repr(case)) == case


# Identities


def test_sequences_agree_with_expected_tokens() -> None:
    identities = [
        PrefixIdentity(),
        PrefixIdentity(cache_salt="s"),
        PrefixIdentity(lora_name="s"),
        PrefixIdentity(mm_items=(MultiModalItem("a", 1, 2),)),
        PrefixIdentity(mm_items=(MultiModalItem("b", 1, 2),)),
        PrefixIdentity(mm_items=(MultiModalItem("a", 2, 2),)),
    ]
    prompt = [5, 5, 5, 5, 5, 9]
    sequences = Sequences(len(identities), 64, vocab_size=1000)
    for row, identity in enumerate(identities):
        sequences.start(row, prompt, identity)
    rows = np.arange(len(identities))
    outputs = np.array([sequences.extend(rows) for _ in range(20)]).T.tolist()
    assert outputs == [expected_tokens(prompt, 20, 1000, identity) for identity in identities]
    # All rows differ from their first difference on.
    assert len({tuple(output) for output in outputs}) == len(identities)
    assert len(set(sequences.identities[:, 5].tolist())) == len(identities)
    # Before the images of rows 3 and 5, there is no difference to row 0.
    assert sequences.identities[3, 0] == sequences.identities[0, 0]
    assert sequences.identities[3, 1] != sequences.identities[0, 1]
    assert sequences.identities[5, 1] == sequences.identities[0, 1]


def test_expected_tokens_stop() -> None:
    tokens = expected_tokens([1, 2, 3], 50, vocab_size=10)
    assert len(tokens) == 50
    stop = tokens[7]
    stopped = expected_tokens([1, 2, 3], 50, vocab_size=10, stop_tokens=[stop])
    assert stopped == tokens[: tokens.index(stop) + 1]
    assert expected_tokens([1, 2, 3], 50, vocab_size=10, max_model_len=9) == tokens[:6]


def test_drafts_are_verified() -> None:
    sequences = Sequences(1, 64, vocab_size=1000)
    right = expected_tokens([1, 2, 3], 9, vocab_size=1000)
    sequences.start(0, [1, 2, 3], PrefixIdentity())
    drafts = [right[0], right[1], (right[2] + 1) % 1000]
    sequences.put_drafts(0, drafts)
    assert sequences.verify_drafts(0, drafts) == right[:3]
    assert sequences.known[0] == 6
    sequences.put_drafts(0, right[3:5])
    assert sequences.verify_drafts(0, right[3:5]) == right[3:6]
    sequences.propose(0, 4)
    # Proposals are temporary and do not change what follows.
    assert sequences.extend(np.array([0])).tolist() == right[6:7]


# Device memory


def write(memory: DeviceMemory, block: int, slot: int, content: int, tag: int) -> None:
    memory.put(np.array([block]), np.array([slot]), np.array([content], np.uint64), np.array([tag]))


def test_memory_holds_what_was_written_last() -> None:
    memory = DeviceMemory(num_blocks=4, max_block_size=4)
    write(memory, 2, 0, 11, tag=1)
    write(memory, 2, 1, 12, tag=1)
    write(memory, 3, 0, 13, tag=2)
    assert memory.slots[MODEL, 2:].tolist() == [[11, 12, 0, 0], [13, 0, 0, 0]]
    write(memory, 2, 1, 14, tag=1)
    assert memory.slots[MODEL, 2].tolist() == [11, 14, 0, 0]


def test_a_new_owner_empties_a_block() -> None:
    memory = DeviceMemory(num_blocks=4, max_block_size=4)
    write(memory, 2, 0, 11, tag=1)
    write(memory, 2, 3, 12, tag=2)
    assert memory.slots[MODEL, 2].tolist() == [0, 0, 0, 12]
    memory.erase([2])
    assert not memory.slots.any()
    write(memory, 1, 0, 1, tag=1)
    memory.erase()
    assert not memory.slots.any()


def test_forbidden_writes_are_found() -> None:
    memory = DeviceMemory(num_blocks=4, max_block_size=4)
    with pytest.raises(WriteFault, match="null block"):
        write(memory, 0, 0, 11, tag=1)
    with pytest.raises(WriteFault, match="two owners write to block 3"):
        memory.put(
            np.array([3, 3]), np.array([0, 1]), np.array([1, 2], np.uint64), np.array([1, 2])
        )


# Read rules


def test_first_reads() -> None:
    starts = np.array([0, 3, 4, 5, 17])
    assert full().first_read(starts).tolist() == [0, 0, 0, 0, 0]
    # Position 4 of a window of 4 reads 1, 2, 3 and itself.
    assert sliding(4).first_read(starts).tolist() == [0, 0, 1, 2, 14]
    assert sliding(1).first_read(starts).tolist() == starts.tolist()
    assert chunked(4).first_read(starts).tolist() == [0, 0, 4, 4, 16]


def test_rules_of_specs() -> None:
    shape: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    assert kind_of(FullAttentionSpec(**shape)) == full(16)
    assert kind_of(MLAAttentionSpec(**shape)) == full(16)
    assert kind_of(FullAttentionSpec(**shape, sliding_window=7)) == sliding(7, 16)
    assert kind_of(SlidingWindowSpec(**shape, sliding_window=9)) == sliding(9, 16)
    chunks = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=32)
    assert kind_of(chunks) == chunked(32, 16)
    states = MambaSpec(
        block_size=16, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="all"
    )
    with pytest.raises(NotImplementedError, match="MambaSpec"):
        kind_of(states)


@pytest.mark.parametrize("kind", [full(), sliding(4), sliding(1), chunked(4), mamba(4), cross()])
def test_rules_take_integers_and_arrays(kind: AttentionKind) -> None:
    """The driver calls them for one request at a time, the oracle for all requests of a step."""
    starts = np.arange(20)
    ends = starts + 3
    for rule in (kind.first_read, kind.state_column):
        assert rule(starts).tolist() == [rule(start) for start in range(20)]
    columns = [kind.first_column(start, start + 3) for start in range(20)]
    assert kind.first_column(starts, ends).tolist() == columns
