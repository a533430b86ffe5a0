"""What a `fit` has learned, read from the files that it leaves.

    metrics.csv      first and last figures of training and of held-out rows ─┐
    rollouts.jsonl   completions of the first and of the last iterations     ─┴▶ FitResult
      line()     the sentence at the end of `fit`
      warnings   why it cannot have taught much, or what it has taught wrongly

`rlt fit` prints it, `Trainer.fit` returns it, and `rlt report` shows it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from rlt_lightning.judging.answers import ends_with_answer
from rlt_lightning.run.jsonl import Row, read_json_rows, read_rows_from
from rlt_lightning.run.metrics_csv import Curve, read_metrics

# Optimizer steps below which a run hardly changes a model: the shortest shipped run that is meant to has 24.
MIN_STEPS = 20
MORE_STEPS = "Add rows, raise trainer.max_epochs or max_steps, or lower data.prompts_per_step"
# Below these the alarms of a running fit are raised too: spread of a group, nats; entropy, nats; length, as
# a part of what it was.
GROUP_STD_BELOW = 1e-3
ENTROPY_BELOW = 0.02
LENGTH_BELOW = 0.33
# Fraction of the last groups above which groups without spread are more than chance.
FLAT_GROUPS_ABOVE = 0.5
# A fraction of completions, such as the closed ones, that falls by more than this is no noise.
FRAC_FALL = 0.1
# Steps that the first and the last figure are means of: a quarter of the run, and no more than this.
MAX_WINDOW = 10
RIGHT = "explanation/right_frac"  # not in metrics.csv: judged from rollouts.jsonl
RIGHT_TEXT = "explanations that end with the answer"
# What a run improves, the first that it has: its words, and whether it is to rise.
OBJECTIVES = {
    "reward/mean": ("reward", True),
    "distill/divergence": ("divergence from the teacher", False),
    "policy/loss": ("loss", False),
}
# Figures of held-out rows, and what the sentence calls them.
HELD_OUT = {"reward/val_mean": "reward", "policy/val_loss": "loss", "distill/val_divergence": "divergence"}
ROLLOUTS = "rollouts.jsonl"
FIRST_BYTES = 2**20  # of rollouts.jsonl that are read from its end at first


@dataclass(frozen=True)
class Change:
    """A figure at the start and at the end of a run.

    Example: `Change(-0.71, -0.38, 0.03, 0.02, 10)`: the reward was -0.71 ± 0.03 in the first ten iterations
    and -0.38 ± 0.02 in the last ten.

    Attributes:
        first: Mean of the first `num_steps` values.
        last: Mean of the last `num_steps` values.
        first_error: Standard error of `first` over its steps; NaN if it is one value.
        last_error: Standard error of `last`.
        num_steps: Values that each mean is of.
    """

    first: float
    last: float
    first_error: float = math.nan
    last_error: float = math.nan
    num_steps: int = 1

    @property
    def gain(self) -> float:
        """Return last - first."""
        return self.last - self.first

    @property
    def error(self) -> float:
        """Return the standard error of the gain; 0 if it is not known."""
        return math.hypot(*(0.0 if math.isnan(e) else e for e in (self.first_error, self.last_error)))

    @property
    def has_risen(self) -> bool:
        """Return whether the figure has risen by more than twice its standard error."""
        return self.gain > 2 * self.error and self.gain > 0

    @property
    def has_fallen(self) -> bool:
        """Return whether the figure has fallen by more than twice its standard error."""
        return -self.gain > 2 * self.error and self.gain < 0


@dataclass(frozen=True)
class FitResult:
    """What a fit has learned.

    Attributes:
        folder: The run folder.
        steps: Optimizer steps.
        changes: Figures of training by the names of metrics.csv, such as reward/mean or policy/loss, and
            explanation/right_frac, the fraction of explanations that end with the right answer, where a rule
            can judge them: over the same first and last iterations, its errors over problems.
        limits: What shows that there was little to learn from, or is little left: short clauses, on which
            `warnings` say more.
        held_out: Figures of held-out rows and evaluation sets: reward/val_mean, eval/SET/pass_at_1, …
        warnings: Why the run cannot have taught much, or what it has taught wrongly; a sentence each.
        before: A row of rollouts.jsonl: the median explanation of a problem in the first iteration. None if
            the run samples no completions.
        after: The same of the last iteration, of the same problem if that has it.
    """

    folder: Path
    steps: int = 0
    changes: dict[str, Change] = field(default_factory=dict)
    held_out: dict[str, Change] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    before: Row | None = None
    after: Row | None = None

    def find_objective(self) -> tuple[str, bool, Change] | None:
        """Return what the run improves: its words, whether it is to rise, and its change; None if unknown."""
        for name, (words, rises) in OBJECTIVES.items():
            if name in self.changes:
                return words, rises, self.changes[name]
        return None

    def judge(self) -> str:
        """Return "yes" if what the run improves is better by more than twice its error, "no" if worse."""
        found = self.find_objective()
        if found is None or found[2].num_steps < 2:
            return "unclear"
        _, rises, change = found
        better, worse = (
            (change.has_risen, change.has_fallen) if rises else (change.has_fallen, change.has_risen)
        )
        return "yes" if better else "no" if worse else "unclear"

    def line(self) -> str:
        """Return what was learned, as one sentence without its full stop; '' if nothing was measured."""
        parts = [describe_objective(self.changes)]
        parts += [
            f"held-out {HELD_OUT[name]} {show(self.held_out[name])}"
            for name in HELD_OUT
            if name in self.held_out
        ]
        for name, change in self.held_out.items():
            if name.startswith("eval/"):
                parts.append(f"accuracy on {name.split('/')[1]} {show_percent(change)}")
        if RIGHT in self.changes and "reward/correct" not in self.changes:
            what = "answers that are right" if "distill/divergence" in self.changes else RIGHT_TEXT
            parts.append(f"{what} {show_percent(self.changes[RIGHT])}")
        return ", ".join(filter(None, parts))


def describe_objective(changes: dict[str, Change]) -> str:
    """Return the figure that the run improves, first and last, with its terms."""
    if "reward/mean" in changes:
        labels = {"reward/solution": "r_SS", "reward/kl": "r_KL"}
        terms = [f"{label} {show(changes[name], False)}" for name, label in labels.items() if name in changes]
        if "reward/correct" in changes:
            terms.append(f"right answers {show_percent(changes['reward/correct'])}")
        return f"reward {show(changes['reward/mean'])}" + (f" ({', '.join(terms)})" if terms else "")
    for name, label in (("distill/divergence", "divergence from the teacher"), ("policy/loss", "loss")):
        if name in changes:
            return f"{label} {show(changes[name])} nats per token"
    return ""


def show(change: Change, with_errors: bool = True) -> str:
    """Return a change as text: -0.71 ± 0.03 → -0.38 ± 0.02."""
    pairs = ((change.first, change.first_error), (change.last, change.last_error))
    texts = [format_figure(value, error if with_errors else math.nan) for value, error in pairs]
    return texts[0] if change.num_steps == 1 and texts[0] == texts[1] else " → ".join(texts)


def format_figure(value: float, error: float, sign: str = "") -> str:
    """Return a figure with two digits of its standard error and as many decimals: -0.350 ± 0.010.

    Without an error, or with one of 0, three digits of the figure alone.
    """
    if not 0 < error < math.inf:
        return f"{value:{sign}.3g}"
    decimals = max(0, 1 - int(f"{error:.1e}".split("e")[1]))
    return f"{value:{sign}.{decimals}f} ± {error:.{decimals}f}"


def show_percent(change: Change) -> str:
    """Return the change of a fraction as text: 20.1 → 95.5 %."""
    texts = [f"{100 * value:.1f}" for value in (change.first, change.last)]
    return f"{texts[0] if texts[0] == texts[1] else ' → '.join(texts)} %"


def read_fit_result(folder: Path) -> FitResult:
    """Read what a fit has learned from its run folder.

    Raises:
        InputError: If metrics.csv or rollouts.jsonl is damaged.
    """
    curves, _ = read_metrics(folder / "metrics.csv")
    is_held_out = {name: "/val_" in name or name.startswith("eval/") for name in curves}
    training = {name: curve for name, curve in curves.items() if not is_held_out[name]}
    steps = max((curve[0][-1] for curve in training.values()), default=0)
    changes = {name: change for name, curve in training.items() if (change := measure_change(curve))}
    held_out = {
        name: change
        for name, curve in curves.items()
        if (name in HELD_OUT or name.endswith("/pass_at_1")) and (change := measure_held_out(name, curves))
    }
    first, last = read_windows(
        folder / ROLLOUTS, sorted({s for curve in training.values() for s in curve[0]})
    )
    if first.num_judged and last.num_judged:
        errors = first.right_error, last.right_error
        changes[RIGHT] = Change(
            first.right_frac, last.right_frac, *errors, min(first.num_steps, last.num_steps)
        )
    flat = last.flat_frac if "reward/zero_std_groups" in training else 0.0
    limits = list(find_limits(training, changes, flat))
    warnings = list(find_warnings(steps, limits, changes, held_out))
    pair = choose_pair(first.rows, last.rows)
    return FitResult(folder, steps, changes, held_out, [clause for clause, _ in limits], warnings, *pair)


def measure_change(curve: Curve) -> Change | None:
    """Return the means of a curve's first and last values; None if none is finite."""
    values = [value for value in curve[1] if value is not None]
    if not values:
        return None
    size = choose_window(len(values))
    first, last = values[:size], values[-size:]
    first_error, last_error = (
        stdev(part) / math.sqrt(size) if size > 1 else math.nan for part in (first, last)
    )
    return Change(fmean(first), fmean(last), first_error, last_error, size)


