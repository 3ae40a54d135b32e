# SPDX-License-Identifier: Apache-2.0
"""Regenerate the tables of docs/compatibility.md.

    python -m tools.compatibility [--check]

The list that the factory decides by (``coverage.py``) says which manager serves each feature in
``features.py`` and each hybrid architecture in base's registry. Text outside of the tables stays
as it is. With ``--check`` nothing is written, and the exit status is 1 if the page is out of date.
"""

import argparse
import sys

from tools.compatibility.page import PAGE, fill


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="report whether the page is current")
    options = parser.parse_args(arguments)
    before = PAGE.read_text()
    after = fill(before)
    if after == before:
        print(f"{PAGE.name} is up to date")
        return 0
    if options.check:
        print(f"{PAGE.name} is out of date; run: python -m tools.compatibility", file=sys.stderr)
        return 1
    PAGE.write_text(after)
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
