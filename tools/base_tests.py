# SPDX-License-Identifier: Apache-2.0
"""Run base vLLM's tests of its scheduler and KV connectors with base's manager and with ours.

    python tools/base_tests.py [FILE ...]

The tests come out of base's source distribution, which is downloaded once from pip's package index
into the folder of the checkpoints, with what they import beyond vLLM. The table says, file by
file, what passes where. The exit status is 1 if a test passes with base and fails with the fork
and is not one of the few that cannot run on it (`NOT_FOR_THE_FORK`).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urldefrag, urljoin

from rich.console import Console
from rich.table import Table

import vllm
from checkpoint_makers.store import cache_dir

#: What runs unless files are named; none of it needs a GPU or weights.
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
#: What they import beyond what vLLM does.
PACKAGES = ("msgpack==1.2.4", "pytest-asyncio==1.5.0", "ray==2.60.0", "tblib==3.2.2")
#: The models that they name: of these only the configuration is read.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
}
MODELS = {
    "facebook/opt-125m": OPT
    | {"hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
    "facebook/opt-350m": OPT
    | {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    | {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
}

#: Tests that cannot tell anything of the fork, since they do more to base's manager than read it.
NOT_FOR_THE_FORK = {
    "looks for base's class CrossAttentionManager": (
        "test_variable_length_cross_attn_block_allocation",
        "test_cross_attn_blocks_not_over_allocated",
        "test_cross_attn_blocks_not_under_allocated",
        "test_cross_attn_zero_blocks_without_encoder_inputs",
    ),
    "takes blocks out of base's pool (get_new_blocks)": (
        "test_cow_retentions_deferred_until_copy_step_processed",
    ),
    "fakes a full pool by setting free_block_queue.num_free_blocks": (
        "test_request_preemption[True]",
        "test_request_preemption[False]",
        "test_async_preempt_readmit_before_transfer_output_is_deferred",
    ),
    "walks through the dictionary inside of base's prefix cache": (
        "test_invalid_blocks_evicted_prevents_cache_pollution",
    ),
    "expects the order in which base hands out blocks after a reset": (
        "test_request_finished_mixed_full_attn_and_sliding_window",
    ),
}

FORK = "fork"
PASS, NOT_FOR_US, FORK_ONLY = "pass with both", "need base's own", "FAIL WITH THE FORK ONLY"
BASE_TOO, SKIPPED = "fail with base", "skipped"
SERVED, READ = "of them served by the fork", "that read its tables"


@dataclass
class Outcome:
    """What became of one test in one run; the plugin writes it."""

    outcome: str = "not run"
    #: Of a failure: the error's first line.
    why: str = ""
    #: Per scheduler that was built, who served it: the fork, or why base.
    served: list[str] = field(default_factory=list)
    #: What the test read of base's structures, and got from the fork's (`base_tests_views`).
    looked_at: list[str] = field(default_factory=list)


def find_sdist(page: str, page_url: str, version: str) -> tuple[str, str]:
    """URL and sha256 of base's source distribution, from its page in a package index.

    Raises:
        SystemExit: the page does not have it.
    """
    name = f"vllm-{version}.tar.gz"
    for link in re.findall(r'href="([^"]+)"', page):
        url, fragment = urldefrag(urljoin(page_url, link))
        if url.endswith(f"/{name}") and fragment.startswith("sha256="):
            return url, fragment.removeprefix("sha256=")
    raise SystemExit(f"{page_url} has no {name} with a sha256")


def index_url() -> str:
    """The package index that pip asks."""
    from pip._internal.models.index import PyPI

    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or configured or PyPI.simple_url


def fetch_tests(version: str) -> Path:
    """The folder with base's ``tests`` and what they need, made first if it is missing."""
    folder = cache_dir() / f"base-tests-{version}"
    if folder.exists():
        return folder
    with urllib.request.urlopen(f"{index_url().rstrip('/')}/vllm/") as page:
        url, sha256 = find_sdist(page.read().decode(), page.url, version)
    print(f"downloading base's tests into {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        archive = Path(partial, "sdist.tar.gz")
        with urllib.request.urlopen(url) as source, archive.open("wb") as target:
            shutil.copyfileobj(source, target)
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise SystemExit(f"vllm-{version}.tar.gz has sha256 {found}; the index says {sha256}")
        unpacked = Path(partial, f"vllm-{version}")
        with tarfile.open(archive) as tar:
            tests = [m for m in tar if m.name.startswith(f"{unpacked.name}/tests/")]
            tar.extractall(partial, tests, filter="data")
        for name, config in MODELS.items():
            # From here, a model's name is the path of a folder.
            (unpacked / name).mkdir(parents=True)
            (unpacked / name / "config.json").write_text(json.dumps(config))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", unpacked / "packages", *PACKAGES], check=True)
        unpacked.rename(folder)
    return folder


def run_tests(folder: Path, files: Sequence[str], manager: str) -> dict[str, Outcome]:
    """Run test files in a process of their own; what it prints goes to a log in the folder."""
    report, log = folder / f"{manager}.jsonl", folder / f"{manager}.log"
    report.unlink(missing_ok=True)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""), f"{folder}/packages"]
    environment = os.environ | {
        "BASE_TESTS_REPORT": str(report),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_HYBRID_KV": "1" if manager == FORK else "0",
    }
    command = [sys.executable, "-m", "pytest", "-p", "base_tests_plugin", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "--tb=native", "--timeout=300", "-q", *files]
    print(f"running with {manager}; see {log}", file=sys.stderr)
    with log.open("w") as out:
        run = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=out)
    # 0 and 1: all tests ran. Whatever else happened must not pass for a few tests less.
    if run.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {run.returncode}; see {log}")
    return read_report(report.read_text().splitlines())


