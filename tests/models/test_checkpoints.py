# SPDX-License-Identifier: Apache-2.0
"""The outputs of the tiny checkpoints depend on what they attend to, so they can test a KV cache.

These tests run on base vLLM, so that a fault of the hybrid manager cannot hide here.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from support.engine import EngineProcess, EngineResult, Round, assert_base_ran
from support.engine_prompts import noise_prompt, with_changed_token
from tools import checkpoints
from tools.checkpoints.byte_tokenizer import (
    BOS_ID,
    END_OF_TURN_ID,
    EOS_ID,
    TURN_ID,
    VOCAB_SIZE,
    printable_ids,
    token_id,
)
from tools.checkpoints.store import CACHE_VARIABLE
from tools.checkpoints.tiny_models import TINY_GEMMA3, WINDOW, ensure_tiny

PROMPT_LENGTH = 700
MAX_TOKENS = 48
#: Base's path for Mamba on CPUs crashes with prefix caching.
WITHOUT_PREFIX_CACHE = ("tiny-granite4", "tiny-falcon-h1")
TINY_NAMES = [name for name in checkpoints.CHECKPOINTS if name.startswith("tiny-")]
#: It needs audio.
WHISPER = "tiny-whisper"
#: Has more tokens and needs torchvision or a replacement. `test_multimodal.py` shows the same.
IMAGES = "tiny-gemma3-images"
#: Base has no PLaMo 2; `test_plamo2.py` shows the same for it.
NOT_ON_BASE = ("tiny-plamo2",)


@pytest.fixture(scope="module")
def base_engine() -> Iterator[EngineProcess]:
    with EngineProcess(hybrid=False) as process:
        yield process


def reach_of_windows(num_layers: int) -> int:
    """How many tokens back a stack of layers with sliding windows can read at most."""
    return num_layers * (WINDOW - 1)


def text_ids(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [BOS_ID, *rng.choices(printable_ids(), k=length - 1)]


def run_with_changes(
    engine: EngineProcess, model: Path, distances: Sequence[int]
) -> tuple[EngineResult, list[int], list[list[int]]]:
    """Returns the result, the output of the unchanged prompt, and one output per distance."""
    prompt = text_ids(PROMPT_LENGTH)
    prompts = [prompt, *(with_changed_token(prompt, distance) for distance in distances)]
    result = engine.run(
        model,
        [Round(prompts, MAX_TOKENS)],
        enable_prefix_caching=model.name not in WITHOUT_PREFIX_CACHE,
    )
    assert_base_ran(result)
    unchanged, *changed = result.rounds[0].token_ids
    assert [len(output) for output in (unchanged, *changed)] == [MAX_TOKENS] * len(prompts)
    return result, unchanged, changed


def num_different(unchanged: list[int], outputs: list[list[int]]) -> int:
    return sum(output != unchanged for output in outputs)


def test_tiny_gemma3_depends_on_tokens_that_only_full_attention_reaches(
    base_engine: EngineProcess,
) -> None:
    # The full-attention layer is the last: what it reads of a far token has passed only layers
    # with sliding windows, which do not carry it that far.
    model = checkpoints.tiny_gemma3()
    layer_types = json.loads((model / "config.json").read_text())["layer_types"]
    assert layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    distances = [330, 400, 500, 600, 690]
    assert min(distances) > reach_of_windows(5)
    result, unchanged, changed = run_with_changes(base_engine, model, distances)
    assert result.num_groups == 6
    assert num_different(unchanged, changed) == len(distances)


def test_without_its_full_attention_layer_it_does_not_depend_on_far_tokens(
    base_engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    config = {**TINY_GEMMA3.config, "layer_types": ["sliding_attention"] * 6}
    model = ensure_tiny(replace(TINY_GEMMA3, config=config))
    distances = [400, 500, 600, 690]
    assert min(distances) > reach_of_windows(6)
    _, unchanged, changed = run_with_changes(base_engine, model, [20, *distances])
    assert changed[0] != unchanged
    assert num_different(unchanged, changed[1:]) == 0


def test_tiny_mistral_depends_on_what_its_windows_reach_and_on_nothing_else(
    base_engine: EngineProcess,
) -> None:
    reach = reach_of_windows(4)
    inside, outside = [5, 30, 60, 100], [reach + 1, reach + 20, 400, 690]
    result, unchanged, changed = run_with_changes(
        base_engine, checkpoints.tiny_mistral(), [*inside, *outside]
    )
    assert result.num_groups == 1
    assert num_different(unchanged, changed[: len(inside)]) == len(inside)
    assert num_different(unchanged, changed[len(inside) :]) == 0
    # The log-probabilities do not change either.
    logprobs = result.rounds[0].logprobs
    for of_outside in logprobs[1 + len(inside) :]:
        assert of_outside == pytest.approx(logprobs[0], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "num_groups", "least"),
    [
        ("tiny-gemma2", 2, 5),
        ("tiny-llama", 1, 5),
        # A single layer reads beyond the chunk, and its heads attend to few tokens.
        ("tiny-llama4", 4, 4),
        ("tiny-granite4", 4, 5),
        ("tiny-falcon-h1", 2, 5),
    ],
)
def test_the_other_tiny_models_depend_on_near_and_far_tokens(
    base_engine: EngineProcess, name: str, num_groups: int, least: int
) -> None:
    model = checkpoints.CHECKPOINTS[name](False)
    distances = [60, 200, 400, 500, 690]
    result, unchanged, changed = run_with_changes(base_engine, model, distances)
    assert result.num_groups == num_groups
    assert num_different(unchanged, changed) >= least


def test_tiny_whisper_depends_on_what_it_hears_and_on_near_and_far_tokens(
    base_engine: EngineProcess,
) -> None:
    """It depends also on the last fifth of two seconds of audio, the encoder's last block."""
    prompt = text_ids(300)
    lengths = [32_000, 28_800, 16_000, 1_600]
    sounds = [noise_prompt(seed, 32_000, prompt) for seed in (1, 2, 3)]
    sounds += [noise_prompt(1, num_samples, prompt) for num_samples in lengths]
    sounds += [noise_prompt(1, 32_000, with_changed_token(prompt, d)) for d in (20, 100, 200, 290)]
    result = base_engine.run(
        checkpoints.tiny_whisper(), [Round(sounds, MAX_TOKENS)], max_model_len=448
    )
    assert_base_ran(result)
    assert result.num_groups == 2
    unchanged, *others = result.rounds[0].token_ids
    same = others.pop(lengths.index(32_000) + 2)
    assert same == unchanged and len(unchanged) == MAX_TOKENS
    assert num_different(unchanged, others) == len(others)
    for text in result.rounds[0].texts:
        assert text.isascii() and text.isprintable() and len(set(text)) > 10


