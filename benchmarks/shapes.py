# SPDX-License-Identifier: Apache-2.0
"""The models and requests that the benchmarks of the KV cache manager drive."""

from collections.abc import Callable
from typing import Any

import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

BLOCK_SIZE = 16
WINDOW = 1024
NUM_PROMPT_TOKENS = 2048
MAX_MODEL_LEN = 8192
#: Numbers of KV cache groups: full attention alone, or with 1, 5 (Gemma 3) or 45 window groups.
NUM_GROUPS = (1, 2, 6, 46)


def kv_cache_config(num_groups: int, num_blocks: int) -> KVCacheConfig:
    """Gemma-3-12B shapes: one full-attention group, the others sliding window."""
    shape: dict[str, Any] = dict(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=256, dtype=torch.bfloat16
    )
    full: KVCacheSpec = FullAttentionSpec(**shape)
    window: KVCacheSpec = SlidingWindowSpec(**shape, sliding_window=WINDOW)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[f"layer.{i}"], kv_cache_spec=window if i else full)
            for i in range(num_groups)
        ],
        # What base chooses for hybrid models.
        prefix_cache_retention_interval=0,
    )


def build_manager(manager_class: Callable[..., Any], num_groups: int, num_blocks: int) -> Any:
    """A manager with the arguments that base's scheduler passes."""
    return manager_class(
        kv_cache_config=kv_cache_config(num_groups, num_blocks),
        max_model_len=MAX_MODEL_LEN,
        max_in_flight_tokens=NUM_PROMPT_TOKENS,
        enable_caching=True,
        use_eagle=False,
        num_prefill_lookahead=0,
        log_stats=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        metrics_collector=None,
        watermark=0.0,
        enable_mamba_shared_prefix_checkpoint=False,
    )


def make_requests(count: int, num_output_tokens: int, first: int = 0) -> list[Request]:
    """Requests with different prompts, each with its first output tokens."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    requests = []
    for number in range(first, first + count):
        prompt = [number, *range(1, NUM_PROMPT_TOKENS)]
        request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
            pooling_params=None,
            block_hasher=hasher,
        )
        request.append_output_token_ids(list(range(num_output_tokens)))
        requests.append(request)
    return requests


def managers() -> dict[str, Callable[..., Any]]:
    """The manager classes by name: base's and the hybrid manager."""
    from vllm.v1.core import kv_cache_manager as base
    from vllm.v1.core.hybrid import KVCacheManager

    return {"base": base.KVCacheManager, "hybrid": KVCacheManager}


def start(manager: Any, request: Request) -> int:
    """Place a new request with its whole prompt, as base's scheduler does.

    Returns the length of its prefix hit in tokens.
    """
    blocks, num_hit, _ = manager.get_computed_blocks(request)
    new_blocks = manager.allocate_slots(
        request,
        NUM_PROMPT_TOKENS - num_hit,
        num_new_computed_tokens=num_hit,
        new_computed_blocks=blocks,
        num_lookahead_tokens=0,
        num_external_computed_tokens=0,
        delay_cache_blocks=False,
        num_encoder_tokens=0,
        full_sequence_must_fit=True,
        reserved_blocks=0,
        has_scheduled_reqs=True,
        skip_zeroing_group_ids=(),
    )
    assert new_blocks is not None, "the pool is too small for the benchmark"
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = NUM_PROMPT_TOKENS
    return num_hit


def reset(request: Request) -> None:
    """Return a request to the waiting state, with no computed tokens."""
    request.status = RequestStatus.WAITING
    request.num_computed_tokens = 0
