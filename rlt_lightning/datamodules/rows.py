"""Parse the rows of any source: which texts they hold, or why they cannot be used.

columns ─▶ parse_row ─▶ ParsedRow       question, solution, traces
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlt_lightning.judging.answers import read_reference
from rlt_lightning.tags import R1, STRATOS, TagStyle, holds_half_pair
from rlt_lightning.tasks.countdown import require_counts
from rlt_lightning.types import BadRowError, BadRowReason

QUESTION_COLUMNS = ("question", "prompt", "problem")  # the first that holds a text
TRACE_COLUMN = "reasoning_trace"  # Bespoke-Stratos rows have it between the thought tags


def find_question(columns: Mapping[str, Any], names: Sequence[str] = QUESTION_COLUMNS) -> Any:
    """Return a row's question: the first column that holds text, else the text of a user's only turn.

    A text of digits is a number of the row if another column holds words. If there is no text, what the first
    column holds that is not missing.
    """
    values = [columns[name] for name in names if columns.get(name) is not None]
    turns = [value[0] for value in values if isinstance(value, list) and len(value) == 1]
    asked = [turn.get("content") for turn in turns if isinstance(turn, dict) and turn.get("role") == "user"]
    texts = [value for value in [*values, *asked] if has_text(value)]
    return min(texts, key=lambda text: text.strip().isdecimal(), default=next(iter(values), None))


def has_text(value: Any) -> bool:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def keep_columns(columns: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Return a source's columns; one with a name that we write becomes `source_NAME`."""
    kept: dict[str, Any] = {}
    for name, value in columns.items():
        key = name
        while key in taken or (key != name and key in columns):
            key = f"source_{key}"
        kept[key] = value
    return kept


def fill_solution(columns: dict[str, Any]) -> dict[str, Any]:
    """Use a row's answer as its solution if it has none: judging an answer needs no more."""
    if columns.get("conversations") or columns.get("solution"):
        return columns
    answer = columns.get("answer")
    return columns if answer is None else columns | {"solution": str(answer)}


def require_judgeable(reference: Mapping[str, Any]) -> None:
    """Reject a row that cannot serve to judge answers.

    Raises:
        BadRowError: With what the row lacks.
    """
    kind = reference.get("kind", "math")
    if kind not in ("math", "choice", "countdown"):
        detail = f"kind must be math, choice or countdown, but is {kind}"
        raise BadRowError(BadRowReason.WRONG_TYPE, detail)
    if kind == "countdown":
        require_counts(reference.get("numbers"), reference.get("target"))
    else:
        read_reference(reference)


@dataclass(frozen=True)
class ParsedRow:
    """The texts of a row, whatever its columns are called."""

    question: str
    solution: str  # the text between the solution tags, surrounding newlines included
    traces: dict[str, str]  # by column, the text between the thought tags; '' without text
    completion: str | None  # raw generated text of a teacher
    system: str | None  # the row's system prompt for the student


def find_missing_columns(
    row: dict[str, Any], trace_columns: Sequence[str], allows_completion: bool
) -> list[str]:
    """Return the names of the columns that a row should have but has not."""
    has = set(row)
    if row.get("conversations"):
        has |= {"question", "solution", TRACE_COLUMN}
    if has & {*QUESTION_COLUMNS}:
        has.add("question")
    if allows_completion and "completion" in has:
        has.add(TRACE_COLUMN)
    return [name for name in ("question", "solution", *trace_columns) if name not in has]


def parse_row(
    row: dict[str, Any],
    tags: TagStyle,
    trace_columns: Sequence[str] = (),
    allows_completion: bool = False,
    student_tags: TagStyle | None = None,
    solution_in_tags: bool = True,
) -> ParsedRow:
    """Parse a row of Bespoke-Stratos' format, or one with question and solution.

    Args:
        row: The columns of the row.
        tags: The tags of the resulting texts. Text between the same tags in the row is kept unchanged; text
            between other tags gets the separator of `tags`.
        trace_columns: Names of the traces that the task needs.
        allows_completion: Whether a `completion` may replace `reasoning_trace`.
        student_tags: The tags of the row's system prompt, which is the student's; None: `tags`.
        solution_in_tags: Whether a model reads or writes the solution between tags, so that it may hold none.

    Raises:
        BadRowError: With the reason why the row cannot be used.
    """
    if missing := find_missing_columns(row, trace_columns, allows_completion):
        detail = (
            f"the row lacks {', '.join(missing)} and has {', '.join(sorted(map(str, row))) or 'no columns'}"
        )
        raise BadRowError(BadRowReason.MISSING_COLUMN, detail)
    is_turn = bool(row.get("conversations"))
    parsed = _parse_stratos(row, tags, student_tags or tags) if is_turn else _parse_custom(row, tags)
    if not parsed.question.strip():
        raise BadRowError(BadRowReason.EMPTY_QUESTION, "the question has no text")
    if not parsed.solution.strip():
        raise BadRowError(BadRowReason.EMPTY_SOLUTION, "the solution has no text")
    if solution_in_tags:
        _require_no_tag("solution", parsed.solution, tags, student_tags or tags, is_turn)
    has_completion = allows_completion and bool(parsed.completion)
    for name in trace_columns:
        if name not in parsed.traces:
            parsed.traces[name] = _trace(row, name, tags)
        if name == TRACE_COLUMN and has_completion:
            continue
        if not parsed.traces[name].strip():
            raise BadRowError(BadRowReason.EMPTY_TRACE, f"{name} has no text")
        _require_no_tag(
            name, parsed.traces[name], tags, student_tags or tags, is_turn and name == TRACE_COLUMN
        )
    return parsed


