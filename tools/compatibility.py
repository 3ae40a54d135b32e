# SPDX-License-Identifier: Apache-2.0
"""Make the tables of docs/compatibility.md anew.

    python tools/compatibility.py [--check]

What manages an engine is asked of the factory's own list (`coverage.py`), for every feature in
`compatibility_tables/features.py` and for every hybrid architecture in base's registry. Text
outside of the tables is left as it is. With `--check` nothing is written, and the exit status
is 1 if the page is not up to date.
"""

import argparse
import sys
from pathlib import Path

from compatibility_tables.page import fill

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the tables of docs/compatibility.md anew.")
    parser.add_argument("--check", action="store_true", help="only say whether that is needed")
    options = parser.parse_args(arguments)
    before = PAGE.read_text()
    after = fill(before)
    if after == before:
        print(f"{PAGE.name} is up to date")
        return 0
    if options.check:
        print(f"{PAGE.name} is not up to date: python tools/compatibility.py", file=sys.stderr)
        return 1
    PAGE.write_text(after)
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
