# SPDX-License-Identifier: Apache-2.0
"""The plugin's options on the command line of `vllm serve`."""

import pytest

from support.server import Server, ServerError
from tools import checkpoints


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            '{"hybrid_kv": {"chekc_integrity": true}}',
            "additional_config: options of hybrid_kv must be among enabled, on_uncovered, "
            "check_integrity, got 'chekc_integrity'",
        ),
        (
            "{hybrid_kv",
            'additional_config must be a JSON object such as {"hybrid_kv": {"enabled": true}}, '
            "got '{hybrid_kv'",
        ),
    ],
)
def test_bad_options_are_an_error_before_the_model_is_loaded(options: str, message: str) -> None:
    arguments = [f"--additional-config={options}"]
    with Server(checkpoints.tiny_gemma3(), hybrid=True, arguments=arguments) as server:
        with pytest.raises(ServerError, match=r"It ended with [1-9]"):
            server.wait_until_healthy()
        log = server.log
    assert f"ValueError: {message}" in log
    assert "load model" not in log
    assert "Initializing a V1 LLM engine" not in log