def _require_no_tag(column: str, text: str, tags: TagStyle, student_tags: TagStyle, is_turn: bool) -> None:
    """Reject a text with a tag: it would teach where a thought ends twice.

    Outside a conversation's turn, where the outer tags count, `<think>` marks a whole response.
    """
    tag = find_tag(text, tags, student_tags)
    if tag is None and not is_turn:
        tag = next((mark for mark in (R1.thought_open, R1.thought_close) if mark in text), None)
    if tag is not None:
        raise BadRowError(BadRowReason.EXTRA_TAG, f"{column} holds the tag {tag}")


def _parse_custom(row: dict[str, Any], tags: TagStyle) -> ParsedRow:
    return ParsedRow(
        question=_text(find_question(row), "question"),
        solution=tags.wrap(_text(row["solution"], "solution")),
        traces={TRACE_COLUMN: _trace(row, TRACE_COLUMN, tags)},
        completion=_text(row.get("completion"), "completion") or None,
        system=None,
    )


def _trace(row: dict[str, Any], column: str, tags: TagStyle) -> str:
    text = _text(row.get(column), column)
    return tags.wrap(text) if text.strip() else ""


def _parse_stratos(row: dict[str, Any], tags: TagStyle, student_tags: TagStyle) -> ParsedRow:
    own_system, question, answer = split_turns(_list(row["conversations"]))
    system = _text(row.get("system"), "system") or own_system
    if system is None and row.get("system") == "":
        # It was written without a system prompt.
        system = ""
    completion = _text(row.get("completion"), "completion") or None
    own_start, stratos_start = answer.find(tags.thought_open), answer.find(STRATOS.thought_open)
    # The outer tags count: the thought may hold tags of the other style.
    is_own = own_start >= 0 and not 0 <= stratos_start < own_start
    if is_own and (blocks := _split_blocks(answer, tags)):
        return ParsedRow(question, blocks[1], {TRACE_COLUMN: blocks[0]}, completion, system)
    if blocks := _split_blocks(answer, STRATOS):
        thought, solution = map(tags.wrap, blocks)
        system = system and STRATOS.translate(system, student_tags)
        return ParsedRow(question, solution, {TRACE_COLUMN: thought}, completion, system)
    raise BadRowError(BadRowReason.MISSING_TAGS, "the assistant's turn lacks one of the four tags in order")


def split_turns(turns: list[Any]) -> tuple[str | None, str, str]:
    """Return the system prompt, if there is one, the question and the assistant's text of a conversation.

    Raises:
        BadRowError: If it is not one user and one assistant turn.
    """
    read = [_turn(turn) for turn in turns]
    roles = [role for role, _ in read if role != "system"]
    if roles not in (["user", "assistant"], ["human", "gpt"]):
        detail = (
            f"conversations must be one user and one assistant turn, but are {', '.join(roles) or 'empty'}"
        )
        raise BadRowError(BadRowReason.WRONG_TYPE, detail)
    question, answer = (text for role, text in read if role != "system")
    return next((text for role, text in read if role == "system"), None), question, answer


def _split_blocks(text: str, tags: TagStyle) -> tuple[str, str] | None:
    """Return thought and solution as they stand between the outer tags; None if a tag is missing."""
    _, opened, rest = text.partition(tags.thought_open)
    rest, solution_closed, _ = rest.rpartition(tags.solution_close)
    rest, solution_opened, solution = rest.rpartition(tags.solution_open)
    thought, closed, _ = rest.rpartition(tags.thought_close)
    return (thought, solution) if opened and closed and solution_opened and solution_closed else None


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadRowError(BadRowReason.WRONG_TYPE, f"a turn must be an object, but is {type(turn).__name__}")
    # A table whose rows differ has both pairs of columns; the unused pair holds None.
    role = turn.get("role") if turn.get("from") is None else turn["from"]
    text = turn.get("content") if turn.get("value") is None else turn["value"]
    return _text(role, "from"), _text(text, "value")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        kind = type(value).__name__
        raise BadRowError(BadRowReason.WRONG_TYPE, f"conversations must be a list, but is {kind}")
    return value


def _text(value: Any, column: str) -> str:
    """Return a text; a missing value counts as empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRowError(BadRowReason.WRONG_TYPE, f"{column} must be text, but is {type(value).__name__}")
    if holds_half_pair(value):
        raise BadRowError(
            BadRowReason.WRONG_TYPE, f"{column} must be Unicode text, but holds half a surrogate pair"
        )
    return value


def find_tag(text: str, *styles: TagStyle) -> str | None:
    """Return a tag of the styles or of Bespoke-Stratos that a text holds; None if it holds none."""
    return next((tag for style in (*styles, STRATOS) for tag in style.tags().values() if tag in text), None)


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
    if any(find_tag(part, tags) for part in (*parts, rest)):
        return None
    thought, solution = parts[1].strip(), parts[3].strip()
    return (thought, solution) if thought and solution else None
