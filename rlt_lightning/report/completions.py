"""Read a run's completions for the report: no more of them than a page can hold."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from rlt_lightning.datamodules.bad_rows import BadRowError
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.records.jsonl import Row
from rlt_lightning.records.rows import evenly_spread
from rlt_lightning.tags import R1, STRATOS

COMPLETIONS = ("rollouts.jsonl", "traces.jsonl", "scores.jsonl")
# Columns of completions that are figures of theirs, in the order in which they are shown.
TERMS: tuple[str, ...] = (
    "reward",
    "solution_log_prob_reward",
    "kl_reward",
    "format_reward",
    "correct",
    "formatted",
    "timed_out",
)
BOOKKEEPING = {"step", "row", "completion", "policy_version", "seed", "worker"}  # numbers that are no figures
TOKENS = ("thought_tokens", "thought_kl", "solution_tokens", "solution_log_probs")
NUMBER_SIZE = 8  # characters of a token's figure on the page, about


@dataclass(frozen=True)
class Bounds:
    """How much of a run a page takes: its completions, and the characters of their texts and tokens."""

    completions: int
    characters: int


@dataclass
class Spread:
    """Number, mean and standard deviation of what comes one by one (Welford's sums)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Take one more."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += step * (value - self.mean)

    @property
    def std(self) -> float:
        """With the unbiased variance, as metrics.csv has it; 0 of a single value."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass
class Asked:
    """A problem and what came of it; completions are named by their position in the file."""

    row: int | None
    question: str
    solution: str
    first: int
    first_step: int | None
    last: int = 0
    best: int | None = None
    worst: int | None = None
    later: int | None = None  # best of those after the first step
    rewards: dict[int, float] = field(default_factory=dict)  # of the three
    steps: set[int | None] = field(default_factory=set)
    met_first: Spread = field(default_factory=Spread)  # rewards of the first step

    def add(self, position: int, step: int | None, reward: float | None) -> None:
        """Take one more completion."""
        self.last = position
        self.steps.add(step)
        if reward is None:
            return
        if step == self.first_step:
            self.met_first.add(reward)
        elif self.later is None or reward > self.rewards[self.later]:
            self.later = position
        if self.best is None or reward > self.rewards[self.best]:
            self.best = position
        if self.worst is None or reward < self.rewards[self.worst]:
            self.worst = position
        if position in (self.best, self.worst, self.later):
            self.rewards[position] = reward
            self.rewards = {i: self.rewards[i] for i in (self.best, self.worst, self.later) if i is not None}

    @property
    def gain(self) -> float | None:
        """By how much the best later completion beats the mean of the first time; None if met once."""
        if self.later is None or not self.met_first.count:
            return None
        return self.rewards[self.later] - self.met_first.mean


@dataclass
class Completions:
    """The completions of a run: those that a page takes, and figures of all."""

    file: str = ""
    total: int = 0
    kept: dict[int, Row] = field(default_factory=dict)  # by position in the file
    problems: list[Asked] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    spreads: dict[str, dict[int, Spread]] = field(default_factory=dict)  # term -> step -> over completions


def read_completions(rows: Callable[[], Iterable[Row]], file: str, bounds: Bounds) -> Completions:
    """Read completions twice, one by one: to choose those that a page takes, and to take them.

    Args:
        rows: Begins to read them.
        file: Name of the file that they have the form of.
        bounds: What a page takes.
    """
    found = Completions(file)
    by_texts: dict[tuple[str, str], Asked] = {}
    sizes: list[int] = []
    owners: list[Asked] = []
    spreads: dict[str, dict[int, Spread]] = defaultdict(lambda: defaultdict(Spread))
    for position, row in enumerate(rows()):
        question, solution, text = texts_of(row, file)
        step, figures = step_of(row, file), figures_of(row, file)
        if (question, solution) not in by_texts:
            number = row.get("row") if file != "scores.jsonl" else None  # there it is a column of the source
            by_texts[question, solution] = Asked(number, question, solution, position, step)
            found.problems.append(by_texts[question, solution])
        by_texts[question, solution].add(position, step, figures.get("reward"))
        owners.append(by_texts[question, solution])
        sizes.append(len(text) + sum(len(part) + NUMBER_SIZE for part in token_texts(row)))
        for name, value in figures.items():
            if name not in found.terms:
                found.terms.append(name)
            if step is not None and value is not None:
                spreads[name][step].add(value)
    found.total = len(sizes)
    found.terms.sort(key=lambda name: TERMS.index(name) if name in TERMS else len(TERMS))
    found.spreads = {name: dict(sorted(by_step.items())) for name, by_step in spreads.items()}
    chosen = choose(found.problems, owners, sizes, bounds)
    numbers = {texts: number for number, texts in enumerate(by_texts)}
    for position, row in enumerate(rows()):
        if position in chosen:
            found.kept[position] = completion_of(row, file, numbers)
    return found


def choose(problems: list[Asked], owners: list[Asked], sizes: list[int], bounds: Bounds) -> set[int]:
    """Choose each problem's best, worst, most improved, first and last completion, then evenly over the file.

    Args:
        problems: Of the file.
        owners: The problem of each completion, in the order of the file, which is that of the iterations.
        sizes: Characters of each completion; those of its problem count once.
        bounds: How many, and how many characters in all.
    """
    kinds: list[list[int | None]] = [
        [problem.best for problem in problems],
        [problem.worst for problem in problems],
        [problem.later if (problem.gain or 0) > 0 else None for problem in problems],
        [problem.first for problem in problems],
        [problem.last for problem in problems],
        list(range(len(sizes))),
    ]
    chosen: set[int] = set()
    shown: set[int] = set()  # problems, by the position of their first completion
    left = bounds.characters
    for kind in kinds:
        candidates = sorted({position for position in kind if position is not None} - chosen)
        if not candidates:
            continue
        mean_size = sum(sizes[i] for i in candidates) / len(candidates)
        room = min(bounds.completions - len(chosen), int(left / max(mean_size, 1)))
        for position in evenly_spread(candidates, room):
            owner = owners[position]
            size = sizes[position] + (0 if owner.first in shown else len(owner.question + owner.solution))
            if size <= left:
                chosen.add(position)
                shown.add(owner.first)
                left -= size
    return chosen


def texts_of(row: Row, file: str) -> tuple[str, str, str]:
    """Question, solution and explanation of a completion, whichever verb wrote it."""
    column = "explanation" if file == "rollouts.jsonl" else row.get("trace_column", TRACE_COLUMN)
    texts = [row.get(name) for name in ("question", "solution", column)]
    if all(isinstance(text, str) for text in texts):
        question, solution, explanation = map(str, texts)
        return question, solution.strip(), explanation
    for tags in (STRATOS, R1):
        with suppress(BadRowError):
            parsed = parse_row(row, tags, (column,), allows_completion=True)
            trace = (column == TRACE_COLUMN and parsed.completion) or parsed.traces[column].strip()
            return parsed.question, parsed.solution.strip(), trace
    return "", "", json.dumps(row.get("conversations", ""), ensure_ascii=False)  # in tags of their own


def step_of(row: Row, file: str) -> int | None:
    """The iteration of a completion; in other files than rollouts.jsonl, a column of that name is none."""
    step = row.get("step") if file == "rollouts.jsonl" else None
    return step if isinstance(step, int) else None


def figures_of(row: Row, file: str) -> dict[str, float | None]:
    """The numbers that say something about a completion; None where one is not finite.

    Rows of a predict run also hold the columns of the source, whose numbers are none of ours.
    """
    ours = (name for name in row if name not in BOOKKEEPING) if file == "rollouts.jsonl" else TERMS
    found = {name: float(row[name]) for name in ours if isinstance(row.get(name), (int, float))}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def token_texts(row: Row) -> Iterable[str]:
    """The texts of the tokens that a row carries figures of; none if it lacks one of the four columns."""
    if not has_tokens(row):
        return ()
    return (*row["thought_tokens"], *row["solution_tokens"])


def has_tokens(row: Row) -> bool:
    """Whether a row has tokens and as many figures."""
    for names, kinds in ((TOKENS[::2], str), (TOKENS[1::2], (int, float, NoneType))):
        for column in map(row.get, names):
            if not isinstance(column, list) or not all(isinstance(value, kinds) for value in column):
                return False
    return all(len(row[texts]) == len(row[values]) for texts, values in (TOKENS[:2], TOKENS[2:]))


def completion_of(row: Row, file: str, problems: dict[tuple[str, str], int]) -> Row:
    """A completion as the page takes it.

    Args:
        row: As it was written.
        file: Name of its file.
        problems: Numbers of the problems, by question and solution.
    """
    question, solution, text = texts_of(row, file)
    return {
        "problem": problems[question, solution],
        "step": step_of(row, file),
        "number": row.get("completion", row.get("trace")) if file != "scores.jsonl" else None,
        "column": row.get("trace_column"),
        "finish": row.get("finish_reason"),
        "text": text,
        "figures": figures_of(row, file),
        "tokens": {name: list(numbers_or_texts(row[name])) for name in TOKENS} if has_tokens(row) else None,
    }


def numbers_or_texts(values: list[Any]) -> Iterator[Any]:
    """A column of tokens as the page takes it: numbers in few digits, None where one is not finite."""
    for value in values:
        if isinstance(value, str):
            yield value
        else:
            yield round(float(value), 4) if value is not None and math.isfinite(value) else None
