# SPDX-License-Identifier: Apache-2.0
"""The native core (sources in ``csrc/``)."""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHash

class BlankBlockIds:
    """The physical block ids that hold nothing reusable: a stack.

    A new one holds the ids 1 to num_blocks - 1, lowest first. Id 0 is the null
    block and never blank. ValueError unless 1 <= num_blocks <= 2**31 - 1.
    """

    def __init__(self, num_blocks: int) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    def take(self, n: int) -> list[int]:
        """Take n ids, the most recently returned first.

        ValueError, with nothing taken, unless 0 <= n <= len(self).
        """

    def give_back(self, ids: Sequence[int]) -> None:
        """Return ids; the first is the next to be taken.

        ValueError, with nothing changed, for an id that is not in
        1 to num_blocks - 1, is blank already, or comes twice.
        """

    def to_list(self) -> list[int]:
        """All blank ids, in the order in which they would be taken."""

    def __len__(self) -> int: ...
    def __contains__(self, id: int) -> bool: ...

class BlockHasher:
    """Chained hashes of full blocks of tokens: base's, of a serialized (parent, tokens, keys).

    ``algorithm`` is sha256, sha256_cbor, xxhash or xxhash_cbor. ValueError for another, or
    unless 1 <= block_size <= 8192.
    """

    def __init__(self, algorithm: str, block_size: int) -> None: ...
    def hash_blocks(
        self, parent: bytes, tokens: list[int], start: int, rest: bytes
    ) -> list[BlockHash]:
        """Hash the full blocks of ``tokens[start:]``; for many, the interpreter lock is released.

        ``parent`` is the hash before the first block, and ``rest`` what follows the tokens of
        every block when the tuple is serialized. ValueError for a start outside of the list, a
        parent that is empty or longer than 255 bytes or a rest that is empty or longer than
        16,384, TypeError for tokens that are no ints, OverflowError for those that do not fit
        in 32 bits.
        """

def sha256_portable(message: bytes) -> bytes:
    """SHA-256 without the processor's SHA instructions, for tests."""
