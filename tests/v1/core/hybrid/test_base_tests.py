# SPDX-License-Identifier: Apache-2.0
"""`tools.base_tests` reads an index page and two runs. None of base's tests runs here."""

import json

import pytest

from tools.base_tests import verdicts
from tools.base_tests.sources import find_sdist
from tools.base_tests.verdicts import Outcome, Tally, judge, read_report

PASSED, FAILED = Outcome("passed", served=[verdicts.HYBRID]), Outcome("failed", "ValueError: no")
FILE = "tests/v1/core/test_scheduler.py"


def test_sdist_is_found_with_its_digest_and_not_one_of_another_version():
    page = """
    <a href="/files/vllm-1.0.0.tar.gz#sha256=aa">x</a>
    <a href="../files/my-vllm-1.0.0.1.tar.gz#sha256=bb">x</a>
    <a href="/files/vllm-1.0.0-py3-none-any.whl#sha256=cc">x</a>
    """
    url = "https://index.example/simple/vllm/"
    assert find_sdist(page, url, "1.0.0") == (
        "https://index.example/files/vllm-1.0.0.tar.gz",
        "aa",
    )
    with pytest.raises(SystemExit, match=r"vllm-1\.0\.0\.1\.tar\.gz"):
        find_sdist(page, url, "1.0.0.1")


def test_failed_teardown_of_a_test_that_passed_counts():
    lines = [
        json.dumps({"test": "a", "outcome": "passed"}),
        json.dumps({"test": "a", "outcome": "failed", "why": "in teardown"}),
        json.dumps({"test": "b", "outcome": "failed", "why": "in setup"}),
        json.dumps({"test": "b", "outcome": "passed"}),
    ]
    outcomes = read_report(lines)
    assert {test: o.why for test, o in outcomes.items()} == {"a": "in teardown", "b": "in setup"}
    assert {o.outcome for o in outcomes.values()} == {"failed"}


def test_verdicts():
    (reason, (known, *_)), *_ = verdicts.NEEDS_BASE.items()
    assert judge(f"{FILE}::test_a", PASSED, PASSED)[0] == verdicts.PASS
    assert judge(f"{FILE}::test_a", PASSED, FAILED) == (verdicts.HYBRID_ONLY, FAILED.why)
    assert judge(f"{FILE}::{known}", PASSED, FAILED) == (verdicts.NOT_FOR_US, reason)
    assert judge(f"{FILE}::test_a", FAILED, FAILED) == (verdicts.BASE_TOO, FAILED.why)
    # A test that is missing or skipped in the run with the hybrid manager has not passed.
    assert judge(f"{FILE}::test_a", PASSED, Outcome())[0] == verdicts.HYBRID_ONLY
    assert judge(f"{FILE}::test_a", PASSED, Outcome("skipped"))[0] == verdicts.HYBRID_ONLY
    assert judge(f"{FILE}::test_a", Outcome("skipped"), FAILED)[0] == verdicts.BASE_TOO


def test_failures_and_those_served_are_counted_per_file():
    base = {f"{FILE}::{name}": PASSED for name in ("a", "b", "c")}
    hybrid = {f"{FILE}::a": PASSED, f"{FILE}::b": FAILED, f"{FILE}::c": Outcome("passed")}
    tally = Tally(base, hybrid)
    assert tally.failures == [f"{FILE}::b: {FAILED.why}"]
    assert tally.files[FILE][verdicts.PASS] == 2
    assert tally.files[FILE][verdicts.SERVED] == 1
    assert tally.served == {verdicts.HYBRID: 1}
