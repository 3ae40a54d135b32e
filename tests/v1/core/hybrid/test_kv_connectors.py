# SPDX-License-Identifier: Apache-2.0
"""What KV connectors need from the manager: slots for loads, block ids, and when to cache.

Most tests have values worked out by hand; random loads are compared with base's manager. Unless
said otherwise, the model is that of test_kv_cache_manager: one full-attention group and five
groups of window 33.
"""

import random
from typing import Any

import pytest

from support.by_hand import GEMMA, check, held_pattern, make_manager, request
from support.kv_configs import KVSetup, chunked, full, sliding
from support.oracle import OracleSettings
from support.oracle.engine_config import make_vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import Request, RequestStatus


def begin_load(manager: Any, req: Request, num_external: int, **changes: Any) -> int | None:
    """Give a request slots for a load. Returns the length of its hit, or None if refused."""
    blocks, num_hit, _, diverged = manager.get_computed_blocks_for_connector(req)
    assert not diverged
    new = manager.allocate_slots(
        req,
        0,
        num_new_computed_tokens=num_hit,
        new_computed_blocks=blocks,
        num_external_computed_tokens=num_external,
        delay_cache_blocks=True,
        **changes,
    )
    check(manager)
    if new is None:
        return None
    req.num_computed_tokens = num_hit + num_external
    req.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    return num_hit


def end_load(manager: Any, req: Request) -> None:
    """Like base's scheduler, cache the loaded tokens and compute the last token again."""
    manager.cache_blocks(req, req.num_computed_tokens)
    check(manager)
    req.num_computed_tokens = min(req.num_computed_tokens, req.num_tokens - 1)
    req.status = RequestStatus.WAITING


def test_a_load_beside_the_steps():
    manager = make_manager()
    first, second = request("first", (1, 90)), request("second", (1, 90))

    assert begin_load(manager, first, 64) == 0
    # A window gets only the blocks that the token after the load reads.
    assert held_pattern(manager, first) == ["xxxx"] + ["..xx"] * 5
    assert manager.block_pool.get_num_free_blocks() == 999 - 4 - 10
    assert manager.get_computed_blocks(second)[1] == 0
    end_load(manager, first)
    assert manager.get_computed_blocks(second)[1] == 64
    assert manager.allocate_slots(first, 26) is not None
    assert held_pattern(manager, first) == ["xxxxxx"] + ["..xxxx"] * 5
    manager.free(first)
    assert manager.usage == 0


def test_a_load_in_the_step_that_goes_on_from_it():
    manager = make_manager()
    first = request("first", (1, 90))

    new = manager.allocate_slots(first, 26, num_external_computed_tokens=64)
    check(manager)
    assert new is not None
    assert held_pattern(manager, first) == ["xxxxxx"] + ["..xxxx"] * 5
    # Tokens that are loaded within the step can be read in the same step.
    assert manager.get_computed_blocks(request("second", (1, 90)))[1] == 80


def test_a_load_after_a_hit():
    manager = make_manager()
    first, second = request("first", (1, 50), (2, 10)), request("second", (1, 50), (3, 50))
    assert manager.allocate_slots(first, 60) is not None
    first.num_computed_tokens = 60

    assert begin_load(manager, second, 48) == 48
    # The window before the hit's end lies before the window that the load needs.
    assert held_pattern(manager, second) == ["xxxxxx"] + ["....xx"] * 5
    blocks = manager.get_blocks("second").get_unhashed_block_ids_all_groups()
    assert blocks == [
        ids[-3:] if len(set(ids)) == 6 else ids[-2:] for ids in manager.get_block_ids("second")
    ]
    ids = manager.get_block_ids("second")
    assert ids[0][:3] == manager.get_block_ids("first")[0][:3]


def test_a_load_of_the_whole_prompt_keeps_what_the_last_token_reads():
    """It is computed again. At 64 tokens it reads 31 to 63; the next token reads 32 to 64."""
    manager = make_manager()
    first = request("first", (1, 64))

    assert begin_load(manager, first, 64) == 0
    assert held_pattern(manager, first) == ["xxxx"] + [".xxx"] * 5
    end_load(manager, first)
    assert manager.allocate_slots(first, 1) is not None
    assert held_pattern(manager, first) == ["xxxx"] + [".xxx"] * 5
    first.status, first.num_computed_tokens = RequestStatus.RUNNING, 64
    first.append_output_token_ids(7)
    assert manager.allocate_slots(first, 1) is not None
    assert held_pattern(manager, first) == ["xxxxx"] + ["..xxx"] * 5


