# SPDX-License-Identifier: Apache-2.0
"""Run tests on a native core built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tools.sanitize [pytest arguments]

Without arguments it runs the tests that use the native core most. Any finding ends the run with a
report and a failure. Needs g++ and its sanitizer libraries, which are part of g++.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.native_tools import build_core, configure_core, find_compiler

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm/v1/core/hybrid"
TESTS = ROOT / "tests/v1/core/hybrid"
DEFAULT = (
    "test_block_hasher.py",
    "test_block_pool.py",
    "test_managers.py",
    "test_kv_cache_manager.py",
    "test_differential_cases.py",
    "test_differential.py",
)
FLAGS = (
    "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
    # The C++ standard library also checks its indices.
    " -D_GLIBCXX_ASSERTIONS"
)


def build(folder: Path) -> Path:
    """A copy of the package in ``folder``, with a sanitized core."""
    copy = folder / "hybrid"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "_core*.so"))
    options = ("-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_CXX_FLAGS={FLAGS}")
    configure_core(ROOT, folder / "build", *options)
    shutil.copy(build_core(folder / "build"), copy)
    return copy


def runtime_libraries() -> str:
    """The sanitizers' libraries, which must be loaded before Python's own."""
    compiler = find_compiler() or "g++"
    paths = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    for path in paths:
        if not Path(path).is_file():
            raise SystemExit(f"{compiler} has no {path}; install its sanitizer libraries")
    return ":".join(paths)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize",
        description="Run tests on a native core built with AddressSanitizer and "
        "UndefinedBehaviorSanitizer.",
        usage="%(prog)s [-h] [pytest arguments ...]",
        epilog=f"Without arguments: {', '.join(DEFAULT)} in {TESTS.relative_to(ROOT)}.",
        allow_abbrev=False,
    )
    _, arguments = parser.parse_known_args()
    arguments = arguments or [str(TESTS / name) for name in DEFAULT]
    with tempfile.TemporaryDirectory() as folder:
        source = build(Path(folder))
        environment = os.environ | {
            "HYBRID_KV_SOURCE": str(source),
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTHONDONTWRITEBYTECODE": "1",
            # A separate allocation for each Python object, so that a read after free is found.
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": runtime_libraries(),
            # Python and torch keep much memory until the process ends.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "support.mutated_package", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
