"""Rows of any source: read, understood, and, where they cannot be used, counted with the reason."""

from __future__ import annotations

import csv
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlt_lightning.datamodules import chains, word_sums
from rlt_lightning.datamodules.arithmetic import KINDS, arithmetic_rows
from rlt_lightning.datamodules.countdown import MAX_NUMBERS, countdown_row, countdown_rows
from rlt_lightning.judging.answers import reference_answer
from rlt_lightning.tags import STRATOS, TagStyle
from rlt_lightning.types import InputError

ARITHMETIC = "arithmetic"
EMBEDDED: dict[str, Callable[[int, int, str], list[dict[str, Any]]]] = {  # of their size, a seed and a split
    ARITHMETIC: arithmetic_rows,
    "countdown": countdown_rows,
    **{f"{ARITHMETIC}:{kind}": partial(arithmetic_rows, kind=kind) for kind in KINDS},
    **chains.SOURCES,
    **word_sums.SOURCES,
}
CHOICES = (
    f"'{ARITHMETIC}' (embedded default), '{ARITHMETIC}:KIND' such as '{ARITHMETIC}:addition', 'chains', "
    "'word_sums' or 'countdown' (embedded), a .jsonl, .json, .parquet or .csv file, a folder of such files, "
    "or a Hugging Face data set id such as 'bespokelabs/Bespoke-Stratos-17k' or, with a configuration, "
    "'openai/gsm8k:main'"
)
QUESTION_COLUMNS = ("question", "prompt", "problem")  # the first that a row has
TRACE_COLUMN = "reasoning_trace"  # Bespoke-Stratos rows have it between the thought tags
SHOWN_ROWS = 5  # row numbers per reason in messages


class BadRowReason(StrEnum):
    """Why a row cannot be used."""

    BROKEN_JSON = "broken_json"
    WRONG_TYPE = "wrong_type"
    MISSING_COLUMN = "missing_column"
    MISSING_TAGS = "missing_tags"
    EMPTY_QUESTION = "empty_question"
    EMPTY_SOLUTION = "empty_solution"
    EMPTY_TRACE = "empty_trace"
    NO_ANSWER = "no_answer"
    PROMPT_TOO_LONG = "prompt_too_long"
    SOLUTION_TOO_LONG = "solution_too_long"
    TOO_LONG = "too_long"
    UNSOLVABLE = "unsolvable"


