# SPDX-License-Identifier: Apache-2.0
"""The native core (sources in ``csrc/``)."""

from collections.abc import Sequence

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
