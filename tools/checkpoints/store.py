# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints that are made once.

A checkpoint is made in a temporary folder beside its final place and renamed when it is
complete, so a folder with the final name is never incomplete. A file lock keeps two processes
from making the same checkpoint at once.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from filelock import FileLock

CACHE_VARIABLE = "HYBRID_KV_MODEL_CACHE"
DEFAULT_CACHE = "~/.cache/vllm-hybrid-kv"
#: Written last into a finished checkpoint: what it was made from.
MARKER_NAME = "made-from.json"

Origin = Mapping[str, object]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be made. The message is one line that says what to do."""


def cache_dir() -> Path:
    """The folder that holds the checkpoints, created if it is missing.

    It is `$HYBRID_KV_MODEL_CACHE`, or `~/.cache/vllm-hybrid-kv` where that is unset or empty.

    Raises:
        CheckpointError: it cannot be created, or nothing can be written in it.
    """
    setting = os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE
    folder = Path(setting).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell (read-only mounts, quotas), so write something.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(
            f"the cache folder cannot be used: {CACHE_VARIABLE} is {setting!r} "
            f"({error.strerror or error}); set it to a folder that can be created and written"
        ) from error
    return folder


def require_memory(needed: int, purpose: str, remedy: str = "end other programs") -> None:
    """Raise if too little memory is available.

    Args:
        needed: bytes that must be available.
        purpose: what they are for, as in "to convert Gemma 3 270M".
        remedy: what the user can do, besides using a larger machine.

    Raises:
        CheckpointError: fewer are available.
    """
    available = psutil.virtual_memory().available
    if available < needed:
        raise CheckpointError(
            f"too little memory {purpose}: {available / 1e9:.1f} GB available, "
            f"{needed / 1e9:.1f} GB needed; {remedy}, or use a larger machine"
        )


def require_disk(needed: int, folder: Path, purpose: str) -> None:
    """Raise if the disk of `folder` has too little free space; arguments as in `require_memory`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"too little disk space {purpose}: {free / 1e9:.1f} GB free in {folder}, "
            f"{needed / 1e9:.1f} GB needed; free some, or set {CACHE_VARIABLE} to another disk"
        )


def is_checkpoint(name: str, origin: Origin) -> bool:
    """Whether the checkpoint `name` is there, complete and made from `origin`."""
    return _was_made_from(cache_dir() / name, origin)


def ensure_checkpoint(
    name: str,
    origin: Origin,
    make: Callable[[Path], None],
    *,
    force: bool = False,
) -> Path:
    """Return the folder of the checkpoint `name`. Makes it first if that is needed.

    Args:
        name: of the checkpoint and of its folder.
        origin: everything that decides what the checkpoint is, as plain JSON values. A
            checkpoint that was made from anything else is made again.
        make: writes the checkpoint into the empty folder that it is given.
        force: make it again even if it is there.
    """
    root = cache_dir()
    folder = root / name
    if not force and _was_made_from(folder, origin):
        return folder
    with FileLock(root / f".{name}.lock"):
        # Another process may have made it while this one waited.
        if not force and _was_made_from(folder, origin):
            return folder
        _remove_leftovers(root, name)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=root))
        try:
            make(partial)
            (partial / MARKER_NAME).write_text(json.dumps(origin, indent=2) + "\n")
            partial.chmod(0o755)
            _replace(folder, partial)
        except OSError as error:
            raise CheckpointError(f"cannot write {name} into {root}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _was_made_from(folder: Path, origin: Origin) -> bool:
    try:
        found = json.loads((folder / MARKER_NAME).read_text())
    except (OSError, ValueError):
        return False
    return found == json.loads(json.dumps(origin))


def _remove_leftovers(root: Path, name: str) -> None:
    """Remove what killed processes left; only the holder of the lock may call this."""
    for leftover in root.glob(f".{name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _replace(folder: Path, finished: Path) -> None:
    """Put `finished` in the place of `folder`, which may hold an older checkpoint."""
    if folder.exists():
        # A folder cannot be renamed over one that has content.
        outdated = finished.with_name(finished.name + "-outdated")
        folder.rename(outdated)
        finished.rename(folder)
        shutil.rmtree(outdated, ignore_errors=True)
    else:
        finished.rename(folder)
