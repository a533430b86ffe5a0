"""Show an answer in a terminal as it arrives, its thought dimmed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Literal

from rlt_lightning.tags import TagStyle

Kind = Literal["plain", "thought", "solution", "tag"]
STYLES: dict[Kind, str] = {"thought": "\x1b[2m", "solution": "\x1b[1;32m"}  # dim; bold and green
RESET = "\x1b[0m"
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Screen:
    """One answer on standard output: as it is, or on a terminal with styles in place of the tags."""

    def __init__(self, tags: TagStyle) -> None:
        self.splitter = TagSplitter(tags)
        self.terminal = sys.stdout.isatty()
        self.styled = self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, piece: str) -> None:
        """Write a piece at once, but for what may be the beginning of a tag."""
        if not self.styled:
            write(piece, self.terminal)
            return
        for kind, text in self.splitter.feed(piece):
            self._write_styled(kind, text)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        if self.styled:
            self._write_styled(*self.splitter.rest())
        write("\n", self.terminal)

    def _write_styled(self, kind: Kind, text: str) -> None:
        if kind != "tag" and text:
            write(text, self.terminal, STYLES.get(kind, ""))


def write(text: str, terminal: bool, style: str = "") -> None:
    """Write to standard output; a terminal is spared the control characters that a model may write."""
    text = text.translate(CONTROLS) if terminal else text
    sys.stdout.write(f"{style}{text}{RESET}" if style else text)
    sys.stdout.flush()


class TagSplitter:
    """Tell thought, solution and the rest apart in a text whose tags may arrive in pieces."""

    def __init__(self, tags: TagStyle) -> None:
        self.begins: dict[str, Kind] = {  # what follows each tag
            tags.thought_open: "thought",
            tags.thought_close: "plain",
            tags.solution_open: "solution",
            tags.solution_close: "plain",
        }
        self.kind: Kind = "plain"
        self.pending = ""  # may be the beginning of a tag

    def feed(self, piece: str) -> Iterator[tuple[Kind, str]]:
        """Yield what is certain with this piece, tags as pieces of their own."""
        self.pending += piece
        while found := [tag for tag in self.begins if tag in self.pending]:
            tag = min(found, key=self.pending.index)
            before, _, self.pending = self.pending.partition(tag)
            yield self.kind, before
            yield "tag", tag
            self.kind = self.begins[tag]
        certain = len(self.pending) - max(map(self._num_begun, self.begins))
        yield self.kind, self.pending[:certain]
        self.pending = self.pending[certain:]

    def rest(self) -> tuple[Kind, str]:
        """What was held back, at the end of the text."""
        text, self.pending = self.pending, ""
        return self.kind, text

    def _num_begun(self, tag: str) -> int:
        """Number of characters at the end that are a beginning of this tag."""
        return next(n for n in range(len(tag) - 1, -1, -1) if self.pending.endswith(tag[:n]))
