# SPDX-License-Identifier: Apache-2.0
"""KV cache residency metrics: base's collector hears of the same things from both managers."""

from collections import Counter
from typing import Any

import pytest

from support.kv_configs import KVSetup, full, sliding
from support.requests import RequestPlan, block_hasher, make_request
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.request import Request

MANAGERS = (BaseKVCacheManager, KVCacheManager)


class CountingCollector(KVCacheMetricsCollector):
    """Counts what it is told of each physical block, the null block left out."""

    def __init__(self) -> None:
        super().__init__(sample_rate=1.0)
        self.told: Counter[str] = Counter()

    def on_block_allocated(self, block: Any) -> None:
        self.told["allocated"] += 1
        super().on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        self.told["hit"] += block.block_id != 0
        super().on_block_accessed(block)


class Run:
    """A manager of the kind that Gemma 3 needs, its collector, and one request at a time."""

    def __init__(self, manager_cls: type, num_blocks: int, enable_caching: bool = True) -> None:
        self.collector = CountingCollector()
        setup = KVSetup(
            (full(16), sliding(33, 16, 5)), num_blocks, retention=None, caching=enable_caching
        )
        self.manager: Any = setup.build(manager_cls, metrics_collector=self.collector)
        self.num_requests = 0

    def prefill(self, *path: tuple[int, int]) -> Request:
        self.num_requests += 1
        request = make_request(RequestPlan(path), f"r{self.num_requests}", block_hasher(16))
        blocks, num_hit, _ = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks)
        assert new is not None
        request.num_computed_tokens = request.num_tokens
        return request

    def serve(self, *path: tuple[int, int]) -> None:
        self.manager.free(self.prefill(*path))


def test_blocks_are_allocated_hit_and_evicted() -> None:
    for manager_cls in MANAGERS:
        run = Run(manager_cls, num_blocks=1 + 30)
        run.serve((1, 80))
        assert run.collector.told == {"allocated": 30}
        # The window of the last token is two blocks long, of five groups.
        run.serve((1, 64), (2, 16))
        assert run.collector.told == {"allocated": 30 + 6, "hit": 4 + 10}
        assert len(run.collector.drain_events()) == 6
        # All ids are given to others now.
        run.serve((3, 80))
        assert len(run.collector.drain_events()) == 30


def test_blocks_that_are_named_are_evicted() -> None:
    for manager_cls in MANAGERS:
        run = Run(manager_cls, num_blocks=100)
        request = run.prefill((1, 80))
        ids = run.manager.get_block_ids(request.request_id)
        run.manager.evict_blocks({ids[0][0], ids[0][1]})
        assert len(run.collector.drain_events()) == 2


def test_a_reset_forgets() -> None:
    for manager_cls in MANAGERS:
        run = Run(manager_cls, num_blocks=100)
        run.serve((1, 80))
        assert run.collector.block_metrics
        assert run.manager.reset_prefix_cache()
        assert not run.collector.block_metrics


@pytest.mark.parametrize("manager_cls", MANAGERS, ids=["base", "fork"])
def test_nothing_is_evicted_without_prefix_caching(manager_cls: type) -> None:
    run = Run(manager_cls, num_blocks=1 + 30, enable_caching=False)
    run.serve((1, 80))
    run.serve((2, 80))
    assert run.collector.told == {"allocated": 60}
    assert run.collector.drain_events() == []
