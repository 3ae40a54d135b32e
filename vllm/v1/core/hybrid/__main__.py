# SPDX-License-Identifier: Apache-2.0
"""Command line: ``python -m vllm.v1.core.hybrid``, or ``vllm-hybrid-kv``."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vllm-hybrid-kv",
        usage="vllm-hybrid-kv [-h] doctor [-h] [MODEL] [flags of vllm serve]",
        description="The hybrid KV cache manager for vLLM.",
        epilog="doctor: is the hybrid manager active here, and how would it serve MODEL?",
    )
    parser.add_argument("command", choices=["doctor"])
    # The arguments after the command are vLLM's flags, so this parser does not see them.
    parser.parse_args(arguments[:1])

    from vllm.v1.core.hybrid.doctor.command import run

    return run(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
