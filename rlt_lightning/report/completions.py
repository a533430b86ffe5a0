"""Read a run's completions for the report: no more of them than a page can hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlt_lightning.report.completion_rows import completion_of, figures_of, size_of, step_of, texts_of
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.metrics import label_columns
from rlt_lightning.run.rows import evenly_spread


@dataclass(frozen=True)
class Bounds:
    """How many completions a page takes, and how many characters of their texts and tokens."""

    completions: int
    characters: int


@dataclass
class Spread:
    """Number, mean and standard deviation of values that come one by one (Welford's sums)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count another value."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self.squares += step * (value - self.mean)

    @property
    def std(self) -> float:
        """Return the standard deviation, unbiased as in metrics.csv; 0 for a single value."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass
class AskedProblem:
    """A problem and its completions; a completion is named by its position in the file."""

    row: int | None
    question: str
    solution: str
    first: int
    first_step: int | None
    last: int = 0
    best: int | None = None
    worst: int | None = None
    best_later: int | None = None  # the best after the first step
    rewards: dict[int, float] = field(default_factory=dict)  # of best, worst and best_later
    steps: set[int | None] = field(default_factory=set)
    first_rewards: Spread = field(default_factory=Spread)  # of the completions of the first step

    def add(self, position: int, step: int | None, reward: float | None) -> None:
        """Count another completion."""
        self.last = position
        self.steps.add(step)
        if reward is None:
            return
        if step == self.first_step:
            self.first_rewards.add(reward)
        elif self.best_later is None or reward > self.rewards[self.best_later]:
            self.best_later = position
        if self.best is None or reward > self.rewards[self.best]:
            self.best = position
        if self.worst is None or reward < self.rewards[self.worst]:
            self.worst = position
        if position in (self.best, self.worst, self.best_later):
            self.rewards[position] = reward
            self.rewards = {
                i: self.rewards[i] for i in (self.best, self.worst, self.best_later) if i is not None
            }

    @property
    def gain(self) -> float | None:
        """Return by how much the best later completion beats the mean of the first step, if there is one."""
        if self.best_later is None or not self.first_rewards.count:
            return None
        return self.rewards[self.best_later] - self.first_rewards.mean


@dataclass
class Completions:
    """The completions of a run: the rows that a page takes, and figures of all."""

    file: str = ""
    total: int = 0
    kept: dict[int, Row] = field(default_factory=dict)  # by position in the file
    problems: list[AskedProblem] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    spreads: dict[str, dict[int, Spread]] = field(default_factory=dict)  # term -> step -> over completions


def read_completions(rows: Callable[[], Iterable[Row]], file: str, bounds: Bounds) -> Completions:
    """Read completions twice, one by one: first to choose what the page shows, then to keep it.

    Args:
        rows: Called to read the rows from the start.
        file: Name of the file whose columns the rows have.
        bounds: What a page takes.
    """
    found = Completions(file)
    by_texts: dict[tuple[str, str], AskedProblem] = {}
    sizes: list[int] = []
    owners: list[AskedProblem] = []
    spreads: dict[str, dict[int, Spread]] = defaultdict(lambda: defaultdict(Spread))
    for position, row in enumerate(rows()):
        question, solution, text = texts_of(row, file)
        step, values = step_of(row, file), figures_of(row, file)
        if (question, solution) not in by_texts:
            # In scores.jsonl a column `row` belongs to the source.
            number = row.get("row") if file != "scores.jsonl" else None
            by_texts[question, solution] = AskedProblem(number, question, solution, position, step)
            found.problems.append(by_texts[question, solution])
        by_texts[question, solution].add(position, step, values.get("reward"))
        owners.append(by_texts[question, solution])
        sizes.append(size_of(row, text))
        for name, value in values.items():
            if name not in found.terms:
                found.terms.append(name)
            if step is not None and value is not None:
                spreads[name][step].add(value)
    found.total = len(sizes)
    order = list(label_columns())
    found.terms.sort(key=lambda name: order.index(name) if name in order else len(order))
    found.spreads = {name: dict(sorted(by_step.items())) for name, by_step in spreads.items()}
    chosen = choose(found.problems, owners, sizes, bounds)
    numbers = {texts: number for number, texts in enumerate(by_texts)}
    for position, row in enumerate(rows()):
        if position in chosen:
            found.kept[position] = completion_of(row, file, numbers)
    return found


def choose(
    problems: list[AskedProblem], owners: list[AskedProblem], sizes: list[int], bounds: Bounds
) -> set[int]:
    """Choose each problem's best, worst, most improved, first and last completion, then evenly over the file.

    Args:
        problems: The problems of the file.
        owners: The problem of each completion, in the order of the file and so of the iterations.
        sizes: Characters of each completion. The characters of its problem count once.
        bounds: What a page takes.
    """
    kinds: list[list[int | None]] = [
        [problem.best for problem in problems],
        [problem.worst for problem in problems],
        [problem.best_later if (problem.gain or 0) > 0 else None for problem in problems],
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
