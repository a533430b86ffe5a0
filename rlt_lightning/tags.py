"""The text of token ids: whole, token by token, and where a tag begins in it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of token ids as it is: special tokens written out, no white space tidied away."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def token_texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The text that each token adds; together they are the whole. A character is its last token's."""
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer.backend_tokenizer, token_id) or "" for token_id in token_ids]
    if texts:  # what is left of a character that was cut
        texts[-1] += decode(tokenizer, token_ids)[len("".join(texts)) :]
    return texts


def start_of_tag(tokenizer: Any, token_ids: list[int], tag: str) -> int:
    """Index of the token that holds the tag's first character, given that its last is in the last token.

    Raises:
        ValueError: If the tag is not there.
    """
    shortest = max(0, len(token_ids) - len(tag.encode()))  # each token holds at least one byte of the tag
    for start in range(len(token_ids) - 1, shortest - 1, -1):
        if tag in decode(tokenizer, token_ids[start:]):
            return start
    raise ValueError(
        f"A completion that finished with 'stop' must end with {tag}, but its last tokens read "
        f"{decode(tokenizer, token_ids[shortest:])!r}. Check the engine that sampled it."
    )