def test_a_load_of_the_rest_of_a_prompt_keeps_what_the_last_token_reads_of_the_hit():
    manager = make_manager()
    first, second = request("first", (1, 50)), request("second", (1, 50), (2, 14))
    assert manager.allocate_slots(first, 50) is not None

    assert begin_load(manager, second, 16) == 48
    assert held_pattern(manager, second) == ["xxxx"] + [".xxx"] * 5
    assert manager.get_block_ids("second")[1][1] == manager.get_block_ids("first")[1][1]


def test_a_load_of_a_prompt_of_one_token():
    """No computed token is left, so base's scheduler looks the request up again."""
    manager = make_manager()
    first = request("first", (1, 1))
    assert begin_load(manager, first, 1) == 0
    end_load(manager, first)
    assert first.num_computed_tokens == 0

    assert begin_load(manager, first, 1) == 0
    assert held_pattern(manager, first) == ["x"] * 6
    assert manager.block_pool.get_num_free_blocks() == 999 - 6


def test_a_load_that_fails():
    """Either nothing is loaded, or only the first two blocks."""
    manager = make_manager(kinds=(full(16),))
    first, second = request("first", (1, 90)), request("second", (1, 90))
    begin_load(manager, first, 80)
    manager.free(first)
    assert manager.usage == 0

    begin_load(manager, second, 80)
    second.num_computed_tokens = 32
    end_load(manager, second)
    assert manager.get_computed_blocks(request("third", (1, 90)))[1] == 32
    assert manager.allocate_slots(second, 58) is not None
    check(manager)
    assert manager.get_computed_blocks(request("third", (1, 90)))[1] == 80


def test_blocks_of_a_load_are_not_zeroed():
    """Blocks of groups that the load leaves out are zeroed, and so are later blocks."""
    manager = make_manager(kinds=(full(16), sliding(33, 16, 2, dtype="float32")))
    first = request("first", (1, 90))
    begin_load(manager, first, 64, skip_zeroing_group_ids=(0, 2))
    ids = manager.get_block_ids("first")
    assert manager.take_new_block_ids() == [i for i in ids[1] if i]
    end_load(manager, first)
    manager.allocate_slots(first, 26)
    ids = manager.get_block_ids("first")
    assert sorted(manager.take_new_block_ids()) == sorted(i for group in ids for i in group[4:])


def test_a_load_leaves_blocks_for_others():
    """The load takes 14 blocks. The other 26 tokens need 2 more in each group."""
    others = request("others", (1, 16))  # hold 6 blocks
    for num_free, reserved, fits in ((26, 0, True), (27, 1, True), (26, 1, False), (25, 0, False)):
        manager = make_manager(1 + 6 + num_free)
        assert manager.allocate_slots(others, 16) is not None
        load = begin_load(manager, request("first", (2, 90)), 64, reserved_blocks=reserved)
        assert load == (0 if fits else None)
        assert manager.block_pool.get_num_free_blocks() == num_free - 14 * fits


def test_a_load_without_others_leaves_nothing_for_them():
    manager = make_manager(1 + 26)
    assert begin_load(manager, request("first", (1, 90)), 64, reserved_blocks=5) == 0


def test_blocks_as_a_connector_looks_at_them():
    manager = make_manager()
    first = request("first", (1, 90))
    begin_load(manager, first, 70)
    end_load(manager, first)

    blocks = manager.get_blocks("first")
    ids = manager.get_block_ids("first")
    assert len(blocks.blocks) == 6
    assert tuple([block.block_id for block in group] for group in blocks.blocks) == ids
    assert [[block.is_null for block in group] for group in blocks.blocks] == [
        [i == 0 for i in group] for group in ids
    ]
    # 70 tokens fill four blocks; the first two are out of the windows.
    assert [[block.block_hash is not None for block in group] for group in blocks.blocks] == [
        [True, True, True, True, False]
    ] + [[False, False, True, True, False]] * 5
    unhashed = blocks.get_unhashed_block_ids_all_groups()
    assert unhashed == [[group[-1].block_id] for group in blocks.blocks]
    assert [len(group) for group in blocks.new_empty().blocks] == [0] * 6
    assert [len(group) for group in (blocks + blocks).blocks] == [10] * 6


