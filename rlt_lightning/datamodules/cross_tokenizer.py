"""Tokenise for a student whose tokenizer is not the teacher's: it reads the explanation in its tokens.

    teacher's tokens ─▶ bytes ─▶ text ─▶ student's tokens          ByteExactTokenizer
           └──────────── ends ───────────── ends ────▶ spans       split_spans (numerics/spans.py)

Its tokenizer and its chat format are used for question and solution too.

Two kinds of tokenizers have tokens whose bytes are known:

    byte-level BPE      Qwen, Llama 3, SmolLM2, GPT-2: each character of a token's name stands for one byte
    with "▁" for a      Llama 2, Gemma, Mistral: a token's name is its text; <0x0A> is a single byte
      space

Any other kind is refused.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from rlt_lightning.datamodules.control_tokens import BYTE_TOKEN, SPACE, hide_word, hide_words
from rlt_lightning.datamodules.formats import SENTINEL, ChatFormat, encode_pieces
from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.numerics.spans import Span, split_spans
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import Completion, InputError, ModelView, Problem, Rollout, SFTExample

REPLACEMENT = "\ufffd"
# What every tokenizer must spell: ASCII, and characters of two, three and four bytes.
PROBE = "".join(map(chr, range(0x20, 0x7F))) + " So x = 12345.\n\n\t\\frac{1}{2} é e\u0301 \ufb01 Ω\u2126 Ж"
PROBE += " 数学 🧮👩🏽‍🏫 \ufffd <|im_end|></s>\n\n"


def build_byte_table() -> dict[str, int]:
    """Return which byte a character stands for in the names of byte-level tokens.

    Printable bytes of Latin-1 stand for themselves; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + index): b for index, b in enumerate(others)}


BYTES = build_byte_table()


class CrossTokenizerFormat(ChatFormat):
    """The contexts of a teacher and of a student with different tokenizers.

    Args:
        tokenizer: The teacher's, see `ChatFormat`.
        student_tokenizer: The student's.
        tags: See `ChatFormat`; likewise the others.
        teacher_system_prompt: None for ours.
        student_system_prompt: None for ours.
        student_tags: None: the same as the teacher's.
        thinks: See `ChatFormat`: the "teacher" is then the model that thinks, the "student" one that reads.

    Raises:
        InputError: If the bytes of either tokenizer's tokens cannot be known, a ChatFormat of either cannot
            be made, or the student's tokenizer glues the separator to the closing tag.
    """

    student: ChatFormat

    def __init__(
        self,
        tokenizer: Any,
        student_tokenizer: Any,
        tags: str | TagStyle = "stratos",
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        student_tags: str | TagStyle | None = None,
        thinks: bool = False,
    ) -> None:
        prompts = teacher_system_prompt, student_system_prompt
        super().__init__(tokenizer, tags, *prompts, student_tags, fills=False, thinks=thinks)
        # Never asked for a teacher's chat, which its template may not know.
        self.student = ChatFormat(
            student_tokenizer, tags, "", self.student_system_prompt, student_tags, fills=False
        )
        self.student_tokenizer = student_tokenizer
        self.teachers_text = ByteExactTokenizer(tokenizer, "teacher")
        self.students_text = ByteExactTokenizer(student_tokenizer, "student")
        tags_read = self.student_tags
        before = SENTINEL + tags_read.separator
        _, closing = encode_pieces(student_tokenizer, [before, tags_read.thought_close])
        if b"".join(map(self.students_text.decode_bytes, closing)) != tags_read.thought_close.encode():
            raise InputError(
                "The student's tokenizer must divide the separator from the tag after it, but "
                f"{tags_read.separator!r} shares a token with {tags_read.thought_close!r}. Set other "
                "data.student_tags."
            )
        separator = tags_read.separator if tags_read.separator != self.tags.separator else ""
        self.after_explanation = separator + tags_read.thought_close

    def build_problem(
        self,
        row_number: int,
        question: str,
        solution: str,
        student_system_prompt: str | None = None,
        columns: dict[str, Any] | None = None,
    ) -> Problem:
        """See `ChatFormat.build_problem`; the student's pieces are in its tokens, without a separator."""
        texts = row_number, question, solution, student_system_prompt
        teachers, students = super().build_problem(*texts, columns), self.student.build_problem(*texts)
        return replace(
            teachers,
            teacher_prefix=teachers.teacher_prompt,
            think_prefix=[],
            student_prefix=students.student_prefix + students.think_prefix,
            student_suffix=students.student_suffix,
            solution_ids=students.solution_ids,
        )

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """See `ChatFormat.build_rollout`; the student reads the explanation in its tokens.

        r_KL counts the spans that hold the explanation. If the student's tokens glue the separator after it
        to its last character, the last span holds that too. Tokens of a character that is incomplete at the
        end are in no span.
        """
        rollout = super().build_rollout(problem, completion)
        written = rollout.require_view()  # in the teacher's tokens
        text, ends = self.students_text.spellable(*self.teachers_text.decode_text(written.token_ids))
        token_ids, student_ends = self.students_text.encode(text, self.after_explanation)
        spans: list[Span] = []
        num_tokens = 0
        for span in split_spans(ends, student_ends):
            if num_tokens >= written.num_tokens:
                break
            spans.append(span)
            num_tokens += span[0]
        view = ModelView(
            problem,
            completion,
            token_ids,
            num_tokens,
            num_own=sum(num_student for _, num_student in spans),
            spans=spans,
            num_left_out=max(0, written.num_tokens - num_tokens),
        )
        return replace(rollout, view=view)

    def count_read_tokens(self, problem: Problem, completion: Completion) -> int:
        """See `ChatFormat.count_read_tokens`."""
        return len(self.build_rollout(problem, completion).require_view().token_ids)

    def build_student_sft_example(
        self,
        row_number: int,
        question: str,
        thought: str,
        solution: str,
        student_system_prompt: str | None = None,
    ) -> SFTExample:
        """See `ChatFormat.build_student_sft_example`; in the student's tokens."""
        texts = question, thought, solution, student_system_prompt
        return self.student.build_student_sft_example(row_number, *texts)


