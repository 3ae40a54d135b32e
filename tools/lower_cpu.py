# SPDX-License-Identifier: Apache-2.0
"""Run tests as on a CPU with fewer vector instructions.

    python -m tools.lower_cpu {avx512,avx2} [pytest arguments ...]

vLLM asks PyTorch for the CPU's features, and chooses its kernels and some dtypes by the answer.
This command lowers the answer in every Python process of the tests, and the instructions that
PyTorch and oneDNN use.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Python imports this module at its start.
SITECUSTOMIZE = '''
import sys
from importlib.machinery import PathFinder


class Finder:
    """Lowers the features that torch.cpu reports, when it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for feature in {missing!r}:
                name = f"_is_{{feature}}_supported"
                assert name in vars(module), name
                setattr(module, name, lambda: False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
'''


@dataclass(frozen=True)
class Level:
    #: Features that PyTorch reports as missing.
    missing: tuple[str, ...]
    #: The most that PyTorch's and oneDNN's own kernels may use.
    aten: str
    onednn: str


_NO_BF16 = ("avx512_bf16", "amx_tile", "amx_fp16")
LEVELS = {
    "avx512": Level(_NO_BF16, "avx512", "AVX512_CORE_VNNI"),
    "avx2": Level((*_NO_BF16, "avx512", "vnni"), "avx2", "AVX2"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lower_cpu",
        description="Run tests as on a CPU with fewer vector instructions.",
        usage="%(prog)s [-h] {avx512,avx2} [pytest arguments ...]",
        allow_abbrev=False,
    )
    parser.add_argument("level", choices=LEVELS)
    options, arguments = parser.parse_known_args()
    level = LEVELS[options.level]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITECUSTOMIZE.format(missing=level.missing))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
            "ATEN_CPU_CAPABILITY": level.aten,
            "ONEDNN_MAX_CPU_ISA": level.onednn,
        }
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
