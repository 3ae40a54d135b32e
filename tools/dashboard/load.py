# SPDX-License-Identifier: Apache-2.0
"""Load that moves every metric: shared prefixes, repeated prompts, and too few blocks for all."""

import random
import string
import threading
import time
from collections.abc import Callable

import httpx

from tools.dashboard.promql import Scrape

#: Prompts begin with one of so many documents of so many characters, which are about tokens.
NUM_DOCUMENTS, DOCUMENT_LENGTH = 6, 320
NUM_CLIENTS = 8


def text(seed: object, length: int) -> str:
    """Random letters, the same for the same seed."""
    return "".join(random.Random(str(seed)).choices(string.ascii_lowercase, k=length))


def make_prompt(rng: random.Random) -> str:
    """A document and a question. Some pairs occur often, others once."""
    document = text(f"document {rng.randrange(NUM_DOCUMENTS)}", DOCUMENT_LENGTH)
    common = rng.random() < 0.3
    question = f"question {rng.randrange(2 if common else 10**9)}"
    return document + text(question, 40 if common else rng.randrange(30, 120))


class Load:
    """Clients that ask all the time, each in a thread; a context manager.

    Args:
        api_url: The base of the OpenAI-compatible API.
        model: The model's served name.

    Raises on leaving:
        RuntimeError: if a request failed.
    """

    def __init__(self, api_url: str, model: str) -> None:
        self._url, self._model = f"{api_url}/completions", model
        self._end = threading.Event()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,)) for seed in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if error is None and self._errors:
            raise RuntimeError(f"all requests must succeed, got {self._errors[0]}")

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(timeout=120) as http:
            while not self._end.is_set():
                body = {
                    "model": self._model,
                    "prompt": make_prompt(rng),
                    "max_tokens": rng.randrange(8, 64),
                    "temperature": 0,
                }
                try:
                    http.post(self._url, json=body).raise_for_status()
                except httpx.HTTPError as error:
                    self._errors.append(repr(error))
                    return


def scrape_until(
    url: str, is_done: Callable[[list[Scrape]], bool], timeout: float, interval: float = 1.0
) -> list[Scrape]:
    """Scrape ``/metrics`` below a URL each ``interval`` seconds, until done or timed out.

    The times of the scrapes begin at 0.
    """
    scrapes: list[Scrape] = []
    begin = time.monotonic()
    with httpx.Client(base_url=url, timeout=60) as http:
        while (now := time.monotonic() - begin) < timeout and not (scrapes and is_done(scrapes)):
            scrapes.append(Scrape.parse(now, http.get("/metrics").raise_for_status().text))
            time.sleep(max(begin + now + interval - time.monotonic(), 0))
    return scrapes
