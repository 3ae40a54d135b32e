# SPDX-License-Identifier: Apache-2.0
"""The token sequences that the simulated model runner holds, one row per request."""

from collections.abc import Sequence

import numpy as np

from support.identity import PrefixIdentity, mix, prefix_sums, sample_tokens, token_terms


class Sequences:
    """Prefix identities of all rows, and the simulated model that continues them.

    Args:
        num_rows: Requests held at once.
        num_positions: Longest sequence of a row.
        vocab_size: Tokens are sampled from ``range(vocab_size)``.
    """

    def __init__(self, num_rows: int, num_positions: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        #: Per position, the identity of the prefix that ends there. Beyond `known` it is
        #: scratch space for draft tokens.
        self.identities = np.zeros((num_rows, num_positions), dtype=np.uint64)
        #: Number of tokens that are certain: prompt and sampled.
        self.known = np.zeros(num_rows, dtype=np.int64)
        self._sums = np.zeros((num_rows, num_positions), dtype=np.uint64)
        self._seeds = np.zeros(num_rows, dtype=np.uint64)

    def start(self, row: int, tokens: Sequence[int], identity: PrefixIdentity) -> None:
        """Put a sequence of known tokens into a row."""
        length = len(tokens)
        self._seeds[row] = identity.seed
        self._sums[row, :length] = prefix_sums(tokens, identity)
        self.identities[row, :length] = mix(self._seeds[row, None] + self._sums[row, :length])
        self.known[row] = length

    def put(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Continue the prefix before each position by a token; `known` stays."""
        sums = self._sums[rows, positions - 1] + token_terms(tokens, positions)
        self._sums[rows, positions] = sums
        self.identities[rows, positions] = mix(self._seeds[rows] + sums)

    def sample(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What the model samples at these positions."""
        return sample_tokens(self.identities[rows, positions], self.vocab_size)

    def extend(self, rows: np.ndarray) -> np.ndarray:
        """Sample one token after the known ones of each row, and make it known."""
        ends = self.known[rows]
        tokens = self.sample(rows, ends - 1)
        self.put(rows, ends, tokens)
        self.known[rows] = ends + 1
        return tokens

    def put_drafts(self, row: int, drafts: Sequence[int]) -> None:
        """Put draft tokens after the known ones, as scratch."""
        for position, token in enumerate(drafts, int(self.known[row])):
            self.put(np.array([row]), np.array([position]), np.array([token]))

    def verify_drafts(self, row: int, drafts: Sequence[int]) -> list[int]:
        """Accept the drafts that the model would have sampled, and sample one token more.

        The drafts must have been `put_drafts`. Returns all tokens that became known.
        """
        first = int(self.known[row])
        positions = np.arange(first - 1, first + len(drafts))
        sampled = self.sample(np.full_like(positions, row), positions).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
            accepted += 1
        tokens = sampled[: accepted + 1]
        last = first + accepted
        self.put(np.array([row]), np.array([last]), np.array(tokens[-1:]))
        self.known[row] = last + 1
        return tokens

    def propose(self, row: int, num_drafts: int) -> list[int]:
        """Guess the next tokens: about three in four are what the model will sample.

        Which ones are wrong depends on the prefix only.
        """
        drafts: list[int] = []
        position = int(self.known[row]) - 1
        for _ in range(num_drafts):
            identity = int(self.identities[row, position])
            token = int(self.sample(np.array([row]), np.array([position]))[0])
            if identity % 4 == 0:
                token = (token + 1) % self.vocab_size
            drafts.append(token)
            position += 1
            self.put(np.array([row]), np.array([position]), np.array([token]))
        return drafts
