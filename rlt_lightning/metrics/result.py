"""Summarise what a `fit` has learned: means of its figures at the start and at the end of metrics.csv."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rlt_lightning.metrics.catalogue import OURS, find_metric, read_entries
from rlt_lightning.run.metrics_csv import Curve, read_metrics

# Steps that the first and the last mean are of: a quarter of the run, and no more than this.
MAX_WINDOW = 10
# The figures of the sentence, with their words.
SHOWN = {
    "reward/mean": "reward",
    "reward/solution": "solution term",
    "reward/kl": "KL term",
    "reward/correct": "right answers",
    "distill/divergence": "divergence from the teacher",
    "policy/loss": "loss",
}
# Figures of held-out rows, and what the sentence calls them.
HELD_OUT = {"reward/val_mean": "reward", "policy/val_loss": "loss", "distill/val_divergence": "divergence"}
# Figures that say what a run improves. Beside them the loss says nothing.
OBJECTIVES = {"reward/mean", "distill/divergence"}


@dataclass(frozen=True)
class Change:
    """A figure at the start and at the end of a run.

    Example: `Change(-0.71, -0.38, 10)`: the reward was -0.71 in the first ten iterations and -0.38 in the
    last ten.

    Attributes:
        first: Mean of the first `num_steps` values.
        last: Mean of the last `num_steps` values.
        num_steps: Values that each mean is of.
    """

    first: float
    last: float
    num_steps: int = 1

    def __str__(self) -> str:
        """Return the change as text: -0.71 → -0.38."""
        return f"{self.first:.3g} → {self.last:.3g}"


@dataclass(frozen=True)
class FitResult:
    """What a fit has learned.

    Attributes:
        folder: The run folder.
        steps: Optimizer steps.
        changes: Figures of training by the names of metrics.csv, such as reward/mean or policy/loss.
        held_out: Figures of held-out rows and evaluation sets, first and last validation: reward/val_mean,
            eval/SET/pass_at_1, …
    """

    folder: Path
    steps: int = 0
    changes: dict[str, Change] = field(default_factory=dict)
    held_out: dict[str, Change] = field(default_factory=dict)

    def line(self) -> str:
        """Return what was learned, as one sentence without its full stop; '' if nothing was measured."""
        return ", ".join(f"{words} {change}" for words, change in self.figures().items())

    def figures(self) -> dict[str, str]:
        """Return the figures that say what was learned, as first → last, by what they are called."""
        shown = [name for name in SHOWN if name in self.changes]
        if OBJECTIVES & self.changes.keys():
            shown = [name for name in shown if name != "policy/loss"]
        found = {SHOWN[name]: str(self.changes[name]) for name in shown}
        found |= {name_term(name): str(self.changes[name]) for name in self.changes if is_added_term(name)}
        found |= {
            f"held-out {HELD_OUT[name]}": str(self.held_out[name])
            for name in HELD_OUT
            if name in self.held_out
        }
        for name, change in self.held_out.items():
            if name.endswith("/pass_at_1"):
                percent = f"{100 * change.first:.1f} → {100 * change.last:.1f} %"
                found[f"accuracy on {name.split('/')[1]}"] = percent
        return found


def read_fit_result(folder: Path) -> FitResult:
    """Read what a fit has learned from its run folder.

    Raises:
        InputError: If metrics.csv or catalogue.json is damaged.
    """
    curves, _ = read_metrics(folder / "metrics.csv")
    read_entries(folder)
    training = {
        name: curve for name, curve in curves.items() if "/val_" not in name and not name.startswith("eval/")
    }
    steps = max((curve[0][-1] for curve in training.values()), default=0)
    changes = {name: measure_change(curve, MAX_WINDOW) for name, curve in training.items()}
    held_out = {
        name: measure_change(curve, 1)
        for name, curve in curves.items()
        if name in HELD_OUT or name.endswith("/pass_at_1")
    }
    return FitResult(folder, steps, changes, held_out)


def is_added_term(name: str) -> bool:
    """Return whether a metric is a term that a reward of the user's has added."""
    return re.fullmatch(r"reward/\w+", name) is not None and find_metric(name) not in OURS


def name_term(name: str) -> str:
    """Return what the sentence calls an added term: its title in lower case, else its name."""
    title = find_metric(name).title
    if title == name:
        return f"{name.removeprefix('reward/')} term"
    return title if title[:2].isupper() else title[:1].lower() + title[1:]


def measure_change(curve: Curve, max_window: int) -> Change:
    """Return the means of a curve's first and last values; a curve has at least one finite value."""
    values = [value for value in curve[1] if value is not None]
    size = max(1, min(max_window, len(values) // 4))
    return Change(fmean(values[:size]), fmean(values[-size:]), size)
