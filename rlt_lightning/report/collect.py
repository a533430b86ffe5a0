"""Read what a run folder holds, as plain data of bounded size.

collect              a run: its metrics, completions, groups, evaluation and settings
  read_completions   rows of a file, twice: first to choose what a page shows, then to keep it
    read_texts, …    one row, whichever verb wrote it
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Any

from rlt_lightning.console import waiting_for
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.judging.answers import ends_with_answer
from rlt_lightning.run.folder import flatten, read_settings
from rlt_lightning.run.jsonl import Row, read_json_rows
from rlt_lightning.run.metrics import COLUMNS, label_columns, read_entries
from rlt_lightning.run.metrics_csv import Curve, read_metrics
from rlt_lightning.run.result import FitResult, read_fit_result
from rlt_lightning.run.rollout_rows import describe_samples, identify_copy, spread_evenly
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.tasks.stepwise import TRACE_KINDS, find_trace_kind
from rlt_lightning.types import BadRowError, InputError

COMPLETION_FILES = ("rollouts.jsonl", "traces.jsonl", "scores.jsonl")
# Numbers among these columns say where a row comes from.
NO_FIGURES = {column.name for column in COLUMNS["completion"]}
TOKEN_COLUMNS = tuple(column.name for column in COLUMNS["tokens"])
NUMBER_SIZE = 8  # characters of a token's figure on the page, about
FILES = ("metrics.csv", *COMPLETION_FILES, "groups.json", "evaluation.json")
DIVERGENCE = "distill/divergence"  # only on-policy distillation logs it
GROUP = {"group", "num_rows", "reward", "reward_min", "reward_max"}


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
    """A problem and its completions; a completion is named by its position in the file.

    Attributes:
        row: Number of its row in the data.
        question: Its question.
        solution: Its solution.
        first: Its first completion.
        groups: For each iteration that it came in, its completions and their rewards, in the file's order.
        last: Its last completion.
    """

    row: int | None
    question: str
    solution: str
    first: int
    groups: dict[int | None, list[tuple[float, int]]] = field(default_factory=dict)
    last: int = 0

    def add(self, position: int, step: int | None, reward: float | None) -> None:
        """Count another completion."""
        self.last = position
        group = self.groups.setdefault(step, [])
        if reward is not None:
            group.append((reward, position))

    @property
    def ranked(self) -> list[tuple[float, int]]:
        """Return all rewards and their completions, the largest first; of equal ones the earliest."""
        pairs = (pair for group in self.groups.values() for pair in group)
        return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))

    @property
    def rewarded(self) -> list[list[tuple[float, int]]]:
        """Return the groups that have rewards."""
        return [group for group in self.groups.values() if group]

    def find_landmarks(self) -> dict[str, int | None]:
        """Return the completions that the page compares.

        Returns:
            typical_first and typical_last: of median reward in the first and the last iteration that the
            problem came in, the last None if it came once. highest and lowest: by reward.
        """
        groups, ranked = self.rewarded, self.ranked
        return {
            "typical_first": find_median(groups[0]) if groups else None,
            "typical_last": find_median(groups[-1]) if len(groups) > 1 else None,
            "highest": ranked[0][1] if ranked else None,
            "lowest": ranked[-1][1] if ranked else None,
        }

    @property
    def gain(self) -> float | None:
        """Return the mean reward of the last time minus that of the first; None if it came once."""
        groups = self.rewarded
        return compute_mean(groups[-1]) - compute_mean(groups[0]) if len(groups) > 1 else None


def find_median(group: list[tuple[float, int]]) -> int:
    """Return the completion of median reward."""
    return sorted(group)[len(group) // 2][1]


def compute_mean(group: list[tuple[float, int]]) -> float:
    """Return the mean reward of a group."""
    return fmean(reward for reward, _ in group)


@dataclass
class KindCount:
    """What the reward makes of one kind of completion.

    Attributes:
        count: Completions of the kind.
        rewards: Their rewards.
        leads: Their rewards minus the mean of their group.
        tops: Groups of more than one kind in which one of this kind has the largest reward.
        groups: Groups of more than one kind that have one of this kind.
    """

    count: int = 0
    rewards: Spread = field(default_factory=Spread)
    leads: Spread = field(default_factory=Spread)
    tops: int = 0
    groups: int = 0


@dataclass
class Completions:
    """The completions of a run: the rows that a page takes, and figures of all."""

    file: str = ""
    total: int = 0
    kept: dict[int, Row] = field(default_factory=dict)  # by position in the file; of identical ones the first
    shown_as: list[int] = field(
        default_factory=list
    )  # position -> that of the first identical one of its group
    problems: list[AskedProblem] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    spreads: dict[str, dict[int, Spread]] = field(default_factory=dict)  # term -> step -> over completions
    kinds: dict[str, dict[int, float]] = field(default_factory=dict)  # kind -> step -> fraction
    right: dict[int, float] = field(default_factory=dict)  # step -> fraction that ends with the answer
    by_kind: dict[str, KindCount] = field(default_factory=dict)  # kind, or right and wrong


@dataclass
class Run:
    """The contents of one run folder."""

    folder: Path
    metrics: dict[str, Curve]
    completions: Completions
    groups: list[Row]
    evaluation: dict[str, Any] | None
    settings: dict[str, Any]  # config.yaml, flat
    notes: list[str]
    result: FitResult | None = None  # of a fit


def collect(folder: Path, bounds: Bounds) -> Run:
    """Read a run folder.

    Raises:
        InputError: If it holds nothing to show, or a file that is not what it must be.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in FILES):
        raise InputError(
            f"RUN_DIR must be the folder of a run, with one of {', '.join(FILES)}, but {folder} is none. "
            "Name the folder that --output_dir was."
        )
    read_entries(folder)
    metrics, notes = read_metrics(folder / "metrics.csv")
    completions = Completions()
    for name in COMPLETION_FILES:
        if not completions.total:
            with waiting_for(f"{folder / name} to be read"):
                completions = read_completions(partial(read_json_rows, folder / name), name, bounds)
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
    kept = sum(row["copies"] for row in completions.kept.values())
    if kept < completions.total:
        notes.append(
            f"{kept:,} of the {completions.total:,} completions in {completions.file} are on this page: of "
            "each problem those of largest, smallest and median reward, the last iteration, each problem's "
            "first and last, as far as there is room, then evenly over iterations. Curves and their spreads "
            "count all. More: --max_completions, --max_text_mib."
        )
    is_fit = evaluation is None and (metrics or completions.file == COMPLETION_FILES[0])
    result = read_fit_result(folder) if is_fit else None
    settings = flatten(read_settings(folder))
    return Run(folder, metrics, completions, groups, evaluation, settings, notes, result)


