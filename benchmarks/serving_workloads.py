# SPDX-License-Identifier: Apache-2.0
"""What `serving.py` sends: the models, and each workload as arguments of `vllm bench serve`."""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools import checkpoints


@dataclass(frozen=True)
class ServedModel:
    """A model and how both servers are started with it."""

    checkpoint: Callable[[], Path]
    dtype: str
    #: Physical blocks of the pool, the null block included.
    num_blocks: int
    #: Requests of a run, by workload.
    num_requests: dict[str, int]


#: Tokens of a block: the smallest that attention on CPUs supports.
BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048
#: The pool holds all that two of the workloads leave behind, and about half of the chats.
MODELS = {
    "gemma3-270m": ServedModel(
        checkpoints.gemma3_270m,
        "bfloat16",
        1000,
        {"prefixes": 32, "chat": 64, "short": 64},
    ),
    "tiny": ServedModel(
        checkpoints.tiny_gemma3,
        "float32",
        1200,
        {"prefixes": 128, "chat": 192, "short": 256},
    ),
}

#: Requests that run at once, by workload.
CONCURRENCY = {"prefixes": 8, "chat": 8, "short": 16}
NUM_PREFIXES = 4
PREFIX_LEN, SUFFIX_LEN, PREFIX_OUTPUT_LEN = 1024, 32, 16
SHORT_LEN, SHORT_OUTPUT_LEN = 24, 32
NUM_TURNS = 4
#: Tokens of one message in a chat, and of the reply that is generated.
MESSAGE_LEN, REPLY_LEN, CHAT_OUTPUT_LEN = 96, 64, 16

WORKLOADS = {
    "prefixes": f"{NUM_PREFIXES} shared prefixes of {PREFIX_LEN} tokens",
    "chat": f"conversations of {NUM_TURNS} turns, more than the pool holds",
    "short": f"prompts of {SHORT_LEN} tokens",
}


class Tokenizer(Protocol):
    """What is used of a tokenizer of Transformers."""

    bos_token: str

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def count_requests(workload: str, requested: int) -> int:
    """The requests of a run: ``requested``, rounded up to what the workload can be divided into."""
    step = {"prefixes": NUM_PREFIXES, "chat": NUM_TURNS, "short": 1}[workload]
    return round_up(requested, step)


def client_arguments(
    workload: str, num_requests: int, seed: int, url: str, model_name: str, checkpoint: Path
) -> list[str]:
    """The arguments of `vllm bench serve`, without the path of the chats' file."""
    general = {
        "backend": "vllm",
        "base-url": url,
        "model": model_name,
        "tokenizer": checkpoint,
        "num-prompts": num_requests,
        "max-concurrency": CONCURRENCY[workload],
        "seed": seed,
        "temperature": 0,
        "percentile-metrics": "ttft,itl",
        "metric-percentiles": "50,99",
    }
    own: dict[str, object]
    match workload:
        case "prefixes":
            own = {
                "dataset-name": "prefix_repetition",
                "prefix-repetition-num-prefixes": NUM_PREFIXES,
                "prefix-repetition-prefix-len": PREFIX_LEN,
                "prefix-repetition-suffix-len": SUFFIX_LEN,
                "prefix-repetition-output-len": PREFIX_OUTPUT_LEN,
            }
        case "chat":
            own = {"dataset-name": "sharegpt", "sharegpt-output-len": CHAT_OUTPUT_LEN}
        case "short":
            own = {
                "dataset-name": "random",
                "random-input-len": SHORT_LEN,
                "random-output-len": SHORT_OUTPUT_LEN,
            }
        case _:
            raise ValueError(f"the workload must be one of {', '.join(WORKLOADS)}, got {workload}")
    flags = ["--ignore-eos", "--disable-tqdm"]
    if workload == "chat":
        # Without oversampling, a prompt that is left out fails the run.
        flags += ["--disable-shuffle", "--no-oversample"]
    return [*flags, *(f"--{name}={value}" for name, value in (general | own).items())]


def write_chats(path: Path, tokenizer: Tokenizer, num_requests: int, seed: int) -> None:
    """Write a file for the dataset `sharegpt`: prompts of chats in the order of their sending.

    vLLM's benchmark for real conversations is not in its wheel. So each prompt is a conversation up
    to one of its turns, and the next turn's prompt begins with it. The replies in a conversation
    are drawn in advance: what the model generates is not sent back. Both servers so get the same
    prompts, whatever they answer. (The dataset `custom` would do the same, but needs pandas.)
    """
    rng = random.Random(seed)
    num_chats = num_requests // NUM_TURNS
    chats = [list(_prompts(tokenizer, rng)) for _ in range(num_chats)]
    done: Counter[int] = Counter()
    entries = []
    for chat in turn_order(rng, num_chats, NUM_TURNS, CONCURRENCY["chat"]):
        # The dataset sends the first value. It demands a second one, and does not send it.
        entries.append({"conversations": [{"value": chats[chat][done[chat]]}, {"value": ""}]})
        done[chat] += 1
    path.write_text(json.dumps(entries))


def turn_order(rng: random.Random, num_chats: int, num_turns: int, gap: int) -> list[int]:
    """Whose turn is next, as numbers of chats, each ``num_turns`` times and in random order.

    Two turns of one chat are ``gap`` or more requests apart, as long as there are other chats left.
    With ``gap`` requests at once, a chat's turn then almost always begins after the one before it
    has ended.
    """
    left = dict.fromkeys(range(num_chats), num_turns)
    order: list[int] = []
    while left:
        recent = order[len(order) - gap :] if len(order) >= gap else order
        others = [chat for chat in left if chat not in recent]
        chat = rng.choice(others) if others else min(left, key=lambda chat: _last(order, chat))
        order.append(chat)
        left[chat] -= 1
        if not left[chat]:
            del left[chat]
    return order


def _last(order: Sequence[int], chat: int) -> int:
    return max(i for i, other in enumerate(order) if other == chat)


def _prompts(tokenizer: Tokenizer, rng: random.Random) -> Iterator[str]:
    """The prompts of one conversation, each the beginning of the next."""
    messages = []
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": _text(tokenizer, rng, MESSAGE_LEN)})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The server adds one, too.
        yield prompt.removeprefix(tokenizer.bos_token)
        messages.append({"role": "assistant", "content": _text(tokenizer, rng, REPLY_LEN)})


def _text(tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> str:
    """Random words of about ``num_tokens`` tokens."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstv" for vowel in "aeiou"]
    words = ("".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(num_tokens))
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    return tokenizer.decode(ids[:num_tokens]).strip()
