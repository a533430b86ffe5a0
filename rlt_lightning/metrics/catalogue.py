"""Describe every metric and reward term in one place, for `rlt report`, `rlt explain` and docs/metrics.md.

    catalogue.yaml                            our metrics ─┐
    a reward's file: register(Metric(…))      its terms   ─┴→ entries → list_metrics, find_metric
                                                                │ ↑
                                     RUN/catalogue.json: write_entries, read_entries

A run imports the file of its reward, which registers its entries. `rlt report`, which reads the run later,
does not, so the run keeps the entries that are not ours in its folder.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

from rlt_lightning.run.jsonl import rewrite
from rlt_lightning.types import InputError

CATALOGUE = "catalogue.json"  # in a run folder


@dataclass(frozen=True)
class Metric:
    """A metric: a row of docs/metrics.md and a chart of `rlt report`.

    Example:
        Metric("policy/lr", "Learning rate", "", "learning rate of this step", "follows the schedule")

    Args:
        name: As it is logged, `PREFIX/NAME`.
        title: Name for people, above its chart.
        unit: Unit of its axis; empty if it has none.
        meaning: What it is, for docs and below the title of its chart. Markdown.
        healthy: Healthy values, and what a bad value says. Markdown.
        bounds: Smallest and largest possible value, such as "0 to 1".
        section: Section of the report. Without one the chart stands in the folded section at the end; a term
            of the reward without an entry stands with the reward.
        column: Column of recorded completions whose mean it is.
        label: Short name of that column; by default the title.
        held_out: Healthy values on held-out problems, logged as `PREFIX/val_NAME`; None if it is not logged.
        logged_by: Modules that log it, where not all of its table do.
        table: Table of docs/metrics.md; by default that of its prefix.
        drawn: A line, the band of another chart, or part of the stack of an iteration's time.
    """

    name: str
    title: str
    unit: str
    meaning: str
    healthy: str = ""
    bounds: str = ""
    section: str = ""
    column: str = ""
    label: str = ""
    held_out: str | None = None
    logged_by: str = ""
    table: str = ""
    drawn: Literal["line", "band", "stack"] = "line"

    @property
    def prefix(self) -> str:
        """Return the part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Return the smallest and the largest possible value, None where `bounds` says no number.

        Example: "0 to 1" is (0.0, 1.0), "≤ 0 without a baseline" (None, 0.0), "0 to ln V" (0.0, None).
        """
        found = re.match(
            r"(?:≤ (?P<most>\d+)|≥ (?P<least>\d+)|(?P<low>\d+) (?:to|or above)(?: (?P<high>\d+))?)",
            self.bounds,
        )
        if found is None:
            return None, None
        low, high = found["least"] or found["low"], found["most"] or found["high"]
        return float(low) if low else None, float(high) if high else None

    @property
    def caption(self) -> str:
        """Return the meaning as a plain sentence."""
        text = self.meaning.replace("`", "")
        begins = text[:1] if "_" in text.partition(" ")[0] else text[:1].upper()  # a setting's name stays
        return begins + text[1:] + "." if text else ""


@dataclass(frozen=True)
class Column:
    """A column of a file of completions or responses whose mean is no metric.

    Args:
        name: As it is written.
        meaning: What it holds. Markdown.
        label: Short name in the report; empty if the report does not show it as a figure.
    """

    name: str
    meaning: str
    label: str = ""


def reward_term(
    name: str,
    title: str,
    meaning: str,
    healthy: str = "",
    unit: str = "nats",
    bounds: str = "",
    column: str = "",
    label: str = "",
    table: str = "",
) -> Metric:
    """Return the entry of a term of a reward: `reward/NAME` and `reward/val_NAME`.

    Args:
        name: As `RLTReward.extra_names` or a column term/NAME of a reward's table has it.
        title: See `Metric`, also for the arguments below.
        meaning: What it is.
        healthy: Healthy values, and what a bad value says.
        unit: Unit of its axis.
        bounds: Smallest and largest possible value.
        column: Column of recorded completions; by default NAME_reward, as for a term of an `RLTReward`.
        label: Short name of that column.
        table: Table of docs/metrics.md.
    """
    return Metric(
        f"reward/{name}",
        title,
        unit,
        meaning,
        healthy,
        bounds,
        section="Reward",
        column=column or f"{name}_reward",
        label=label,
        held_out=f"as `reward/{name}`",
        table=table,
    )


# The base loader makes no numbers or booleans of texts; written in C it takes 4 ms.
_FILE = yaml.load(  # it makes only texts, lists and mappings
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader),
)
OURS: tuple[Metric, ...] = tuple(Metric(name, **{"unit": ""} | row) for name, row in _FILE["metrics"].items())
OF_STUDENT: tuple[str, ...] = tuple(_FILE["of_student"])
EVALUATION = tuple(metric for metric in OURS if metric.prefix == "eval")
OVERALL_FIGURES: tuple[str, ...] = tuple(_FILE["overall_figures"])
SET_TITLES: dict[str, str] = _FILE["set_titles"]
COLUMNS: dict[str, tuple[Column, ...]] = {
    kind: tuple(
        Column(name, **row) if isinstance(row, dict) else Column(name, row) for name, row in rows.items()
    )
    for kind, rows in _FILE["columns"].items()
}
entries = {metric.name: metric for metric in OURS}


def register(*metrics: Metric) -> None:
    """Add metrics to the catalogue, such as the terms of a reward that is not ours.

    A file that defines a reward calls this.

    Raises:
        ValueError: If a metric of this name is in the catalogue and says something else.
    """
    for metric in metrics:
        if entries.setdefault(metric.name, metric) != metric:
            raise ValueError(
                f"A metric needs a name that no other has, but {metric.name!r} is in the catalogue already. "
                "Choose another."
            )


def list_metrics() -> tuple[Metric, ...]:
    """Return every metric; metrics with the same prefix stand together."""
    prefixes = list(dict.fromkeys(metric.prefix for metric in entries.values()))
    return tuple(sorted(entries.values(), key=lambda metric: prefixes.index(metric.prefix)))


def find_metric(name: str) -> Metric:
    """Return the entry of a metric; for a name that is not in the catalogue, an entry that has only the name.

    An unknown term of a reward gets the column in which an RLTReward records it.
    """
    is_term = name.startswith("reward/")
    column = f"{name.removeprefix('reward/')}_reward" if is_term else ""
    return entries.get(name) or Metric(name, name, "", "", section="Reward" if is_term else "", column=column)


def training_name(name: str) -> str:
    """Return the training metric that a validation metric goes with; other names stay as they are."""
    return re.sub(r"/val_", "/", name)


def validation_name(name: str) -> str:
    """Return the validation metric that goes with a training metric."""
    return name.replace("/", "/val_", 1)


def label_columns() -> dict[str, str]:
    """Return the columns of completions that are figures, in their order, each with its short name."""
    found = {metric.column: metric.label or metric.title for metric in list_metrics() if metric.column}
    return found | {column.name: column.label for column in COLUMNS["trace"]}


def build_student_metrics(label: str) -> tuple[Metric, ...]:
    """Return the entries of one of several students, NAME/LABEL for each metric of `OF_STUDENT`."""
    return tuple(
        replace(
            metric,
            name=f"{metric.name}/{label}",
            title=f"{metric.title}, {label}",
            meaning=f"`{metric.name}` by the student {label}",
            healthy=f"as `{metric.name}`",
            column=metric.column and f"{metric.column}/{label}",
            label=metric.label and f"{metric.label}, {label}",
            held_out=metric.held_out and f"as `{metric.name}`",
            table="students",
        )
        for metric in OURS
        if metric.name in OF_STUDENT
    )


def write_entries(folder: Path) -> None:
    """Write the registered entries that are not ours into a run folder; write no file if there are none."""
    path = folder / CATALOGUE
    own = [asdict(metric) for metric in list_metrics() if metric not in OURS]
    if not own:
        path.unlink(missing_ok=True)
        return
    rewrite(path, [json.dumps(own, indent=1, ensure_ascii=False) + "\n"])


def read_entries(folder: Path) -> None:
    """Register the entries of a run folder, if it has any. An entry that is known already stays as it is.

    Raises:
        InputError: If the file is not as rlt writes it.
    """
    path = folder / CATALOGUE
    if not path.exists():
        return
    try:
        found = [Metric(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
        for value in (value for metric in found for value in asdict(metric).values()):
            if not isinstance(value, str | None):
                raise TypeError(f"{value!r} is no text")
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} must hold the entries of metrics that rlt wrote, but does not ({error}). Restore it, or "
            "move it away: its metrics then have only a name."
        ) from error
    for metric in found:
        entries.setdefault(metric.name, metric)