class BadRowError(Exception):
    """This row cannot be used. Caught where rows are counted; it never reaches the user."""

    def __init__(self, reason: BadRowReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


Row = tuple[int, "dict[str, Any] | BadRowError"]  # its number from 1, and its columns or why there are none


@dataclass
class BadRowReport:
    """The rows of one source that cannot be used, by number and reason."""

    source: str
    num_rows: int
    first_row: int = 1  # what row 1 of this source is called in a run that reads several
    bad: list[tuple[int, BadRowError]] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)  # rows that are used without their end

    def add(self, row: int, error: BadRowError) -> None:
        """Count a bad row, numbered as in its source."""
        self.bad.append((row, error))

    @property
    def frac(self) -> float:
        """Part of the rows that cannot be used."""
        return len(self.bad) / max(1, self.num_rows)

    def rows_by_reason(self) -> dict[str, list[int]]:
        """Row numbers by reason, the most frequent reason first."""
        rows: dict[str, list[int]] = {}
        for row, error in self.bad:
            rows.setdefault(str(error.reason), []).append(row)
        return dict(sorted(rows.items(), key=lambda item: -len(item[1])))

    def summary(self) -> str:
        """Counts by reason and the first row numbers, in one line."""
        reasons = []
        for reason, rows in self.rows_by_reason().items():
            reasons.append(f"{reason} {len(rows)} ({row_list(rows)})")
        return f"{len(self.bad)} of {self.num_rows} rows of '{self.source}' cannot be used" + (
            f": {', '.join(reasons)}" if reasons else ""
        )

    def lines(self) -> list[str]:
        """What a user should know: a line for rows that cannot be used, and one for those cut off."""
        lines = [self.summary()] if self.bad else []
        if self.truncated:
            lines.append(
                f"{len(self.truncated)} of {self.num_rows} rows of '{self.source}' are cut off at "
                f"data.max_length ({row_list(self.truncated)})"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Counts, and every bad row with its reason and detail."""
        return {
            "source": self.source,
            "first_row": self.first_row,
            "num_rows": self.num_rows,
            "num_used": self.num_rows - len(self.bad),
            "num_bad": len(self.bad),
            "num_truncated": len(self.truncated),
            "reasons": {reason: len(rows) for reason, rows in self.rows_by_reason().items()},
            "bad_rows": [
                {"row": row, "reason": str(error.reason), "detail": error.detail} for row, error in self.bad
            ],
            "truncated_rows": self.truncated,
        }

    def check(self, max_bad_frac: float, report_path: Path | None) -> None:
        """Stop if more than `max_bad_frac` of the rows, or all of them, cannot be used."""
        if self.frac <= max_bad_frac and len(self.bad) < self.num_rows:
            return
        where = f" All of them are listed in {report_path}." if report_path else ""
        raise InputError(
            f"At most data.max_bad_frac={max_bad_frac:g} of the rows may be unusable, but {self.summary()}."
            f"{where} Correct these rows, or raise data.max_bad_frac or the length limits."
        )


def row_list(rows: list[int]) -> str:
    """Name the first of some rows."""
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", …" if len(rows) > SHOWN_ROWS else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown}"


def write_reports(path: Path, reports: list[BadRowReport]) -> None:
    """Write the reports of a run's sources to one JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sources": [report.as_dict() for report in reports]}, indent=1) + "\n")


# Reading


def read_rows(
    source: str,
    split: str = "train",
    num_embedded_rows: int = 1000,
    seed: int = 0,
    max_rows: int | None = None,
) -> list[Row]:
    """Read the rows of a source; Countdown problems get their question and solution.

    Args:
        source: An embedded source, a file, a folder, a hub id or `ID:CONFIGURATION`.
        split: Of a hub data set, a saved data set, an embedded source, or a folder whose files carry the
            names of splits.
        num_embedded_rows: Size of an embedded source.
        seed: Of an embedded source.
        max_rows: How many to read at most, from the start; None for all.

    Returns:
        Row numbers from 1 (line numbers of a JSONL file) with their columns, or with the reason why a row has
        none.

    Raises:
        InputError: If the source does not exist, cannot be read as a whole, or is empty.
    """
    numbered = islice(_numbered_rows(source, split, num_embedded_rows, seed), max_rows)
    rows = [(number, complete_countdown(columns)) for number, columns in numbered]
    if not rows:
        raise InputError(f"The source must have at least one row, but '{source}' has none. Use {CHOICES}.")
    return rows


def _numbered_rows(source: str, split: str, num_embedded_rows: int, seed: int) -> Iterator[Row]:
    path = Path(source).expanduser()
    if source in EMBEDDED:
        yield from enumerate(EMBEDDED[source](num_embedded_rows, seed, split), start=1)
    elif path.is_dir():
        yield from _read_folder(path, split)
    elif path.is_file():
        yield from _read_file(path)
    elif path.suffix in READERS or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source):
        raise InputError(f"The file or folder '{source}' must exist, but does not. Use {CHOICES}.")
    else:
        yield from _read_hub(source, split)


