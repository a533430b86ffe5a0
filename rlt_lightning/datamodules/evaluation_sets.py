"""The evaluation sets: their sources, prompts, problems and right answers.

name, settings ─ build_set ─▶ EvaluationSet ─ read_set ─▶ problems
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rlt_lightning.datamodules.bad_rows import NumberedRow, list_rows
from rlt_lightning.datamodules.rows import find_question, has_text
from rlt_lightning.datamodules.sources import SourceReader, read_rows
from rlt_lightning.datamodules.token_cache import hash_value
from rlt_lightning.judging.answers import AnswerKind, Reference, read_reference
from rlt_lightning.metrics.answers import OVERALL
from rlt_lightning.tags import fill_template, holds_half_pair
from rlt_lightning.types import BadRowError, BadRowReason, InputError

# The user's turn, as in Bespoke-Stratos-17k.
IN_A_BOX = "Return your final response within \\boxed{}. {question}"
CHOICE = "Return the letter of the right option within \\boxed{}. {question}\n\n{options}"
# Hub ids whose rows must not be published as plain text, under whatever name they are read.
PRIVATE_SOURCES = ("Idavidrein/gpqa",)
# Names of columns; the first one that a row has counts.
QUESTIONS = ("question", "problem", "prompt", "Question")
IDS = ("id", "unique_id", "Record ID")
LETTERS = "ABCD"  # of the options of a choice
# Their columns, the right one first: GPQA's.
CHOICE_COLUMNS = ("Correct Answer", *(f"Incorrect Answer {i}" for i in range(1, len(LETTERS))))
# Rows of an embedded set, if max_rows does not ask for more.
NUM_EMBEDDED_ROWS = 200
# What a setting may name: nothing, a source, or some fields of an EvaluationSet.
Plain = str | bool | int | float | None
SetSettings = str | dict[str, Plain | dict[str, Plain]] | None


@dataclass(frozen=True)
class EvaluationSet:
    r"""One set: where its rows come from, how it is asked, and how it is judged.

    Args:
        title: Name for people.
        source: Hub id, with `:configuration` if it has several, a file, a folder or an embedded source.
        split: Split of the source.
        judge: How its answers are judged: math, choice or countdown.
        template: The user's turn, with `{question}` and, for choice, `{options}`. Other braces stay, as those
            of `\boxed{}` do.
        separator: Text between two options.
        options_seed: Seed of a single stream that shuffles the options of row after row; None: each problem
            has an order, from data.seed and its id.
        where: Columns and texts: only rows whose column contains the text are asked.
        strip: Whether white space around questions and options is removed.
        private: Whether its authors ask not to publish its rows as plain text. Then nothing that could quote
            them is written or shown.
    """

    title: str
    source: str
    split: str = "test"
    judge: AnswerKind = "math"
    template: str = "{question}"
    separator: str = "\n"
    options_seed: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    strip: bool = True
    private: bool = False

    def require_source(self) -> None:
        """Raise InputError if the source is a path that does not exist; nothing is read."""
        SourceReader(self.split).open(self.source)


SETS = {
    "aime24": EvaluationSet("AIME 2024", "HuggingFaceH4/aime_2024", "train", template=IN_A_BOX),
    "aime25": EvaluationSet("AIME 2025", "math-ai/aime25", template=IN_A_BOX),
    "math500": EvaluationSet("MATH-500", "HuggingFaceH4/MATH-500", template=IN_A_BOX),
    "gpqa_diamond": EvaluationSet(
        "GPQA Diamond", "Idavidrein/gpqa:gpqa_diamond", "train", "choice", CHOICE, private=True
    ),
    "gsm8k": EvaluationSet("GSM8K", "openai/gsm8k:main", template=IN_A_BOX),
    "amc23": EvaluationSet("AMC 2023", "math-ai/amc23", template=IN_A_BOX),
    "countdown": EvaluationSet("Countdown", "countdown", judge="countdown"),
    "chains": EvaluationSet("last-digit chains", "chains"),
    "new_chains": EvaluationSet("last-digit chains with a new last step", "new_chains"),
    "word_sums": EvaluationSet("three-step word sums", "word_sums"),
}
PRIVATE_SETS = [name for name, spec in SETS.items() if spec.private]


@dataclass(frozen=True)
class EvaluationProblem:
    """One question of an evaluation set, with its right answer.

    Example:
        EvaluationProblem("sums/17", "sums", "2 + 3?", {"kind": "math", "answer": "5"}, False)

    Attributes:
        id: The name of the set, a slash, and the question's id in the set or, without ids, its row number.
        set_name: The name of the set.
        question: The user's message, made by the set's template.
        reference: What the judge compares an answer with.
        private: Whether nothing may be written that could quote the question.
        prompt: Tokens through the opening of the assistant's turn.
    """

    id: str
    set_name: str
    question: str
    reference: Reference
    private: bool
    prompt: list[int] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the question and its right answer."""
        return hash_value([self.question, self.reference])


