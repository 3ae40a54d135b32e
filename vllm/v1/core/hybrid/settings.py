# SPDX-License-Identifier: Apache-2.0
"""What all attention types of an engine have in common."""

from dataclasses import dataclass

from vllm.v1.core.hybrid.attention_type import AttentionType
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec


@dataclass(frozen=True)
class CacheSettings:
    """Engine-wide settings of the KV cache. Lengths and sizes are in tokens."""

    max_model_len: int
    #: Most tokens that can be scheduled and not yet computed, over all steps in flight.
    max_in_flight_tokens: int
    #: Least common multiple of the block sizes. Prefix hits end at its multiples.
    scheduler_block_size: int
    #: Tokens per block hash; divides every block size.
    hash_block_size: int
    enable_caching: bool
    #: Where sliding windows and Mamba keep cached blocks. None: at every position where a hit can
    #: end. 0: at the end of prompts and at junctions of shared prefixes. Otherwise also every so
    #: many tokens.
    retention_interval: int | None
    #: Whether the worker must zero newly allocated blocks before use.
    needs_zeroing: bool
    #: Tokens after the computed ones that a drafter reads while it prefills: 1 with EAGLE, one per
    #: module with multi-token prediction.
    num_prefill_lookahead: int = 0

    @property
    def num_reprefillable_tokens(self) -> int:
        """Computed tokens at the end whose KV a drafter may still compute anew."""
        return max(self.num_prefill_lookahead - 1, 0)

    def hashes_per_block(self, block_size: int) -> int:
        """How many block hashes a block of ``block_size`` tokens spans."""
        return max(block_size // self.hash_block_size, 1)

    def validate(self, attention_types: tuple[AttentionType, ...]) -> None:
        """Check the settings against the model's attention types.

        Raises:
            ValueError: that names the setting, what is accepted, and its value.
        """
        # Without prefix caching there are no hashes and no hits.
        if self.enable_caching:
            self._validate_block_sizes(attention_types)
            self._validate_prefill_lookahead(attention_types)
        self._validate_retention(attention_types)

    def _validate_block_sizes(self, attention_types: tuple[AttentionType, ...]) -> None:
        if self.scheduler_block_size % self.hash_block_size != 0:
            raise ValueError(
                f"scheduler_block_size must be a multiple of hash_block_size "
                f"({self.hash_block_size}), got {self.scheduler_block_size}"
            )
        for attention_type in attention_types:
            block_size = attention_type.spec.block_size
            if self.scheduler_block_size % block_size != 0:
                raise ValueError(
                    f"scheduler_block_size must be a multiple of the block size of "
                    f"{attention_type}, got {self.scheduler_block_size}"
                )
            if block_size % self.hash_block_size != 0:
                raise ValueError(
                    f"hash_block_size must divide the block size of {attention_type}, "
                    f"got {self.hash_block_size}"
                )

    def _validate_prefill_lookahead(self, attention_types: tuple[AttentionType, ...]) -> None:
        # The block after a hit must hold all tokens that the drafter has seen of what follows.
        if self.num_prefill_lookahead > self.scheduler_block_size and any(
            attention_type.is_eagle for attention_type in attention_types
        ):
            raise ValueError(
                f"num_prefill_lookahead must be at most scheduler_block_size "
                f"({self.scheduler_block_size}) with prefix caching, "
                f"got {self.num_prefill_lookahead}"
            )

    def _validate_retention(self, attention_types: tuple[AttentionType, ...]) -> None:
        interval = self.retention_interval
        if not interval:
            return
        if interval < 0 or interval % self.scheduler_block_size != 0:
            raise ValueError(
                f"prefix_cache_retention_interval must be 0 or a positive multiple of "
                f"{self.scheduler_block_size}, got {interval}"
            )
        if not any(isinstance(t.spec, SlidingWindowSpec | MambaSpec) for t in attention_types):
            raise ValueError(
                f"prefix_cache_retention_interval must be 0 for a model without sliding-window or "
                f"Mamba layers, got {interval}"
            )