def _read_file(path: Path) -> Iterator[Row]:
    if path.suffix not in READERS:
        raise InputError(
            f"The data file must be {', '.join(READERS)}, but is {path}. Convert it, or use {CHOICES}."
        )
    try:
        yield from READERS[path.suffix](path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The data file {path} must be readable, but is not ({_one_line(error)}). Check that it is "
            "whole, its permissions and its encoding (UTF-8)."
        ) from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    """A broken line is a bad row; blank lines are not rows. Lines are numbered as an editor numbers them."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, _columns(json.loads(line))
            except (ValueError, RecursionError) as error:
                yield number, BadRowError(BadRowReason.BROKEN_JSON, str(error))


def _read_json(path: Path) -> Iterator[Row]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"The file {path} must be valid JSON, but is not ({error}). Correct it; if it holds one object "
            "per line, name it .jsonl."
        ) from error
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise InputError(
            f'The file {path} must hold a list of objects or {{"data": [...]}}, but holds neither. Convert '
            "it to one of them, or to .jsonl."
        )
    for number, value in enumerate(content, start=1):
        yield number, _columns(value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise InputError(
            f"The file {path} must be a whole Parquet file, but is not ({_one_line(error)}). Write it anew, "
            f"or use {CHOICES}."
        ) from error
    yield from enumerate(rows, start=1)


def _read_csv(path: Path) -> Iterator[Row]:
    """Every cell is text, also one that looks like a number; the first line names the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a reasoning trace is longer than the default allows
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in row or None in row.values():
                    detail = "the row has more or fewer cells than the header"
                    yield number, BadRowError(BadRowReason.WRONG_TYPE, detail)
                else:
                    yield number, dict(row)
        except csv.Error as error:
            raise InputError(
                f"The file {path} must be valid CSV, but is not ({error}). Correct it, or convert it "
                "to .jsonl."
            ) from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _columns(value: Any) -> dict[str, Any] | BadRowError:
    if isinstance(value, dict):
        return value
    return BadRowError(BadRowReason.WRONG_TYPE, f"a row must be an object, but is {type(value).__name__}")


# File names that start with one of these belong to a split: rows of another must not leak into it.
SPLIT_NAMES = {"train", "test", "validation", "val", "dev"}


def _read_folder(folder: Path, split: str) -> Iterator[Row]:
    """Read a saved data set, or all files of one kind, those of the split if they carry its name."""
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        yield from _read_saved_dataset(folder, split)
        return
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in READERS and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    kinds = sorted({path.suffix for path in files})
    if len(kinds) != 1:
        found = f"holds {', '.join(kinds)}" if kinds else "holds none"
        raise InputError(
            f"A data folder must hold files of one kind ({', '.join(READERS)}) or a saved data set, but "
            f"{folder} {found}. Name one file, or use {CHOICES}."
        )
    splits = {path: re.split(r"[-_.]", path.name)[0] for path in files}
    of_split = [path for path in files if splits[path] == split]
    if not of_split and (others := sorted(set(splits.values()) & SPLIT_NAMES)):
        raise InputError(
            f"The data folder {folder} must have files of the split '{split}', but has those of "
            f"{', '.join(others)}. Set data.split, or name one file."
        )
    offset = 0
    for path in of_split or files:
        number = 0
        for number, columns in _read_file(path):
            yield offset + number, columns
        offset += number


