"""Tags around thoughts, solutions and explanations: their styles, and finding them in sampled tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from tokenizers.decoders import DecodeStream

from rlt_lightning.types import FinishReason, InputError


def holds_half_pair(text: str) -> bool:
    """Return whether a text holds half a surrogate pair, which no tokenizer takes and no file holds."""
    try:
        # 70 times as fast as a look at each character.
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def escape_half_pairs(text: str) -> str:
    r"""Return a text that a file holds: half a surrogate pair becomes its escape, `\ud83e`, as in JSON."""
    return text.encode(errors="backslashreplace").decode()


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the exact text of token ids: special tokens written out, all white space kept."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def require_fast(tokenizer: Any) -> None:
    """Raise InputError if the tokenizer is a slow one, which neither knows offsets nor streams texts."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "The tokenizer must be a fast one, which knows where its tokens start, but "
            f"{type(tokenizer).__name__} is slow. Use a model that ships a tokenizer.json."
        )


class TextStream:
    """Gives the text that each token adds. A character of several tokens belongs to the last of them.

    Args:
        tokenizer: A fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stream = DecodeStream(skip_special_tokens=False)
        # Tokens that have added no text yet.
        self.begun: list[int] = []

    def step(self, token_id: int) -> str:
        """Return the text that a token adds; it may be empty."""
        self.begun.append(token_id)
        try:
            text = self.stream.step(self.tokenizer.backend_tokenizer, token_id) or ""
        except Exception as error:  # tokenizers has no class of its own
            # A tokenizer with byte fallback, such as Llama 2's, takes back a character if the bytes after it
            # are none.
            if "Invalid prefix" not in str(error):
                raise
            text = self.end()
            self.stream = DecodeStream([token_id], skip_special_tokens=False)
        if text:
            self.begun = []
        return text

    def end(self) -> str:
        """Return the text of a character that was begun."""
        return decode(self.tokenizer, self.begun)


def decode_each(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Return the text that each token adds, as `TextStream` does; the last one may have begun a character."""
    stream = TextStream(tokenizer)
    texts = [stream.step(token_id) for token_id in token_ids]
    if texts:
        texts[-1] += stream.end()
    return texts


def start_of_tag(tokenizer: Any, token_ids: list[int], tag: str) -> int:
    """Return the index of the token that holds the tag's first character; the text must end with the tag.

    Raises:
        ValueError: If it does not.
    """
    # Each token holds at least one byte of the tag.
    shortest = max(0, len(token_ids) - len(tag.encode()))
    for start in range(len(token_ids) - 1, shortest - 1, -1):
        if tag in decode(tokenizer, token_ids[start:]):
            return start
    raise ValueError(
        f"A completion that finished with 'stop' must end with {tag}, but its last tokens read "
        f"{decode(tokenizer, token_ids[shortest:])!r}. Check the engine that sampled it."
    )


class StopWatcher:
    """Tell whether a token sequence has just ended, by its end tag or by an end-of-sequence token."""

    def __init__(self, tokenizer: Any, stop: str, eos_token_ids: set[int]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.eos_token_ids = eos_token_ids
        # Each token of the tag carries at least one byte of it, so it fits into this many tokens.
        self.window = len(stop.encode()) + 1
        # Token id -> whether the tag's last character may be in its text.
        self.may_end: dict[int, bool] = {}

    def finish_reason(self, token_ids: list[int]) -> FinishReason:
        """Return "stop" or "eos" when the last token ends the sequence, else "length"."""
        last = token_ids[-1]
        if last in self.eos_token_ids:
            return "eos"
        if last not in self.may_end:
            text = decode(self.tokenizer, [last])
            # The token may hold only a part of a character, which decodes to U+FFFD.
            self.may_end[last] = bool(self.stop) and (self.stop[-1] in text or "\ufffd" in text)
        if self.may_end[last] and self.stop in decode(self.tokenizer, token_ids[-self.window :]):
            return "stop"
        return "length"


@dataclass(frozen=True)
class TagStyle:
    """The tags around thoughts, solutions and explanations, and the separator between a tag and its content.

    Raises:
        InputError: If a tag is empty, or occurs in another one.
    """

    thought_open: str
    thought_close: str
    solution_open: str
    solution_close: str
    explanation_open: str
    explanation_close: str
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        tags = self.tags()
        if empty := [name for name, tag in tags.items() if not tag.strip()]:
            raise InputError(
                f"Every tag must have text, but {', '.join(empty)} is empty. Fill it in data.tags."
            )
        for name, tag in tags.items():
            for other_name, text in tags.items():
                if name != other_name and tag in text:
                    raise InputError(
                        f"No tag may occur in another one, but {name} '{tag}' is in {other_name} '{text}'. "
                        "Choose six different tags in data.tags."
                    )

    def tags(self) -> dict[str, str]:
        """Return the six tags by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "separator"}

    def fill(self, text: str) -> str:
        """Replace placeholders such as {thought_open} by the tags; other braces stay."""
        return fill_template(text, self.tags())

    def translate(self, text: str, style: TagStyle) -> str:
        """Replace these tags in a text by those of another style."""
        for name, tag in self.tags().items():
            text = text.replace(tag, style.tags()[name])
        return text

    def wrap(self, text: str) -> str:
        """Replace the white space on both sides of a text by the separator."""
        return self.separator + text.strip() + self.separator


STRATOS = TagStyle(
    "<|begin_of_thought|>",
    "<|end_of_thought|>",
    "<|begin_of_solution|>",
    "<|end_of_solution|>",
    "<|begin_of_explanation|>",
    "<|end_of_explanation|>",
    separator="\n\n",
)

R1 = TagStyle(
    "<think>", "</think>", "<solution>", "</solution>", "<explanation>", "</explanation>", separator="\n"
)

TAG_STYLES = {"stratos": STRATOS, "r1": R1}


def fill_template(template: str, values: dict[str, str]) -> str:
    """Replace each `{name}` in a template by its value; no other brace is touched, nor one in a value."""
    names = "|".join(values)
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


def style_name(tags: TagStyle) -> str | dict[str, str]:
    """Return what data.tags must be for a style: its name if it is built in, else its fields."""
    names = [name for name, style in TAG_STYLES.items() if style == tags]
    return names[0] if names else {**tags.tags(), "separator": tags.separator}


def tag_style(tags: str | TagStyle) -> TagStyle:
    """Look up a built-in tag style by its name; a TagStyle is returned unchanged."""
    if isinstance(tags, TagStyle):
        return tags
    if tags not in TAG_STYLES:
        raise InputError(
            f"data.tags must be {' or '.join(TAG_STYLES)} or a mapping with the fields of TagStyle, "
            f"but got '{tags}'. Choose one of them."
        )
    return TAG_STYLES[tags]
