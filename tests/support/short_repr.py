# SPDX-License-Identifier: Apache-2.0
"""A `repr` for dataclasses that are printed as programs."""

from dataclasses import fields


class ShortRepr:
    """Leaves out the fields of a dataclass (made with ``repr=False``) that have defaults."""

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        changes = (f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({', '.join(changes)})"