def _read_saved_dataset(folder: Path, split: str) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except IndexError:  # the library fails on a set that was saved without rows
        return
    except (OSError, ValueError) as error:
        raise InputError(
            f"The saved data set {folder} must be loadable, but is not ({_one_line(error)}). Save it anew, "
            f"or use {CHOICES}."
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise InputError(
                f"The saved data set {folder} must have the split '{split}', but has {', '.join(dataset)}. "
                "Set data.split."
            )
        dataset = dataset[split]
    yield from enumerate(dataset, start=1)


def _read_hub(source: str, split: str) -> Iterator[Row]:
    import datasets

    hub_log = logging.getLogger("huggingface_hub")
    level = hub_log.level
    hub_log.setLevel(logging.ERROR)  # five retry warnings say less than the one line below
    name, _, configuration = source.partition(":")
    try:
        dataset = datasets.load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"The data set '{source}', split '{split}', could not be loaded ({_one_line(error)}). "
            f"Use {CHOICES}."
        ) from error
    finally:
        hub_log.setLevel(level)
    yield from enumerate(dataset, start=1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# Understanding


def complete_countdown(columns: dict[str, Any] | BadRowError) -> dict[str, Any] | BadRowError:
    """Add question and solution to a row with only `numbers` (or `nums`) and `target`; keep other rows."""
    if isinstance(columns, BadRowError):
        return columns
    has = {name for name, value in columns.items() if value is not None}
    is_problem = "target" in has and has & {"numbers", "nums"}
    if not is_problem or has & {*QUESTION_COLUMNS, "solution", "conversations"}:
        return columns
    numbers = columns["numbers" if "numbers" in has else "nums"]
    target = columns["target"]
    if not isinstance(numbers, list) or not all(map(_is_count, [*numbers, target])):
        detail = f"numbers and target must be integers, none below 0, but are {numbers} and {target}"
        return BadRowError(BadRowReason.WRONG_TYPE, detail)
    if not 1 <= len(numbers) <= MAX_NUMBERS:
        detail = f"there must be 1 to {MAX_NUMBERS} numbers, but there are {len(numbers)}"
        return BadRowError(BadRowReason.WRONG_TYPE, detail)
    if made := countdown_row(numbers, target):
        return columns | made
    return BadRowError(BadRowReason.UNSOLVABLE, f"no expression makes {target} of {numbers}")


def with_solution(columns: dict[str, Any] | BadRowError) -> dict[str, Any] | BadRowError:
    """Let the answer of a row stand for the solution that it lacks: where answers are judged, it will do."""
    if isinstance(columns, BadRowError) or columns.get("conversations") or columns.get("solution"):
        return columns
    answer = columns.get("answer")
    return columns if answer is None else columns | {"solution": str(answer)}


def require_judgeable(reference: Mapping[str, Any]) -> None:
    """Keep a row out by which no answer can be judged.

    Raises:
        BadRowError: With what it lacks.
    """
    kind = reference.get("kind", "math")
    if kind not in ("math", "choice", "countdown"):
        detail = f"kind must be math, choice or countdown, but is {kind}"
        raise BadRowError(BadRowReason.WRONG_TYPE, detail)
    if kind == "countdown":
        numbers, target = reference.get("numbers"), reference.get("target")
        if not isinstance(numbers, list) or not all(map(_is_count, [*numbers, target])):
            detail = f"numbers and target must be integers, none below 0, but are {numbers} and {target}"
            raise BadRowError(BadRowReason.WRONG_TYPE, detail)
    elif reference_answer(reference) is None:
        detail = "the row has no answer, and its solution has none in \\boxed{} or after ####"
        raise BadRowError(BadRowReason.NO_ANSWER, detail)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class ParsedRow:
    """What a row says, whatever its columns are called."""

    question: str
    solution: str  # as it stands between the solution tags, surrounding newlines included
    traces: dict[str, str]  # by column, as they stand between the thought tags; '' for one without text
    completion: str | None  # raw generated text of a teacher
    system: str | None  # the row's own system prompt, of the student


def check_columns(
    rows: Iterable[Row], source: str, trace_columns: Sequence[str], allows_completion: bool
) -> None:
    """Stop if no row of the source has the columns that a task needs.

    Raises:
        InputError: Naming the missing columns and those found.
    """
    columns = [row for _, row in rows if isinstance(row, dict)]
    missing = [missing_columns(row, trace_columns, allows_completion) for row in columns]
    if not missing or not all(missing):
        return
    found = sorted({str(name) for row in columns[:100] for name in row})
    raise InputError(
        "Rows must have the columns question and solution (for student_rl an answer will do; for "
        "fine-tuning and scoring also reasoning_trace), or conversations, but "
        f"'{source}' lacks {', '.join(missing[0])} and has "
        f"{', '.join(found) or 'no columns'}. Rename its columns."
    )


def missing_columns(row: dict[str, Any], trace_columns: Sequence[str], allows_completion: bool) -> list[str]:
    """Return the names of the columns that a row should have but has not."""
    has = set(row)
    if row.get("conversations") is not None:
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
) -> ParsedRow:
    """Understand a row of Bespoke-Stratos' format or one with question and solution.

    Args:
        row: Its columns.
        tags: Of the texts to be made. Text between a row's own tags stays as it is where they are these tags,
            and else gets these tags' separator.
        trace_columns: Names of the traces that the task needs.
        allows_completion: Whether a `completion` will do instead of `reasoning_trace`.

    Raises:
        BadRowError: With the reason why the row cannot be used.
    """
    if missing := missing_columns(row, trace_columns, allows_completion):
        raise BadRowError(BadRowReason.MISSING_COLUMN, f"the row lacks {', '.join(missing)}")
    parsed = _parse_stratos(row, tags) if row.get("conversations") is not None else _parse_custom(row, tags)
    if not parsed.question.strip():
        raise BadRowError(BadRowReason.EMPTY_QUESTION, "the question has no text")
    if not parsed.solution.strip():
        raise BadRowError(BadRowReason.EMPTY_SOLUTION, "the solution has no text")
    has_completion = allows_completion and bool(parsed.completion)
    for name in trace_columns:
        if name not in parsed.traces:
            parsed.traces[name] = _trace(row, name, tags)
        has_text = parsed.traces[name].strip() or (name == TRACE_COLUMN and has_completion)
        if not has_text:
            raise BadRowError(BadRowReason.EMPTY_TRACE, f"{name} has no text")
    return parsed


