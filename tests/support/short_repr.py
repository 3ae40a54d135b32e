# SPDX-License-Identifier: Apache-2.0
"""A `repr` for dataclasses that are printed as programs."""

from dataclasses import fields


class ShortRepr:
    """Leaves out the fields of a dataclass (made with ``repr=False``) that have defaults."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._changes()})"

    def _changes(self, num_skipped: int = 0) -> str:
        """Arguments for all fields but the first few, as far as they differ from defaults."""
        return ", ".join(
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)[num_skipped:]  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        )
