# SPDX-License-Identifier: Apache-2.0
"""The plugin's options on the command line of `vllm serve`."""

import pytest

from support.server import Server, ServerError
from tools import checkpoints


def test_bad_option_is_an_error_before_the_model_is_loaded() -> None:
    options = '--additional-config={"hybrid_kv": {"chekc_integrity": true}}'
    with Server(checkpoints.tiny_gemma3(), hybrid=True, arguments=[options]) as server:
        with pytest.raises(ServerError, match=r"It ended with [1-9]"):
            server.wait_until_healthy()
        log = server.log
    assert (
        "ValueError: --additional-config: options of hybrid_kv must be among enabled, "
        "on_uncovered, check_integrity, got 'chekc_integrity'"
    ) in log
    assert "load model" not in log
    assert "Initializing a V1 LLM engine" not in log
