# SPDX-License-Identifier: Apache-2.0
"""Models of all shapes under the content oracle: types, groups, block sizes, windows."""

import random
from dataclasses import replace
from typing import Any

import pytest

from support.kv_configs import chunked, full, sliding
from support.oracle import OracleSettings, ReadFault
from support.oracle.workload import Add, Case, Run, random_operations, run_case
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseManager

pytest_plugins = ["support.oracle.fixtures"]
pytestmark = pytest.mark.usefixtures("reads_are_checked")

PLAIN = OracleSettings()
ASYNC = OracleSettings(async_scheduling=True, steps_in_flight=1)

SHAPES = {
    "full": (full(),),
    "two full groups": (full(num_groups=2),),
    "sliding only": (sliding(20, 8, 2),),
    "Gemma 2": (full(num_groups=1), sliding(64)),
    "Gemma 3": (full(), sliding(40, num_groups=5)),
    "gpt-oss": (sliding(128), full()),
    "46 groups": (full(), sliding(33, num_groups=45)),
    "two windows": (sliding(30, 8), sliding(9, 8, 2)),
    "three types": (full(8, 2), sliding(12, 8, 3), sliding(50, 8)),
    "six types": (
        full(8),
        sliding(4, 8),
        sliding(17, 8, 2),
        sliding(40, 8, 3),
        full(16, 2),
        sliding(100, 16),
    ),
    "window of one token": (full(8), sliding(1, 8, 2)),
    "window smaller than a block": (full(16), sliding(5, 16, 2)),
    "window of a block": (full(16), sliding(16, 16, 2)),
    "window a token larger than a block": (full(16), sliding(17, 16, 2)),
    "window larger than the prompts": (full(16), sliding(5000, 16, 2)),
    "larger blocks in the window": (full(8), sliding(40, 32, 3)),
    "larger blocks in full attention": (full(32), sliding(20, 8, 3)),
    "block sizes that do not divide": (full(6), sliding(10, 4, 2)),
    "full attention in blocks that do not divide": (full(6), full(4, 2)),
    "blocks of one token": (full(1), sliding(3, 1, 2)),
    "Llama 4": (full(), chunked(48, num_groups=3)),
    "chunks of a block": (full(8), chunked(8, 8, 2)),
    "chunks larger than the prompts": (chunked(4096, 8), full(8)),
    "chunks only": (chunked(32, 8, 2),),
    "chunks and windows": (chunked(32, 8, 2), sliding(20, 8), chunked(24, 8)),
    "two precisions, zeroed blocks": (full(16), sliding(20, 16, 2, dtype="float32")),
}


