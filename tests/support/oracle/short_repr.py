# SPDX-License-Identifier: Apache-2.0
"""A `repr` for dataclasses that are printed as programs."""

from dataclasses import fields


class ShortRepr:
    """Leaves out the fields of a dataclass (made with ``repr=False``) that have defaults."""

    def __repr__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"
