"""What a `fit` has learned, read from the files that it leaves.

    metrics.csv      first and last figures of training and of held-out rows ─┐
    rollouts.jsonl   completions of the first and of the last iteration      ─┴▶ FitResult
      line()     the sentence at the end of `fit`
      warnings   why it cannot have taught much, or what it has taught wrongly

`rlt fit` prints it, `Trainer.fit` returns it, and `rlt report` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
            explanation/right_frac, the part of the first and of the last iteration's explanations that end
            with the right answer, where answers are numbers.
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
    texts = [
        f"{value:.3g}" + (f" ± {error:.2g}" if with_errors and math.isfinite(error) else "")
        for value, error in pairs
    ]
    return texts[0] if change.num_steps == 1 and texts[0] == texts[1] else " → ".join(texts)


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
    first, last = read_first_rows(folder / ROLLOUTS), read_last_rows(folder / ROLLOUTS)
    if (before := count_right(first)) is not None and (after := count_right(last)) is not None:
        changes[RIGHT] = Change(before[0], after[0], before[1], after[1])
    pair = choose_pair(first, last)
    warnings = list(find_warnings(steps, training, changes, held_out))
    return FitResult(folder, steps, changes, held_out, warnings, *pair)


def measure_change(curve: Curve) -> Change | None:
    """Return the means of a curve's first and last values; None if none is finite."""
    values = [value for value in curve[1] if value is not None]
    if not values:
        return None
    size = max(1, min(MAX_WINDOW, len(values) // 4))
    first, last = values[:size], values[-size:]
    first_error, last_error = (
        stdev(part) / math.sqrt(size) if size > 1 else math.nan for part in (first, last)
    )
    return Change(fmean(first), fmean(last), first_error, last_error, size)


def measure_held_out(name: str, curves: dict[str, Curve]) -> Change | None:
    """Return the first and last value of a held-out figure, with standard errors where they are logged."""
    values = [value for value in curves[name][1] if value is not None]
    errors = curves.get(name.replace("pass_at_1", "standard_error")) if name.endswith("/pass_at_1") else None
    known = [math.nan if value is None else value for value in errors[1]] if errors else [math.nan]
    return Change(values[0], values[-1], known[0], known[-1]) if values else None


def find_warnings(
    steps: int, training: dict[str, Curve], changes: dict[str, Change], held_out: dict[str, Change]
) -> Iterator[str]:
    """Yield why a run cannot have taught much, or what it has taught wrongly."""
    if 0 < steps < MIN_STEPS:
        yield describe_few_steps(steps)
    spread = [value for value in training.get("reward/group_std", ((), ()))[1] if value is not None]
    flat = sum(value < GROUP_STD_BELOW for value in spread)
    if flat > len(spread) / 2:
        yield (
            f"in {flat} of {len(spread)} iterations the completions of a problem all earned the same: there "
            "was nothing to learn from. Raise the temperature or group_size, or take other problems"
        )
    entropy = changes.get("policy/entropy")
    if entropy and entropy.last < ENTROPY_BELOW:
        yield (
            f"policy/entropy went from {entropy.first:.2g} to {entropy.last:.2g} nats: sampling has "
            "collapsed. Lower the learning rate, or raise the loss's kl_coef"
        )
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


def read_first_rows(path: Path) -> list[Row]:
    """Return the completions of the first recorded iteration."""
    return take_iteration(read_json_rows(path))


def read_last_rows(path: Path) -> list[Row]:
    """Return the completions of the last recorded iteration: only the end of the file is read."""
    size = path.stat().st_size if path.exists() else 0
    length = FIRST_BYTES
    while True:
        rows = list(read_rows_from(path, max(0, size - length)))
        last = take_iteration(reversed(rows))[::-1]
        if len(last) < len(rows) or length >= size:
            return last
        length *= 4


def take_iteration(rows: Iterable[Row]) -> list[Row]:
    """Return the rows up to the first one of another iteration."""
    found: list[Row] = []
    for row in rows:
        if found and row.get("step") != found[0].get("step"):
            break
        found.append(row)
    return found


def count_right(rows: list[Row]) -> tuple[float, float] | None:
    """Return the part of explanations that end with the answer, and its standard error; None if unknown.

    An explanation that only names the answer counts too: whether its steps are right, no rule can say.
    """
    found = [ends_with_answer(row["explanation"], row) for row in rows if "explanation" in row]
    known = [float(value) for value in found if value is not None]
    if not known:
        return None
    part = fmean(known)
    return part, math.sqrt(part * (1 - part) / len(known))


def choose_pair(first: list[Row], last: list[Row]) -> tuple[Row | None, Row | None]:
    """Return a typical explanation of each of two iterations, of one problem if both have one."""
    shared = {row["row"] for row in first} & {row["row"] for row in last}

    def choose(rows: list[Row]) -> Row | None:
        own = [row for row in rows if "reward" in row and "explanation" in row]
        number = min(shared) if shared else own[0]["row"] if own else None
        group = sorted((row for row in own if row["row"] == number), key=lambda row: row["reward"])
        return group[len(group) // 2] if group else None

    return choose(first), choose(last)
