# SPDX-License-Identifier: Apache-2.0
"""Which positions of a sequence an attention layer reads, per KV cache spec.

The worker checks one range of positions per request and step: from the first position that
any query of the step reads to the last query's own. Position content does not depend on the
query, so the union of the queries' ranges is all there is to check. Cross attention is the
exception: its positions are those of an encoder's tokens, and each query reads all of them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


class ReadRule(ABC):
    @abstractmethod
    def first_read(self, starts: np.ndarray) -> np.ndarray:
        """The lowest position read by any query at or after ``starts``."""

    def first_column(self, starts: np.ndarray, ends: np.ndarray, block_size: int) -> np.ndarray:
        """The lowest column of its block table that a step over ``[start, end)`` uses."""
        return self.first_read(starts) // block_size


@dataclass(frozen=True)
class ReadAll(ReadRule):
    """Full attention."""

    def first_read(self, starts: np.ndarray) -> np.ndarray:
        return np.zeros_like(starts)


@dataclass(frozen=True)
class ReadWindow(ReadRule):
    """Sliding window: a query reads itself and the ``window - 1`` positions before it."""

    window: int

    def first_read(self, starts: np.ndarray) -> np.ndarray:
        return np.maximum(starts - (self.window - 1), 0)


@dataclass(frozen=True)
class ReadChunk(ReadRule):
    """Chunked local attention: a query reads from the start of its own chunk."""

    chunk: int

    def first_read(self, starts: np.ndarray) -> np.ndarray:
        return starts // self.chunk * self.chunk


@dataclass(frozen=True)
class ReadEncoder(ReadRule):
    """Cross attention: every query reads all positions, which are the encoder's."""

    def first_read(self, starts: np.ndarray) -> np.ndarray:
        return np.zeros_like(starts)


def read_rule(spec: KVCacheSpec) -> ReadRule:
    """The rule of a spec whose layers keep one slot per token.

    Raises:
        NotImplementedError: for specs with another meaning of a slot (Mamba states,
            compressed MLA).
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        rules = {read_rule(layer) for layer in spec.kv_cache_specs.values()}
        if len(rules) == 1:
            return rules.pop()
    elif isinstance(spec, SlidingWindowSpec):
        # Its MLA variant may rebuild its window after a hit, and so read what it has not written.
        if not (isinstance(spec, SlidingWindowMLASpec) and spec.bounded_replay):
            return ReadWindow(spec.sliding_window)
    elif isinstance(spec, CrossAttentionSpec):
        return ReadEncoder()
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        return ReadChunk(spec.attention_chunk_size)
    elif isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
        compressed = isinstance(spec, MLAAttentionSpec) and spec.tokens_per_state != 1
        if not compressed:
            # With the hybrid manager disabled, windows and chunks are kept as full.
            if spec.sliding_window is not None:
                return ReadWindow(spec.sliding_window)
            if spec.attention_chunk_size is not None:
                return ReadChunk(spec.attention_chunk_size)
            return ReadAll()
    raise NotImplementedError(f"no read rule for {type(spec).__name__}")