def choose_window(num_steps: int) -> int:
    """Return how many of a run's steps its first and its last figures are means of."""
    return max(1, min(MAX_WINDOW, num_steps // 4))


def measure_held_out(name: str, curves: dict[str, Curve]) -> Change | None:
    """Return the first and last value of a held-out figure, with standard errors where they are logged."""
    values = [value for value in curves[name][1] if value is not None]
    errors = curves.get(name.replace("pass_at_1", "standard_error")) if name.endswith("/pass_at_1") else None
    known = [math.nan if value is None else value for value in errors[1]] if errors else [math.nan]
    return Change(values[0], values[-1], known[0], known[-1]) if values else None


def find_limits(
    training: dict[str, Curve], changes: dict[str, Change], flat_groups: float
) -> Iterator[tuple[str, str]]:
    """Yield what shows that there was little to learn from, or is little left: a clause, and a warning.

    Args:
        training: Curves of training.
        changes: Their first and last figures.
        flat_groups: Fraction of the last iterations' groups whose completions all earned the same.
    """
    spread = [value for value in training.get("reward/group_std", ((), ()))[1] if value is not None]
    has_answer_term = "policy/answer_loss" in training
    left = "only the answer term trained" if has_answer_term else "there was nothing to learn from"
    flat = sum(value < GROUP_STD_BELOW for value in spread)
    if flat > len(spread) / 2:
        yield (
            f"in {flat} of {len(spread)} iterations no group had any spread",
            f"in {flat} of {len(spread)} iterations the completions of a problem all earned the same: "
            f"{left}. Raise the temperature or group_size, or take other problems",
        )
    elif flat_groups > FLAT_GROUPS_ABOVE:
        percent = f"{100 * flat_groups:.0f} %"
        yield (
            f"{percent} of the last groups have no spread",
            f"in {percent} of the last groups all completions earned the same: little is left to learn from "
            "these problems. Take harder ones, stop earlier, or turn on rollouts.dynamic_sampling",
        )
    entropy = changes.get("policy/entropy")
    if entropy and entropy.last < ENTROPY_BELOW:
        yield (
            f"the entropy is {entropy.last:.2g} nats at the end",
            f"the entropy is {entropy.last:.2g} nats at the end, {entropy.first:.2g} at the start "
            "(policy/entropy): sampling has collapsed. Lower the learning rate, or raise the loss's kl_coef",
        )


def find_warnings(
    steps: int, limits: list[tuple[str, str]], changes: dict[str, Change], held_out: dict[str, Change]
) -> Iterator[str]:
    """Yield why a run cannot have taught much, or what it has taught wrongly.

    Args:
        steps: Optimizer steps.
        limits: What `find_limits` has found.
        changes: First and last figures of training.
        held_out: Those of held-out rows.
    """
    if 0 < steps < MIN_STEPS:
        yield describe_few_steps(steps)
    yield from (warning for _, warning in limits)
    reward = changes.get("reward/mean")
    if reward and reward.has_risen:
        yield from find_wrong_lessons(changes, held_out)
    loss = changes.get("policy/loss")
    # Of RL the loss says nothing. That of a pretrained model may stay where the entropy of its traces is.
    if reward is None and "distill/divergence" not in changes and loss and loss.has_risen:
        yield f"the loss has risen, {show(loss)}: lower the learning rate, or look at the rows"
    for name, change in held_out.items():
        if name.endswith("/pass_at_1") and change.has_fallen:
            yield f"accuracy on {name.split('/')[1]} has fallen, {show_percent(change)}"


def find_wrong_lessons(changes: dict[str, Change], held_out: dict[str, Change]) -> Iterator[str]:
    """Yield what has become worse while the reward has risen."""
    length = changes.get("rollout/length_mean")
    if length and length.last < LENGTH_BELOW * length.first:
        yield (
            f"the reward rose while completions shrank from {length.first:.0f} to {length.last:.0f} tokens: "
            "it pays for saying little. Read rollouts.jsonl, and look at reward.kl_weight"
        )
    fractions = {
        "rollout/closed_frac": "completions that are closed",
        "reward/correct": "right answers",
        RIGHT: RIGHT_TEXT,
    }
    for name, what in fractions.items():
        change = changes.get(name)
        if change and change.has_fallen and -change.gain > FRAC_FALL:
            yield f"the reward rose while {what} fell, {show_percent(change)}: read rollouts.jsonl"
    solution = changes.get("reward/solution")
    if solution and solution.has_fallen:
        yield (
            f"the reward rose while r_SS fell, {show(solution, False)}: explanations help the student less, "
            "and only sound more like it. Lower reward.kl_weight, or warm up longer"
        )
    held = held_out.get("reward/val_mean")
    if held and held.gain < 0:
        yield f"the reward rose while that of held-out rows fell, {show(held)}: take more problems"


def describe_few_steps(steps: int) -> str:
    """Return why so few optimizer steps teach hardly anything, and what to change."""
    return (
        f"{steps} optimizer step{'s' * (steps != 1)} teach{'es' * (steps == 1)} hardly anything: have at "
        f"least {MIN_STEPS}. {MORE_STEPS}"
    )


# Completions


@dataclass
class Window:
    """The completions of a run's first or last iterations, counted one by one.

    Attributes:
        rows: The completions of one iteration: of the window's first or last one.
        steps: The iterations.
        right: For each problem, its completions that end with the right answer, and those that can be judged.
        ranges: For each group, by iteration and problem, its completions, its smallest and largest reward.
    """

    rows: list[Row] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    right: dict[str, tuple[int, int]] = field(default_factory=dict)
    ranges: dict[tuple[int, str], tuple[int, float, float]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Count another completion."""
        step, problem = get_step(row), repr((row.get("row"), row.get("question")))
        self.steps.add(step)
        if (reward := row.get("reward")) is not None:
            number, least, most = self.ranges.get((step, problem), (0, math.inf, -math.inf))
            self.ranges[step, problem] = number + 1, min(least, reward), max(most, reward)
        is_right = ends_with_answer(row["explanation"], row) if "explanation" in row else None
        if is_right is not None:
            number, total = self.right.get(problem, (0, 0))
            self.right[problem] = number + is_right, total + 1

    @property
    def num_steps(self) -> int:
        """Return the number of iterations."""
        return len(self.steps)

    @property
    def num_judged(self) -> int:
        """Return the number of completions that a rule could judge."""
        return sum(total for _, total in self.right.values())

    @property
    def right_frac(self) -> float:
        """Return the fraction of judged completions that end with the right answer.

        A completion that only names the answer counts too: whether its steps are right, no rule can say.
        """
        return sum(number for number, _ in self.right.values()) / self.num_judged

    @property
    def right_error(self) -> float:
        """Return the standard error of `right_frac` over problems; NaN for a single problem.

        sqrt(n / (n - 1) sum_i (c_i - p m_i)^2) / sum_i m_i       for c_i right ones of m_i of problem i, n

        Completions of one problem are not independent, so each problem counts as one observation.
        """
        count, fraction = len(self.right), self.right_frac
        if count < 2:
            return math.nan
        squares = sum((number - fraction * total) ** 2 for number, total in self.right.values())
        return math.sqrt(count / (count - 1) * squares) / self.num_judged

    @property
    def flat_frac(self) -> float:
        """Return the fraction of groups in which all completions earned the same; 0 without groups."""
        groups = [(least, most) for number, least, most in self.ranges.values() if number > 1]
        return sum(least == most for least, most in groups) / len(groups) if groups else 0.0


def read_windows(path: Path, steps: list[int]) -> tuple[Window, Window]:
    """Read the completions of a run's first and last iterations.

    Args:
        path: The run's rollouts.jsonl.
        steps: All iterations of metrics.csv. The windows are those of its figures; one without recorded
            completions is the first or the last recorded iteration.
    """
    size = choose_window(len(steps))
    first, last = Window(), Window()
    until, since = (steps[size - 1], steps[-size]) if steps else (0, math.inf)
    for row in read_json_rows(path):
        step = get_step(row)
        if first.steps and step > until and step not in first.steps:
            break
        first.add(row)
        if len(first.steps) == 1:
            first.rows.append(row)
    for row in read_last_rows(path, since):
        if last.rows and get_step(row) != get_step(last.rows[-1]):
            last.rows.clear()
        last.rows.append(row)
        last.add(row)
    return first, last


def read_last_rows(path: Path, since: float = math.inf) -> Iterator[Row]:
    """Return the completions from an iteration on, at least those of the last one, read from the end."""
    size = path.stat().st_size if path.exists() else 0
    length, last = FIRST_BYTES, None
    while True:
        start = max(0, size - length)
        rows = read_rows_from(path, start)
        first = next(rows, None)
        if first is not None and last is None:
            last = [first, *deque(rows, maxlen=1)][-1]
            since = min(since, get_step(last))
        if start == 0 or (first is not None and get_step(first) < since):
            return (row for row in read_rows_from(path, start) if get_step(row) >= since)
        length *= 4


def get_step(row: Row) -> int:
    """Return the iteration of a completion; 0 if it has none."""
    return row.get("step") or 0


def choose_pair(first: list[Row], last: list[Row]) -> tuple[Row | None, Row | None]:
    """Return a typical explanation of each of two iterations, of one problem if both have one."""
    shared = {row["row"] for row in first} & {row["row"] for row in last}

    def choose(rows: list[Row]) -> Row | None:
        own = [row for row in rows if "reward" in row and "explanation" in row]
        number = min(shared) if shared else own[0]["row"] if own else None
        group = sorted((row for row in own if row["row"] == number), key=lambda row: row["reward"])
        return group[len(group) // 2] if group else None

    return choose(first), choose(last)
