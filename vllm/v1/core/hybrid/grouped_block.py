# SPDX-License-Identifier: Apache-2.0
"""The logical block of one attention type."""


class GroupedKVCacheBlock:
    """One logical block: the physical blocks of all groups of an attention type
    for the same tokens. They are allocated, cached, freed and evicted together.

    ``block_ids[k]`` is the physical block id for the type's ``k``-th group.
    """

    __slots__ = ("block_hash", "block_ids", "is_null", "num_tokens", "ref_cnt", "type_id")

    def __init__(self, type_id: int, block_ids: tuple[int, ...], is_null: bool = False) -> None:
        self.type_id = type_id
        self.block_ids = block_ids
        self.is_null = is_null
        #: How many block tables (or detached lists) hold the block. Not kept for null blocks.
        self.ref_cnt = 0 if is_null else 1
        #: Prefix-cache hash while the block is in its type's prefix index.
        self.block_hash: bytes | None = None
        #: Length in tokens of the prefix that ``block_hash`` stands for.
        self.num_tokens = 0

    def __repr__(self) -> str:
        if self.is_null:
            return f"GroupedKVCacheBlock(type {self.type_id}, null)"
        state = f"cached at {self.num_tokens} tokens" if self.block_hash else "not cached"
        return (
            f"GroupedKVCacheBlock(type {self.type_id}, ids {self.block_ids}, "
            f"ref_cnt {self.ref_cnt}, {state})"
        )