def is_distilled(run: Run) -> bool:
    """Return whether a run is on-policy distillation, whose column `reward` is minus the divergence."""
    return DIVERGENCE in run.metrics


def read_json(path: Path, kind: type) -> Any:
    """Return what a JSON file holds; None if there is no file.

    Raises:
        InputError: If it is no JSON, or not of this kind.
    """
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(
            f"{path} must be JSON, but is not ({error}). Write it again, or move it away."
        ) from error
    if not isinstance(value, kind):
        raise InputError(f"{path} must hold a JSON {kind.__name__}, but does not. Write it again.")
    return value


def require_keys(value: Any, keys: set[str], path: Path) -> None:
    """Check that an object has the keys that rlt writes."""
    if not isinstance(value, dict) or not keys <= value.keys():
        raise InputError(
            f"{path} must have {', '.join(sorted(keys))}, as rlt writes them, but has {value!r:.40}. "
            "Write it again, or move it away."
        )


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
    samples: dict[int, list[int]] = {}  # position of a first completion -> numbers of its copies
    group_sizes: Counter[tuple[int, int | None]] = Counter()
    first_copies: dict[int, int] = {}
    spreads: dict[str, dict[int, Spread]] = defaultdict(lambda: defaultdict(Spread))
    judged: list[tuple[int | None, str | None, bool | None]] = []  # step, kind, whether it is right
    for position, row in enumerate(rows()):
        question, solution, text = read_texts(row, file)
        step, values = read_step(row, file), read_figures(row, file)
        if (question, solution) not in by_texts:
            # In scores.jsonl a column `row` belongs to the source.
            number = row.get("row") if file != "scores.jsonl" else None
            by_texts[question, solution] = AskedProblem(number, question, solution, position)
            found.problems.append(by_texts[question, solution])
        by_texts[question, solution].add(position, step, values.get("reward"))
        owners.append(by_texts[question, solution])
        group = by_texts[question, solution].first, step
        key = hash((group, identify_copy(row, text))) if file != "scores.jsonl" else position
        shown_as = first_copies.setdefault(key, position)
        found.shown_as.append(shown_as)
        number = row.get("completion", row.get("trace"))
        samples.setdefault(shown_as, []).append(number if isinstance(number, int) else group_sizes[group])
        group_sizes[group] += 1
        sizes.append(measure_size(row, text))
        sizes[shown_as] = max(sizes[shown_as], sizes[-1])  # a copy may bring the tokens
        judged.append((step, *judge_text(row, question, solution, text)))
        for name, value in values.items():
            if name not in found.terms:
                found.terms.append(name)
            if step is not None and value is not None:
                spreads[name][step].add(value)
    found.total = len(sizes)
    order = list(label_columns())
    found.terms.sort(key=lambda name: order.index(name) if name in order else len(order))
    found.spreads = {name: dict(sorted(by_step.items())) for name, by_step in spreads.items()}
    found.kinds, found.right = count_by_step(judged)
    found.by_kind = count_by_reward(found.problems, judged)
    last_step = max((step for step, _, _ in judged if step is not None), default=None)
    last = [i for i, (step, _, _) in enumerate(judged) if step is not None and step == last_step]
    chosen = choose_completions(found.problems, owners, sizes, bounds, last, found.shown_as)
    numbers = {texts: number for number, texts in enumerate(by_texts)}
    for position, row in enumerate(rows()):
        shown_as = found.shown_as[position]
        if position in chosen:
            step, kind, is_right = judged[position]
            copies, total = samples[position], group_sizes[owners[position].first, step]
            found.kept[position] = build_completion(row, file, numbers, kind, is_right)
            names = describe_samples(copies, total) if file != "scores.jsonl" else ""
            found.kept[position] |= {"copies": len(copies), "sample": names}
        elif shown_as in chosen and found.kept[shown_as]["tokens"] is None:
            found.kept[shown_as]["tokens"] = build_tokens(row)
    return found


