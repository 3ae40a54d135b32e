# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` and its OpenAI API answer the same with base's manager and the hybrid manager.

Each test sends the same requests to both servers, and verifies that the answers are equal and
right. The hybrid manager verifies all of its bookkeeping in every scheduler step, and an error
would end its server.
"""

import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.server import ACTIVE_LINE, MODEL_NAME, Server
from support.server_questions import (
    Servers,
    ask,
    cached_tokens,
    chat,
    client_of,
    complete,
    text_of,
    text_prompt,
    wait_until_idle,
)
from tools import checkpoints

WINDOW = 64
BLOCK_SIZE = 32
MAX_MODEL_LEN = 4096
#: In tokens. Takes seconds, so the request still runs when its client has done something else.
LONG_ANSWER = 3800
#: Much longer than the window.
LONG_TEXT = " ".join(f"Line {i}: the quick brown fox jumps over the lazy dog." for i in range(8))


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    model = checkpoints.tiny_gemma3()
    arguments = [f"--max-model-len={MAX_MODEL_LEN}"]
    with (
        Server(model, hybrid=False, arguments=arguments) as base,
        Server(model, hybrid=True, arguments=arguments) as hybrid,
    ):
        yield Servers(base.wait_until_healthy(), hybrid.wait_until_healthy())


@pytest.fixture(autouse=True)
def nothing_is_left(servers: Servers) -> Iterator[None]:
    """Each test starts with an empty prefix cache, and leaves no block in use behind."""
    servers.reset_prefix_caches()
    yield
    for server in (servers.base, servers.hybrid):
        wait_until_idle(server)
        assert server.is_healthy()


def test_log_says_which_manager_serves(servers: Servers) -> None:
    (line,) = (line for line in servers.hybrid.log.splitlines() if ACTIVE_LINE in line)
    assert " INFO " in line
    assert f"{ACTIVE_LINE}, 2 managers for 6 KV cache groups: " in line
    assert "sliding_window 64 (5 groups," in line
    assert "full_attention (1 group," in line
    assert "Hybrid KV cache" not in servers.base.log


@pytest.mark.parametrize("length", [2, BLOCK_SIZE, WINDOW + 1, 300, MAX_MODEL_LEN - 48])
def test_completion(servers: Servers, length: int) -> None:
    prompt = text_prompt(length, seed=length)
    answer = servers.both(lambda server: complete(server, prompt, logprobs=0))
    assert len(text_of(answer)) == 48
    assert answer["usage"]["prompt_tokens"] == length
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 48


def test_completion_depends_on_what_is_out_of_the_windows_reach(servers: Servers) -> None:
    prompts = [text_prompt(300, seed=1), "!" + text_prompt(300, seed=1)[1:]]
    assert prompts[0] != prompts[1]
    answers = servers.both(lambda server: [complete(server, prompt) for prompt in prompts])
    assert text_of(answers[0]) != text_of(answers[1])


def test_completions_of_several_prompts_in_one_request(servers: Servers) -> None:
    prompts = [text_prompt(length, seed=50 + length) for length in (20, 90, 200, 333)]
    answer = servers.both(lambda server: complete(server, prompts))
    texts = [choice["text"] for choice in answer["choices"]]
    alone = servers.both(lambda server: [text_of(complete(server, p)) for p in prompts])
    assert texts == alone
    assert len({*texts}) == len(prompts)


def test_completion_ends_at_the_models_limit(servers: Servers) -> None:
    prompt = text_prompt(MAX_MODEL_LEN - 30, seed=2)
    answer = servers.both(lambda server: complete(server, prompt, max_tokens=MAX_MODEL_LEN))
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_of_token_ids(servers: Servers) -> None:
    prompt = [random.Random(3).randrange(40, 120) for _ in range(150)]
    answer = servers.both(lambda server: complete(server, prompt))
    assert answer["usage"]["prompt_tokens"] == 150
    assert len(text_of(answer)) == 48


def test_sampled_completions_of_one_prompt(servers: Servers) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 7}
    answer = servers.both(lambda server: complete(server, text_prompt(200, 4), **sampling))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len({*texts}) == 3


def test_chat(servers: Servers) -> None:
    messages: list[Any] = [
        {"role": "system", "content": LONG_TEXT},
        {"role": "user", "content": "Hello! Who jumps over whom?"},
    ]

    def talk(server: Server) -> list[dict[str, Any]]:
        history, answers = list(messages), []
        with client_of(server) as client:
            for question in ("And who else?", None):
                answer = chat(client, history, max_tokens=40)
                answers.append(answer.model_dump(exclude={"id", "created"}))
                history.append({"role": "assistant", "content": answer.choices[0].message.content})
                history.append({"role": "user", "content": question})
        return answers

    first, second = servers.both(talk)
    assert len(first["choices"][0]["message"]["content"]) == 40
    assert second["choices"][0]["message"]["content"]
    assert cached_tokens(first) == 0
    # The second question hits the first turn in the cache.
    assert cached_tokens(second) >= 448


def test_streams_give_what_the_whole_answers_give(servers: Servers) -> None:
    prompt = text_prompt(250, seed=6)
    messages: list[Any] = [{"role": "user", "content": LONG_TEXT}]

    def stream(server: Server) -> tuple[str, str, Any]:
        with client_of(server) as client:
            pieces = [chunk.choices[0].text for chunk in ask(client, prompt, 64, stream=True)]
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(chat(client, messages, max_tokens=64, **options))
        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        usage = chunks[-1].usage.model_dump(exclude_none=True)
        return "".join(pieces), "".join(said), usage

    def whole(server: Server) -> tuple[str, str, Any]:
        with client_of(server) as client:
            answer = chat(client, messages, max_tokens=64)
        said = answer.choices[0].message.content or ""
        usage = answer.usage.model_dump(exclude_none=True)
        return text_of(complete(server, prompt, max_tokens=64)), said, usage

    streamed = servers.both(stream)
    servers.reset_prefix_caches()
    assert streamed == servers.both(whole)
    assert len(streamed[0]) == 64
    assert len(streamed[1]) == 64


def test_stream_comes_in_pieces(servers: Servers) -> None:
    for server in (servers.base, servers.hybrid):
        with client_of(server) as client:
            pieces = [chunk.choices[0].text for chunk in ask(client, "Once", 32, stream=True)]
        assert len(pieces) > 8


def test_aborted_stream_frees_its_blocks(servers: Servers) -> None:
    prompt, max_tokens = text_prompt(200, seed=8), LONG_ANSWER

    def abort(server: Server) -> str:
        generated = server.metric("generation_tokens_total")
        with client_of(server) as client:
            stream = ask(client, prompt, max_tokens, stream=True)
            received = [next(stream).choices[0].text for _ in range(3)]
            usage = server.wait_for(lambda: server.metric("kv_cache_usage_perc"), bool)
            assert 0 < usage < 1
            assert server.metric("num_requests_running") == 1
            stream.close()
        wait_until_idle(server)
        # The abort stopped it before its end.
        assert server.metric("generation_tokens_total") - generated < max_tokens
        answer = complete(server, prompt)
        assert text_of(answer).startswith("".join(received))
        return text_of(answer)

    assert servers.both(abort)


def test_client_that_gives_up_waiting_frees_its_blocks(servers: Servers) -> None:
    body = {"model": MODEL_NAME, "prompt": text_prompt(100, 9), "max_tokens": LONG_ANSWER}
    # The answer must not end by itself before the client gives up.
    body |= {"ignore_eos": True, "temperature": 0}

    def give_up(server: Server) -> str:
        generated = server.metric("generation_tokens_total")
        with httpx.Client(base_url=server.api_url) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/completions", json=body, timeout=0.5)
        wait_until_idle(server)
        assert server.metric("generation_tokens_total") - generated < LONG_ANSWER
        return text_of(complete(server, body["prompt"]))

    assert servers.both(give_up)


def test_metrics_count_prefix_cache_hits(servers: Servers) -> None:
    names = ("queries", "hits")
    prompt, other = text_prompt(300, seed=10), text_prompt(300, seed=11)

    def run(server: Server) -> list[tuple[float, ...]]:
        deltas: list[tuple[float, ...]] = []
        for question in (prompt, prompt, other):
            before = [server.metric(f"prefix_cache_{name}_total") for name in names]
            answer = complete(server, question)
            wait_until_idle(server)
            after = [server.metric(f"prefix_cache_{name}_total") for name in names]
            deltas.append(tuple(b - a for a, b in zip(before, after, strict=True)))
            assert deltas[-1][1] == cached_tokens(answer)
        return deltas

    # 300 tokens fill 9 blocks of 32.
    assert servers.both(run) == [(300, 0), (300, 9 * BLOCK_SIZE), (300, 0)]


def test_prefix_is_shared_by_prompts_that_go_on_differently(servers: Servers) -> None:
    prefix = text_prompt(256, seed=12)
    prompts = [prefix + text_prompt(60, seed) for seed in (13, 14, 15)]

    def run(server: Server) -> list[dict[str, Any]]:
        return [complete(server, prompt) for prompt in (prefix, *prompts)]

    answers = servers.both(run)
    assert len({text_of(answer) for answer in answers}) == 4
    assert max(map(cached_tokens, answers)) >= 256 - BLOCK_SIZE


def test_reset_prefix_cache_forgets_all_hits(servers: Servers) -> None:
    prompt = text_prompt(300, seed=16)

    def run(server: Server) -> list[dict[str, Any]]:
        answers = [complete(server, prompt), complete(server, prompt)]
        assert server.reset_prefix_cache()
        return [*answers, complete(server, prompt), complete(server, prompt)]

    answers = servers.both(run)
    hit = 9 * BLOCK_SIZE
    assert [cached_tokens(answer) for answer in answers] == [0, hit, 0, hit]
    assert len({text_of(answer) for answer in answers}) == 1


def test_reset_prefix_cache_while_a_request_runs(servers: Servers) -> None:
    """The reset is refused, or it preempts the request, which then gives the same tokens."""
    prompt = text_prompt(200, seed=17)

    def run(server: Server) -> list[bool]:
        names = ("num_preemptions_total", "generation_tokens_total")
        before = [server.metric(name) for name in names]
        with client_of(server) as client:
            stream = ask(client, prompt, max_tokens=LONG_ANSWER, stream=True)
            text = next(stream).choices[0].text
            refused = server.reset_prefix_cache()
            interrupted = server.reset_prefix_cache(reset_running_requests=True)
            now = server.wait_for(
                lambda: [server.metric(name) for name in names], lambda seen: seen[0] > before[0]
            )
            assert now[0] - before[0] == 1
            num_generated = int(now[1] - before[1])
            while len(text) < num_generated + 60:
                text += next(stream).choices[0].text
            stream.close()
        quiet = text_of(complete(server, prompt, max_tokens=len(text)))
        assert text == quiet
        return [refused, interrupted]

    assert servers.both(run) == [False, True]


def test_salts_keep_caches_apart(servers: Servers) -> None:
    prompt = text_prompt(200, seed=18)

    def run(server: Server) -> list[dict[str, Any]]:
        bodies = [{"cache_salt": salt} if salt else {} for salt in ("a", "b", "a", None, None)]
        return [complete(server, prompt, extra_body=body) for body in bodies]

    answers = servers.both(run)
    hit = 6 * BLOCK_SIZE
    assert [cached_tokens(answer) for answer in answers] == [0, 0, hit, 0, hit]
    assert len({text_of(answer) for answer in answers}) == 1


def test_two_clients_at_once(servers: Servers) -> None:
    """With interleaved requests, each client gets the answers that it gets alone."""
    questions = [
        [text_prompt(length, seed=20 * n + length) for length in (150, 40, 400)] for n in (1, 2)
    ]
    max_tokens = 100

    def together(server: Server) -> list[list[str]]:
        answers: list[list[str]] = [[], []]
        order: list[int] = []
        start = threading.Barrier(2, timeout=60)

        def run(me: int) -> None:
            with client_of(server) as client:
                start.wait()
                for question in questions[me]:
                    pieces = []
                    for chunk in ask(client, question, max_tokens, stream=True):
                        order.append(me)
                        pieces.append(chunk.choices[0].text)
                    answers[me].append("".join(pieces))

        threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The pieces of the two clients were interleaved.
        assert order.index(1) < len(order) - 1 - order[::-1].index(0)
        assert order.index(0) < len(order) - 1 - order[::-1].index(1)
        return answers

    def alone(server: Server) -> list[list[str]]:
        return [[text_of(complete(server, q, max_tokens)) for q in mine] for mine in questions]

    expected = servers.both(alone)
    servers.reset_prefix_caches()
    assert servers.both(together) == expected
    assert all(len(text) == max_tokens for mine in expected for text in mine)


def test_more_requests_than_run_at_once(servers: Servers) -> None:
    prompts = [text_prompt(50 + 13 * n, seed=60 + n) for n in range(20)]
    answer = servers.both(lambda server: complete(server, prompts, max_tokens=24))
    assert [len(choice["text"]) for choice in answer["choices"]] == [24] * 20


COMPLETION = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
#: Invalid requests: the path, and the body as text or as values.
BAD_REQUESTS: dict[str, tuple[str, str | dict[str, Any]]] = {
    "prompt too long": ("completions", COMPLETION | {"prompt": "x" * 2 * MAX_MODEL_LEN}),
    "prompt as long as the model's limit": (
        "completions",
        COMPLETION | {"prompt": "x" * (MAX_MODEL_LEN - 1)},
    ),
    "chat too long": (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "x" * 2 * MAX_MODEL_LEN}]},
    ),
    "token ids too many": ("completions", COMPLETION | {"prompt": [40] * 2 * MAX_MODEL_LEN}),
    "token id out of the vocabulary": ("completions", COMPLETION | {"prompt": [40, 100_000]}),
    "not JSON": ("completions", '{"model": "tiny", "prompt": '),
    "nothing": ("completions", ""),
    "a list": ("completions", "[1, 2, 3]"),
    "no prompt": ("completions", {"model": MODEL_NAME}),
    "empty prompts": ("completions", COMPLETION | {"prompt": []}),
    "prompt of another type": ("completions", COMPLETION | {"prompt": {"text": "Hello"}}),
    "max_tokens of another type": ("completions", COMPLETION | {"max_tokens": "many"}),
    "max_tokens negative": ("completions", COMPLETION | {"max_tokens": -1}),
    "temperature negative": ("completions", COMPLETION | {"temperature": -1}),
    "top_p out of range": ("completions", COMPLETION | {"top_p": 7}),
    "too many logprobs": ("completions", COMPLETION | {"logprobs": 5000}),
    "empty salt": ("completions", COMPLETION | {"cache_salt": ""}),
    "unknown model": ("completions", COMPLETION | {"model": "no-such-model"}),
    "no messages": ("chat/completions", {"model": MODEL_NAME}),
    "messages of another type": ("chat/completions", CHAT | {"messages": "Hi"}),
    "unknown path": ("no-such-path", COMPLETION),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_gets_its_error(servers: Servers, name: str) -> None:
    path, body = BAD_REQUESTS[name]
    content = body if isinstance(body, str) else json.dumps(body)

    def run(server: Server) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        answer = server.http.post(f"/v1/{path}", content=content, headers=headers)
        return answer.status_code, answer.json()

    status, answer = servers.both(run)
    assert 400 <= status < 500, answer
    assert answer
    # The next request is served.
    assert servers.both(lambda server: text_of(complete(server, "Hello", max_tokens=8)))
