# SPDX-License-Identifier: Apache-2.0
"""Base's tests, from its source distribution.

They are downloaded once from pip's package index into the folder of the checkpoints, together
with the packages that they import beyond vLLM's own.
"""

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
from pathlib import Path
from urllib.parse import urldefrag, urljoin

from tools.checkpoints.store import cache_dir

#: Packages that the tests import beyond those of vLLM.
PACKAGES = ("msgpack==1.2.4", "pytest-asyncio==1.5.0", "ray==2.60.0", "tblib==3.2.2")
#: The models that the tests name; they read only the configuration.
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


def find_sdist(page: str, page_url: str, version: str) -> tuple[str, str]:
    """URL and sha256 of base's source distribution, from its page in a package index.

    Raises:
        SystemExit: if the page does not list it with a sha256.
    """
    name = f"vllm-{version}.tar.gz"
    for link in re.findall(r'href="([^"]+)"', page):
        url, fragment = urldefrag(urljoin(page_url, link))
        if url.endswith(f"/{name}") and fragment.startswith("sha256="):
            return url, fragment.removeprefix("sha256=")
    raise SystemExit(f"{page_url} must list {name} with a sha256, got no such entry")


def index_url() -> str:
    """The package index that pip is configured to use."""
    from pip._internal.models.index import PyPI

    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or configured or PyPI.simple_url


def fetch_tests(version: str) -> Path:
    """The folder with base's ``tests`` and their packages, downloaded if it is missing."""
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
            raise SystemExit(f"the sha256 of vllm-{version}.tar.gz must be {sha256}, got {found}")
        unpacked = Path(partial, f"vllm-{version}")
        with tarfile.open(archive) as tar:
            tests = [m for m in tar if m.name.startswith(f"{unpacked.name}/tests/")]
            tar.extractall(partial, tests, filter="data")
        for name, config in MODELS.items():
            # The tests run in this folder, so the name of a model is a path here.
            (unpacked / name).mkdir(parents=True)
            (unpacked / name / "config.json").write_text(json.dumps(config))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", unpacked / "packages", *PACKAGES], check=True)
        unpacked.rename(folder)
    return folder
