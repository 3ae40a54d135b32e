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
    #: A common multiple of the block sizes; base uses the least one. Prefix hits end at multiples
    #: of it.
    scheduler_block_size: int
    #: Tokens per block hash; divides every block size.
    hash_block_size: int
    enable_caching: bool
    #: Where sliding windows and Mamba keep cached blocks. None: before every position where a hit
    #: can end. 0: only before the end of prompts and before junctions of shared prefixes. A
    #: positive interval: there, and also before its multiples.
    retention_interval: int | None
    #: Whether the worker must zero newly allocated blocks before use.
    needs_zeroing: bool
    #: Tokens after the computed ones that a drafter reads during prefill: 1 with EAGLE, and one per
    #: module with multi-token prediction (MTP).
    num_prefill_lookahead: int = 0

    @property
    def num_reprefillable_tokens(self) -> int:
        """Computed tokens at the end whose KV a drafter may compute again."""
        return max(self.num_prefill_lookahead - 1, 0)

    def hashes_per_block(self, block_size: int) -> int:
        """How many block hashes a block of ``block_size`` tokens spans."""
        return max(block_size // self.hash_block_size, 1)

    def validate(self, attention_types: tuple[AttentionType, ...]) -> None:
        """Check the settings against the model's attention types.

        Raises:
            ValueError: that names the setting, what is accepted, and its value.
        """

        def require(holds: bool, name: str, value: int, accepted: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {accepted}, got {value}")

        alignment, per_hash = self.scheduler_block_size, self.hash_block_size
        interval, name = self.retention_interval or 0, "prefix_cache_retention_interval"
        multiple = interval >= 0 and interval % alignment == 0
        require(multiple, name, interval, f"0 or a positive multiple of {alignment}")
        sparse = any(isinstance(t.spec, SlidingWindowSpec | MambaSpec) for t in attention_types)
        accepted = "0 for a model without sliding-window or Mamba layers"
        require(interval == 0 or sparse, name, interval, accepted)
        # Without prefix caching there are no hashes and no hits.
        if not self.enable_caching:
            return
        hit, hashes = ("scheduler_block_size", alignment), ("hash_block_size", per_hash)
        require(alignment % per_hash == 0, *hit, f"a multiple of {hashes[0]} ({per_hash})")
        for t in attention_types:
            size = t.spec.block_size
            require(alignment % size == 0, *hit, f"a multiple of the block size of {t}")
            require(size % per_hash == 0, *hashes, f"a divisor of the block size of {t}")
        # The block after a hit must hold all tokens that the drafter reads there.
        lookahead = self.num_prefill_lookahead
        fits = lookahead <= alignment or not any(t.is_eagle for t in attention_types)
        accepted = f"at most scheduler_block_size ({alignment}) with prefix caching"
        require(fits, "num_prefill_lookahead", lookahead, accepted)
