# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks/serving.py` that need no engine."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from serving_results import (
    HITS,
    MEASURES,
    OWN_MEASURES,
    QUERIES,
    Measure,
    ResultError,
    Sample,
    format_number,
    ratios,
    read_sample,
    table_rows,
)
from serving_workloads import NUM_TURNS, count_requests, turn_order, write_chats
from support.server import parse_metrics

METRICS = """
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 300.0
"""


def make_result(**changes: object) -> dict[str, Any]:
    names = [name for name in MEASURES if name not in OWN_MEASURES]
    return {"completed": 10, **{name: 2.0 for name in names}, **changes}


def test_a_sample_has_each_measure_of_the_run_alone() -> None:
    before = parse_metrics(METRICS)
    after = {QUERIES: 1400.0, HITS: 400.0}
    sample = read_sample(make_result(p99_ttft_ms=7.5), 10, before, after, cpu_seconds=0.25)
    assert sample.keys() == MEASURES.keys()
    assert sample["hit_rate"] == pytest.approx(25)  # 100 of 400 tokens
    assert sample["core_cpu_ms"] == pytest.approx(25)
    assert sample["p99_ttft_ms"] == 7.5


def test_a_run_without_a_hit_has_a_rate_of_zero() -> None:
    # A server that has recorded nothing yet does not list its counters.
    sample = read_sample(make_result(), 10, {}, {QUERIES: 400.0}, cpu_seconds=1)
    assert sample["hit_rate"] == 0


@pytest.mark.parametrize(
    ("result", "after", "message"),
    [
        (make_result(completed=9), {QUERIES: 1.0}, "all 10 requests must succeed, got 9"),
        (make_result(), {}, "must look up prefixes, got 0 more"),
        ({"completed": 10}, {QUERIES: 1.0}, "the result must have request_throughput"),
    ],
)
def test_a_run_that_measured_nothing_is_an_error(
    result: dict[str, Any], after: dict[str, float], message: str
) -> None:
    with pytest.raises(ResultError, match=message):
        read_sample(result, 10, {}, after, cpu_seconds=1)


def test_ratios_are_above_one_where_the_hybrid_manager_is_better() -> None:
    assert ratios(Measure("rate", "1/s", True), [10, 10], [20, 5]) == [2, 0.5]
    assert ratios(Measure("time", "ms", False), [10, 10], [20, 5]) == [0.5, 2]
    assert ratios(Measure("rate", "%", True), [0, 10], [20, 0]) == []


def test_rows_compare_rounds_before_they_take_medians() -> None:
    def sample(value: float) -> Sample:
        return dict.fromkeys(MEASURES, value) | {"hit_rate": 0.0}

    # The machine is ten times slower in round 2. The ratio of the medians would be 1.5.
    base, hybrid = [sample(100), sample(10), sample(100)], [sample(150), sample(20), sample(400)]
    rows = {row[0]: row[1:] for row in table_rows(base, hybrid)}
    assert len(rows) == len(MEASURES)
    assert rows["requests, 1/s"] == ("100", "150", "2.00x", "1.50 to 4.00")
    assert rows["TTFT, median, ms"] == ("100", "150", "0.50x", "0.25 to 0.67")
    assert rows["prefix hit rate, %"] == ("0.00", "0.00", "-", "-")


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.12"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_requests_are_rounded_up_to_whole_conversations() -> None:
    assert count_requests("chat", NUM_TURNS + 1) == 2 * NUM_TURNS
    assert count_requests("short", 5) == 5


@pytest.mark.parametrize("num_chats", [1, 3, 20])
def test_turns_of_one_conversation_are_apart(num_chats: int) -> None:
    gap = 8
    order = turn_order(random.Random(0), num_chats, NUM_TURNS, gap)
    assert Counter(order) == dict.fromkeys(range(num_chats), NUM_TURNS)
    for i, chat in enumerate(order):
        if chat in order[max(0, i - gap) : i]:
            # Then no conversation was left that had waited longer.
            others_left = set(order[i:]) - set(order[max(0, i - gap) : i])
            assert not others_left


class WordTokenizer:
    """A token is a word."""

    bos_token = "<bos>"

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.words += text.split()
        return list(range(len(self.words) - len(text.split()), len(self.words)))

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[i] for i in token_ids)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = "".join(f"[{turn['role']}] {turn['content']} " for turn in conversation)
        return f"{self.bos_token}{turns}[assistant]"


def test_a_prompt_begins_with_the_prompt_of_the_turn_before_it(tmp_path: Path) -> None:
    path, again = tmp_path / "chats", tmp_path / "again"
    for file in (path, again):
        write_chats(file, WordTokenizer(), 5 * NUM_TURNS, seed=3)
    assert path.read_text() == again.read_text()
    prompts = [entry["conversations"][0]["value"] for entry in json.loads(path.read_text())]
    assert len(set(prompts)) == 5 * NUM_TURNS
    # The server adds the first token itself.
    assert not any("<bos>" in prompt for prompt in prompts)
    for i, prompt in enumerate(prompts):
        turn = prompt.count("[user]")
        before = [p for p in prompts[:i] if prompt.startswith(p)]
        assert [p.count("[user]") for p in before] == list(range(1, turn))