def judge_text(row: Row, question: str, solution: str, text: str) -> tuple[str | None, bool | None]:
    """Return the kind of a completion and whether it ends with the right answer; None where no rule can say.

    Of an answer with a thought in tags, the kind is that of the thought.
    """
    thought = text
    for tags in (R1, STRATOS):
        if tags.thought_open in text:
            thought = text.partition(tags.thought_open)[2].partition(tags.thought_close)[0]
    names = ("answer", "kind", "numbers", "target")
    reference = {name: row[name] for name in names if name in row}
    reference |= {"question": question, "solution": solution}
    return find_trace_kind(question, thought.strip()), ends_with_answer(text, reference)


def count_by_step(
    judged: list[tuple[int | None, str | None, bool | None]],
) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """Return, for each iteration, the fraction of each kind and of completions with the right answer.

    Args:
        judged: Iteration, kind and whether the answer is right, of each completion; None where unknown.
    """
    kinds: dict[int, Counter[str]] = defaultdict(Counter)
    right: dict[int, Spread] = defaultdict(Spread)
    for step, kind, is_right in judged:
        if step is not None and kind is not None:
            kinds[step][kind] += 1
        if step is not None and is_right is not None:
            right[step].add(float(is_right))
    seen = [kind for kind in TRACE_KINDS if any(kind in counts for counts in kinds.values())]
    by_kind: dict[str, dict[int, float]] = {}
    by_kind |= {kind: {step: c[kind] / c.total() for step, c in sorted(kinds.items())} for kind in seen}
    return by_kind, {step: spread.mean for step, spread in sorted(right.items())}


def count_by_reward(
    problems: list[AskedProblem], judged: list[tuple[int | None, str | None, bool | None]]
) -> dict[str, KindCount]:
    """Return what the reward makes of each kind or, without kinds, of right and wrong answers."""
    words = {True: "right answer", False: "wrong answer", None: None}
    has_kinds = any(kind for _, kind, _ in judged)
    names = [kind if has_kinds else words[is_right] for _, kind, is_right in judged]
    found: dict[str, KindCount] = defaultdict(KindCount)
    for group in (group for problem in problems for group in problem.rewarded):
        mean = compute_mean(group)
        own = {name for _, position in group if (name := names[position]) is not None}
        for reward, position in group:
            if (name := names[position]) is not None:
                found[name].count += 1
                found[name].rewards.add(reward)
                if len(group) > 1:
                    found[name].leads.add(reward - mean)
        if len(own) > 1:
            for name in own:
                found[name].groups += 1
            if (top := names[max(group, key=lambda pair: (pair[0], -pair[1]))[1]]) is not None:
                found[top].tops += 1
    order = [*TRACE_KINDS, *filter(None, words.values())]
    return {name: found[name] for name in order if name in found}


