# SPDX-License-Identifier: Apache-2.0
"""Finds the configuration of a model, without network access."""

import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

#: The first is Hugging Face's, the other Mistral's.
CONFIG_FILES = ("config.json", "params.json")


@contextmanager
def local_model(model: str | None, revision: str | None = None) -> Iterator[str]:
    """The folder of a model.

    Args:
        model: That folder, its ``config.json``, or an id of the Hugging Face Hub. The configuration
            of an id is read from the local Hub cache.
        revision: The branch, tag or commit of an id; the main branch if None.

    Raises:
        ValueError: if ``model`` is neither, or if the cache does not have it.
    """
    if model is None:
        raise ValueError("MODEL must be given together with flags, got only flags")
    path = Path(model)
    if path.is_dir() and any((path / name).is_file() for name in CONFIG_FILES):
        yield model
    elif path.is_file() and path.suffix == ".json":
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(path, Path(folder, CONFIG_FILES[0]))
            yield folder
    else:
        yield _cached_model(model, revision)


def _cached_model(model: str, revision: str | None) -> str:
    rule = f"MODEL must be a {CONFIG_FILES[0]}, a local folder that has one, or a Hub id"
    if Path(model).exists():
        raise ValueError(f"{rule}, got {model!r}")
    try:
        found = [try_to_load_from_cache(model, name, revision=revision) for name in CONFIG_FILES]
    except HFValidationError:
        raise ValueError(f"{rule}, got {model!r}") from None
    for config in found:
        if isinstance(config, str):
            return str(Path(config).parent)
    option = "" if revision is None else f" --revision {revision}"
    raise ValueError(
        f"{rule}, got {model!r}, which the local Hub cache does not have; to fetch its "
        f"configuration: hf download {model} {CONFIG_FILES[0]}{option}"
    )


@dataclass(frozen=True)
class TextPart:
    """The language model of a multimodal model, as a model of its own."""

    #: The folder with its configuration.
    folder: str
    note: str


@contextmanager
def text_part(folder: str) -> Iterator[TextPart | None]:
    """The language model of the multimodal model in ``folder``, where torchvision is missing.

    vLLM needs torchvision to import many multimodal models. Their KV cache is that of the language
    model. None if torchvision can be imported, or if the model is of another kind.
    """
    obstacle = _torchvision_obstacle()
    config = Path(folder, CONFIG_FILES[0])
    whole = json.loads(config.read_text()) if obstacle and config.is_file() else {}
    text: dict[str, Any] = whole.get("text_config") or {}
    architecture = _causal_lm(text["model_type"]) if "model_type" in text else None
    if architecture is None or not _knows(whole.get("architectures", [])):
        yield None
        return
    dtypes = {key: whole[key] for key in ("dtype", "torch_dtype") if key in whole}
    with tempfile.TemporaryDirectory() as text_folder:
        values = dtypes | text | {"architectures": [architecture]}
        Path(text_folder, CONFIG_FILES[0]).write_text(json.dumps(values))
        yield TextPart(
            text_folder,
            f"Only the language model was examined, because torchvision cannot be imported here "
            f"({obstacle}). vLLM needs it to serve {', '.join(whole.get('architectures', []))}.",
        )


def _torchvision_obstacle() -> str | None:
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a build for another PyTorch raises RuntimeError or OSError
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _knows(architectures: list[str]) -> bool:
    from vllm.model_executor.models import ModelRegistry

    return not set(architectures).isdisjoint(ModelRegistry.get_supported_archs())


def _causal_lm(model_type: str) -> str | None:
    """The architecture of a language model whose configuration has this ``model_type``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name if isinstance(name, str) else None
