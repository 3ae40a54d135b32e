# SPDX-License-Identifier: Apache-2.0
"""The tiny PLaMo 2 depends on near and far tokens, by its formulas and without an engine.

Other tests here check what a PLaMo 2 configuration means.
"""

import json
from pathlib import Path

import pytest
import torch

from support.engine_prompts import random_tokens, with_changed_token
from support.plamo2_reference import Plamo2Reference
from tools import checkpoints
from vllm.transformers_utils.configs.plamo2 import Plamo2Config


def likely_next(reference: Plamo2Reference, prompt: list[int]) -> torch.Tensor:
    return reference.log_probabilities(prompt)[-1]


def test_the_tiny_model_depends_on_near_and_far_tokens() -> None:
    reference = Plamo2Reference(checkpoints.tiny_plamo2())
    prompt = random_tokens(400, seed=1)
    unchanged = likely_next(reference, prompt)
    for distance in (1, 40, 63, 64, 126, 200, 390):
        changed = likely_next(reference, with_changed_token(prompt, distance))
        difference = (changed - unchanged).abs().max()
        assert difference > 0.5, f"{distance} tokens before: {difference}"


def test_without_its_states_it_does_not_see_beyond_its_windows() -> None:
    """Only Mamba's states carry information about far tokens."""
    reference = Plamo2Reference(checkpoints.tiny_plamo2())
    for name, weight in reference.weights.items():
        if name.endswith("A_log"):
            weight.fill_(20.0)  # States then forget everything in one step.
    prompt = random_tokens(400, seed=1)
    # Two layers read 63 tokens back, and two 3.
    unchanged = likely_next(reference, prompt)
    inside, outside = (likely_next(reference, with_changed_token(prompt, d)) for d in (60, 140))
    assert not torch.equal(inside, unchanged)
    assert torch.equal(outside, unchanged)


@pytest.mark.parametrize(
    ("num_layers", "step", "attention"),
    [(4, 2, [1, 3]), (5, 2, [1, 3]), (6, 3, [1, 4]), (8, 4, [2, 6]), (2, 4, [1]), (1, 2, [0])],
)
def test_which_layers_have_attention(num_layers: int, step: int, attention: list[int]) -> None:
    config = Plamo2Config(num_hidden_layers=num_layers, mamba_step=step, full_attention_idx=[1])
    assert [i for i in range(num_layers) if not config.is_mamba(i)] == attention
    assert [t == "attention" for t in config.layers_block_type] == [
        i in attention for i in range(num_layers)
    ]
    for layer, layer_type in enumerate(config.layer_types):
        windows = "full_attention" if layer == 1 else "sliding_attention"
        assert layer_type == (windows if layer in attention else "linear_attention")


def test_without_mamba_all_layers_have_attention() -> None:
    config = Plamo2Config(num_hidden_layers=2, mamba_enabled=False)
    assert config.layers_block_type == ["attention", "attention"]


def test_a_step_that_leaves_no_layer_for_mamba_is_refused() -> None:
    with pytest.raises(ValueError, match="mamba_step must be at least 2, got 1"):
        Plamo2Config(mamba_step=1)


def test_a_published_configuration_survives_writing_and_reading(tmp_path: Path) -> None:
    """This includes keys that we do not use, and the window under both of its names."""
    published = {
        "architectures": ["Plamo2ForCausalLM"],
        "model_type": "plamo2",
        "attention_window_size": 2048,
        "sliding_window": 2048,
        "capped_attention_scale": None,
        "hidden_size_per_head": 128,
        "linear_type": "normal",
        "num_hidden_layers": 32,
        "tokenizer_class": "Plamo2Tokenizer",
    }
    first = Plamo2Config(**published)
    first.save_pretrained(tmp_path)
    again = Plamo2Config.from_pretrained(tmp_path)
    assert again.to_dict() == first.to_dict()
    assert published.items() <= json.loads((tmp_path / "config.json").read_text()).items()
