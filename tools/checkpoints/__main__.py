# SPDX-License-Identifier: Apache-2.0
"""Print the folder of a checkpoint, which is made first if it is missing.

python -m tools.checkpoints tiny-gemma3 [--force]
"""

import argparse
import sys

from tools.checkpoints import CHECKPOINTS, CheckpointError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make a checkpoint if it is missing, and print its folder."
    )
    parser.add_argument("name", choices=CHECKPOINTS)
    parser.add_argument("--force", action="store_true", help="make it again even if it is there")
    options = parser.parse_args(arguments)
    try:
        print(CHECKPOINTS[options.name](options.force))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
