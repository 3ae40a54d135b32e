# SPDX-License-Identifier: Apache-2.0
"""Plants each fault of `mutants.py` in a copy of the package and runs the tests on it.

    python tools/mutation_check.py [--only WORD] [--jobs N] [--json FILE]

Prints which test of which layer caught each fault. The exit status is 1 if a fault
went uncaught, or if the tests fail on the unchanged copy.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mutants import MUTANTS, Mutant
from native_tools import configure_core

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm/v1/core/hybrid"
TESTS = ROOT / "tests/v1/core/hybrid"
#: A layer's tests run until the first one fails.
LAYERS = {
    "unit": (
        "test_block_pool.py",
        "test_managers.py",
        "test_kv_cache_manager.py",
        "test_cross_attention.py",
        "test_speculation.py",
        "test_kv_connectors.py",
    ),
    "differential": (
        "test_differential_cases.py",
        "test_differential_cross_attention.py",
        "test_differential.py",
        "test_differential_speculation.py",
    ),
    "oracle": (
        "test_oracle.py",
        "test_oracle_cross_attention.py",
        "test_oracle_speculation.py",
        "test_oracle_shapes.py",
        "test_oracle_random.py",
        "test_oracle_mamba.py",
        "test_oracle_connector.py",
    ),
}
#: A fault that makes the manager loop for ever is caught too.
TIMEOUT_SECONDS = 900
NOT_CAUGHT = ""


def with_fault(mutant: Mutant, text: str) -> str:
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"mutants.py: the place of the fault {mutant.fault!r} occurs "
            f"{text.count(mutant.old)} times in {mutant.file}; it must occur once"
        )
    return text.replace(mutant.old, mutant.new)


class NativeCore:
    """A copy of the native core's sources, built again for each fault in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # One build at a time: all but the file with the fault stays compiled.
        self._lock = threading.Lock()
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copy(ROOT / "CMakeLists.txt", folder)
        # A fault may leave something unused, which is no reason not to run it.
        configure = configure_core(folder, folder / "build", "-DHYBRID_KV_WERROR=OFF")
        self._cmake = configure[0]
        subprocess.run(configure, check=True, capture_output=True)

    def build(self, mutant: Mutant, target: Path) -> None:
        """Put the core with a fault in ``target``, a folder."""
        with self._lock:
            path = self.folder / mutant.file
            text = path.read_text()
            try:
                path.write_text(with_fault(mutant, text))
                command = [self._cmake, "--build", str(self.folder / "build"), "--parallel", "2"]
                build = subprocess.run(command, capture_output=True, text=True)
                if build.returncode:
                    raise SystemExit(f"{mutant.fault!r} does not compile:\n{build.stdout[-2000:]}")
                (core,) = (self.folder / "build").glob("_core*")
                # A new file: a process may have the old one loaded.
                (target / core.name).unlink(missing_ok=True)
                shutil.copy(core, target)
            finally:
                path.write_text(text)


def plant(mutant: Mutant | None, folder: Path, native_core: NativeCore) -> Path:
    """A copy of the package in ``folder``, with the fault in it."""
    copy = folder / "hybrid"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None and mutant.is_native:
        native_core.build(mutant, copy)
    elif mutant is not None:
        path = copy / mutant.file
        path.write_text(with_fault(mutant, path.read_text()))
    return copy


def run_layer(source: Path, layer: str) -> str:
    """The first test of a layer that fails on a copy of the package; "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "support.mutated_package", *(str(TESTS / name) for name in LAYERS[layer])]
    environment = os.environ | {
        "HYBRID_KV_SOURCE": str(source),
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "(does not end)"
    if run.returncode == 0:
        return NOT_CAUGHT
    failed = re.search(
        r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py)(?:::(.*?))?(?: - |$)", run.stdout, re.M
    )
    if failed is None:
        raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr}")
    return failed[2] or failed[1]


def check(mutant: Mutant | None, native_core: NativeCore) -> dict[str, str]:
    """What catches a fault, per layer."""
    with tempfile.TemporaryDirectory() as folder:
        source = plant(mutant, Path(folder), native_core)
        return {layer: run_layer(source, layer) for layer in LAYERS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only faults whose description has this in it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if arguments.only in mutant.fault]
    if not mutants:
        parser.error(f"--only is {arguments.only!r}; no fault has it in its description")

    console, progress = Console(), Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(max(arguments.jobs, 1)) as pool,
    ):
        one_check = partial(check, native_core=NativeCore(Path(folder)))
        results = []
        for mutant, by_layer in track(
            zip([None, *mutants], pool.map(one_check, [None, *mutants]), strict=True),
            total=len(mutants) + 1,
            description="planting faults",
            console=progress,
        ):
            # All of them take most of an hour: nobody should wait for the table in the dark.
            caught_by = ", ".join(layer for layer in LAYERS if by_layer[layer]) or "none"
            progress.print(f"{mutant.fault if mutant else 'no fault'}: {caught_by}")
            results.append(by_layer)
    unchanged, *caught = results
    table = Table(title="Planted faults and the first test of each layer that caught them")
    table.add_column("fault")
    for layer in LAYERS:
        table.add_column(layer, overflow="fold")
    for mutant, by_layer in zip(mutants, caught, strict=True):
        table.add_row(mutant.fault, *(by_layer[layer] or "-" for layer in LAYERS))
    console.print(table)
    missed = [m.fault for m, c in zip(mutants, caught, strict=True) if not any(c.values())]
    false_alarms = [name for name in unchanged.values() if name]
    console.print(f"{len(mutants) - len(missed)} of {len(mutants)} faults were caught")
    for layer in LAYERS:
        console.print(f"  by {layer} tests: {sum(bool(c[layer]) for c in caught)}")
    for fault in missed:
        console.print(f"NOT CAUGHT: {fault}", style="bold red")
    for name in false_alarms:
        console.print(f"FAILS WITHOUT A FAULT: {name}", style="bold red")
    if arguments.json:
        rows = [{"fault": m.fault, **c} for m, c in zip(mutants, caught, strict=True)]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if missed or false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