def load_tokenizers(name: str, student: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a model's tokenizer and, if token ids cannot pass between them, that of its student.

    Returns:
        The model's tokenizer, and the student's; None if every token of the model has the same number in the
        student's vocabulary, so that explanations pass between them as token ids.
    """
    tokenizer = load_tokenizer(name, trust_remote_code)
    if student is None or student == name:
        return tokenizer, None
    students = load_tokenizer(student, trust_remote_code)
    shares = tokenizer.get_vocab().items() <= students.get_vocab().items()
    return tokenizer, None if shares else students


class ByteExactTokenizer:
    """A tokenizer that takes every text as the continuation of a text, byte by byte.

    It differs from the tokenizer that it is made of where that one would change or interpret a text:

    - Added tokens are not recognised, whether they are called special or not: `<|im_end|>` or `<think>` in a
      text become ordinary tokens that spell it. Gemma's, of white space only, stay.
    - Nothing is put before the text, and nothing is normalised, so that the tokens have exactly its bytes.

    Args:
        tokenizer: A fast tokenizer.
        role: Whose it is, for the message.

    Raises:
        InputError: If the bytes of its tokens cannot be known, or are not those of the text.
    """

    def __init__(self, tokenizer: Any, role: str) -> None:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        self.role = role
        self.added: dict[int, str] = {token["id"]: token["content"] for token in described["added_tokens"]}
        self.is_byte_level = any(
            part["type"] == "ByteLevel" for part in iterate_parts(described["pre_tokenizer"])
        )
        self.known: dict[int, bytes] = {}
        self.spelled: dict[str, bool] = {}  # whether there are tokens for a character
        self.tokenizer = Tokenizer.from_str(json.dumps(simplify_description(described)))
        if not self._spells(PROBE):
            raise InputError(
                f"A {role} whose tokenizer is not the other model's must have tokens whose bytes are known: "
                f"byte-level BPE, or {SPACE!r} for a space and tokens for single bytes. But the tokens of "
                f"this {role}'s {type(tokenizer).__name__} do not rejoin to a text. Use another model, or "
                "two of one family."
            )

    def decode_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; of an added token those of its text."""
        if token_id not in self.known:
            self.known[token_id] = self._decode_bytes(token_id)
        return self.known[token_id]

    def decode_text(self, token_ids: list[int]) -> tuple[str, list[int]]:
        """Return the text of tokens, and where each of them ends in it, in bytes.

        Bytes that are no character become U+FFFD. A character that is incomplete at the end is left out: the
        tokens that hold it end one byte after the text.
        """
        pieces = [self.decode_bytes(token_id) for token_id in token_ids]
        data, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
        try:
            return data.decode(), ends
        except UnicodeDecodeError:
            return repair_text(data, ends)

    def encode(self, text: str, following: str = "") -> tuple[list[int], list[int]]:
        """Tokenise a text as it stands before another one.

        Args:
            text: The text.
            following: What follows it. It decides how line breaks at the text's end are tokenised; where a
                token would hold parts of both, the text is tokenised by itself.

        Returns:
            The tokens of the text, and where each of them ends in it, in bytes.

        Raises:
            InputError: If their bytes are not those of the text; see `spellable`.
        """
        length = len(text.encode())
        if not text:
            return [], []
        for context in dict.fromkeys((following, "")):
            ids = self.tokenizer.encode(text + context, add_special_tokens=False).ids
            ends = self._ends(ids, text + context)
            if ends is not None and length in ends:
                number = bisect_right(ends, length)
                return ids[:number], ends[:number]
        # A unigram tokenizer takes "<0x0A>" in a text for that byte.
        ids = []
        for index, part in enumerate(BYTE_TOKEN.split(text)):
            for piece in part if index % 2 else [part]:
                ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        if (ends := self._ends(ids, text)) is not None:
            return ids, ends
        raise InputError(
            f"The tokens of the {self.role}'s tokenizer must have the bytes of every text, but those of "
            f"{text[:60]!r} have others. Use another model, or two of one family."
        )

    def spellable(self, text: str, ends: list[int]) -> tuple[str, list[int]]:
        """Return a text with U+FFFD for each character that the tokenizer has no tokens for.

        Some tokenizers lack rare control characters: SmolLM2's leaves U+0013 out of what it reads.

        Args:
            text: The text.
            ends: Places in it, in bytes, never decreasing.

        Returns:
            The text, and the same indices in it.
        """
        characters = set(text)
        self.spelled |= {c: self._spells(c) for c in characters - self.spelled.keys()}
        if all(self.spelled[c] for c in characters):
            return text, ends
        return place_ends([(c if self.spelled[c] else REPLACEMENT, c.encode()) for c in text], ends)

    # Helpers

    def _spells(self, text: str) -> bool:
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            # The library's class, for a word that is not in the vocabulary. A class derived from it is
            # another fault.
            if type(error) is not Exception:
                raise
            return False
        return self._ends(ids, text) is not None

    def _decode_bytes(self, token_id: int) -> bytes:
        name = self.added.get(token_id) or self.tokenizer.id_to_token(token_id)
        if name is None:  # a row of the embedding that no token uses
            return b""
        if self.is_byte_level and token_id in self.added:
            return name.encode()
        if self.is_byte_level and all(character in BYTES for character in name):
            return bytes(BYTES[character] for character in name)
        if match := BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1][3:5], 16)])
        return name.replace(SPACE, " ").encode()

    def _ends(self, token_ids: list[int], text: str) -> list[int] | None:
        """Return where tokens end in a text, in bytes; None if their bytes are not those of the text."""
        data, end, ends = text.encode(), 0, []
        for token_id in token_ids:
            piece = self.decode_bytes(token_id)
            if data.startswith(piece, end):
                end += len(piece)
            elif not self.is_byte_level and b" " in piece:
                # Such a tokenizer reads the character ▁ of a text as a space.
                for part in re.split(b"( )", piece):
                    found = SPACE.encode() if part == b" " and not data.startswith(b" ", end) else part
                    if not data.startswith(found, end):
                        return None
                    end += len(found)
            else:
                return None
            ends.append(end)
        return ends if end == len(data) else None


