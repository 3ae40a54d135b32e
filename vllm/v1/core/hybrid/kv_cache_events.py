# SPDX-License-Identifier: Apache-2.0
"""KV cache events: what external consumers learn about the prefix cache."""

from collections.abc import Sequence

from msgspec.structs import replace

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashList,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.request import Request


def wants_hits_reported(request: Request) -> bool:
    """Whether a request's prefix hits are published as if they were stored again."""
    # Pooling requests do not have the attribute.
    return getattr(request, "kv_cache_report_mode", "incremental") == "full"


class KVCacheEventLog:
    """Collects the events of a pool.

    As in base there is one event per KV cache group, although the groups of a type change together.
    """

    def __init__(self, attention_types: Sequence[AttentionType]) -> None:
        self.attention_types = tuple(attention_types)
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """All events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def cleared(self) -> None:
        """The prefix cache was reset."""
        self._events.append(AllBlocksCleared())

    def removed(self, type_id: int, block_hash: bytes) -> None:
        """A block left the prefix cache."""
        external_hash = maybe_convert_block_hash(BlockHash(block_hash))
        for group_id in self.attention_types[type_id].group_ids:
            self._events.append(
                BlockRemoved(block_hashes=[external_hash], medium=MEDIUM_GPU, group_idx=group_id)
            )

    def stored(
        self,
        request: Request,
        type_id: int,
        block_hashes: BlockHashList,
        span: range,
        stored: Sequence[int],
    ) -> None:
        """The blocks ``stored`` of a request, indices within ``span``, are in the prefix cache.

        ``block_hashes[i]`` is the hash at the end of the type's ``i``-th block. As in base, the
        event's tokens are those of the whole span, including blocks that are not stored.
        """
        attention_type = self.attention_types[type_id]
        block_size = attention_type.spec.block_size
        extra_keys, mm_index = [], 0
        for i in stored:
            keys, mm_index = generate_block_hash_extra_keys(
                request, i * block_size, (i + 1) * block_size, mm_index
            )
            extra_keys.append(keys)
        parent = maybe_convert_block_hash(block_hashes[span.start - 1]) if span.start else None
        lora = request.lora_request
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(block_hashes[i]) for i in stored],
            parent_block_hash=parent,
            token_ids=request.all_token_ids[span.start * block_size : span.stop * block_size],
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_GPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra_keys),
            kv_cache_spec_kind=get_kv_cache_spec_kind(attention_type.spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(attention_type.spec),
            session_id=request.session_id,
        )
        self._events += [replace(event, group_idx=i) for i in attention_type.group_ids]
