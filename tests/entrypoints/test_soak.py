# SPDX-License-Identifier: Apache-2.0
"""A short soak of a real server, and the verdicts of a soak on faults."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.soak.answers import MIN_TOKENS, Piece, Reference, certain_part
from tools.soak.clients import Tally
from tools.soak.memory import MAX_GROWTH, MIB, growth_of
from tools.soak.questions import MAX_MODEL_LEN, MAX_TOKENS, Question, make_questions
from tools.soak.report import Report

ROOT = Path(__file__).parents[2]


def test_short_soak(tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tools.soak", "--minutes=0.8", "--questions=24"]
    command.append(f"--json={results}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    found = json.loads(results.read_text())
    assert found["passed"]
    assert found["settings"]["manager"] == "hybrid"
    assert found["tally"]["answers"] > 0
    assert found["tally"]["faults"] == []
    assert found["counters"]["num_preemptions"] > 0
    assert len(found["checks"]) >= 17


def good_report() -> Report:
    """The report of a soak without faults."""
    actions = {"ask_the_same_at_once": 3, "ask_what_begins_alike": 3}
    flat = growth_of("EngineCore", [(float(t), 100 * MIB) for t in range(10)])
    return Report(
        settings={"manager": "hybrid"},
        tally=Tally(actions, answers=5, parts=4, tokens=99, cancelled=3, refused=2),
        counters={"num_preemptions": 7, "prefix_cache_hits": 320},
        growths=[flat],
        usages=[0.0, 0.0],
        resets=[True],
        active_lines=1,
    )


FAULTY = {
    "the server has ended": {"breakdown": "it ended"},
    "a wrong answer": {"tally": replace(good_report().tally, faults=["wrong"])},
    "no answer": {"tally": replace(good_report().tally, answers=0)},
    "nothing cancelled": {"tally": replace(good_report().tally, cancelled=0)},
    "nothing refused": {"tally": replace(good_report().tally, refused=0)},
    "no duplicates": {"tally": replace(good_report().tally, actions={})},
    "no preemption": {"counters": {"num_preemptions": 0, "prefix_cache_hits": 320}},
    "no hit": {"counters": {"num_preemptions": 7, "prefix_cache_hits": 0}},
    "blocks in use at rest": {"usages": [0.0, 0.01]},
    "no round": {"usages": []},
    "a reset refused": {"resets": [True, False]},
    "base's manager": {"active_lines": 0},
    "an error of the engine": {"error_lines": ["(EngineCore) ERROR"]},
    "no memory sampled": {"growths": []},
    "memory that grows": {
        "growths": [growth_of("EngineCore", [(t, int(t * 0.5 * MAX_GROWTH)) for t in range(20)])]
    },
}


def test_good_report_passes() -> None:
    report = good_report()
    assert [check.name for check in report.checks() if not check.passed] == []
    assert json.loads(json.dumps(report.as_json()))["passed"]


@pytest.mark.parametrize("name", FAULTY)
def test_report_with_one_thing_wrong_fails(name: str) -> None:
    report = replace(good_report(), **FAULTY[name])
    assert not report.passed
    assert len([check for check in report.checks() if not check.passed]) >= 1


PIECES = [Piece(text, logprob=-0.5, lead=1.0) for text in "abcdef"]
QUESTION = Question(index=0, trunk=0, prompt="?", is_chat=False)
REFERENCE = Reference({QUESTION: PIECES}, refusals={})


@pytest.mark.parametrize(
    ("pieces", "text", "length"),
    [
        (PIECES, "abcdef", 6),
        (PIECES[:4], "abcd", 4),
        (PIECES[:2], "ab", None),
        ([], "", None),
    ],
)
def test_right_answer_has_no_fault(pieces: list[Piece], text: str, length: int | None) -> None:
    assert REFERENCE.find_fault(QUESTION, pieces, text, length) is None


@pytest.mark.parametrize(
    ("pieces", "text", "length"),
    [
        pytest.param([*PIECES[:3], Piece("x", -0.5)], "abcx", None, id="another token"),
        pytest.param([*PIECES[:3], Piece("d", -0.6)], "abcd", 4, id="another probability"),
        pytest.param(PIECES[:3], "abc", 4, id="too short"),
        pytest.param([], "", 4, id="nothing"),
        pytest.param([*PIECES, Piece("g", -0.5)], "abcdefg", None, id="too long"),
        pytest.param(PIECES[:3], "abd", 3, id="another text"),
    ],
)
def test_wrong_answer_has_a_fault(pieces: list[Piece], text: str, length: int | None) -> None:
    assert REFERENCE.find_fault(QUESTION, pieces, text, length)


def test_certain_part_ends_where_the_next_token_is_as_likely_or_no_plain_text() -> None:
    close, binary = Piece("c", -0.5, lead=0.001), Piece("\ufffd", -0.5, lead=1.0)
    assert certain_part([*PIECES[:3], close, *PIECES]) == PIECES[:3]
    assert certain_part([*PIECES[:2], binary]) == PIECES[:2]
    assert certain_part(PIECES) == PIECES


def test_questions_share_prefixes_and_fit() -> None:
    questions = make_questions(60, seed=0)
    assert questions == make_questions(60, seed=0)
    assert questions != make_questions(60, seed=1)
    assert len({question.prompt for question in questions}) == 60
    # A chat adds its markers to the prompt.
    assert max(len(q.prompt) for q in questions) + 40 + MAX_TOKENS <= MAX_MODEL_LEN
    beginnings = [question.prompt[:200] for question in questions if len(question.prompt) > 200]
    assert len({*beginnings}) < len(beginnings) / 4
    assert {question.is_chat for question in questions} == {True, False}
    assert MIN_TOKENS < MAX_TOKENS


def test_growth_is_that_of_the_line_after_the_warm_up() -> None:
    # It grows by 50 MiB at first, and then by 1 MiB a second.
    sizes = [100 * MIB] + [(150 + second) * MIB for second in range(1, 101)]
    growth = growth_of("Worker", list(enumerate(sizes)))
    assert growth.num_samples == 61
    assert growth.first == 190 * MIB
    assert growth.last == growth.peak == 250 * MIB
    assert growth.per_minute == pytest.approx(60 * MIB)
    assert growth.total == pytest.approx(60 * MIB)
    with pytest.raises(ValueError, match="too few"):
        growth_of("Worker", [(0.0, 1), (1.0, 1)])
