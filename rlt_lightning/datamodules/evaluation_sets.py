"""The evaluation sets: their sources, their questions, and the right answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlt_lightning.datamodules.bad_rows import BadRowError, BadRowReason, NumberedRow, row_list
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.judging.answers import (
    LETTERS,
    AnswerKind,
    Reference,
    reference_answer,
    require_reasoning_gym,
)
from rlt_lightning.records.catalogue.evaluation import SET_TITLES
from rlt_lightning.types import InputError

# Stands before a question, as in Bespoke-Stratos-17k.
IN_A_BOX = "Return your final response within \\boxed{}. "
CHOICE_PROMPT = "Return the letter of the right option within \\boxed{{}}. {question}\n\n{options}"
# Names of columns; the first one that a row has counts.
QUESTIONS = ("question", "problem", "prompt", "Question")
IDS = ("id", "unique_id", "Record ID")
NUMBERS = ("numbers", "nums")
OVERALL = "overall"  # the figures' name for the mean over sets
# Rows of an embedded set, if max_rows does not ask for more.
NUM_EMBEDDED_ROWS = 200


@dataclass(frozen=True)
class EvaluationSet:
    """One set as it is published.

    Args:
        title: Name for people.
        source: Hub id, with `:configuration` if it has several, or an embedded source.
        split: Split of the source.
        kind: How its answers are judged.
        private: Whether its authors ask not to publish its rows as plain text. Then nothing that could quote
            them is written or shown.
        instruction: Text before each question.
    """

    title: str
    source: str
    split: str = "test"
    kind: AnswerKind = "math"
    private: bool = False
    instruction: str = ""


SETS = {
    "aime24": EvaluationSet(SET_TITLES["aime24"], "HuggingFaceH4/aime_2024", "train", instruction=IN_A_BOX),
    "aime25": EvaluationSet(SET_TITLES["aime25"], "math-ai/aime25", instruction=IN_A_BOX),
    "math500": EvaluationSet(SET_TITLES["math500"], "HuggingFaceH4/MATH-500", instruction=IN_A_BOX),
    "gpqa_diamond": EvaluationSet(
        SET_TITLES["gpqa_diamond"], "Idavidrein/gpqa:gpqa_diamond", "train", kind="choice", private=True
    ),
    "gsm8k": EvaluationSet(SET_TITLES["gsm8k"], "openai/gsm8k:main", instruction=IN_A_BOX),
    "amc23": EvaluationSet(SET_TITLES["amc23"], "math-ai/amc23", instruction=IN_A_BOX),
    "countdown": EvaluationSet(SET_TITLES["countdown"], "countdown", kind="countdown"),
    "arithmetic": EvaluationSet(SET_TITLES["arithmetic"], "arithmetic"),
    "chains": EvaluationSet(SET_TITLES["chains"], "chains"),
    "word_sums": EvaluationSet(SET_TITLES["word_sums"], "word_sums"),
}


@dataclass(frozen=True)
class Question:
    """One question of a set, with its right answer."""

    id: str  # set/own id or, if the set has no ids, set/row number
    text: str  # the user's message, instruction included
    reference: Reference


def evaluation_set(name: str, source: str | None) -> EvaluationSet:
    """Look up a set. Any other name with a source is a user's set, asked unchanged and judged as math.

    Raises:
        InputError: If there is no such set, and no source either.
    """
    if name in SETS:
        return SETS[name]
    if source is None or name == OVERALL or not re.fullmatch(r"[\w-]+", name):
        raise InputError(
            f"data.sets may name {', '.join(SETS)}, or a set of your own with its file, but names '{name}' "
            f"with {'none' if source is None else repr(source)}. Choose one of the sets, or give a name of "
            "letters, digits, - and _ with a file."
        )
    return EvaluationSet(name, source)


def read_set(name: str, source: str | None, max_rows: int | None, seed: int) -> list[Question]:
    """Read a set.

    Args:
        name: One of `SETS`, or another name for a user's source.
        source: A file, folder or hub id to read instead; of a folder or hub id, the split `test`.
        max_rows: Most rows to read, from the start.
        seed: Seed of the order of options, and of an embedded source.

    Raises:
        InputError: If there is no such set, it is empty, or one of its rows cannot be used.
    """
    spec = evaluation_set(name, source)
    if spec.kind == "countdown":
        require_reasoning_gym()
    where = source or spec.source
    split = spec.split if source is None else "test"
    rows = read_rows(where, split, max_rows or NUM_EMBEDDED_ROWS, seed, max_rows)
    ids = row_ids(rows)
    questions: list[Question] = []
    unusable: list[tuple[int, BadRowError]] = []
    for (number, row), row_id in zip(rows, ids, strict=True):
        try:
            if isinstance(row, BadRowError):
                raise row
            text, reference = READERS[spec.kind](row, f"{seed} {name}/{row_id}")
            questions.append(Question(f"{name}/{row_id}", spec.instruction + text, reference))
        except BadRowError as error:
            unusable.append((number, error))
    if unusable:
        numbers = row_list([number for number, _ in unusable])
        raise InputError(
            f"Every row of the set {name} must be usable, but {len(unusable)} of {len(rows)} in '{where}' "
            f"are not ({numbers}: {unusable[0][1].detail}). "
            "Correct or remove them."
        )
    return questions


def row_ids(rows: list[NumberedRow]) -> list[str]:
    """Return the ids in the rows if all have different ones, otherwise the row numbers."""
    for column in IDS:
        own = [
            str(row.get(column)) for _, row in rows if isinstance(row, dict) and row.get(column) is not None
        ]
        if len(own) == len(rows) == len(set(own)):
            return own
    return [str(number) for number, _ in rows]


# Readers of each kind. Their errors quote no row, which may be of a private set.


def read_math(row: dict[str, Any], seed: str) -> tuple[str, Reference]:
    """Read a question with a mathematical answer."""
    answer = reference_answer(row)
    if answer is None:
        detail = "it has neither an answer nor a solution with a \\boxed{} one"
        raise BadRowError(BadRowReason.EMPTY_SOLUTION, detail)
    return question_of(row), {"kind": "math", "answer": answer}


def read_choice(row: dict[str, Any], seed: str) -> tuple[str, Reference]:
    """Read a question with options in GPQA's columns, and order them by the seed."""
    columns = ["Correct Answer", *(f"Incorrect Answer {i}" for i in range(1, len(LETTERS)))]
    if missing := [column for column in columns if not str(row.get(column) or "").strip()]:
        raise BadRowError(BadRowReason.MISSING_COLUMN, f"it lacks {', '.join(missing)}")
    order = random.Random(seed).sample(columns, len(columns))
    options = "\n".join(f"{letter}) {str(row[c]).strip()}" for letter, c in zip(LETTERS, order, strict=True))
    text = CHOICE_PROMPT.format(question=question_of(row), options=options)
    return text, {"kind": "choice", "answer": LETTERS[order.index(columns[0])]}


def read_countdown(row: dict[str, Any], seed: str) -> tuple[str, Reference]:
    """Read numbers and their target; `read_rows` has added the question if the row had none."""
    numbers = next((row[column] for column in NUMBERS if row.get(column) is not None), None)
    target = row.get("target")
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in [*numbers, target]):
        detail = "it must have a list of integers, numbers or nums, and an integer target"
        raise BadRowError(BadRowReason.MISSING_COLUMN, detail)
    return question_of(row), {"kind": "countdown", "numbers": numbers, "target": target}


READERS: dict[AnswerKind, Callable[[dict[str, Any], str], tuple[str, Reference]]] = {
    "math": read_math,
    "choice": read_choice,
    "countdown": read_countdown,
}


def question_of(row: dict[str, Any]) -> str:
    """Return the text of a row's question."""
    question = next((row[column] for column in QUESTIONS if row.get(column) is not None), None)
    if not isinstance(question, str) or not question.strip():
        raise BadRowError(BadRowReason.EMPTY_QUESTION, f"it has no text in {', '.join(QUESTIONS)}")
    if any("\ud800" <= character <= "\udfff" for character in question):
        raise BadRowError(BadRowReason.WRONG_TYPE, "its question holds half a surrogate pair")
    return question.strip()
