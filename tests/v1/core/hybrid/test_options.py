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
def test_what_is_not_said_is_the_default(additional_config):
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
        ({"enabled": "no"}, "hybrid_kv.enabled is 'no'; accepted are true and false"),
        ({"enabled": 1}, "hybrid_kv.enabled is 1; accepted are true and false"),
        ({"check_integrity": None}, "hybrid_kv.check_integrity is None; accepted are true and"),
        ({"on_uncovered": "abort"}, "'abort'; accepted are 'fallback' and 'error'"),
        ({"on_uncovered": ["error"]}, "['error']; accepted are 'fallback' and 'error'"),
        ({"on_uncoverd": "error"}, "hybrid_kv.on_uncoverd is not an option; accepted are enabled,"),
        ({1: True}, "hybrid_kv.1 is not an option; accepted are enabled, on_uncovered, check_"),
        (None, "hybrid_kv is None; accepted is an object with any of enabled, on_uncovered"),
        (True, "hybrid_kv is True; accepted is an object"),
        ([], "hybrid_kv is []; accepted is an object"),
    ],
)
def test_anything_else_is_an_error_in_one_line(values, message):
    with pytest.raises(ValueError) as error:
        HybridKVOptions.from_additional_config({"hybrid_kv": values})
    text = str(error.value)
    assert text.startswith("--additional-config: ")
    assert message in text
    assert "\n" not in text