def choose_completions(
    problems: list[AskedProblem],
    owners: list[AskedProblem],
    sizes: list[int],
    bounds: Bounds,
    last: list[int],
    shown_as: list[int],
) -> set[int]:
    """Choose what the page compares, the last iteration, first and last ones, then evenly over the file.

    Args:
        problems: The problems of the file.
        owners: The problem of each completion, in the order of the file and so of the iterations.
        sizes: Characters of each completion. The characters of its problem count once.
        bounds: What a page takes.
        last: The completions of the last iteration.
        shown_as: For each completion the one that is shown in its place: the first identical one.
    """
    landmarks = [problem.find_landmarks() for problem in problems]
    names = ("highest", "lowest", "typical_first", "typical_last")
    kinds: list[list[int | None]] = [
        *([found[name] for found in landmarks] for name in names),
        [*last],
        [problem.first for problem in problems],
        [problem.last for problem in problems],
        [*range(len(sizes))],
    ]
    chosen: set[int] = set()
    shown: set[int] = set()  # problems, by the position of their first completion
    left = bounds.characters
    for kind in kinds:
        candidates = sorted({shown_as[position] for position in kind if position is not None} - chosen)
        if not candidates:
            continue
        mean_size = sum(sizes[i] for i in candidates) / len(candidates)
        room = min(bounds.completions - len(chosen), int(left / max(mean_size, 1)))
        for position in spread_evenly(candidates, room):
            owner = owners[position]
            size = sizes[position] + (0 if owner.first in shown else len(owner.question + owner.solution))
            if size <= left:
                chosen.add(position)
                shown.add(owner.first)
                left -= size
    return chosen


def read_texts(row: Row, file: str) -> tuple[str, str, str]:
    """Return question, solution and explanation of a completion."""
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
    # A conversation in tags that we do not know is shown as it is.
    return "", "", json.dumps(row.get("conversations", ""), ensure_ascii=False)


def read_step(row: Row, file: str) -> int | None:
    """Return the iteration of a completion; only in rollouts.jsonl is the column `step` one."""
    step = row.get("step") if file == "rollouts.jsonl" else None
    return step if isinstance(step, int) else None


def read_figures(row: Row, file: str) -> dict[str, float | None]:
    """Return the numbers that say something about a completion; None for a number that is not finite.

    Rows of a predict run also hold the columns of the source, so only columns of the catalogue count there.
    """
    ours = (name for name in row if name not in NO_FIGURES) if file == "rollouts.jsonl" else label_columns()
    found = {name: float(row[name]) for name in ours if isinstance(row.get(name), (int, float))}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def measure_size(row: Row, text: str) -> int:
    """Return how many characters a completion takes on the page, about: its text and its tokens."""
    if not has_tokens(row):
        return len(text)
    tokens = (*row["thought_tokens"], *row["solution_tokens"])
    return len(text) + sum(len(token) + NUMBER_SIZE for token in tokens)


def has_tokens(row: Row) -> bool:
    """Return whether a row has all four columns of tokens, with a figure for each token."""
    for names, kinds in ((TOKEN_COLUMNS[::2], str), (TOKEN_COLUMNS[1::2], (int, float, NoneType))):
        for column in map(row.get, names):
            if not isinstance(column, list) or not all(isinstance(value, kinds) for value in column):
                return False
    return all(
        len(row[texts]) == len(row[values]) for texts, values in (TOKEN_COLUMNS[:2], TOKEN_COLUMNS[2:])
    )


def build_completion(
    row: Row, file: str, problems: dict[tuple[str, str], int], kind: str | None, is_right: bool | None
) -> Row:
    """Return a completion as the page takes it.

    Args:
        row: The row as it was written.
        file: Name of its file.
        problems: Number of each problem, by question and solution.
        kind: Its kind, as `judge_text` says.
        is_right: Whether it ends with the right answer.
    """
    question, solution, text = read_texts(row, file)
    return {
        "kind": kind,
        "right": is_right,
        "problem": problems[question, solution],
        "step": read_step(row, file),
        "column": row.get("trace_column"),
        "finish": row.get("finish_reason"),
        "text": text,
        "figures": read_figures(row, file),
        "tokens": build_tokens(row),
    }


def build_tokens(row: Row) -> Row | None:
    """Return a row's columns of tokens as the page takes them; None if it has none."""
    return {name: list(round_numbers(row[name])) for name in TOKEN_COLUMNS} if has_tokens(row) else None


def round_numbers(values: list[Any]) -> Iterator[Any]:
    """Yield a column of tokens for the page: numbers in few digits, None for one that is not finite."""
    for value in values:
        if isinstance(value, str):
            yield value
        else:
            yield round(float(value), 4) if value is not None and math.isfinite(value) else None
