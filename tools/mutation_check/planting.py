# SPDX-License-Identifier: Apache-2.0
"""Copies of the package, or of its native core, with one fault in them."""

import shutil
import subprocess
from pathlib import Path

from tools.mutation_check.mutants import Mutant
from tools.native_tools import build_core, configure_core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm/v1/core/hybrid"


def with_fault(mutant: Mutant, text: str) -> str:
    """The text of a source file with the fault in it.

    Raises:
        SystemExit: if the place of the fault does not occur exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise SystemExit(
            f"the place of the fault {mutant.fault!r} must occur once in {mutant.file}, got {count}"
        )
    return text.replace(mutant.old, mutant.new)


class NativeCore:
    """A copy of the native core's sources, which is rebuilt for each fault in them.

    Only one thread may use it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copy(ROOT / "CMakeLists.txt", folder)
        # A fault may leave something unused, which must not stop the build.
        configure_core(folder, folder / "build", "-DHYBRID_KV_WERROR=OFF", quiet=True)

    def build(self, mutant: Mutant, target: Path) -> None:
        """Put the core with a fault into the folder ``target``.

        Raises:
            SystemExit: if the fault does not compile.
        """
        path = self.folder / mutant.file
        text = path.read_text()
        try:
            path.write_text(with_fault(mutant, text))
            core = build_core(self.folder / "build", quiet=True)
        except subprocess.CalledProcessError as error:
            output = error.output[-2000:]
            raise SystemExit(f"the fault {mutant.fault!r} must compile, got:\n{output}") from error
        finally:
            path.write_text(text)
        # A new file, because a process may have loaded the old one.
        (target / core.name).unlink(missing_ok=True)
        shutil.copy(core, target)


def plant(mutant: Mutant | None, folder: Path, native_core: NativeCore) -> Path:
    """A copy of the package in ``folder``, with the fault in it if there is one."""
    copy = folder / "hybrid"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None and mutant.is_native:
        native_core.build(mutant, copy)
    elif mutant is not None:
        path = copy / mutant.file
        path.write_text(with_fault(mutant, path.read_text()))
    return copy
