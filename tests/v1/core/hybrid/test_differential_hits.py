# SPDX-License-Identifier: Apache-2.0
"""Hit tokens of base's manager and ours on the same workload, with a pool that is too small.

Conversations grow from a few shared prefixes and come back with falling frequency. Base evicts
a type's physical blocks one by one, ours evicts them together, so the two keep different
prefixes. Every hit of both is verified, as in test_differential.py.
"""

import random
from typing import Any

from support.differential import count_evictions
from support.kv_configs import AttentionKind, KVSetup, blocks_for, full, sliding
from support.manager_driver import ManagerDriver, Op
from support.requests import RequestPlan
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager

MODELS: dict[str, tuple[AttentionKind, ...]] = {
    "Gemma-like": (full(16), sliding(33, 16, num_groups=5)),
    "many groups": (full(16, num_groups=2), sliding(65, 16, num_groups=10)),
    "windows only": (sliding(65, 16, num_groups=6),),
    "three types": (full(16), sliding(33, 16, num_groups=3), sliding(129, 16, num_groups=2)),
    "unequal blocks": (full(16, num_groups=2), sliding(65, 32, num_groups=4)),
}
NUM_PLANS = 24


def workload(seed: int) -> tuple[list[RequestPlan], list[Op]]:
    """24 conversations from 6 shared prefixes, and 80 requests for them."""
    chance = random.Random(seed)
    trunks = [(label, chance.choice([32, 64, 128, 200])) for label in range(6)]
    plans = [
        RequestPlan((chance.choice(trunks), (100 + i, chance.choice([8, 40, 100]))))
        for i in range(NUM_PLANS)
    ]
    ops: list[Op] = []
    for _ in range(80):
        plan = min(int(chance.expovariate(1 / 6)), NUM_PLANS - 1)
        ops.append(("serve", plan, chance.choice([1, 4, 20])))
        while chance.random() < 0.5:
            ops.append(("step", 256))
        if chance.random() < 0.9:
            ops.append(("finish", 0))
    return plans, ops


def hit_tokens(manager_class: Any, setup: KVSetup, seed: int) -> tuple[int, int]:
    """Hit tokens, and evicted physical blocks."""
    plans, ops = workload(seed)
    driver = ManagerDriver(manager_class, setup, plans)
    evictions = count_evictions(driver.manager)
    for op in ops:
        driver.apply(op)
    driver.wind_down()
    return driver.counts["hit tokens"], evictions()


def test_hit_tokens_with_eviction() -> None:
    total, evicted = [0, 0], [0, 0]
    print()
    for name, kinds in MODELS.items():
        for retention in (None, 0):
            for seed in range(2):
                plans, _ = workload(seed)
                needed = sum(blocks_for(kinds, plan.num_prompt_tokens) for plan in plans)
                setup = KVSetup(
                    kinds,
                    num_blocks=max(needed // 6, blocks_for(kinds, 340)),
                    retention=retention,
                    max_chunk=256,
                )
                base, base_evicted = hit_tokens(BaseKVCacheManager, setup, seed)
                ours, ours_evicted = hit_tokens(KVCacheManager, setup, seed)
                evicted[0] += base_evicted
                evicted[1] += ours_evicted
                total[0] += base
                total[1] += ours
                fewer = "  (fewer)" if ours < base else ""
                print(
                    f"{name}, retention {retention}, workload {seed}: "
                    f"{base:,} hit tokens with base, {ours:,} with ours{fewer}"
                )
    print(f"all: {total[0]:,} hit tokens with base, {total[1]:,} with ours")
    print(f"all: {evicted[0]:,} blocks evicted with base, {evicted[1]:,} with ours")
    assert min(evicted) > 0
    assert 0 < total[0] <= total[1]
