"""What the catalogue holds: metrics and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A metric: a row of docs/metrics.md, a chart of `rlt report` and a line of the W&B workspace.

    Example:
        Metric("policy/lr", "Learning rate", "", "learning rate of this step", "follows the schedule")

    Args:
        name: As it is logged, `PREFIX/NAME`.
        title: Name for people, above its chart.
        unit: Unit of its axis; empty if it has none.
        meaning: What it is, for docs and below the title of its chart. Markdown.
        healthy: Healthy values, and what a bad value says. Markdown.
        bounds: Smallest and largest possible value, such as "0 to 1".
        section: Section of the report. Without one the chart stands in the folded section at the end.
        column: Column of recorded completions whose mean it is.
        label: Short name of that column; by default the title.
        panel: Metric whose panel in W&B it shares; by default its own.
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
    panel: str = ""
    held_out: str | None = None
    logged_by: str = ""
    table: str = ""
    drawn: Literal["line", "band", "stack"] = "line"

    @property
    def prefix(self) -> str:
        """Return the part of the name before the slash."""
        return self.name.partition("/")[0]

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
        name: As `RLTReward.extra_names` or the fields of a `RewardTerms` have it.
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
