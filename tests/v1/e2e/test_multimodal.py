# SPDX-License-Identifier: Apache-2.0
"""Images on the real engine: Gemma 3 with its vision tower, with the fork off and on.

On CPUs base attends causally inside of an image, too.
"""

from support.engine import EnginePair, Round, assert_same_outputs
from support.engine_prompts import Illustrated, random_text
from tools import checkpoints

PAGES = [random_text(100, seed) for seed in range(3)]
#: Where the tokens of the first and of the second image begin: after <bos>, a page, the
#: newlines, and what announces an image; the second also after 64 tokens and three marks.
FIRST_IMAGE, SECOND_IMAGE = 103, 271
PROMPT_LENGTH = 437


def illustrated(first: int, second: int) -> Illustrated:
    """The same text with two images, given by their seeds."""
    return Illustrated("<start_of_image>".join(PAGES), [first, second])


def last_block_end(length: int) -> int:
    return length // 32 * 32


def test_images(engines: EnginePair) -> None:
    """A prompt is hit as far as its images are the same."""
    pairs = [(1, 2), (1, 2), (1, 3), (1, 4), (5, 2), (6, 2)]
    base, fork = engines.run(
        checkpoints.tiny_gemma3_images(),
        [
            *(Round([illustrated(*pair)], max_tokens=8) for pair in pairs),
            Round([illustrated(*pair) for pair in {*pairs, (7, 2), (6, 3)}], max_tokens=8),
        ],
    )

    assert_same_outputs(base, fork)
    assert [r.num_cached_tokens for r in fork.rounds] == [r.num_cached_tokens for r in base.rounds]
    # Who comes second with another image only shows where prefixes part; the third resumes there.
    assert [r.num_cached_tokens[0] for r in fork.rounds[:-1]] == [
        *(0, last_block_end(PROMPT_LENGTH - 1)),
        *(0, last_block_end(SECOND_IMAGE)),
        *(0, last_block_end(FIRST_IMAGE)),
    ]
    outputs = [r.token_ids[0] for r in fork.rounds[:-1]]
    assert outputs[0] == outputs[1]
    assert len(set(map(tuple, outputs))) == len(set(pairs))


def test_images_with_preemption(engines: EnginePair) -> None:
    """Images that are cut by chunks, in a pool that only some of the requests fit in."""
    base, fork = engines.run(
        checkpoints.tiny_gemma3_images(),
        [
            Round(
                [illustrated(*pair) for pair in [(1, 2), (1, 3), (1, 4), (5, 2), (1, 2)]],
                max_tokens=[40, 60, 30],
                arrivals=[0, 1, 3, 8, 30],
                aborts={2: 40},
            )
        ],
        max_model_len=512,
        max_num_batched_tokens=80,
        num_gpu_blocks_override=88,
    )

    assert_same_outputs(base, fork)
    for result in (base, fork):
        assert result.total("num_preemptions") > 0
        assert result.total("prefix_cache_hits") > 0
    assert fork.peak_usage > 0.8
