"""What run folders hold, as plain data of bounded size."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from rlt_lightning.datamodules.rows import TRACE_COLUMN, BadRowError, parse_row
from rlt_lightning.records.jsonl import Row, rows_in
from rlt_lightning.records.rows import evenly_spread
from rlt_lightning.records.run_folder import flat
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.types import InputError

COMPLETIONS = ("rollouts.jsonl", "traces.jsonl", "scores.jsonl")
FILES = ("metrics.csv", *COMPLETIONS, "groups.json", "evaluation.json")
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
TERMS += ("solution_log_prob_mean", "solution_log_prob_min", "kl_mean", "kl_max")
TERMS += ("num_tokens", "student_tokens", "closed", "fits")
BOOKKEEPING = {"step", "row", "completion", "policy_version", "seed", "worker"}  # numbers that are no figures
GROUP = {"group", "num_rows", "reward", "reward_min", "reward_max"}
TOKENS = ("thought_tokens", "thought_kl", "solution_tokens", "solution_log_probs")
NUMBER_SIZE = 8  # characters of a token's figure on the page, about
Curve = tuple[list[int], list[float | None]]  # steps and values; None: not finite


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


@dataclass
class Run:
    """What one run folder holds."""

    folder: Path
    metrics: dict[str, Curve]
    completions: Completions
    groups: list[Row]
    evaluation: dict[str, Any] | None
    settings: dict[str, Any]  # config.yaml, flat
    notes: list[str]


def collect(folder: Path, bounds: Bounds) -> Run:
    """Read a run folder.

    Raises:
        InputError: If it holds nothing to show, or a file that is not what it must be.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in FILES):
        raise InputError(
            f"RUN_DIR must be the folder of a run, with one of {', '.join(FILES)}, but {folder} is none. "
            "Name what --output_dir was."
        )
    metrics, notes = read_metrics(folder / "metrics.csv")
    completions = Completions()
    for name in COMPLETIONS:
        if not completions.total:
            completions = read_completions(partial(rows_in, folder / name), name, bounds)
    groups = read_json(folder / "groups.json", list) or []
    for row in groups:
        require_keys(row, GROUP, folder / "groups.json")
    evaluation = read_json(folder / "evaluation.json", dict)
    if evaluation is not None:
        require_keys(evaluation, {"sets"}, folder / "evaluation.json")
    if not (metrics or completions.total or groups or evaluation):
        raise InputError(
            f"{folder} holds a run that has written no figures yet. Wait for its first iteration."
        )
    kept = len(completions.kept)
    if kept < completions.total:
        notes.append(
            f"{kept:,} of the {completions.total:,} completions in {completions.file} are on this page: each "
            "problem's best, worst, first, last and most improved, as far as there is room, then evenly over "
            "iterations. Curves and their spreads count all. More: --max_completions, --max_text_mib."
        )
    return Run(folder, metrics, completions, groups, evaluation, read_settings(folder), notes)


def read_settings(folder: Path) -> dict[str, Any]:
    """The run's config.yaml as dotted names and values; nothing where there is none.

    Raises:
        InputError: If it is no YAML.
    """
    path = folder / "config.yaml"
    try:
        return flat(yaml.safe_load(path.read_text())) if path.exists() else {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} must be YAML, but is not ({reason}). Restore it, or move it away."
        ) from error


def read_json(path: Path, kind: type) -> Any:
    """A JSON file; None if there is none.

    Raises:
        InputError: If it is not of its kind.
    """
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(
            f"{path} must be JSON, but is not ({error}). Make it anew, or move it away."
        ) from error
    if not isinstance(value, kind):
        raise InputError(f"{path} must hold a JSON {kind.__name__}, but does not. Make it anew.")
    return value


def require_keys(value: Any, keys: set[str], path: Path) -> None:
    """Check that an object is one of ours."""
    if not isinstance(value, dict) or not keys <= value.keys():
        raise InputError(
            f"{path} must have {', '.join(sorted(keys))}, as rlt writes them, but has {value!r:.40}. "
            "Make it anew, or move it away."
        )


def read_metrics(path: Path) -> tuple[dict[str, Curve], list[str]]:
    """Read metrics.csv: a curve for each metric that has any value, and what is to be said about them.

    Raises:
        InputError: If a step or a value is no number.
    """
    curves: dict[str, Curve] = {}
    odd: dict[str, list[int]] = defaultdict(list)
    if not path.exists():
        return {}, []
    whole, _, _ = path.read_text(errors="replace").rpartition("\n")  # a kill may tear the last line
    for row in csv.DictReader(StringIO(whole)):
        step = number_in(row.pop("step", None), path, "step")
        if not math.isfinite(step):
            raise InputError(f"Steps in {path} must be whole numbers, but one is {step}. Correct it.")
        for name, cell in row.items():
            if not cell:
                continue
            value = number_in(cell, path, name)
            if not math.isfinite(value):
                odd[name].append(int(step))
            steps, values = curves.setdefault(name, ([], []))
            steps.append(int(step))
            values.append(value if math.isfinite(value) else None)
    curves = {name: curve for name, curve in curves.items() if any(v is not None for v in curve[1])}
    notes = [
        f"{name} is not finite at {len(steps)} step{'s' * (len(steps) > 1)} (first: {steps[0]}); gaps there."
        for name, steps in odd.items()
    ]
    return curves, notes


def number_in(cell: Any, path: Path, name: str | None) -> float:
    """The number in a cell."""
    try:
        return float(cell)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"Every cell of {path} must be a number or empty, but the column {name} has {cell!r}. Correct or "
            "delete that line."
        ) from error


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