def read_report(lines: Iterable[str]) -> dict[str, Outcome]:
    """The outcome of each test; a failed phase counts more than another that went well."""
    outcomes: dict[str, Outcome] = {}
    for line in lines:
        values = json.loads(line)
        test = values.pop("test")
        if test not in outcomes or outcomes[test].outcome != "failed":
            outcomes[test] = Outcome(**values)
    return outcomes


def judge(test: str, base: Outcome, fork: Outcome) -> tuple[str, str]:
    """What a test tells of the fork, and why it tells nothing or fails."""
    if base.outcome == fork.outcome == "skipped":
        return SKIPPED, ""
    if base.outcome != "passed":
        return BASE_TOO, base.why or base.outcome
    if fork.outcome == "passed":
        return PASS, ""
    for reason, names in NOT_FOR_THE_FORK.items():
        if test.rpartition("::")[2] in names:
            return NOT_FOR_US, reason
    return FORK_ONLY, fork.why or fork.outcome


class Tally:
    """Counts per file, and the reasons behind them."""

    COLUMNS = (PASS, SERVED, READ, NOT_FOR_US, FORK_ONLY, BASE_TOO, SKIPPED)

    def __init__(self, base: dict[str, Outcome], fork: dict[str, Outcome]) -> None:
        self.files: dict[str, Counter[str]] = {}
        self.reasons: dict[str, Counter[str]] = {NOT_FOR_US: Counter(), BASE_TOO: Counter()}
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        for test in base | fork:
            result = fork.get(test, Outcome())
            verdict, why = judge(test, base.get(test, Outcome()), result)
            count = self.files.setdefault(test.partition("::")[0], Counter())
            count[verdict] += 1
            count[SERVED] += verdict == PASS and FORK in result.served
            count[READ] += verdict == PASS and bool(result.looked_at)
            self.served.update(result.served)
            if verdict in self.reasons:
                self.reasons[verdict][why] += 1
            elif verdict == FORK_ONLY:
                self.failures.append(f"{test}: {why}")

    def print(self, console: Console) -> None:
        table = Table(title="Base's own tests")
        table.add_column("file", no_wrap=True)
        for column in self.COLUMNS:
            table.add_column(column, justify="right")
        rows, others = {}, []
        for name, count in sorted(self.files.items()):
            if count[SERVED] or count[NOT_FOR_US] or count[FORK_ONLY]:
                rows[name.removeprefix("tests/v1/")] = count
            else:
                others.append(count)
        rows[f"{len(others)} others"] = sum(others, Counter[str]())
        rows["all"] = sum(self.files.values(), Counter[str]())
        for name, count in rows.items():
            table.add_row(name, *(str(count[column] or "") for column in self.COLUMNS))
        console.print(table)
        titles = {"Schedulers of the fork's run were served by": self.served}
        titles |= {f"They {verdict}:": reasons for verdict, reasons in self.reasons.items()}
        for title, reasons in titles.items():
            lines = [f"{number:6} {why[:160]}" for why, number in reasons.most_common()]
            console.print(f"\n{title}", *lines, sep="\n", markup=False)
        for failure in self.failures:
            console.print(f"{FORK_ONLY}: {failure}", style="bold red", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", default=FILES, help="as tests/v1/core/test_output.py")
    files = parser.parse_args().files
    folder = fetch_tests(vllm.__version__.partition("+")[0])
    tally = Tally(*(run_tests(folder, files, manager) for manager in ("base", FORK)))
    # In a file, numbers must not be cut off.
    tally.print(Console(width=None if sys.stdout.isatty() else 180))
    # A run in which the fork served nothing shows nothing.
    return 1 if tally.failures or not tally.served[FORK] else 0


if __name__ == "__main__":
    sys.exit(main())