def simplify_description(described: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's description, changed as `ByteExactTokenizer` says."""
    stay = [token for token in described["added_tokens"] if token["content"].replace(SPACE, " ").isspace()]
    controls = {token["content"] for token in described["added_tokens"] if token not in stay}
    model, pre_tokenizer = dict(described["model"]), described["pre_tokenizer"]
    model |= {"dropout": None, "unk_token": None} if model["type"] == "BPE" else {}
    # A control token that is also in the model's vocabulary keeps its number there, under another name.
    model = hide_words(model, {word: hide_word(i) for i, word in enumerate(sorted(controls))})
    for part in iterate_parts(pre_tokenizer):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    spaces = [part for part in iterate_parts(described["normalizer"]) if part.get("content") == SPACE]
    return described | {
        "added_tokens": stay,
        "normalizer": {"type": "Sequence", "normalizers": spaces} if spaces else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": model,
    }


def iterate_parts(described: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if described is None:
        return
    inner = described.get("normalizers") or described.get("pretokenizers")
    if inner is None:
        yield described
    for part in inner or []:
        yield from iterate_parts(part)


def repair_text(data: bytes, ends: list[int]) -> tuple[str, list[int]]:
    """Return the text of bytes that may be invalid UTF-8, and map indices of its bytes to those of the text.

    Args:
        data: The bytes.
        ends: Places in them, never decreasing.

    Returns:
        The text, with U+FFFD for what is no character and without an incomplete character at its end; and the
        indices, in bytes of the text. What lies in an incomplete character ends one byte after the text.
    """
    pieces: list[tuple[str, bytes]] = []
    start = 0
    while start < len(data):
        try:
            part, bad, reason = data[start:].decode(), b"", ""
        except UnicodeDecodeError as error:
            part = data[start : start + error.start].decode()
            bad, reason = data[start + error.start : start + error.end], error.reason
        pieces += [(character, character.encode()) for character in part]
        start += len(part.encode()) + len(bad)
        if bad and not (start == len(data) and reason == "unexpected end of data"):
            pieces.append((REPLACEMENT, bad))
    return place_ends(pieces, ends)


def place_ends(pieces: list[tuple[str, bytes]], ends: list[int]) -> tuple[str, list[int]]:
    """Join characters to a text, and map indices of the bytes that they stand for to indices of the text.

    Args:
        pieces: Each character with the bytes that it stands for.
        ends: Places in those bytes, never decreasing.

    Returns:
        The text; and the indices, in its bytes: of an index within a character that character's end, and
        one byte after the text for indices after it.
    """
    text = "".join(character for character, _ in pieces)
    old = list(accumulate((len(stood) for _, stood in pieces), initial=0))
    new = list(accumulate((len(character.encode()) for character, _ in pieces), initial=0))
    return text, [new[i] if (i := bisect_left(old, end)) < len(old) else new[-1] + 1 for end in ends]