@pytest.mark.parametrize(
    "manager_cls", [BaseKVCacheManager, KVCacheManager], ids=["base", "hybrid"]
)
def test_what_a_drafter_reads_again_is_kept_of_a_load(manager_cls: Any) -> None:
    """With two modules, a load keeps as much as a hit at the load's end needs."""
    kinds = (full(16, draft=True), sliding(33, 16, 2, retained=1))
    manager = make_manager(2000, manager_cls, kinds=kinds, use_eagle=True, prefill_lookahead=2)
    first = request("first", (1, 440))
    assert begin_load(manager, first, 432) == 0
    # 432 - 32 - 1 tokens are skipped: all of 25 blocks except the last.
    assert held_pattern(manager, first)[1] == "." * 24 + "xxx"


def test_offloading_is_not_divided_by_the_number_of_groups():
    """In base, a key belongs to one group and takes only one block of that group.

    So memory on the host holds as many physical blocks as the same amount of device memory.
    """
    memory = 64 << 20
    config = make_vllm_config(OracleSettings(), block_size=16, num_blocks=1)
    config.cache_config.kv_cache_layout = "LBNHC"
    config.kv_transfer_config = KVTransferConfig(
        "OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": memory},
    )
    specs = {f"layer.{i}": (sliding(64, 16) if i % 6 else full(16)).spec() for i in range(12)}
    (kv_cache,) = get_kv_cache_configs(config, [specs], [memory])

    assert len(kv_cache.kv_cache_groups) == 6
    offloading = CPUOffloadingSpec(build_offloading_config(config, kv_cache))
    assert offloading.num_chunks == kv_cache.num_blocks


KINDS = {
    "Gemma": GEMMA,
    "full attention": (full(16),),
    "windows": (sliding(33, 16, 2), sliding(20, 16)),
    "chunks": (full(16), chunked(48, 16, 2)),
    "unequal block sizes": (full(32), sliding(33, 16, 2)),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_random_loads_as_with_base(kinds: Any) -> None:
    """Answers, free blocks, null blocks and hits are equal for random loads after random hits."""
    rng = random.Random(4)
    num_refused = num_loads = 0
    for num_blocks in (40, 4000):
        # Base also publishes parts of large full-attention blocks.
        events = {"enable_kv_cache_events": len({kind.block_size for kind in kinds}) == 1}
        setup = KVSetup(kinds, num_blocks, retention=None)
        managers = [setup.build(cls, **events) for cls in (BaseKVCacheManager, KVCacheManager)]
        alive: list[list[Request]] = []
        for step in range(60):
            path = ((1, rng.randrange(1, 100)), (step, rng.randrange(1, 60)))
            length = sum(n for _, n in path)
            lookahead, reserved = rng.choice((0, 3)), rng.choice((0, 0, 5))
            fits = rng.random() < 0.5
            # In a small pool, loads beside steps are admitted by another rule than base's.
            beside = rng.random() < 0.6 and num_blocks > 100
            share = rng.random()
            seen = []
            requests = []
            for manager in managers:
                req = request(f"r{step}", *path)
                requests.append(req)
                blocks, num_hit, _, _ = manager.get_computed_blocks_for_connector(req)
                num_external = int((length - 1 - num_hit) * share)
                num_new = 0 if beside and num_external else length - num_hit - num_external
                new = manager.allocate_slots(
                    req,
                    num_new,
                    num_new_computed_tokens=num_hit,
                    new_computed_blocks=blocks,
                    num_lookahead_tokens=lookahead if num_new else 0,
                    num_external_computed_tokens=num_external,
                    delay_cache_blocks=not num_new,
                    full_sequence_must_fit=fits,
                    reserved_blocks=reserved,
                )
                check(manager)
                refused = new is None
                if not refused and not num_new:
                    req.num_computed_tokens = num_hit + num_external
                    end_load(manager, req)
                unhashed = manager.get_blocks(req.request_id).get_unhashed_block_ids_all_groups()
                seen.append(
                    (
                        num_hit,
                        refused,
                        held_pattern(manager, req),
                        manager.block_pool.get_num_free_blocks(),
                        [len(ids) for ids in unhashed],
                        manager.estimate_cached_tokens(req),
                        sorted(map(repr, manager.take_events())),
                    )
                )
                num_refused += refused
                num_loads += not refused and num_external > 0
            assert seen[0] == seen[1]
            if not seen[0][1]:
                alive.append(requests)
            # As long as no request ends, even a small pool evicts no block that could be hit.
            if num_blocks > 100 and len(alive) > 5:
                for manager, req in zip(managers, alive.pop(rng.randrange(5)), strict=True):
                    manager.free(req)
    assert num_refused > 0
    assert num_loads > 40
