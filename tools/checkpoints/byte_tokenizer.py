# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer of our own for the tiny checkpoints.

Token ids 0 to 4 are `<pad>`, `<eos>`, `<bos>` and the two markers of a chat turn; the byte
`b` has the id `FIRST_BYTE + b`. Every prompt starts with `<bos>`. For models with images, the
tokens of `IMAGE_TOKENS` and `NEWLINES` follow.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<turn>", "</turn>")
PAD_ID, EOS_ID, BOS_ID, TURN_ID, END_OF_TURN_ID = range(len(SPECIAL_TOKENS))
FIRST_BYTE = len(SPECIAL_TOKENS)
VOCAB_SIZE = FIRST_BYTE + 256

#: The tokens for the begin, one position and the end of an image, under the names that Gemma 3's
#: processor reads.
IMAGE_TOKENS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image>",
    "eoi_token": "<end_of_image>",
}
#: Gemma's vocabulary has them, and vLLM's processor asks for them: it merges those that come
#: to stand beside an image.
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
IMAGE_TOKEN_ID = VOCAB_SIZE + list(IMAGE_TOKENS).index("image_token")
VOCAB_SIZE_WITH_IMAGES = VOCAB_SIZE + len(IMAGE_TOKENS) + len(NEWLINES)

# A rendered chat is tokenized without special tokens, so the template writes <bos> itself.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{{ '<turn>' + message['role'] + '\\n' + message['content'] + '</turn>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<turn>assistant\\n' }}{%- endif -%}"
)


def token_id(character: str) -> int:
    """The token id of one ASCII character."""
    (byte,) = character.encode("ascii")
    return FIRST_BYTE + byte


def printable_ids() -> list[int]:
    """Token ids of the printable ASCII characters, space included."""
    return [token_id(chr(code)) for code in range(0x20, 0x7F)]


def save_tokenizer(
    folder: Path, max_length: int, with_images: bool = False
) -> "PreTrainedTokenizerFast":
    """Write the tokenizer's files, as a fast tokenizer that `AutoTokenizer` loads offline."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte, symbol in enumerate(_byte_symbols()):
        vocabulary[symbol] = FIRST_BYTE + byte
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    if with_images:
        marks = IMAGE_TOKENS.values()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in marks])
        tokenizer.add_tokens([AddedToken(newlines, normalized=False) for newlines in NEWLINES])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<turn>", "</turn>"],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        **({"extra_special_tokens": IMAGE_TOKENS} if with_images else {}),
    )
    fast.save_pretrained(folder)
    return fast


def _byte_symbols() -> Iterator[str]:
    """The character that byte-level tokenizers write for each byte value, in order.

    Visible Latin-1 characters stand for themselves; the others, in order, for the
    characters from code point 256 on. `tokenizers` has the same table but in no order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = 256
    for byte in range(256):
        if byte in visible:
            yield chr(byte)
        else:
            yield chr(stand_in)
            stand_in += 1