@pytest.mark.parametrize("settings", [PLAIN, ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("kinds", SHAPES.values(), ids=SHAPES.keys())
def test_shape(manager_cls: Any, kinds: tuple, settings: OracleSettings) -> None:
    """A prompt and its continuations, in a roomy pool: hits at many lengths."""
    operations = [Add(tail=90, max_tokens=20), Run(6)]
    for shared in (90, 89, 64, 33, 16, 7, 1):
        operations += [Add(tail=40, parent=0, shared=shared, max_tokens=20), Run(3)]
    operations += [Add(tail=0, parent=i, shared=500, follow=True, max_tokens=9) for i in range(8)]
    # Groups of a type side by side, or between those of others.
    layout = 1 if settings.async_scheduling else None
    case = Case(kinds, tuple(operations), settings, 4000, layout=layout)
    engine = run_case(manager_cls, case)
    # Base caches nothing for a window of one token, which needs no block for a hit.
    if kinds != SHAPES["window of one token"]:
        assert engine.tokens_from_cache >= 64


#: What base's manager of chunks refuses (unequal block sizes), or takes as a hit although blocks
#: of the chunk before are missing (chunks that begin inside of a block).
CHUNKS_OF_OURS = {
    "inside of a block": (full(16), chunked(40, 16, 3)),
    "smaller than a block": (full(16), chunked(6, 16, 2)),
    "of a token": (full(8), chunked(1, 8)),
    "larger blocks": (full(8), chunked(48, 16, 2)),
    "smaller blocks, other windows": (full(32), chunked(24, 8, 2), sliding(20, 16)),
    "block sizes that do not divide": (full(6), chunked(10, 4, 2)),
}


@pytest.mark.parametrize("settings", [PLAIN, ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("kinds", CHUNKS_OF_OURS.values(), ids=CHUNKS_OF_OURS.keys())
def test_chunks_that_base_does_not_take(kinds: tuple, settings: OracleSettings) -> None:
    test_shape(KVCacheManager, kinds, settings)
    test_shape_in_a_small_pool(KVCacheManager, kinds, settings)


def test_base_reads_blocks_that_it_does_not_have_where_a_chunk_begins_inside_of_one() -> None:
    """Within a few random mixes, which the hybrid manager plays to the end."""
    kinds = CHUNKS_OF_OURS["inside of a block"]
    cases = [case_in_a_small_pool(kinds, PLAIN, 0, 0, random.Random(seed)) for seed in range(10)]
    for case in cases:
        run_case(KVCacheManager, case)
    with pytest.raises(ReadFault, match="which is the null block"):
        for case in cases:
            run_case(BaseManager, case)


def case_in_a_small_pool(
    kinds: tuple, settings: OracleSettings, seed: int, extra_blocks: int, rng: random.Random
) -> Case:
    settings = replace(settings, max_num_batched_tokens=(24, 64, 200)[seed], vocab_size=256)
    operations = tuple(random_operations(rng, 40, settings.max_model_len))
    return Case(kinds, operations, settings, extra_blocks, layout=seed)


@pytest.mark.parametrize("settings", [PLAIN, ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("kinds", SHAPES.values(), ids=SHAPES.keys())
def test_shape_in_a_small_pool(manager_cls: Any, kinds: tuple, settings: OracleSettings) -> None:
    """A random mix in pools from the smallest possible one upwards."""
    num_groups = sum(kind.num_groups for kind in kinds)
    for seed, extra_blocks in enumerate((0, 2 * num_groups, 10 * num_groups)):
        rng = random.Random(f"{kinds} {seed}")
        run_case(manager_cls, case_in_a_small_pool(kinds, settings, seed, extra_blocks, rng))


@pytest.mark.parametrize("settings", [PLAIN, ASYNC], ids=["plain", "async"])
def test_prompts_of_one_token(manager_cls: Any, settings: OracleSettings) -> None:
    settings = replace(settings, max_num_seqs=32)
    adds = [Add(tail=1, max_tokens=1 + i % 40) for i in range(60)]
    run_case(manager_cls, Case(SHAPES["Gemma 3"], tuple(adds), settings, extra_blocks=40))


@pytest.mark.parametrize("settings", [PLAIN, ASYNC], ids=["plain", "async"])
def test_long_prompts(manager_cls: Any, settings: OracleSettings) -> None:
    settings = replace(settings, max_model_len=6000, max_num_batched_tokens=512, max_num_seqs=4)
    operations = (
        Add(tail=5000, max_tokens=30),
        Run(4),
        Add(tail=4000, max_tokens=30),
        Run(12),
        Add(tail=900, parent=0, shared=4500, max_tokens=30),
        Add(tail=0, parent=1, shared=6000, follow=True, max_tokens=30),
    )
    case = Case(SHAPES["Gemma 3"], operations, settings, extra_blocks=6000)
    engine = run_case(manager_cls, case)
    assert engine.tokens_from_cache == 4496 + 4000


def test_the_longest_sequence_fills_the_smallest_pool(manager_cls: Any) -> None:
    for kinds in SHAPES.values():
        engine = run_case(manager_cls, Case(kinds, (Add(tail=200, max_tokens=500),), PLAIN))
        [submission] = engine.submissions.values()
        assert len(submission.outputs) == PLAIN.max_model_len - 200


@pytest.mark.parametrize("settings", [PLAIN, ASYNC], ids=["plain", "async"])
def test_a_model_without_kv_cache(manager_cls: Any, settings: OracleSettings) -> None:
    settings = replace(settings, enable_prefix_caching=False)
    operations = (Add(tail=30, max_tokens=5), Add(tail=70, max_tokens=9))
    engine = run_case(manager_cls, Case((), operations, settings, extra_blocks=5))
    assert [len(s.outputs) for s in engine.submissions.values()] == [5, 9]
    assert engine.reads["kv"] == 0
