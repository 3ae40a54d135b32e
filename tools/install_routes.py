# SPDX-License-Identifier: Apache-2.0
"""Run README's installation commands in fresh environments, and check what they install.

    python -m tools.install_routes [cuda] [cpu] [editable] [wheel]

Each route runs in a copy of the last commit. Then vLLM is imported, `vllm-hybrid-kv doctor` must
report that the hybrid manager would be active, and `pip uninstall` must leave nothing behind. The
route ``wheel`` first builds both wheels, and then takes the environment without vLLM: the native
core is imported from the wheel, on the newest Python that is found. The others take minutes and
gigabytes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.wheels import Problem, build, find_pythons, minor_version

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm/v1/core/hybrid"
ROUTES = ("cuda", "cpu", "editable", "wheel")
#: Variables that could bring in what was not installed in a route.
FOREIGN = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_HYBRID_KV", "VLLM_PLUGINS")
#: Loads the native core without vLLM.
IMPORT_CORE = """
import importlib.util, pathlib, sysconfig
(path,) = pathlib.Path(sysconfig.get_path("platlib"), "vllm/v1/core/hybrid").glob("_core*.so")
spec = importlib.util.spec_from_file_location("_core", path)
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
pool = core.BlockPool(10, [(1, 16, 1)], records_evictions=False)
assert pool.get_num_free_blocks() == 9
print(path.name)
"""


def read_routes(readme: str) -> dict[str, str]:
    """The commands of each route: the code after a comment ``<!-- route: NAME -->``."""
    found = re.findall(r"<!-- route: (\w+) -->\n```sh\n(.*?)```", readme, re.DOTALL)
    return dict(found)


class Environment:
    """A fresh virtual environment, and a copy of the last commit beside it."""

    def __init__(self, python: str, folder: Path, only_pypi: bool) -> None:
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        self.sources = folder / "sources"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.sources], check=True)
        self._bin = folder / "venv" / "bin"
        self._variables = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        if only_pypi:
            # The user's configuration may prefer CPU builds of PyTorch.
            self._variables.pop("PIP_FIND_LINKS", None)
            self._variables["PIP_CONFIG_FILE"] = os.devnull
        self._variables["PATH"] = f"{self._bin}{os.pathsep}{self._variables['PATH']}"

    @property
    def files(self) -> list[Path]:
        """The package's files in the environment."""
        (site,) = self._bin.parent.glob("lib/python3.*/site-packages")
        ours = [*site.glob(f"{PACKAGE}/**/*"), *site.glob("vllm_hybrid_kv*")]
        return [path for path in ours if path.is_file() and path.suffix != ".pyc"]

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            command,
            cwd=cwd or self._bin.parent,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise Problem(f"`{' '.join(command)[:200]}` failed:\n{done.stdout[-3000:]}")
        return done.stdout

    def remove_package(self) -> None:
        """Uninstall the package; nothing of it may stay."""
        self.run("pip", "uninstall", "--yes", "vllm-hybrid-kv")
        if self.files:
            raise Problem(f"`pip uninstall` must remove all files, got {self.files[0]} left")


def check(route: str, commands: str) -> str:
    """Run a route; returns the line that shows its result."""
    oldest, newer = find_pythons()
    python = newer if route == "wheel" else oldest
    with tempfile.TemporaryDirectory() as name:
        environment = Environment(python, Path(name), only_pypi=route == "cuda")
        if route == "wheel":
            for interpreter in (oldest, newer):
                build(interpreter, environment.sources / "dist")
        environment.run("bash", "-e", "-c", commands, cwd=environment.sources)
        if route == "wheel":
            shown = environment.run("python", "-c", IMPORT_CORE)
        else:
            environment.run("python", "-c", "import vllm")
            shown = environment.run("vllm-hybrid-kv", "doctor")
            shown = next(line for line in shown.splitlines() if "base vLLM" in line)
        environment.remove_package()
    return f"Python 3.{minor_version(python)}: {' '.join(shown.split())}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("routes", nargs="*", metavar="ROUTE", help=f"some of {', '.join(ROUTES)}")
    routes: Sequence[str] = parser.parse_args(arguments).routes or ROUTES
    if unknown := set(routes).difference(ROUTES):
        parser.error(f"routes must be of {', '.join(ROUTES)}, got {', '.join(sorted(unknown))}")
    commands: Mapping[str, str] = read_routes((ROOT / "README.md").read_text())
    failed = 0
    for route in routes:
        started = time.monotonic()
        try:
            result = check(route, commands[route])
        except Problem as problem:
            result, failed = f"FAILED: {problem}", failed + 1
        print(f"{route:9} {time.monotonic() - started:4.0f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
