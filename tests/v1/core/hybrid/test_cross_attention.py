# SPDX-License-Identifier: Apache-2.0
"""Cross attention, with values worked out by hand, on base's manager and the hybrid manager.

Whisper-like unless said otherwise: a self-attention and a cross-attention group, with blocks
of 16 tokens. Base's manager has the same values throughout.
"""

from typing import Any

import pytest

from support.by_hand import check, decode
from support.by_hand import make_manager as make_any_manager
from support.kv_configs import KVSetup, cross, full, sliding
from support.requests import RequestPlan, make_request
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.request import Request, RequestStatus

WHISPER = (full(16), cross(16))


@pytest.fixture(params=[BaseKVCacheManager, KVCacheManager], ids=["base", "hybrid"])
def manager_class(request: pytest.FixtureRequest) -> Any:
    return request.param


def make_manager(manager_class: Any, num_blocks: int = 100, kinds=WHISPER, **changes: Any) -> Any:
    return make_any_manager(num_blocks, manager_class, kinds=kinds, caching=False, **changes)


def new_request(name: str, num_tokens: int) -> Request:
    return make_request(RequestPlan(((1, num_tokens),)), name, None)


def admit(manager: Any, req: Request, num_encoder_tokens: int, **changes: Any) -> list[int] | None:
    """Admit a request as the scheduler does. Returns the new blocks per group; None if refused."""
    new = manager.allocate_slots(
        req, req.num_tokens, num_encoder_tokens=num_encoder_tokens, **changes
    )
    check(manager)
    if new is None:
        return None
    req.num_computed_tokens = req.num_tokens
    req.status = RequestStatus.RUNNING
    return [len(ids) for ids in new.get_block_ids()]


def num_free(manager: Any) -> int:
    return manager.block_pool.get_num_free_blocks()


def test_the_encoders_blocks_come_at_once_and_stay(manager_class: Any) -> None:
    manager = make_manager(manager_class)
    req = new_request("r", 20)
    assert admit(manager, req, 50) == [2, 4]  # 20 and 50 tokens
    ids = manager.get_block_ids("r")
    assert len({*ids[0], *ids[1]}) == 6 and 0 not in ids[0] + ids[1]
    assert num_free(manager) == 99 - 6
    # Slots 21 to 32 exist. The 33rd and 49th token need a new block each; the encoder needs none.
    steps = decode(manager, req, 30)
    assert [i for i, step in enumerate(steps) if any(step)] == [12, 28]
    assert steps[12] == steps[28] == [1, 0]
    assert manager.get_block_ids("r")[1] == ids[1]
    assert num_free(manager) == 99 - 8
    manager.free(req)
    assert num_free(manager) == 99
    assert manager.get_block_ids("r") == ([], [])


@pytest.mark.parametrize("kinds", [(full(16), cross(16)), (cross(16), full(16))])
def test_groups_keep_the_configs_order(manager_class: Any, kinds: tuple) -> None:
    manager = make_manager(manager_class, kinds=kinds)
    req = new_request("r", 20)
    by_kind = dict(zip([kind.kind for kind in kinds], admit(manager, req, 50), strict=True))
    assert by_kind == {"full": 2, "cross": 4}
    lengths = [len(ids) for ids in manager.get_block_ids("r")]
    assert dict(zip([kind.kind for kind in kinds], lengths, strict=True)) == by_kind


def test_several_groups_of_each_type(manager_class: Any) -> None:
    kinds = (sliding(20, 8, 2), cross(32, 3), full(16))
    manager = make_manager(manager_class, kinds=kinds)
    req = new_request("r", 40)
    assert admit(manager, req, 33) == [5, 5, 2, 2, 2, 3]
    assert num_free(manager) == 99 - 19
    # The query at 48 reads from position 29 on: blocks 0 to 2 of both windows go.
    decode(manager, req, 9)
    assert [ids.count(0) for ids in manager.get_block_ids("r")] == [3, 3, 0, 0, 0, 0]
    manager.free(req)
    assert num_free(manager) == 99


def test_admission_counts_the_encoder(manager_class: Any) -> None:
    """The request needs 2 + 4 blocks: 6 free blocks suffice. With 5, nothing is taken."""
    for full_sequence_must_fit in (False, True):
        for num_blocks in (6, 7):
            manager = make_manager(manager_class, num_blocks)
            req = new_request("r", 20)
            new = admit(manager, req, 50, full_sequence_must_fit=full_sequence_must_fit)
            assert new == (None if num_blocks == 6 else [2, 4])
            assert num_free(manager) == (5 if num_blocks == 6 else 0)
            assert manager.get_block_ids("r") == ([], []) or num_blocks == 7


def test_blocks_that_are_reserved_or_below_the_watermark(manager_class: Any) -> None:
    req = new_request("r", 20)
    manager = make_manager(manager_class, 16)
    assert admit(manager, new_request("other", 20), 50) == [2, 4]
    assert admit(manager, req, 50, reserved_blocks=4) is None
    assert num_free(manager) == 9
    assert admit(manager, req, 50, reserved_blocks=3) == [2, 4]
    # Base's watermark is a tenth of all 10 blocks: 1.
    for num_blocks, expected in ((10, [2, 4]), (7, [2, 4])):
        manager = make_manager(manager_class, num_blocks, watermark=0.1)
        assert admit(manager, new_request("r", 20), 50) == expected
    manager = make_manager(manager_class, 11, watermark=0.4)
    assert admit(manager, new_request("a", 20), 50) == [2, 4]  # 4 stay free
    assert admit(manager, new_request("b", 1), 1, has_scheduled_reqs=True) is None
    assert admit(manager, new_request("b", 1), 1, has_scheduled_reqs=False) == [1, 1]


