# SPDX-License-Identifier: Apache-2.0
"""What `tools/base_tests.py` makes of an index page and of two runs; it runs no test of base's."""

import json

import pytest

import base_tests
from base_tests import Outcome, Tally, find_sdist, judge, read_report

PASSED, FAILED = Outcome("passed", served=[base_tests.FORK]), Outcome("failed", "ValueError: no")
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
    (reason, (known, *_)), *_ = base_tests.NOT_FOR_THE_FORK.items()
    assert judge(f"{FILE}::test_a", PASSED, PASSED)[0] == base_tests.PASS
    assert judge(f"{FILE}::test_a", PASSED, FAILED) == (base_tests.FORK_ONLY, FAILED.why)
    assert judge(f"{FILE}::{known}", PASSED, FAILED) == (base_tests.NOT_FOR_US, reason)
    assert judge(f"{FILE}::test_a", FAILED, FAILED) == (base_tests.BASE_TOO, FAILED.why)
    # A test that the fork's run lost, or skips, is not one that passes.
    assert judge(f"{FILE}::test_a", PASSED, Outcome())[0] == base_tests.FORK_ONLY
    assert judge(f"{FILE}::test_a", PASSED, Outcome("skipped"))[0] == base_tests.FORK_ONLY
    assert judge(f"{FILE}::test_a", Outcome("skipped"), FAILED)[0] == base_tests.BASE_TOO


def test_failures_and_those_served_are_counted_per_file():
    base = {f"{FILE}::{name}": PASSED for name in ("a", "b", "c")}
    fork = {f"{FILE}::a": PASSED, f"{FILE}::b": FAILED, f"{FILE}::c": Outcome("passed")}
    tally = Tally(base, fork)
    assert tally.failures == [f"{FILE}::b: {FAILED.why}"]
    assert tally.files[FILE][base_tests.PASS] == 2
    assert tally.files[FILE][base_tests.SERVED] == 1
    assert tally.served == {base_tests.FORK: 1}
