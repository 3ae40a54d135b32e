# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM's log out of the doctor's output, and finds the cause of a failure in it."""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

#: In vLLM's message about an unknown architecture: several hundred names follow.
_ALL_ARCHITECTURES = re.compile(r"\W*Supported architectures: dict_keys.*", re.DOTALL)
_LEVEL = "VLLM_LOGGING_LEVEL"


@contextmanager
def quiet_vllm() -> Iterator[list[logging.LogRecord]]:
    """Collect the errors that vLLM logs instead of showing its log.

    Does nothing if the user has set a log level.
    """
    errors: list[logging.LogRecord] = []
    if _LEVEL in os.environ:
        yield errors
        return

    os.environ[_LEVEL] = "ERROR"
    vllm_logger = logging.getLogger("vllm")
    handlers = vllm_logger.handlers
    collector = logging.Handler(logging.ERROR)
    collector.emit = errors.append  # type: ignore[method-assign, assignment]
    # The import of the configuration logs already.
    vllm_logger.handlers = [collector]
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # Configure now. Otherwise vLLM would do so later, with its own handlers.
    configure_logging_if_needed(LoggingConfig())
    vllm_logger.handlers = [collector]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield errors
    finally:
        vllm_logger.handlers = handlers
        del os.environ[_LEVEL]


def in_one_line(error: Exception, logged: Sequence[logging.LogRecord]) -> str:
    """The error in one line, with the cause that vLLM logged."""
    message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    message = _ALL_ARCHITECTURES.sub("", message.removeprefix("Value error, "))
    message = " ".join(message.split()) or type(error).__name__
    causes = [record.exc_info[1] for record in logged if record.exc_info]
    if not causes:
        return message
    # vLLM imports a model in a separate process, and logs the traceback of that process.
    return f"{message} ({str(causes[-1]).strip().splitlines()[-1]})"