def test_a_whole_sequence_that_does_not_fit_is_refused_with_its_encoder(
    manager_class: Any,
) -> None:
    """The first chunk, 16 of 64 tokens, needs 1 + 4 blocks; the whole sequence needs 4 + 4."""
    for num_blocks in (8, 9):
        manager = make_manager(manager_class, num_blocks)
        req = new_request("r", 64)
        new = manager.allocate_slots(req, 16, num_encoder_tokens=50, full_sequence_must_fit=True)
        check(manager)
        assert (new is None) == (num_blocks == 8)
        assert num_free(manager) == (7 if num_blocks == 8 else 3)


def test_preempted_and_resumed(manager_class: Any) -> None:
    manager = make_manager(manager_class)
    req = new_request("r", 20)
    admit(manager, req, 50)
    decode(manager, req, 13)
    manager.free(req)
    req.status, req.num_computed_tokens = RequestStatus.PREEMPTED, 0
    assert num_free(manager) == 99
    assert admit(manager, req, 50) == [3, 4]
    assert decode(manager, req, 15)[-1] == [0, 0]
    assert decode(manager, req, 1) == [[1, 0]]


def test_blocks_of_a_request_that_are_returned_later(manager_class: Any) -> None:
    manager = make_manager(manager_class)
    req = new_request("r", 20)
    admit(manager, req, 50)
    blocks = manager.pop_blocks_for_free(req)
    check(manager)
    assert num_free(manager) == 99 - 6
    manager.block_pool.free_blocks(reversed(blocks))
    assert num_free(manager) == 99


def test_without_input_to_the_encoder(manager_class: Any) -> None:
    manager = make_manager(manager_class)
    req = new_request("r", 20)
    assert admit(manager, req, 0) == [2, 0]
    assert decode(manager, req, 13)[-1] == [1, 0]


def test_encoder_tokens_of_a_running_request(manager_class: Any) -> None:
    """Base's scheduler passes them only at admission. Base's manager accepts them at any time."""
    manager = make_manager(manager_class, 12)
    req = new_request("r", 20)
    assert admit(manager, req, 16) == [2, 1]
    req.append_output_token_ids(7)

    def step(num_encoder_tokens: int) -> list[int] | None:
        new = manager.allocate_slots(req, 1, num_encoder_tokens=num_encoder_tokens)
        check(manager)
        return new and [len(ids) for ids in new.get_block_ids()]

    assert step(16) == [0, 0]
    assert step(160) is None  # 9 more, of 8
    assert num_free(manager) == 8
    assert step(0) == [0, 0]
    assert step(33) == [0, 2]
    assert step(1) == [0, 0]
    assert step(9 * 16) == [0, 6]


def test_block_ids_for_computed_tokens(manager_class: Any) -> None:
    manager = make_manager(manager_class)
    req = new_request("r", 40)
    admit(manager, req, 50)
    own, encoder = manager.get_block_ids("r")
    assert manager.get_block_ids_for_computed_tokens("r", 17) == (own[:2], encoder)
    assert manager.get_block_ids_for_computed_tokens("r", 0) == ([], encoder)
    assert manager.estimate_cached_tokens(req) == 0


def test_new_blocks_are_zeroed(manager_class: Any) -> None:
    manager = make_manager(manager_class, kinds=(full(16), cross(16, dtype="float32")))
    req = new_request("r", 20)
    admit(manager, req, 50)
    own, encoder = manager.get_block_ids("r")
    assert sorted(manager.take_new_block_ids()) == sorted(own + encoder)
    decode(manager, req, 13)
    assert manager.take_new_block_ids() == manager.get_block_ids("r")[0][2:]


def test_encoder_tokens_change_nothing_without_cross_attention(manager_class: Any) -> None:
    manager = make_manager(manager_class, kinds=(full(16),))
    req = new_request("r", 20)
    assert admit(manager, req, 50) == [2]


def test_decode_steps_end_in_the_gate() -> None:
    """No Python runs for a step without an event, and the encoder causes no events."""
    manager = make_manager(KVCacheManager)
    req = new_request("r", 20)
    admit(manager, req, 50)
    assert manager._gates._next_events["r"] == 33
    req.append_output_token_ids(7)
    assert manager.allocate_slots(req, 1, num_lookahead_tokens=0) is manager.empty_kv_cache_blocks


def test_a_wrong_number_of_encoder_tokens_changes_nothing() -> None:
    manager = make_manager(KVCacheManager)
    for wrong, message in (
        (-1, "num_encoder_tokens must be .* got -1"),
        (1 << 40, "got 68719476736"),
    ):
        with pytest.raises(ValueError, match=message):
            admit(manager, new_request("r", 20), wrong)
        check(manager)
        assert num_free(manager) == 99
        assert manager.get_block_ids("r") == ([], [])


def test_nothing_is_hit_if_prefix_caching_is_requested() -> None:
    manager = KVSetup(WHISPER, 100).build(KVCacheManager)
    for name in "ab":
        req = new_request(name, 40)
        blocks, num_hit, junction = manager.get_computed_blocks(req)
        assert (blocks, num_hit, junction) == (manager.empty_kv_cache_blocks, 0, 0)
        assert admit(manager, req, 50) == [3, 4]
        manager.free(req)
        assert manager.block_pool.num_evictable_ids == 0
