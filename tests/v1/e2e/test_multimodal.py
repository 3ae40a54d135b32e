# SPDX-License-Identifier: Apache-2.0
"""Images on the real engine: Gemma 3 with its vision tower, with either manager.

On CPUs, base's attention is causal also inside of an image.
"""

from support.engine import EnginePair, Round, assert_same_outputs
from support.engine_prompts import image_prompt, random_text
from tools import checkpoints

PAGES = [random_text(100, seed) for seed in range(3)]
#: Where the tokens of the two images begin: after <bos>, a page, the newlines and the token that
#: begins an image; the second also after the first image's 64 tokens and three more tokens.
FIRST_IMAGE, SECOND_IMAGE = 103, 271
PROMPT_LENGTH = 437


def illustrated(first: int, second: int) -> dict[str, object]:
    """The same text with two images, given by their seeds."""
    return image_prompt("<start_of_image>".join(PAGES), [first, second])


def last_block_end(length: int) -> int:
    return length // 32 * 32


def test_images(engines: EnginePair) -> None:
    """A prompt is hit up to the first image that differs."""
    pairs = [(1, 2), (1, 2), (1, 3), (1, 4), (5, 2), (6, 2)]
    base, hybrid = engines.run(
        checkpoints.tiny_gemma3_images(),
        [
            *(Round([illustrated(*pair)], max_tokens=8) for pair in pairs),
            Round([illustrated(*pair) for pair in {*pairs, (7, 2), (6, 3)}], max_tokens=8),
        ],
    )

    assert_same_outputs(base, hybrid)
    assert hybrid.num_cached_tokens == base.num_cached_tokens
    # The second prompt with another image shows where prefixes diverge; the third resumes there.
    assert [r.num_cached_tokens[0] for r in hybrid.rounds[:-1]] == [
        *(0, last_block_end(PROMPT_LENGTH - 1)),
        *(0, last_block_end(SECOND_IMAGE)),
        *(0, last_block_end(FIRST_IMAGE)),
    ]
    outputs = [r.token_ids[0] for r in hybrid.rounds[:-1]]
    assert outputs[0] == outputs[1]
    assert len(set(map(tuple, outputs))) == len(set(pairs))


def test_images_with_preemption(engines: EnginePair) -> None:
    """Chunks end inside of images, and only some of the requests fit into the pool."""
    base, hybrid = engines.run(
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
        # Otherwise a request is admitted only once it fits, and none is preempted.
        scheduler_reserve_full_isl=False,
    )

    assert_same_outputs(base, hybrid)
    for result in (base, hybrid):
        assert result.total("num_preemptions") > 0
        assert result.total("prefix_cache_hits") > 0
    assert hybrid.peak_usage > 0.8