def _parse_custom(row: dict[str, Any], tags: TagStyle) -> ParsedRow:
    question = next((row[name] for name in QUESTION_COLUMNS if row.get(name) is not None), None)
    return ParsedRow(
        question=_text(question, "question"),
        solution=tags.wrap(_text(row["solution"], "solution")),
        traces={TRACE_COLUMN: _trace(row, TRACE_COLUMN, tags)},
        completion=_text(row.get("completion"), "completion") or None,
        system=None,
    )


def _trace(row: dict[str, Any], column: str, tags: TagStyle) -> str:
    text = _text(row.get(column), column)
    return tags.wrap(text) if text.strip() else ""


def _parse_stratos(row: dict[str, Any], tags: TagStyle) -> ParsedRow:
    turns = [_turn(turn) for turn in _list(row["conversations"])]
    systems = [text for role, text in turns if role == "system"]
    roles = [role for role, _ in turns if role != "system"]
    if roles not in (["user", "assistant"], ["human", "gpt"]):
        detail = (
            f"conversations must be one user and one assistant turn, but are {', '.join(roles) or 'empty'}"
        )
        raise BadRowError(BadRowReason.WRONG_TYPE, detail)
    question, answer = (text for role, text in turns if role != "system")
    system = _text(row.get("system"), "system") or next(iter(systems), None)
    completion = _text(row.get("completion"), "completion") or None
    own, stratos = answer.find(tags.thought_open), answer.find(STRATOS.thought_open)
    is_own = own >= 0 and not 0 <= stratos < own  # the thought may hold tags of the other style
    if is_own and (blocks := _split_blocks(answer, tags)):
        return ParsedRow(question, blocks[1], {TRACE_COLUMN: blocks[0]}, completion, system)
    if blocks := _split_blocks(answer, STRATOS):
        thought, solution = map(tags.wrap, blocks)
        system = system and _translate(system, tags)
        return ParsedRow(question, solution, {TRACE_COLUMN: thought}, completion, system)
    raise BadRowError(BadRowReason.MISSING_TAGS, "the assistant's turn lacks one of the four tags in order")


def _split_blocks(text: str, tags: TagStyle) -> tuple[str, str] | None:
    """Return thought and solution as they stand between the outer tags; None if a tag is missing."""
    _, opened, rest = text.partition(tags.thought_open)
    rest, solution_closed, _ = rest.rpartition(tags.solution_close)
    rest, solution_opened, solution = rest.rpartition(tags.solution_open)
    thought, closed, _ = rest.rpartition(tags.thought_close)
    return (thought, solution) if opened and closed and solution_opened and solution_closed else None


def _translate(system: str, tags: TagStyle) -> str:
    """Let a system prompt that explains the Stratos tags explain the ones that are used."""
    for name, tag in STRATOS.tags().items():
        system = system.replace(tag, tags.tags()[name])
    return system


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadRowError(BadRowReason.WRONG_TYPE, f"a turn must be an object, but is {type(turn).__name__}")
    # A table has both pairs of columns where its rows differ; the one that is not used holds None.
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
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadRowError(
            BadRowReason.WRONG_TYPE, f"{column} must be Unicode text, but holds half a surrogate pair"
        )
    return value
