# SPDX-License-Identifier: Apache-2.0
"""Resolve ``requirements/cpu.in`` to ``requirements/cpu.lock``: every package, with its version.

    make lock

The lock is valid on every machine: it has no hosts, no paths, and no "+cpu" in a version. It also
omits the CUDA libraries of PyPI's PyTorch, because pip resolves these in the bootstrap.
"""

import json
import re
import subprocess
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUT = ROOT / "requirements" / "cpu.in"
LOCK = ROOT / "requirements" / "cpu.lock"
CUDA_ONLY = re.compile(r"(nvidia|cuda)-")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def base() -> str:
    """The pinned vLLM for CPUs, as pyproject.toml states it for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["cpu"]
    return requirement


def markers() -> dict[str, str]:
    """The environment markers of the input by package, which the lock must keep."""
    found = {}
    for line in INPUT.read_text().splitlines():
        requirement, _, marker = line.split("#")[0].partition(";")
        if marker:
            found[canonical(re.split(r"[=<>!\[]", requirement)[0].strip())] = marker.strip()
    return found


def resolve() -> dict[str, str]:
    """Version by package, as pip would install the input into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        report = Path(folder, "report.json")
        command = [f"{folder}/bin/python", "-m", "pip", "install", "--dry-run"]
        subprocess.run([*command, "--report", report, "-r", INPUT], check=True)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonical(p["name"]): p["version"].split("+")[0] for p in packages}


def main() -> None:
    marker_of = markers()
    lines = [
        f"{name}=={version}" + (f"; {marker_of[name]}" if name in marker_of else "")
        for name, version in resolve().items()
        if not CUDA_ONLY.match(name)
    ]
    header = "# Made from cpu.in by `make lock`. Do not edit.\n"
    LOCK.write_text(header + "\n".join(sorted([*lines, base()])) + "\n")
    print(f"{len(lines) + 1} packages in {LOCK.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
