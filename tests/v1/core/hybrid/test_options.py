# SPDX-License-Identifier: Apache-2.0
"""Options under ``--additional-config '{"hybrid_kv": {...}}'``, read strictly."""

import pytest

from vllm.config import VllmConfig
from vllm.v1.core.hybrid.options import HybridKVOptions

DEFAULTS = HybridKVOptions(enabled=True, on_uncovered="fallback", check_integrity=False)


class OpaqueConfig:
    """What vLLM also takes as an additional config: any object that can be hashed."""

    def compute_hash(self) -> str:
        return "opaque"


@pytest.mark.parametrize(
    "additional_config", [{}, {"other": {"enabled": 3}}, {"hybrid_kv": {}}, None, OpaqueConfig()]
)
def test_missing_options_have_their_defaults(additional_config):
    assert HybridKVOptions.from_additional_config(additional_config) == DEFAULTS


def test_options_are_read_from_the_engine_configuration():
    given = {"enabled": False, "on_uncovered": "error", "check_integrity": True}
    config = VllmConfig(additional_config={"hybrid_kv": given})
    assert HybridKVOptions.from_vllm_config(config).model_dump() == given
    assert HybridKVOptions.from_vllm_config(VllmConfig()) == DEFAULTS
    assert HybridKVOptions.from_vllm_config(None) == DEFAULTS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enabled": "no"}, "hybrid_kv.enabled must be true or false, got 'no'"),
        ({"enabled": 1}, "hybrid_kv.enabled must be true or false, got 1"),
        ({"check_integrity": None}, "check_integrity must be true or false, got None"),
        ({"on_uncovered": "abort"}, "must be 'fallback' or 'error', got 'abort'"),
        ({"on_uncovered": ["error"]}, "must be 'fallback' or 'error', got ['error']"),
        ({"on_uncoverd": "error"}, "_uncovered, check_integrity, got 'on_uncoverd'"),
        ({1: True}, "options of hybrid_kv must be among enabled, on_unc"),
        (None, "hybrid_kv must be an object with any of enabled, on_un"),
        (True, "check_integrity, got True"),
        ([], "check_integrity, got []"),
    ],
)
def test_an_invalid_option_is_an_error_in_one_line(values, message):
    with pytest.raises(ValueError) as error:
        HybridKVOptions.from_additional_config({"hybrid_kv": values})
    text = str(error.value)
    assert text.startswith("additional_config: ")
    assert message in text
    assert "\n" not in text


def test_invalid_json_is_an_error_that_names_the_option():
    with pytest.raises(ValueError) as error:
        HybridKVOptions.from_additional_config("{hybrid_kv")
    assert str(error.value) == (
        'additional_config must be a JSON object such as {"hybrid_kv": {"enabled": true}}, '
        "got '{hybrid_kv'"
    )
