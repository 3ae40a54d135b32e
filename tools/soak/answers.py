# SPDX-License-Identifier: Apache-2.0
"""Answers, and the answers of the reference server, which gets one question at a time."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tools.soak.questions import GARBAGE, MAX_TOKENS, Question

#: Tolerance of log-probabilities. In float32, another order of summation changed them by 1e-5. A
#: wrong block changes them far more.
LOGPROB_TOLERANCE = 1e-3
#: A token whose lead over the second likeliest is smaller may differ in another batch.
SAFE_LEAD = 1e-2
#: Questions with a shorter certain answer are left out.
MIN_TOKENS = 24

_PLAIN = {*string.printable}


@dataclass(frozen=True)
class Piece:
    """A generated token: its text, its log-probability, and its lead over the second likeliest.

    The lead is 0 if the request did not ask for other tokens.
    """

    text: str
    logprob: float
    lead: float = 0.0


def read_pieces(choice: dict[str, Any], is_chat: bool) -> list[Piece]:
    """The tokens in a choice of an answer or of one chunk of a stream."""
    found = choice["logprobs"]
    if not found:
        return []
    if is_chat:
        entries = found["content"] or []
        texts = [entry["token"] for entry in entries]
        logprobs = [entry["logprob"] for entry in entries]
        likely = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
    else:
        texts, logprobs = found["tokens"], found["token_logprobs"]
        likely = [[*(top or {}).values()] for top in found["top_logprobs"]]
    return [
        Piece(text, logprob, lead=logprob - sorted(tops)[-2] if len(tops) > 1 else 0.0)
        for text, logprob, tops in zip(texts, logprobs, likely, strict=True)
    ]


def text_of(choice: dict[str, Any], is_chat: bool) -> str:
    if not is_chat:
        return choice["text"]
    return choice.get("message", choice.get("delta", {})).get("content") or ""


@dataclass(frozen=True)
class Reference:
    """Certain answers by question, and status and body of the refusals of invalid requests."""

    answers: dict[Question, Sequence[Piece]]
    refusals: dict[str, tuple[int, str]]

    def find_fault(
        self, question: Question, pieces: Sequence[Piece], text: str, length: int | None
    ) -> str | None:
        """The fault of an answer of ``length`` tokens, or of a part of one (``length=None``)."""
        expected = self.answers[question]
        wrong = [
            i
            for i, (got, right) in enumerate(zip(pieces, expected, strict=False))
            if got.text != right.text or abs(got.logprob - right.logprob) > LOGPROB_TOLERANCE
        ]
        if wrong:
            i = wrong[0]
            return (
                f"question {question.index}, token {i}: {pieces[i].text!r} "
                f"({pieces[i].logprob:.4f}), expected {expected[i].text!r} "
                f"({expected[i].logprob:.4f}); prompt {question.prompt!r}"
            )
        if length is not None and len(pieces) != length:
            return f"question {question.index}: {len(pieces)} tokens, expected {length}"
        if len(pieces) > len(expected):
            return f"question {question.index}: more tokens than the reference has"
        if text != "".join(piece.text for piece in pieces):
            return f"question {question.index}: the text is not that of its tokens: {text!r}"
        return None


def ask_reference(url: str, questions: Sequence[Question]) -> Reference:
    """Send an idle server each question and each invalid request, one after another.

    Raises:
        RuntimeError: if too few answers are certain, or if an invalid request is not refused.
    """
    answers: dict[Question, Sequence[Piece]] = {}
    refusals: dict[str, tuple[int, str]] = {}
    with httpx.Client(base_url=url, timeout=120) as client:
        for question in questions:
            body = question.body(MAX_TOKENS, num_logprobs=2)
            answer = client.post(question.path, json=body).raise_for_status().json()
            pieces = certain_part(read_pieces(answer["choices"][0], question.is_chat))
            if len(pieces) >= MIN_TOKENS:
                answers[question] = pieces
        for name, (path, content) in GARBAGE.items():
            refusals[name] = refusal(client.post(path, content=content, headers=JSON))
            if not 400 <= refusals[name][0] < 500:
                raise RuntimeError(f"the reference server answers {name}: {refusals[name]}")
    if len(answers) < len(questions) / 2:
        raise RuntimeError(f"only {len(answers)} of {len(questions)} answers are certain")
    return Reference(answers, refusals)


JSON = {"Content-Type": "application/json"}


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.text


def certain_part(pieces: Sequence[Piece]) -> list[Piece]:
    """The beginning of an answer that every batch must give, and that is plain text."""
    for length, piece in enumerate(pieces):
        if piece.lead < SAFE_LEAD or not {*piece.text} <= _PLAIN:
            return list(pieces[:length])
    return list(pieces)