def build_set(name: str, settings: SetSettings) -> EvaluationSet:
    """Look up a set and change it as the settings say. Any other name with a source is a user's set.

    Args:
        name: One of `SETS`, or the name of a user's set.
        settings: None for the set as it is; a source, whose split is `test`; or some fields of the set.

    Raises:
        InputError: If there is no such set and no source either, or a setting cannot be.
    """
    given = {"source": settings} if isinstance(settings, str) else dict(settings or {})
    known = SETS.get(name)
    if known is None and (not given.get("source") or name == OVERALL or not re.fullmatch(r"[\w-]+", name)):
        raise InputError(
            f"data.sets may name {', '.join(SETS)}, or a set of your own with its file, but names '{name}' "
            f"with {'none' if settings is None else repr(settings)}. Choose one of the sets, or give a name "
            "of letters, digits, - and _ with a file."
        )
    given = check_fields(name, given)
    if "source" in given:
        # The published split belongs to the published source.
        given = {"split": "test"} | given
    if known is None:
        prompt = {"template": CHOICE} if given.get("judge") == "choice" else {}
        chosen = EvaluationSet(**{"title": name} | prompt | given)
    else:
        chosen = replace(known, **given)
    require_template(name, chosen)
    must_be_private = chosen.source.partition(":")[0] in PRIVATE_SOURCES or name in PRIVATE_SETS
    if must_be_private and given.get("private") is False:
        raise InputError(
            f"data.sets.{name} must stay private, since its authors ask not to publish its rows as plain "
            "text, but private is false. Remove it."
        )
    return replace(chosen, private=chosen.private or must_be_private)


def read_set(name: str, settings: SetSettings, max_rows: int | None, seed: int) -> list[EvaluationProblem]:
    """Read a set.

    Args:
        name: One of `SETS`, or the name of a user's set.
        settings: What `build_set` takes.
        max_rows: Most rows to read, from the start; of a set with `where`, from the rows that it leaves.
        seed: Seed of the order of options, and of an embedded source.

    Raises:
        InputError: If there is no such set, it is empty, or one of its rows cannot be used.
    """
    spec = build_set(name, settings)
    rows = read_set_rows(name, spec, max_rows, seed)
    ids = choose_ids(rows)
    stream = None if spec.options_seed is None else random.Random(spec.options_seed)
    problems: list[EvaluationProblem] = []
    unusable: list[tuple[int, BadRowError]] = []
    for (number, row), row_id in zip(rows, ids, strict=True):
        try:
            if isinstance(row, BadRowError):
                raise row
            parts, reference = READERS[spec.judge](row, spec, stream or f"{seed} {name}/{row_id}")
            text = fill_template(spec.template, parts)
            if holds_half_pair(text):
                raise BadRowError(BadRowReason.WRONG_TYPE, "its question holds half a surrogate pair")
            problems.append(EvaluationProblem(f"{name}/{row_id}", name, text, reference, spec.private))
        except BadRowError as error:
            unusable.append((number, error))
    if unusable:
        numbers = list_rows([number for number, _ in unusable])
        raise InputError(
            f"Every row of the set {name} must be usable, but {len(unusable)} of {len(rows)} in "
            f"'{spec.source}' are not ({numbers}: {unusable[0][1].detail}). "
            "Correct or remove them."
        )
    return problems


def read_set_rows(name: str, spec: EvaluationSet, max_rows: int | None, seed: int) -> list[NumberedRow]:
    """Read at most `max_rows` of the rows that `where` keeps. It always keeps a row that cannot be read.

    Raises:
        InputError: If no row is left, or what `read_rows` raises.
    """
    num_read = None if spec.where else max_rows
    rows = read_rows(spec.source, spec.split, max_rows or NUM_EMBEDDED_ROWS, seed, num_read)
    left = [(number, row) for number, row in rows if isinstance(row, BadRowError) or matches(row, spec.where)]
    if not left:
        wanted = " and ".join(f"'{text}' in {column}" for column, text in spec.where.items())
        raise InputError(
            f"data.sets.{name}.where must leave rows, but none of {len(rows)} in '{spec.source}' has "
            f"{wanted}. Correct the columns and texts."
        )
    return left[:max_rows]


