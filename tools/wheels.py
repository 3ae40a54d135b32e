# SPDX-License-Identifier: Apache-2.0
"""Build the wheels of this package: one for Python 3.11, and one for Python 3.12 and newer.

    make wheels                                        # both, into dist/
    python -m tools.wheels --python /usr/bin/python3.12

The second uses Python's stable ABI, which nanobind supports from 3.12 on. auditwheel tags both with
the oldest manylinux that they run on. Each build has an environment of its own, with the versions
of requirements/wheels.txt.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "wheels.txt"
#: The newest Python of the stable ABI's build, where several are found.
NEWEST = 14


class Problem(Exception):
    """A problem that the user has to fix. Only the text is shown."""


def minor_version(python: str) -> int:
    """The minor version of an interpreter of Python 3.

    Raises:
        Problem: if it is no such interpreter.
    """
    code = "import sys; print(*sys.version_info[:2])"
    try:
        shown = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()
    except OSError:
        shown = []
    if len(shown) != 2 or shown[0] != "3":
        raise Problem(f"--python must name interpreters of Python 3, got {python}")
    return int(shown[1])


def find_pythons() -> list[str]:
    """Python 3.11, and the oldest Python from 3.12 on, on PATH or among pyenv's versions.

    Raises:
        Problem: if one of them is not found.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")

    def find(minor: int) -> str | None:
        # The one that runs this first. pyenv puts scripts on PATH that fail for other versions.
        if sys.version_info[1] == minor:
            return sys.executable
        in_pyenv = sorted(pyenv.glob(f"3.{minor}.*/bin/python"))
        return str(in_pyenv[-1]) if in_pyenv else shutil.which(f"python3.{minor}")

    oldest, newer = find(11), next(filter(None, map(find, range(12, NEWEST + 1))), None)
    if oldest is None or newer is None:
        missing = "Python 3.11" if oldest is None else "Python 3.12 or newer"
        raise Problem(f"{missing} must be on PATH or be named by --python, got none")
    return [oldest, newer]


def expected_name(minor: int) -> re.Pattern[str]:
    """The file name of the wheel that a Python 3 of this minor version builds."""
    tag = "cp311-cp311" if minor == 11 else "cp312-abi3"
    return re.compile(rf"vllm_hybrid_kv-[^-]+-{tag}-manylinux_[^-]+\.whl")


def build(python: str, out: Path) -> Path:
    """Build a wheel with an interpreter; returns its path in ``out``."""
    minor = minor_version(python)
    if minor < 11:
        raise Problem(f"--python must be Python 3.11 or newer, got 3.{minor}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        scripts = folder / "venv" / "bin"
        environment = os.environ | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "HYBRID_KV_STABLE_ABI": str(int(minor >= 12)),
        }

        def run(*command: str | Path) -> None:
            done = subprocess.run(
                [scripts / "python", "-m", *command],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode != 0:
                raise Problem(f"`{' '.join(map(str, command[:2]))}` failed:\n{done.stdout[-3000:]}")

        run("pip", "install", "-r", REQUIREMENTS)
        built = folder / "built"
        # `build/` of the repository may hold the core of another Python.
        sources = folder / "sources"
        shutil.copytree(ROOT, sources, ignore=_not_sources)
        run("pip", "wheel", "--no-deps", "--no-build-isolation", "-w", built, sources)
        (wheel,) = built.glob("*.whl")
        repaired = folder / "repaired"
        run("auditwheel", "repair", "-w", repaired, wheel)
        (wheel,) = repaired.glob("*.whl")
        if not expected_name(minor).fullmatch(wheel.name):
            raise Problem(f"the wheel must match {expected_name(minor).pattern}, got {wheel.name}")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, out))


def _not_sources(folder: str, names: list[str]) -> list[str]:
    """What a build does not need: hidden files, results, and native cores that were built here."""
    results = {"build", "dist", "site"} if Path(folder) == ROOT else set()
    return [n for n in names if n.startswith(".") or n in results or n.endswith((".so", ".pyc"))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", nargs="+", help="interpreters to build with")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    options = parser.parse_args(arguments)
    try:
        for python in options.python or find_pythons():
            wheel = build(python, options.out)
            print(f"{wheel.relative_to(Path.cwd()) if wheel.is_relative_to(Path.cwd()) else wheel}")
    except Problem as problem:
        print(f"wheels: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
