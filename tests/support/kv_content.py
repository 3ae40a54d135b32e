# SPDX-License-Identifier: Apache-2.0
"""What the KV cache memory holds, slot by slot, as the workers would have written it."""

from collections.abc import Sequence

from support.kv_configs import AttentionKind


class Unsafe(AssertionError):
    """A block table leads to KV that is not what its request would have computed."""


class KVContent:
    """For every physical block: whose group wrote it, where in a sequence, and what.

    A slot's content is the identity of the token prefix that ends in it (see
    `support.identity`). Steps run in the order in which they are scheduled,
    so content is written when a step is scheduled.
    """

    def __init__(self, groups: Sequence[AttentionKind]) -> None:
        self.groups = groups
        # Physical id -> (group, index of the block in its sequence, content of its slots).
        self._blocks: dict[int, tuple[int, int, list[int]]] = {}
        self.num_slots_checked = 0

    def write(
        self,
        tables: Sequence[Sequence[int]],
        identities: list[int],
        start: int,
        end: int,
        encoder: list[int],
    ) -> None:
        """KV of positions ``start`` to ``end`` is computed, in every group.

        In a request's first step also that of its encoder's positions, all at once.
        """
        for group, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
            if not kind.of_encoder:
                self._write(group, table, identities, start, end)
            elif start == 0:
                self._write(group, table, encoder, 0, len(encoder))

    def _write(
        self, group: int, table: Sequence[int], identities: list[int], start: int, end: int
    ) -> None:
        kind = self.groups[group]
        size = kind.block_size
        if end > len(table) * size:
            raise Unsafe(f"group {group} writes token {end - 1} but has {len(table)} blocks")
        # Only the last state is written.
        first_index = kind.state_column(end) if kind.holds_states else start // size
        for index in range(first_index, -(-end // size)):
            block_id = table[index]
            if block_id == 0:
                raise Unsafe(f"group {group} writes block {index} to the null block")
            if kind.holds_states:
                self._blocks[block_id] = (group, index, [identities[end - 1]])
                continue
            block = self._blocks.get(block_id)
            if block is None or block[:2] != (group, index):
                block = self._blocks[block_id] = (group, index, [0] * size)
            first, last = max(start, index * size), min(end, (index + 1) * size)
            offset = index * size
            block[2][first - offset : last - offset] = identities[first:last]

    def check_states(
        self, tables: Sequence[Sequence[int]], identities: list[int], start: int
    ) -> None:
        """A step from position ``start`` on finds its states; call it before its writes."""
        for group, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
            if kind.holds_states and start:
                index = kind.state_column(start)
                if self._blocks.get(table[index]) != (group, index, [identities[start - 1]]):
                    raise Unsafe(
                        f"group {group} reads the state after token {start - 1} from id "
                        f"{table[index]}, which holds another"
                    )
                self.num_slots_checked += 1

    def check_step(
        self,
        tables: Sequence[Sequence[int]],
        identities: list[int],
        start: int,
        end: int,
        encoder: list[int],
    ) -> None:
        """Every read of a step that computes positions ``start`` to ``end`` is right."""
        for group, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
            if kind.of_encoder:
                self._check(group, table, encoder, 0, len(encoder), "reads")
            elif not kind.holds_states:
                self._check(group, table, identities, kind.first_read(start), end, "reads")

    def check_hit(
        self, tables: Sequence[Sequence[int]], identities: list[int], hit_length: int
    ) -> None:
        """A prefix hit of ``hit_length`` tokens can be resumed from, in every group.

        Blocks that the hit gives but that no later token attends to must be right too.
        """
        self.check_states(tables, identities, hit_length)
        for group, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
            size = kind.block_size
            if hit_length % size or len(table) * size != hit_length:
                raise Unsafe(f"group {group}: {len(table)} blocks for a hit of {hit_length} tokens")
            if kind.holds_states:
                if any(table[:-1]):
                    raise Unsafe(f"group {group} hits more than the state at the end: {table}")
                continue
            first = kind.first_read(hit_length)
            self._check(group, table, identities, first, hit_length, "hits")
            for index in range(first // size):
                if table[index]:
                    span = index * size, (index + 1) * size
                    self._check(group, table, identities, *span, "hits")

    def _check(
        self,
        group: int,
        table: Sequence[int],
        identities: list[int],
        start: int,
        end: int,
        verb: str,
    ) -> None:
        size = self.groups[group].block_size
        if end > len(table) * size:
            raise Unsafe(f"group {group} {verb} token {end - 1} but has {len(table)} blocks")
        blocks = self._blocks
        for index in range(start // size, -(-end // size)):
            block_id = table[index]
            writer = blocks.get(block_id)
            if writer is None or writer[0] != group or writer[1] != index:
                if block_id == 0:
                    raise Unsafe(f"group {group} {verb} block {index}, which is null")
                raise Unsafe(
                    f"group {group} {verb} block {index} as id {block_id}, which was "
                    f"written by {writer and f'group {writer[0]} as block {writer[1]}'}"
                )
            offset = index * size
            held, expected = writer[2], identities[offset : offset + size]
            if offset < start or offset + size > end:
                span = slice(max(start - offset, 0), min(end - offset, size))
                held, expected = held[span], expected[span]
            if held != expected:
                raise Unsafe(
                    f"group {group} {verb} block {index} as id {block_id}, which holds another "
                    f"prefix somewhere in tokens {offset} to {offset + size}"
                )
        self.num_slots_checked += max(end - start, 0)
