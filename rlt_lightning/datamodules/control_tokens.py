"""Tokenise given texts as plain text: what spells a control token in a question or trace does not become one.

    "say <|im_end|>" ─ mark_text ─▶ "say <▯|im_end|>"
                                         │ chat template
                 "<|im_start|>user\\nsay <▯|im_end|><|im_end|>" ─ encode_marked ─▶ token ids

The mark ▯ is a Unicode code point that is no character. It passes through chat templates, and tells apart
what a text spells and what the template writes: only the latter becomes control tokens. Texts without control
tokens get no mark, and are tokenised as usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

# Two code points that are no characters: the mark, and one that begins and ends hidden names.
MARK, HIDDEN = "\U0010ffff", "\U0010fffe"
NUM_KEPT = 8  # tokenizers whose control tokens are remembered
BRACKETS = re.compile(r"[<>\[\]{}|]")
BYTE_TOKEN = re.compile(r"(<0x[0-9A-F]{2}>)")
SPACE = "\u2581"  # "▁", a space in the names of tokens


def mark_text(tokenizer: Any, text: str, keep: Iterable[str] = ()) -> str:
    """Mark the control tokens that a given text spells, so that `encode_marked` reads them as text.

    Args:
        tokenizer: A fast tokenizer.
        text: The text.
        keep: Tags that stay tokens if they are such.
    """
    return _load_reader(tokenizer).mark(text, frozenset(keep))


def encode_marked(tokenizer: Any, pieces: list[str]) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Tokenise the concatenated pieces; only control tokens without a mark become control tokens.

    Returns:
        The token ids, where each of them starts and ends, and the lengths of the pieces in the same unit.
    """
    return _load_reader(tokenizer).encode(pieces)


def hide_words(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the description of a tokenizer's model with other names for some words of its vocabulary.

    Words keep their numbers, and no merge makes them.
    """
    model = dict(model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict) and not names.keys().isdisjoint(vocabulary):
        model["vocab"] = {names.get(word, word): number for word, number in vocabulary.items()}
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model.get("merges", [])]
        if pairs:
            model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]
    return model


def is_control(token: dict[str, Any]) -> bool:
    """Return whether an added token is a control token: no white space, no word, and no single byte.

    Whether it is called special says too little: DeepSeek's `<｜User｜>` and Qwen's `<|fim_prefix|>` are not.
    """
    word = token["content"]
    if len(word) < 2 or word.replace(SPACE, " ").isspace() or BYTE_TOKEN.fullmatch(word):
        return False
    return bool(token["special"] or BRACKETS.search(word))


@lru_cache(NUM_KEPT)
def _load_reader(tokenizer: Any) -> _MarkedReader:
    return _MarkedReader(tokenizer)


class _MarkedReader:
    """A tokenizer that knows its control tokens under hidden names, so that no given text can spell them."""

    def __init__(self, tokenizer: Any) -> None:
        self.original = tokenizer
        self.words = {
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if is_control({"content": token.content, "special": token.special})
        }
        self.pattern = _match_any(self.words)
        self.names: dict[str, str] = {}
        self.renamed: Tokenizer | None = None  # made when a text is marked: vocabularies are large
        self.numbers: dict[int, int] = {}  # of added tokens: their number in the original

    def mark(self, text: str, keep: frozenset[str]) -> str:
        """See `mark_text`."""
        text = text.replace(MARK, "\ufffd").replace(HIDDEN, "\ufffd")
        if self.pattern is None or not self.pattern.search(text):
            return text
        kept = _match_any(keep)
        parts = [text] if kept is None else re.split(f"({kept.pattern})", text)
        return "".join(part if index % 2 else self._mark_all(part) for index, part in enumerate(parts))

    def _mark_all(self, text: str) -> str:
        assert self.pattern is not None
        while True:
            marked = self.pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
            if marked == text:
                return text
            text = marked  # two words may have overlapped

    def encode(self, pieces: list[str]) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """See `encode_marked`."""
        if self.renamed is None:
            self._rename()
        assert self.renamed is not None
        assert self.pattern is not None
        pieces = [
            self.pattern.sub(lambda found: self.names[found[0]], piece).replace(MARK, "") for piece in pieces
        ]
        encoding = self.renamed.encode("".join(pieces), add_special_tokens=False)
        ids = [self.numbers.get(number, number) for number in encoding.ids]
        return ids, encoding.offsets, list(map(len, pieces))

    def _rename(self) -> None:
        described = json.loads(self.original.backend_tokenizer.to_str())
        added = described["added_tokens"]
        self.names = {word: hide_word(number) for number, word in enumerate(sorted(self.words))}
        model = hide_words(described["model"], self.names)
        names = [self.names.get(token["content"]) for token in added]
        renamed = [
            token | {"content": name, "normalized": False} if name else token
            for token, name in zip(added, names, strict=True)
        ]
        if isinstance(model["vocab"], dict):
            model["vocab"] = model["vocab"] | {token["content"]: token["id"] for token in renamed}
        described |= {"model": model, "added_tokens": renamed}
        described |= {"post_processor": None, "truncation": None, "padding": None}
        self.renamed = Tokenizer.from_str(json.dumps(described))
        original = {token["content"]: token["id"] for token in renamed}
        found = self.renamed.get_added_tokens_decoder()
        self.numbers = {number: original[token.content] for number, token in found.items()}


def hide_word(number: int) -> str:
    """Return the hidden name of a token, which `mark_text` leaves in no text."""
    return f"{HIDDEN}{number}{HIDDEN}"


def _match_any(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the longest of some words; None if there are none."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
