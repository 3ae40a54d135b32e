# SPDX-License-Identifier: Apache-2.0
"""KV cache residency metrics: base's collector gets the same reports from both managers."""

from collections import Counter
from typing import Any

import pytest

from support.by_hand import GEMMA, prefill, request
from support.kv_configs import KVSetup
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.request import Request

MANAGERS = (BaseKVCacheManager, KVCacheManager)


class CountingCollector(KVCacheMetricsCollector):
    """Counts the reports of each physical block, the null block left out."""

    def __init__(self) -> None:
        super().__init__(sample_rate=1.0)
        self.reports: Counter[str] = Counter()

    def on_block_allocated(self, block: Any) -> None:
        self.reports["allocated"] += 1
        super().on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        self.reports["hit"] += block.block_id != 0
        super().on_block_accessed(block)


class Run:
    """A manager for a model like Gemma 3, its collector, and one request at a time."""

    def __init__(self, manager_cls: type, num_blocks: int, enable_caching: bool = True) -> None:
        self.collector = CountingCollector()
        setup = KVSetup(GEMMA, num_blocks, caching=enable_caching)
        self.manager: Any = setup.build(manager_cls, metrics_collector=self.collector)
        self.num_requests = 0

    def prefill(self, *path: tuple[int, int]) -> Request:
        self.num_requests += 1
        req = request(f"r{self.num_requests}", *path)
        assert prefill(self.manager, req) is not None
        return req

    def serve(self, *path: tuple[int, int]) -> None:
        self.manager.free(self.prefill(*path))


def test_blocks_are_allocated_hit_and_evicted() -> None:
    for manager_cls in MANAGERS:
        run = Run(manager_cls, num_blocks=1 + 30)
        run.serve((1, 80))
        assert run.collector.reports == {"allocated": 30}
        # The window of the last token is two blocks long, of five groups.
        run.serve((1, 64), (2, 16))
        assert run.collector.reports == {"allocated": 30 + 6, "hit": 4 + 10}
        assert len(run.collector.drain_events()) == 6
        # All ids have been reallocated.
        run.serve((3, 80))
        assert len(run.collector.drain_events()) == 30


def test_blocks_that_are_evicted_by_id_are_reported() -> None:
    for manager_cls in MANAGERS:
        run = Run(manager_cls, num_blocks=100)
        req = run.prefill((1, 80))
        ids = run.manager.get_block_ids(req.request_id)
        run.manager.evict_blocks({ids[0][0], ids[0][1]})
        assert len(run.collector.drain_events()) == 2


def test_a_reset_forgets_all_blocks() -> None:
    for manager_cls in MANAGERS:
        run = Run(manager_cls, num_blocks=100)
        run.serve((1, 80))
        assert run.collector.block_metrics
        assert run.manager.reset_prefix_cache()
        assert not run.collector.block_metrics


@pytest.mark.parametrize("manager_cls", MANAGERS, ids=["base", "hybrid"])
def test_nothing_is_evicted_without_prefix_caching(manager_cls: type) -> None:
    run = Run(manager_cls, num_blocks=1 + 30, enable_caching=False)
    run.serve((1, 80))
    run.serve((2, 80))
    assert run.collector.reports == {"allocated": 60}
    assert run.collector.drain_events() == []
