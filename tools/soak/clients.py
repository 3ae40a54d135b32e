# SPDX-License-Identifier: Apache-2.0
"""Clients that ask, cancel, repeat and send invalid requests, and check every answer."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tools.soak.answers import JSON, MIN_TOKENS, Piece, Reference, read_pieces, refusal, text_of
from tools.soak.questions import GARBAGE, Question

#: Seconds after which a request counts as hung.
PATIENCE = 180


@dataclass
class Tally:
    """The actions of the clients of a soak, and their results."""

    #: The number of each action. A Counter would not survive `dataclasses.asdict`.
    actions: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    parts: int = 0
    tokens: int = 0
    cancelled: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


class SoakClient:
    """One client, which does one action at a time. Some actions send several requests at once.

    The actions depend only on ``seed``, not on the answers of the server.
    """

    def __init__(self, http: httpx.AsyncClient, reference: Reference, tally: Tally, seed: str):
        self._http = http
        self._reference = reference
        self._questions = list(reference.answers)
        self._tally = tally
        self._draw = random.Random(seed)

    async def act(self) -> None:
        """Do one random action, and add its faults to the tally."""
        actions: dict[Callable[[], Awaitable[None]], int] = {
            self.ask_and_wait: 5,
            self.ask_and_stream: 5,
            self.cancel_a_stream: 4,
            self.give_up_waiting: 2,
            self.cancel_many: 1,
            self.ask_the_same_at_once: 3,
            self.ask_what_begins_alike: 3,
            self.send_garbage: 3,
            self.break_off_a_request: 1,
        }
        (action,) = self._draw.choices(list(actions), [*actions.values()])
        done = self._tally.actions
        done[action.__name__] = done.get(action.__name__, 0) + 1
        try:
            async with asyncio.timeout(PATIENCE):
                await action()
        except TimeoutError:
            self._fault(f"{action.__name__} took longer than {PATIENCE} s")
        except (httpx.HTTPError, OSError, LookupError, ValueError) as error:
            # No answer, or a malformed one.
            self._fault(f"{action.__name__}: {error!r}")

    async def ask_and_wait(self) -> None:
        await self._whole(*self._pick())

    async def ask_and_stream(self) -> None:
        await self._stream(*self._pick())

    async def cancel_a_stream(self) -> None:
        question, length = self._pick()
        await self._stream(question, length, stop_after=self._draw.randrange(length))

    async def give_up_waiting(self) -> None:
        await self._give_up(*self._pick(), after=self._draw.uniform(0.0, 1.5))

    async def cancel_many(self) -> None:
        """Send more requests than can run, and cancel all at the same moment."""
        after = self._draw.uniform(0.05, 1.0)
        asked = [self._pick() for _ in range(6)]
        await asyncio.gather(*(self._give_up(q, length, after) for q, length in asked))

    async def ask_the_same_at_once(self) -> None:
        question, length = self._pick()
        copies = [self._draw.choice((self._whole, self._stream)) for _ in range(3)]
        await asyncio.gather(*(ask(question, length) for ask in copies))

    async def ask_what_begins_alike(self) -> None:
        trunk = self._pick()[0].trunk
        family = [question for question in self._questions if question.trunk == trunk]
        asked = self._draw.sample(family, min(3, len(family)))
        await asyncio.gather(*(self._stream(q, self._length(q)) for q in asked))

    async def send_garbage(self) -> None:
        name = self._draw.choice(list(GARBAGE))
        path, content = GARBAGE[name]
        seen = refusal(await self._http.post(path, content=content, headers=JSON))
        self._tally.refused += 1
        if seen != self._reference.refusals[name]:
            self._fault(f"{name} gets {seen}, expected {self._reference.refusals[name]}")

    async def break_off_a_request(self) -> None:
        """Send only the beginning of a request."""
        question, length = self._pick()
        body = json.dumps(question.body(length)).encode()
        head = f"POST {question.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        url = self._http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}\r\n\r\n".encode() + body[: self._draw.randrange(len(body))])
        await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def _pick(self) -> tuple[Question, int]:
        question = self._draw.choice(self._questions)
        return question, self._length(question)

    def _length(self, question: Question) -> int:
        return self._draw.randint(MIN_TOKENS, len(self._reference.answers[question]))

    def _body(self, question: Question, length: int, **more: Any) -> dict[str, Any]:
        # Some requests have a salt, and may reuse only blocks with the same salt.
        if self._draw.random() < 0.1:
            more["cache_salt"] = self._draw.choice("ab")
        return question.body(length, **more)

    async def _whole(self, question: Question, length: int) -> None:
        response = await self._http.post(question.path, json=self._body(question, length))
        if response.status_code != 200:
            self._fault(f"question {question.index} gets {refusal(response)}")
            return
        (choice,) = response.json()["choices"]
        pieces = read_pieces(choice, question.is_chat)
        self._judge(question, pieces, text_of(choice, question.is_chat), length)

    async def _stream(self, question: Question, length: int, stop_after: int | None = None) -> None:
        """Read the answer as it comes, and disconnect after ``stop_after`` tokens or a few more."""
        body = self._body(question, length, stream=True)
        pieces: list[Piece] = []
        text, ended = "", False
        async with self._http.stream("POST", question.path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._fault(f"question {question.index} gets {refusal(response)}")
                return
            async for line in response.aiter_lines():
                if stop_after is not None and len(pieces) >= stop_after:
                    break
                if not line:
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "choices" not in event:
                    self._fault(f"question {question.index} breaks off with {line}")
                    return
                for choice in event["choices"]:
                    pieces += read_pieces(choice, question.is_chat)
                    text += text_of(choice, question.is_chat)
        if stop_after is None and not ended:
            self._fault(f"question {question.index}: the stream has no end")
        self._tally.cancelled += not ended
        self._judge(question, pieces, text, length if ended else None)

    async def _give_up(self, question: Question, length: int, after: float) -> None:
        """Wait for an answer for ``after`` seconds at most."""
        try:
            async with asyncio.timeout(after):
                await self._whole(question, length)
        except TimeoutError:
            self._tally.cancelled += 1

    def _judge(
        self, question: Question, pieces: Sequence[Piece], text: str, length: int | None
    ) -> None:
        fault = self._reference.find_fault(question, pieces, text, length)
        if fault:
            self._fault(fault)
        self._tally.tokens += len(pieces)
        if length is None:
            self._tally.parts += 1
        else:
            self._tally.answers += 1

    def _fault(self, text: str) -> None:
        self._tally.faults.append(text)
