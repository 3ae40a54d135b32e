# SPDX-License-Identifier: Apache-2.0
"""Examines the installation and a model, and prints tables of what it found."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from vllm.v1.core.hybrid.doctor.installation import Check, examine_installation
from vllm.v1.core.hybrid.doctor.vllm_log import in_one_line
from vllm_hybrid_kv import DOCTOR_USAGE, FAILED

if TYPE_CHECKING:
    from vllm.v1.core.hybrid.doctor.model import ModelReport

logger = logging.getLogger(__name__)

ACTIVE, NOT_ACTIVE = 0, 1


def run(arguments: Sequence[str], vllm_errors: Sequence[logging.LogRecord]) -> int:
    """Run the command; returns the exit status.

    Args:
        arguments: What follows ``doctor`` on the command line.
        vllm_errors: The errors that vLLM logs meanwhile, see `vllm_log.quiet_vllm`.
    """
    # Lines in a file or a pipe are not wrapped at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160)
    checks = examine_installation()
    console.print(_installation_table(checks))
    installed = all(check.ok for check in checks)
    if not arguments:
        _say(console, f"Hybrid KV cache: {'active' if installed else 'not active'}")
        return ACTIVE if installed else NOT_ACTIVE
    try:
        report = _examine_model(arguments)
    except Exception as error:
        logger.debug("The model could not be examined", exc_info=True)
        print(f"vllm-hybrid-kv doctor: {in_one_line(error, vllm_errors)}", file=sys.stderr)
        return FAILED
    if report.rows:
        console.print(_model_table(report))
    else:
        _say(console, f"{report.architecture} keeps no KV cache")
    if report.note:
        _say(console, report.note)
    _say(console, _verdict(report, installed))
    return ACTIVE if installed and report.reason_for_base is None else NOT_ACTIVE


def _examine_model(arguments: Sequence[str]) -> "ModelReport":
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.hybrid.doctor.model import examine_model
    from vllm.v1.core.hybrid.doctor.model_folder import local_model, text_part

    parser = make_arg_parser(
        FlexibleArgumentParser(prog="vllm-hybrid-kv doctor", usage=DOCTOR_USAGE)
    )
    parser.set_defaults(model=None)
    parsed = parser.parse_args(list(arguments))
    with local_model(parsed.model_tag or parsed.model, parsed.revision) as folder:
        parsed.model = folder
        try:
            return examine_model(AsyncEngineArgs.from_cli_args(parsed))
        except Exception as error:
            with text_part(folder) as text:
                if text is None:
                    raise
                logger.debug("The whole model could not be examined", exc_info=error)
                parsed.model = text.folder
                return replace(examine_model(AsyncEngineArgs.from_cli_args(parsed)), note=text.note)


def _installation_table(checks: Sequence[Check]) -> Table:
    table = Table(title="Installation", title_justify="left", box=box.SIMPLE, show_header=False)
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]no[/]"
        table.add_row(mark, check.name, check.found)
    return table


def _model_table(report: "ModelReport") -> Table:
    from vllm.v1.core.hybrid.doctor.model import COLUMNS

    table = Table(
        title=f"KV cache of {report.architecture}", title_justify="left", box=box.SIMPLE_HEAD
    )
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("block size", "group") else "left")
    for row in report.rows:
        table.add_row(*row)
    return table


def _verdict(report: "ModelReport", installed: bool) -> str:
    """The line that the engine would log; if the plugin is not active, what it would do."""
    if report.reason_for_base is not None:
        return f"Hybrid KV cache: using base vLLM's manager, because {report.reason_for_base}"
    if not installed:
        return f"Hybrid KV cache: not active; if it were, {report.arrangement}"
    return f"Hybrid KV cache: active, {report.arrangement}"


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)