def matches(row: dict[str, Any], where: Mapping[str, str]) -> bool:
    """Return whether each column of `where` contains its text."""
    return all(row.get(column) is not None and text in str(row[column]) for column, text in where.items())


def choose_ids(rows: list[NumberedRow]) -> list[str]:
    """Return the ids in the rows if all have different ones, otherwise the row numbers."""
    for column in IDS:
        ids = [
            str(row.get(column)) for _, row in rows if isinstance(row, dict) and row.get(column) is not None
        ]
        if len(ids) == len(rows) == len(set(ids)):
            return ids
    return [str(number) for number, _ in rows]


# Readers of each kind: what the template holds, and the right answer. Their errors quote no row, which may be
# of a private set.

OptionOrder = random.Random | str  # a stream that shuffles, or the seed of one problem's order
Parts = tuple[dict[str, str], Reference]
Reader = Callable[[dict[str, Any], EvaluationSet, OptionOrder], Parts]


def read_math(row: dict[str, Any], spec: EvaluationSet, order: OptionOrder) -> Parts:
    """Read a question with a mathematical answer."""
    reference = {"kind": "math", "answer": read_reference({**row, "kind": "math"})}
    return {"question": read_question(row, spec.strip)}, reference


def read_choice(row: dict[str, Any], spec: EvaluationSet, order: OptionOrder) -> Parts:
    """Read a question with options in GPQA's columns, and put them in order."""
    if missing := [column for column in CHOICE_COLUMNS if not str(row.get(column) or "").strip()]:
        raise BadRowError(BadRowReason.MISSING_COLUMN, f"it lacks {', '.join(missing)}")
    shuffled = list(CHOICE_COLUMNS)
    if isinstance(order, random.Random):
        order.shuffle(shuffled)
    else:
        shuffled = random.Random(order).sample(CHOICE_COLUMNS, len(CHOICE_COLUMNS))
    texts = [str(row[column]).strip() if spec.strip else str(row[column]) for column in shuffled]
    options = [f"{letter}) {text}" for letter, text in zip(LETTERS, texts, strict=True)]
    parts = {"question": read_question(row, spec.strip), "options": spec.separator.join(options)}
    return parts, {"kind": "choice", "answer": LETTERS[shuffled.index(CHOICE_COLUMNS[0])]}


def read_countdown(
    row: dict[str, Any], spec: EvaluationSet, order: OptionOrder
) -> tuple[dict[str, str], Reference]:
    """Read a question with numbers and their target."""
    numbers, target = row.get("numbers"), row.get("target")
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in [*numbers, target]):
        detail = "it must have numbers, a list of integers, and an integer target"
        raise BadRowError(BadRowReason.MISSING_COLUMN, detail)
    parts = {"question": read_question(row, spec.strip)}
    return parts, {"kind": "countdown", "numbers": numbers, "target": target}


READERS: dict[AnswerKind, Reader] = {
    "math": read_math,
    "choice": read_choice,
    "countdown": read_countdown,
}


def read_question(row: dict[str, Any], strip: bool = True) -> str:
    """Return the text of a row's question."""
    question = find_question(row, QUESTIONS)
    if not has_text(question):
        raise BadRowError(BadRowReason.EMPTY_QUESTION, f"it has no text in {', '.join(QUESTIONS)}")
    return question.strip() if strip else question


# Settings of a set


def check_fields(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a user names for a set.

    Raises:
        InputError: If there is no such field, or no such judge.
    """
    known = [field.name for field in fields(EvaluationSet)]
    if unknown := [key for key in given if key not in known]:
        raise InputError(
            f"data.sets.{name} may set {', '.join(known)}, but sets {', '.join(unknown)}. Check the spelling."
        )
    if given.get("judge", "math") not in READERS:
        raise InputError(
            f"data.sets.{name}.judge must be one of {', '.join(READERS)}, but is {given['judge']!r}. "
            "Correct it."
        )
    return given


def require_template(name: str, spec: EvaluationSet) -> None:
    """Raise InputError if a template lacks what it must hold, or holds what YAML made of an escape."""
    needed = ("{question}", "{options}") if spec.judge == "choice" else ("{question}",)
    if missing := [name for name in needed if name not in spec.template]:
        raise InputError(
            f"data.sets.{name}.template must contain {' and '.join(needed)} for the judge {spec.judge}, but "
            f"{spec.template!r} lacks {' and '.join(missing)}. Add it."
        )
    if re.search(r"[\x00-\x09\x0b-\x1f\x7f]", spec.template):
        raise InputError(
            f"data.sets.{name}.template must hold no control character but line breaks, but is "
            f"{spec.template!r}. Between double quotes YAML reads \\b of \\boxed as such: use single quotes."
        )
