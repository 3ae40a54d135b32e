# SPDX-License-Identifier: Apache-2.0
"""From block hash to cached block, for one attention type."""

from collections.abc import Iterator

from vllm.v1.core.hybrid.grouped_block import GroupedKVCacheBlock


class PrefixIndex:
    """Cached blocks of one attention type by block hash.

    Several blocks may carry the same hash: requests that compute the same prefix
    at the same time each keep their own block, because a block id that a request
    has been given never changes. The oldest one answers lookups; the others
    take over in order when it is evicted.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, GroupedKVCacheBlock] = {}
        # Rare, so apart: the second and later blocks of a hash.
        self._duplicates: dict[bytes, list[GroupedKVCacheBlock]] = {}
        #: The block for a hash, or None. Bound to the dict: the hottest call of a lookup.
        self.get = self._blocks.get

    def insert(self, block: GroupedKVCacheBlock, block_hash: bytes, num_tokens: int) -> None:
        """Enter ``block`` as holding the last tokens of a prefix of ``num_tokens``."""
        if block.is_null or block.block_hash is not None:
            raise ValueError(f"cannot enter {block} in the prefix cache: it is null or cached")
        block.block_hash = block_hash
        block.num_tokens = num_tokens
        if self._blocks.setdefault(block_hash, block) is not block:
            self._duplicates.setdefault(block_hash, []).append(block)

    def remove(self, block: GroupedKVCacheBlock) -> None:
        """Take ``block`` out; it keeps its ids but can no longer be hit."""
        block_hash = block.block_hash
        if block_hash is None:
            raise ValueError(f"{block} is not in the prefix cache")
        block.block_hash = None
        block.num_tokens = 0
        others = self._duplicates.get(block_hash)
        if self._blocks[block_hash] is not block:
            assert others is not None
            others.remove(block)
        elif others:
            self._blocks[block_hash] = others.pop(0)
        else:
            del self._blocks[block_hash]
        if others is not None and not others:
            del self._duplicates[block_hash]

    def clear(self) -> None:
        """Forget all blocks."""
        for block in self:
            block.block_hash = None
            block.num_tokens = 0
        self._blocks.clear()
        self._duplicates.clear()

    def __iter__(self) -> Iterator[GroupedKVCacheBlock]:
        yield from self._blocks.values()
        for others in self._duplicates.values():
            yield from others

    def __len__(self) -> int:
        return len(self._blocks) + sum(map(len, self._duplicates.values()))

    def check_integrity(self) -> None:
        """Raise AssertionError where a hash leads to a block that does not carry it."""
        for block_hash, block in self._blocks.items():
            assert block.block_hash == block_hash, f"{block} is indexed under another hash"
        for block_hash, others in self._duplicates.items():
            assert others, "an emptied list of duplicates was kept"
            assert block_hash in self._blocks, "duplicates without a first block"
            for block in others:
                assert block.block_hash == block_hash, f"{block} is indexed under another hash"
        assert len({id(block) for block in self}) == len(self), "a block is indexed twice"
