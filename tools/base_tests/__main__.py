# SPDX-License-Identifier: Apache-2.0
"""Run base vLLM's tests of its scheduler and KV connectors with base's and the hybrid manager.

    python -m tools.base_tests [FILE ...]

The table shows, per file, how many tests pass with which manager. The exit status is 1 if a test
passes with base and fails with the hybrid manager, unless it is one of the few that need base's own
manager (`verdicts.NEEDS_BASE`).
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import vllm
from tools.base_tests.sources import fetch_tests
from tools.base_tests.verdicts import BASE, HYBRID, Outcome, Tally, read_report

ROOT = Path(__file__).resolve().parents[2]
#: The default files; none of them needs a GPU or weights.
FILES = (
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_priority_preemption_bug.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_swa_inflight_window_free.py",
    "tests/v1/core/test_worker_slot_overflow.py",
    "tests/v1/kv_connector/unit",
)


def run_tests(folder: Path, files: Sequence[str], manager: str) -> dict[str, Outcome]:
    """Run test files in a subprocess, whose output goes to a log in ``folder``."""
    report, log = folder / f"{manager}.jsonl", folder / f"{manager}.log"
    report.unlink(missing_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), f"{folder}/packages"]
    environment = os.environ | {
        "BASE_TESTS_REPORT": str(report),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_HYBRID_KV": "1" if manager == HYBRID else "0",
    }
    command = [sys.executable, "-m", "pytest", "-p", "tools.base_tests.plugin"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += ["--tb=native", "--timeout=300", "-q", *files]
    print(f"running with {manager}; see {log}", file=sys.stderr)
    with log.open("w") as out:
        run = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out)
    # With 0 and 1, all tests ran. With any other status, some tests did not run.
    if run.returncode not in (0, 1):
        raise SystemExit(f"pytest's exit status must be 0 or 1, got {run.returncode}; see {log}")
    return read_report(report.read_text().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", default=FILES, help="as tests/v1/core/test_output.py")
    files = parser.parse_args().files
    folder = fetch_tests(vllm.__version__.partition("+")[0])
    tally = Tally(*(run_tests(folder, files, manager) for manager in (BASE, HYBRID)))
    # A wide table where the output is a file, so that no number is cut off.
    tally.print(Console(width=None if sys.stdout.isatty() else 180))
    # If the hybrid manager served no scheduler, the run shows nothing and fails.
    return 1 if tally.failures or not tally.served[HYBRID] else 0


if __name__ == "__main__":
    sys.exit(main())
