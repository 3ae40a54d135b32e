# SPDX-License-Identifier: Apache-2.0
"""What the managers of all attention types share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.hybrid._core import BlockList, BlockTable
from vllm.v1.core.hybrid.block_pool import BlockPool
from vllm.v1.core.hybrid.step import ALL, NEVER, NO_LIMIT, Step, Target
from vllm.v1.core.kv_cache_utils import BlockHash, resolve_block_hashes
from vllm.v1.request import Request


class SingleTypeKVCacheManager(ABC):
    """Block tables and prefix lookups of one attention type, for all its groups.

    Blocks are logical blocks unless a name says otherwise. Each takes one physical block per
    group.
    """

    #: Whether every prefix of a hit is also a hit. Then a hit can be shortened without a lookup.
    downward_closed: ClassVar[bool] = False
    #: Whether blocks leave a request's table before the request ends.
    releases: ClassVar[bool] = False
    #: Whether null blocks may stand between the blocks of a table.
    has_gaps: ClassVar[bool] = False
    #: Whether a hit can be unusable for a step, see `is_usable`.
    delays_hits: ClassVar[bool] = False
    #: Whether equal tokens mean equal blocks, so that blocks may be cached at all.
    prefix_cacheable: ClassVar[bool] = True
    #: Tokens that are kept before the window, because a drafter may compute the last processed
    #: tokens again.
    num_reread_tokens: int = 0

    def __init__(self, type_id: int, block_pool: BlockPool) -> None:
        attention_type = block_pool.attention_types[type_id]
        settings = block_pool.settings
        self.type_id = type_id
        self.attention_type = attention_type
        self.kv_cache_spec = attention_type.spec
        self.block_size: int = attention_type.spec.block_size
        #: Slots per block of the table; 0 if slots do not change the target.
        self.slots_per_block: int = self.block_size
        self.num_groups = attention_type.num_groups
        #: Blocks after a hit that must be cached too, and are computed again. The drafter's KV of
        #: the last token of a hit depends on the token after the hit.
        self.num_peeked = int(attention_type.is_eagle)
        #: Last computed tokens whose KV is not final yet. As in base, the KV of the target model is
        #: always final, unless the drafter shares its only group.
        self.num_not_final = 0
        if attention_type.is_eagle or sum(t.num_groups for t in block_pool.attention_types) == 1:
            self.num_not_final = settings.num_reprefillable_tokens
        #: Hit lengths are multiples of this many blocks, which all types can serve.
        self.hit_alignment_blocks = settings.scheduler_block_size // self.block_size
        self.hit_alignment_tokens = settings.scheduler_block_size
        self.block_pool = block_pool
        self.event_log = block_pool.event_log
        self.settings = settings
        self.no_blocks = block_pool.new_list(type_id)
        #: Whether every block can serve a hit.
        self.caches_all = True
        #: The most blocks that one request ever holds at a time.
        self.max_blocks_per_request = NO_LIMIT
        self.records_new_block_ids = settings.needs_zeroing and isinstance(
            attention_type.spec, specs.AttentionSpec
        )
        self._new_block_ids: list[int] = []

    # What differs between attention types.

    def target(self, step: Step) -> Target:
        """What a request's block table must hold after a step."""
        return -(-step.slots_end // self.block_size), ALL

    def num_slots(self, table: BlockTable) -> int:
        """Number of slots that a table has; `NO_LIMIT` if slots do not change the target."""
        return len(table) * self.block_size

    def num_computed_blocks(self, num_computed_tokens: int) -> int:
        """Blocks at the beginning of a table that hold the first ``num_computed_tokens``."""
        return -(-num_computed_tokens // self.block_size)

    def block_begin(self, i: int) -> int:
        """Position of the first token that depends on block ``i`` of a table."""
        return i * self.block_size

    def can_resume(self, table: BlockTable, end: int) -> bool:
        """Whether a table still has the blocks that a query at position ``end`` reads."""
        num_unread = self.num_skipped_tokens(end - self.num_reread_tokens)
        return table.num_released <= num_unread // self.block_size

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no query after ``num_computed_tokens`` attends to."""
        return 0

    @abstractmethod
    def find_longest_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> tuple[BlockList, int]:
        """The longest cached prefix of at most ``max_tokens`` that can be resumed from.

        ``block_hashes[i]`` is chained over the first ``(i + 1) * hash_block_size`` tokens. Returns
        the blocks of the prefix, with null blocks where no block is needed, and its length in
        tokens, a multiple of the scheduler block size. The `num_peeked` blocks after the prefix are
        cached too. They may hold tokens beyond ``max_tokens``.
        """

    def is_usable(self, hit: BlockList) -> bool:
        """Whether this step can start from a hit. If not, the next step can."""
        return True

    def new_step_starts(self) -> None:  # noqa: B027 (most types have nothing to do)
        """The scheduler begins a step."""

    def cacheable_blocks(
        self, begin: int, end: int, boundaries: Sequence[int]
    ) -> Sequence[tuple[int, int]]:
        """The blocks from index ``begin`` to before ``end`` that can serve a hit.

        Returns ascending ``(begin, end)`` pairs. The other blocks are not cached. Called only
        without `caches_all`. ``boundaries`` are token positions, multiples of the scheduler block
        size, where a later request is expected to resume.
        """
        raise NotImplementedError

    def caches_beyond(self, end: int, boundaries: Sequence[int]) -> bool:
        """Whether any block from index ``end`` on can serve a hit.

        Called only without `caches_all`.
        """
        raise NotImplementedError

    def next_release(self, num_released: int) -> int:
        """Processed tokens at which ``num_released + 1`` leading blocks have left the window."""
        return NEVER

    # Shared code. Mamba extends `cache_blocks`.

    def bound_blocks(self, spec: specs.SlidingWindowSpec | specs.ChunkedLocalAttentionSpec) -> None:
        """Set the cap of `peak_target` to the one that base sizes the pool with."""
        self.max_blocks_per_request = spec.max_admission_blocks_per_request(
            self.settings.max_in_flight_tokens, self.settings.max_model_len
        )

    def peak_target(self, step: Step, num_null: int) -> Target:
        """`target`, capped at the most blocks that a request ever holds.

        The table begins with ``num_null`` null blocks, or will once a hit is adopted. They take no
        room, so they do not count towards the cap. Base counts them: it takes a request for one
        that has nearly all its blocks when half of its window is still to come.
        """
        num_blocks, num_written = self.target(step)
        return min(num_blocks, num_null + self.max_blocks_per_request), num_written

    def release_skipped(self, table: BlockTable, num_processed_tokens: int) -> int:
        """Release the blocks that no query after ``num_processed_tokens`` attends to.

        The count excludes tokens of steps in flight, which still read before their own position.
        Returns the number of processed tokens at which the next block can be released.
        """
        num_unread = self.num_skipped_tokens(num_processed_tokens - self.num_reread_tokens)
        num_skipped = num_unread // self.block_size
        return self.next_release(table.release_before(num_skipped))

    def cache_blocks(
        self, request: Request, table: BlockTable, num_tokens: int, boundaries: Sequence[int]
    ) -> int:
        """Enter the full blocks of the first ``num_tokens``, all final, in the prefix cache.

        Returns the number of tokens at which more blocks can be cached; `NEVER` if none can.
        """
        begin, end = table.num_decided, self.num_cacheable_blocks(num_tokens)
        if begin < end:
            runs: Sequence[tuple[int, int]] = ((begin, end),)
            if not self.caches_all:
                runs = self.cacheable_blocks(begin, end, boundaries)
                self._count_junction(request, begin, end)
            for run in runs:
                table.cache(*run, request.block_hashes)
            table.num_decided = end
            if self.event_log is not None:
                blocks = table.blocks(begin)
                stored = [i for run in runs for i in range(*run) if not blocks[i - begin].is_null]
                self.report_stored(request, range(begin, end), stored)
        # As in base, the event log also reports spans of tokens without a stored block.
        caches_more = (
            self.caches_all or self.event_log is not None or self.caches_beyond(end, boundaries)
        )
        return self.next_cacheable(table.num_decided) if caches_more else NEVER

    def _count_junction(self, request: Request, begin: int, end: int) -> None:
        """Count a junction if its blocks end among those from ``begin`` to before ``end``."""
        if request.shared_prefix_boundary:
            alignment = self.hit_alignment_tokens
            junction = request.shared_prefix_boundary // alignment * alignment
            if begin < junction // self.block_size + self.num_peeked <= end:
                self.block_pool.counters.junction_kept(self.type_id)

    def num_cacheable_blocks(self, num_tokens: int) -> int:
        """How many blocks of the first ``num_tokens`` a hit can need.

        These are the blocks before the last position where a hit can end, and with `num_peeked` the
        block after that position.
        """
        num_full = max(num_tokens - self.num_not_final, 0) // self.block_size
        num_blocks = num_full // self.hit_alignment_blocks * self.hit_alignment_blocks
        # As in base, the peeked block waits for the first position where a hit can end.
        if self.num_peeked and num_full > num_blocks and num_tokens >= self.hit_alignment_tokens:
            num_blocks += 1
        return num_blocks

    def next_cacheable(self, num_blocks: int) -> int:
        """The number of tokens at which more than ``num_blocks`` become cacheable."""
        alignment = self.hit_alignment_blocks
        if self.num_peeked and num_blocks % alignment == 0:
            num_tokens = (num_blocks + 1) * self.block_size + self.num_not_final
            return max(num_tokens, self.hit_alignment_tokens)
        return (num_blocks // alignment + 1) * self.hit_alignment_tokens + self.num_not_final

    def report_stored(self, request: Request, span: range, stored: Sequence[int]) -> None:
        """Report blocks of a request as cached to the event log, which must be on."""
        assert self.event_log is not None
        self.block_pool.report_evictions()
        # Hashes are chained over the whole prefix. A type with larger blocks uses every n-th.
        block_hashes = resolve_block_hashes(
            request.block_hashes, self.settings.hash_block_size, self.block_size
        )
        self.event_log.stored(request, self.type_id, block_hashes, span, stored)

    def take_new_block_ids(self) -> list[int]:
        """Physical ids to zero, allocated since the last call."""
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    def record_for_zeroing(self, table: BlockTable, start_token: int) -> None:
        """Record the blocks from ``start_token`` on, a multiple of the block size, for zeroing."""
        if not self.records_new_block_ids:
            return
        if start_token % self.block_size != 0:
            raise ValueError(
                f"start_token must be a multiple of {self.block_size}, got {start_token}"
            )
        self.record_new(table.blocks(min(start_token // self.block_size, len(table))))

    def record_new(self, blocks: BlockList, skip_group_ids: Sequence[int] = ()) -> None:
        """Record new blocks for zeroing if the model needs it, except those of skipped groups."""
        if not self.records_new_block_ids:
            return
        for group_id, ids in zip(self.attention_type.group_ids, blocks.block_ids(), strict=True):
            if group_id not in skip_group_ids:
                self._new_block_ids += ids

    def check_integrity(self, request_id: str, table: BlockTable) -> None:
        """Raise AssertionError if a request's block table breaks an invariant."""
        where = f"request {request_id}, {self.attention_type}"
        blocks = table.blocks()
        assert 0 <= table.num_released <= len(blocks), (
            f"{where}: {table.num_released} of {len(blocks)} blocks are released"
        )
        for i, block in enumerate(blocks):
            if i < table.num_released:
                assert block.is_null, f"{where}: released block {i} is {block}, not null"
            elif block.is_null:
                is_between = self.has_gaps and i + 1 < len(blocks)
                assert is_between, f"{where}: block {i} is null"
            else:
                assert block.type_id == self.type_id, f"{where}: block {i} has type {block.type_id}"
            if block.block_hash is not None:
                assert i < table.num_decided, f"{where}: undecided block {i} is cached"
