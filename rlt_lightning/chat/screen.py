"""Show an answer in a terminal as it arrives: the thought dimmed, the solution highlighted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

from rlt_lightning.models.announce import has_styles
from rlt_lightning.tags import CONTROL_CODES, TagStyle

Part = Literal["plain", "thought", "solution", "tag"]
# Dim; bold and green.
STYLES: dict[Part, str] = {"thought": "\x1b[2m", "solution": "\x1b[1;32m"}
RESET = "\x1b[0m"
# Replaces control characters, which would change the terminal; line ends and tabs stay. Marks of direction
# stay too: an answer in Arabic or Hebrew needs them. scoring/explain.py replaces them, since they
# would reorder its tokens.
WITHOUT_CONTROLS = {code: "\ufffd" for code in CONTROL_CODES if chr(code) not in "\n\t"}


class Screen:
    """One answer on standard output: on a terminal with styles in place of the tags, elsewhere unchanged."""

    def __init__(self, tags: TagStyle) -> None:
        self.splitter = TagSplitter(tags)
        self.terminal = sys.stdout.isatty()
        self.styled = has_styles()

    def show(self, piece: str) -> None:
        """Write a piece, except for an end that may be the beginning of a tag."""
        if not self.styled:
            write(piece, self.terminal)
            return
        for part, text in self.splitter.feed(piece):
            self._write_styled(part, text)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        if self.styled:
            self._write_styled(*self.splitter.flush())
        write("\n", self.terminal)

    def _write_styled(self, part: Part, text: str) -> None:
        if part != "tag" and text:
            write(text, self.terminal, STYLES.get(part, ""))


def write(text: str, terminal: bool, style: str = "") -> None:
    """Write to standard output; a terminal gets no control characters, which a model may write."""
    text = text.translate(WITHOUT_CONTROLS) if terminal else text
    sys.stdout.write(f"{style}{text}{RESET}" if style else text)
    sys.stdout.flush()


class TagSplitter:
    """Split a text into thought, solution and other parts, although its tags may arrive in pieces.

    With the tags of "r1", the pieces "<thi" and "nk>Add" give ("tag", "<think>"), ("thought", "Add") and
    empty texts.
    """

    def __init__(self, tags: TagStyle) -> None:
        # The part that follows each tag.
        self.begins: dict[str, Part] = {
            tags.thought_open: "thought",
            tags.thought_close: "plain",
            tags.solution_open: "solution",
            tags.solution_close: "plain",
        }
        self.part: Part = "plain"
        self.pending = ""  # may be the beginning of a tag

    def feed(self, piece: str) -> Iterator[tuple[Part, str]]:
        """Yield the texts that are certain with this piece; each tag is yielded separately."""
        self.pending += piece
        while found := [tag for tag in self.begins if tag in self.pending]:
            tag = min(found, key=self.pending.index)
            before, _, self.pending = self.pending.partition(tag)
            yield self.part, before
            yield "tag", tag
            self.part = self.begins[tag]
        certain = len(self.pending) - max(map(self._num_begun, self.begins))
        yield self.part, self.pending[:certain]
        self.pending = self.pending[certain:]

    def flush(self) -> tuple[Part, str]:
        """Return the text that is still pending when the answer has ended."""
        text, self.pending = self.pending, ""
        return self.part, text

    def _num_begun(self, tag: str) -> int:
        """Return the number of characters at the end that may begin this tag."""
        return next(n for n in range(len(tag) - 1, -1, -1) if self.pending.endswith(tag[:n]))
