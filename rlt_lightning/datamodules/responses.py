"""Take a model's whole response apart: its thought and its solution, whatever marks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlt_lightning.datamodules.bad_rows import NumberedRow
from rlt_lightning.datamodules.rows import QUESTION_COLUMNS, TRACE_COLUMN, split_turns
from rlt_lightning.judging.answers import reference_answer
from rlt_lightning.tags import R1, STRATOS, TagStyle
from rlt_lightning.types import BadRowError, BadRowReason

# Models that write no tags, such as QwQ-32B-Preview, begin their solution with such a line.
HEADING = re.compile(r"^[ \t]*(?:#+ *|\*\*)final (?:answer|solution):?(?:\*\*)?:?[ \t]*$", re.M | re.I)
BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
LINE_END = re.compile(r"[ \t]*\r?\n")


def holds_tag(text: str, tags: TagStyle) -> bool:
    """Return whether a text holds a tag that a student would take for the end of its thought."""
    return tags.occur_in(text) or STRATOS.occur_in(text)


def split_response(response: str, tags: TagStyle) -> tuple[str, str] | None:
    """Return the thought and the solution, stripped, of a response that has each tag once and in order.

    The solution is then the text in which a judge looks for the answer.

    Returns:
        None if a tag is missing or repeated, or if thought or solution have no text.
    """
    parts, rest = [], response
    for tag in (tags.thought_open, tags.thought_close, tags.solution_open, tags.solution_close):
        part, found, rest = rest.partition(tag)
        if not found:
            return None
        parts.append(part)
    if any(holds_tag(part, tags) for part in (*parts, rest)):
        return None
    return strip_both(parts[1], parts[3])


def split_raw(response: str, tags: TagStyle) -> tuple[str, str] | None:
    """Return the thought and the solution of any model's response, stripped.

    Tried in this order: the tags in use, those of Bespoke-Stratos, `<think>…</think>` before the solution
    (the first tag may be missing, since some prompts end with it), and a line such as `**Final Answer**`.
    """
    for style in (tags, STRATOS):
        if found := split_response(response, style):
            return found
    if R1.thought_close in response:
        thought, _, solution = response.partition(R1.thought_close)
        found = strip_both(thought.strip().removeprefix(R1.thought_open), solution)
        return None if found is None or any(holds_tag(part, R1) for part in found) else found
    headings = list(HEADING.finditer(response))
    if not headings or holds_tag(response, R1):
        return None
    return strip_both(response[: headings[-1].start()], response[headings[-1].end() :])


def strip_both(thought: str, solution: str) -> tuple[str, str] | None:
    """Return two texts without the white space around them; None if one of them is empty."""
    thought, solution = thought.strip(), solution.strip()
    return (thought, solution) if thought and solution else None


def tidy_response(thought: str, solution: str) -> tuple[str, str]:
    """Reformat a response by rules: a part of what others let a language model rewrite.

    White space at line ends and repeated blank lines are removed. The thought ends where it announces its
    final answer, which the solution gives; the solution loses that line.
    """
    headings = list(HEADING.finditer(thought))
    if headings and thought[: headings[-1].start()].strip():
        thought = thought[: headings[-1].start()]
    solution = HEADING.sub("", solution) if HEADING.sub("", solution).strip() else solution
    thought, solution = (
        BLANK_LINES.sub("\n\n", LINE_END.sub("\n", text)).strip() for text in (thought, solution)
    )
    return thought, solution


@dataclass(frozen=True)
class RawResponses:
    """How rows with a model's whole response are read: its parts replace `reasoning_trace` and `solution`.

    Args:
        column: Column of the response: a text, a list of texts (several responses), or a list of turns. None:
            rows have a trace and a solution of their own.
        tidy: Whether responses are reformatted by rules; see `tidy_response`.
    """

    column: str | None = None
    tidy: bool = False

    def split_rows(self, rows: Iterable[NumberedRow], tags: TagStyle) -> Iterator[NumberedRow]:
        """Return a row per response, with the number of the row that it came from."""
        if self.column is None:
            return iter(rows)
        return (
            (number, made)
            for number, columns in rows
            for made in ([columns] if isinstance(columns, BadRowError) else self._rows_of(columns, tags))
        )

    def _rows_of(self, columns: dict[str, Any], tags: TagStyle) -> Iterator[dict[str, Any] | BadRowError]:
        value = columns.get(str(self.column))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            try:
                _, question, value = split_turns(value)
            except BadRowError as error:
                yield error
                return
            columns = {QUESTION_COLUMNS[0]: question, **columns}
        for response in value if isinstance(value, list) and value else [value]:
            yield self._row(columns, response, tags)

    def _row(self, columns: dict[str, Any], response: Any, tags: TagStyle) -> dict[str, Any] | BadRowError:
        if not isinstance(response, str):
            kind = "missing" if response is None else f"a {type(response).__name__}"
            reason = BadRowReason.MISSING_COLUMN if response is None else BadRowReason.WRONG_TYPE
            return BadRowError(reason, f"{self.column} must be a response's text, but is {kind}")
        if (parts := split_raw(response, tags)) is None:
            detail = f"{self.column} has no tags or heading that part a thought from a solution"
            return BadRowError(BadRowReason.MISSING_TAGS, detail)
        thought, solution = tidy_response(*parts) if self.tidy else parts
        kept = {n: v for n, v in columns.items() if n not in (self.column, "conversations")}
        # The right answer must outlive the solution that held it.
        if kept.get("kind", "math") != "countdown" and (answer := reference_answer(kept)) is not None:
            kept["answer"] = answer
        return {**kept, TRACE_COLUMN: thought, "solution": solution}