def test_outputs_are_varied_and_printable(base_engine: EngineProcess) -> None:
    prompts = ["Hello", "The capital of France is"]
    for name in TINY_NAMES:
        if name in (WHISPER, IMAGES, *NOT_ON_BASE):
            continue
        result = base_engine.run(
            checkpoints.CHECKPOINTS[name](False),
            [Round(prompts, MAX_TOKENS)],
            enable_prefix_caching=name not in WITHOUT_PREFIX_CACHE,
        )
        texts = result.rounds[0].texts
        assert len(set(texts)) == len(prompts)
        for text in texts:
            assert text.isascii() and text.isprintable() and len(text) == MAX_TOKENS
            assert len(set(text)) > 10, f"{name} repeats itself: {text}"


def test_the_same_seed_gives_the_same_files_and_another_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[dict[str, bytes]] = []
    for cache, model in (
        ("a", TINY_GEMMA3),
        ("b", TINY_GEMMA3),
        ("c", replace(TINY_GEMMA3, seed=1)),
    ):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / cache))
        folder = ensure_tiny(model)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    first, same, other = files
    assert first == same
    differing = {name for name in first if first[name] != other[name]}
    assert differing == {"model.safetensors", "made-from.json"}


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_second_call_writes_nothing(name: str) -> None:
    def times(folder: Path) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}

    make = checkpoints.CHECKPOINTS[name]
    before = times(make(False))
    assert before["model.safetensors"] > 0
    assert times(make(False)) == before


@pytest.mark.parametrize("name", [name for name in TINY_NAMES if name != IMAGES])
def test_the_tokenizer_maps_bytes_and_adds_bos(name: str) -> None:
    folder = checkpoints.CHECKPOINTS[name](False)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer("Hi").input_ids == [BOS_ID, token_id("H"), token_id("i")]
    for text in ("two  spaces\n\nand a\ttab", "Grüße, 日本 🎉", " leading", ""):
        ids = tokenizer(text).input_ids
        assert len(ids) == 1 + len(text.encode())
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("<turn></turn><eos>", add_special_tokens=False).input_ids == [
        TURN_ID,
        END_OF_TURN_ID,
        EOS_ID,
    ]
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos><turn>user\nHi</turn>\n<turn>assistant\n"
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [EOS_ID, END_OF_TURN_ID]


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The model, converted unless an earlier run has done so."""
    return checkpoints.gemma3_270m()


def test_gemma3_270m_is_complete_and_converted_once(gemma: Path) -> None:
    config = json.loads((gemma / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["sliding_window"] == 512
    assert config["layer_types"].count("sliding_attention") == 15
    assert config["layer_types"].count("full_attention") == 3
    assert 5e8 < (gemma / "model.safetensors").stat().st_size < 6e8
    assert not list(gemma.glob("*.gguf"))
    assert "Gemma Terms of Use" in (gemma / "GEMMA_TERMS.html").read_text()
    before = (gemma / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.gemma3_270m() == gemma
    assert (gemma / "model.safetensors").stat().st_mtime_ns == before


def test_the_tokenizer_of_gemma3_270m_adds_bos_and_has_turns(gemma: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gemma, local_files_only=True)
    text = "two  spaces\n\nand Grüße, 日本 🎉"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.bos_token_id not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text

    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<bos><start_of_turn>user\nBe short.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    turns = tokenizer("<start_of_turn><end_of_turn>", add_special_tokens=False).input_ids
    stops = json.loads((gemma / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.eos_token_id, turns[1]]
    assert len(turns) == 2


def test_gemma3_270m_continues_a_text_sensibly(base_engine: EngineProcess, gemma: Path) -> None:
    prompts = [
        "The capital of France is",
        "The quick brown fox jumps over the lazy",
        "1, 2, 3, 4, 5, 6,",
    ]
    result = base_engine.run(gemma, [Round(prompts, 16)], dtype="bfloat16", max_model_len=256)
    assert_base_ran(result)
    capital, fox, numbers = result.rounds[0].texts
    assert fox.startswith(" dog")
    assert numbers.startswith(" 7, 8, 9")
    # Without <bos> it would repeat one token.
    assert "France" in capital
    assert len(set(result.rounds[0].token_ids[0])) >= 5
