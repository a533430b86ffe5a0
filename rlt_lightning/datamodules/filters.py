"""Filter usable rows: pass rate, overlap with evaluation sets, wrong answers, duplicates.

The same filters serve rows of any origin: raw traces, a student's own right answers, a teacher's
explanations. Every filter is off by default. Filters are applied in the order of `FilterReason`, and a row
counts for the first that leaves it out. Duplicates come last, so a row is only a duplicate of one that is
used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from rlt_lightning.console import waiting_for
from rlt_lightning.datamodules.bad_rows import BadRowReport, FilterReason
from rlt_lightning.datamodules.evaluation_sets import SetSettings, build_set, read_question, read_set_rows
from rlt_lightning.datamodules.rows import ParsedRow, Row, read_number, require_judgeable
from rlt_lightning.judging.judge import Judge
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import BadRowError, InputError

# Characters of scripts that put no space between words: each of them counts as a word.
# Thai to Myanmar, Khmer, Tai, Chinese and Japanese with their halfwidth and rare forms.
NO_SPACES = (
    "\u0e01-\u0e7f\u0e81-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u2e80-\u2fdf\u3005-\u3007"
    "\u3031-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\ua4cf\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f"
    "\U00016f00-\U00018fff\U0001aff0-\U0001b16f\U00020000-\U0003fffd"
)
# Words, and the operators that make two sums different questions.
# 3.5 is one word, and relations and operations are words.
WORD = re.compile(rf"\d+(?:[.,]\d+)*|[{NO_SPACES}]|[^\W{NO_SPACES}]+|[-+*/^=<>≤≥≠×÷·−%!|]")
JUDGED_ROWS = 1000  # that are judged, and in memory, at a time
Rejection = tuple[FilterReason, str]  # with a detail that quotes no evaluation set


@dataclass(frozen=True)
class Filters:
    """Which usable rows of `data.source` are left out. Every filter is off unless it is set.

    Args:
        min_pass_rate: Least `pass_rate` of a row: the share of right answers that `rlt predict` has written.
        max_pass_rate: Most of it, to leave out problems that are too easy.
        overlap_with: Evaluation sets with what `data.sets` of `rlt test` takes for them. A question is left
            out that has `overlap_ngram` words in a row with one of theirs, or all words of a shorter one.
        overlap_ngram: Length of these n-grams, words; characters in scripts without spaces.
        right_only: Leave out rows whose solution does not have the row's right `answer`.
        duplicates: "question" keeps one row of a question, "trace" all its different traces.
    """

    min_pass_rate: float | None = None
    max_pass_rate: float | None = None
    overlap_with: dict[str, SetSettings] | None = None
    overlap_ngram: int = 13
    right_only: bool = False
    duplicates: Literal["question", "trace"] | None = None

    def __post_init__(self) -> None:
        for name in ("min_pass_rate", "max_pass_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"data.filters.{name} must be in [0, 1], but is {value}. Correct it.")
        if self.overlap_ngram < 1:
            raise InputError(
                f"data.filters.overlap_ngram must be at least 1, but is {self.overlap_ngram}. Raise it."
            )

    def list_active(self) -> dict[str, Any]:
        """Return the filters that are on, with the size of the n-grams of overlaps."""
        found = {
            n: value for n, value in vars(self).items() if value not in (None, {}) and value is not False
        }
        if "overlap_with" not in found:
            del found["overlap_ngram"]
        return found


class RowFilter:
    """Apply filters to the sources of one run, and remember the rows that are used: they have no duplicates.

    Args:
        filters: Which rows are left out.
        traces: Columns of the traces that the task reads; none for stages without traces.
        tags: The tags in use.

    Raises:
        InputError: If a filter needs what the rows of this stage do not have, or an evaluation set cannot be
            read.
    """

    def __init__(self, filters: Filters, traces: list[str], tags: TagStyle) -> None:
        if filters.duplicates == "trace" and not traces:
            raise InputError(
                "These data read no traces, so data.filters.duplicates may not be trace. Set it to question."
            )
        self.filters = filters
        self.traces = traces
        self.tags = tags
        self.overlaps = Overlaps(filters.overlap_with or {}, filters.overlap_ngram)
        self.used: set[tuple[str, ...]] = set()

    def filter_rows(self, rows: Iterable[Row], report: BadRowReport) -> Iterator[Row]:
        """Return the rows of one source that no filter leaves out, and report the others."""
        if {"min_pass_rate", "max_pass_rate"} & self.filters.list_active().keys():
            rows = check_pass_rates(rows, report.source)
        left = self._check_rows(rows, report)
        return self._judge_rows(left, report) if self.filters.right_only else left

    def describe(self) -> dict[str, Any]:
        """Return the settings that leave rows out, as plain values."""
        overlaps = sorted(self.overlaps.runs)
        return {"filters": self.filters.list_active(), "overlaps": overlaps, "of": self.traces}

    def is_duplicate(self, row: ParsedRow) -> bool:
        """Return whether a row that is used has the same question or, if so set, also the same traces."""
        return self.filters.duplicates is not None and self._key(row) in self.used

    def remember(self, row: ParsedRow) -> None:
        """Remember a row that is used."""
        self.used.add(self._key(row))

    # Helpers

    def _check_rows(self, rows: Iterable[Row], report: BadRowReport) -> Iterator[Row]:
        for number, columns, row in rows:
            if rejection := self._find_rejection(columns, row):
                report.filtered.append((number, *rejection))
            else:
                yield number, columns, row

    def _find_rejection(self, columns: dict[str, Any], row: ParsedRow) -> Rejection | None:
        """Return the first reason to leave a row out, as far as the row itself tells."""
        filters = self.filters
        if not is_within(read_number(columns, "pass_rate"), filters.min_pass_rate, filters.max_pass_rate):
            return FilterReason.PASS_RATE, f"pass_rate is {columns.get('pass_rate')!r}"
        if (name := self.overlaps.find_overlap(row.question)) is not None:
            return FilterReason.OVERLAP, f"the question overlaps with one of {name}"
        return None

    def _judge_rows(self, rows: Iterable[Row], report: BadRowReport) -> Iterator[Row]:
        """Yield the rows whose solution has the right answer, as `rlt test` would judge it."""
        rest = iter(rows)
        with Judge(self.tags) as judge:
            while some := list(islice(rest, JUDGED_ROWS)):
                yield from self._judge_some(some, judge, report)

    def _judge_some(self, rows: list[Row], judge: Judge, report: BadRowReport) -> list[Row]:
        judged: list[Row] = []
        references: list[dict[str, Any]] = []
        for number, columns, row in rows:
            reference = {name: value for name, value in columns.items() if name != "solution"}
            try:
                require_judgeable(reference)
            except BadRowError as error:
                report.filtered.append((number, FilterReason.NO_REFERENCE, error.detail))
                continue
            judged.append((number, columns, row))
            references.append(reference)
        solutions = [row.solution for _, _, row in judged]
        with waiting_for(f"the judge of {len(judged)} rows of {report.source}"):
            verdicts = judge.judge_all(zip(solutions, references, strict=True))
        for (number, _, _), reference, verdict in zip(judged, references, verdicts, strict=True):
            if not verdict.correct:
                detail = f"the solution's answer is {verdict.answer}, not {reference.get('answer')}"
                report.filtered.append((number, FilterReason.WRONG_ANSWER, detail))
        return [row for row, verdict in zip(judged, verdicts, strict=True) if verdict.correct]

    def _key(self, row: ParsedRow) -> tuple[str, ...]:
        traces = [row.traces[name] for name in self.traces] if self.filters.duplicates == "trace" else []
        return tuple(" ".join(text.casefold().split()) for text in (row.question, *traces))


class Overlaps:
    """Find questions that overlap with those of evaluation sets, by runs of words.

    Args:
        sets: Names of sets, each with what `build_set` takes.
        size: Words of a run. All words of a shorter evaluation question are a run.
    """

    def __init__(self, sets: dict[str, SetSettings], size: int) -> None:
        # Run of words -> the set that it is of.
        self.runs: dict[tuple[str, ...], str] = {}
        for name, settings in sets.items():
            for question in read_evaluation_questions(name, settings):
                words = split_words(question)
                for run in list_ngrams(words, min(size, len(words))):
                    self.runs.setdefault(run, name)
        self.sizes = sorted({len(run) for run in self.runs})

    def find_overlap(self, question: str) -> str | None:
        """Return the set of a question that this one overlaps with; None if there is none."""
        words = split_words(question)
        found = (self.runs.get(run) for size in self.sizes for run in list_ngrams(words, size))
        return next((name for name in found if name is not None), None)


def check_pass_rates(rows: Iterable[Row], source: str) -> Iterator[Row]:
    """Yield rows, and stop after the last one if none had a pass_rate.

    Raises:
        InputError: If no row had one.
    """
    found: set[bool] = set()
    for row in rows:
        found.add("pass_rate" in row[1])
        yield row
    if found == {False}:
        raise InputError(
            "data.filters.min_pass_rate and max_pass_rate need rows with pass_rate, which `rlt predict` "
            f"writes with StudentRLData, but '{source}' has none. Remove these filters."
        )


def read_evaluation_questions(name: str, settings: SetSettings) -> list[str]:
    """Read the questions of a set as they are published, without what `rlt test` puts around them."""
    rows = read_set_rows(name, build_set(name, settings), None, seed=0)
    try:
        return [read_question(row) for _, row in rows if isinstance(row, dict)]
    except BadRowError as error:
        raise InputError(
            f"Every row of data.filters.overlap_with {name} must have a question, but one has not: "
            f"{error.detail}. Name another source."
        ) from error


def split_words(text: str) -> list[str]:
    """Return the words and operators of a text in lower case; punctuation does not count."""
    return WORD.findall(text.casefold())


def list_ngrams(words: list[str], size: int) -> Iterable[tuple[str, ...]]:
    """Return all runs of so many words."""
    return zip(*(words[i:] for i in range(size)), strict=False) if size else ()


def is_within(value: float | None, least: float | None, most: float | None) -> bool:
    """Return whether a value keeps to bounds; a missing one keeps to none."""
    if least is None and most is None:
        return True
    return value is not None and (least is None or value >= least) and (most is None or value <= most)
