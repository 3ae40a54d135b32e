# SPDX-License-Identifier: Apache-2.0
"""Options of the fork on the command line of `vllm serve`."""

from support.server import Server
from tools import checkpoints


def test_bad_option_is_an_error_before_the_model_is_loaded() -> None:
    options = '--additional-config={"hybrid_kv": {"chekc_integrity": true}}'
    with Server(checkpoints.tiny_gemma3(), fork=True, arguments=[options]) as server:
        status = server.wait_until_ended()
        log = server.log
    assert status > 0
    assert (
        "ValueError: --additional-config: hybrid_kv.chekc_integrity is not an option; "
        "accepted are enabled, on_uncovered, check_integrity"
    ) in log
    assert "load model" not in log
    assert "Initializing a V1 LLM engine" not in log
