"""The catalogue: our entries and the entries of other packages."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import entry_points

from rlt_lightning.run.catalogue.columns import TAUGHT, TRACE
from rlt_lightning.run.catalogue.distillation import DISTILLATION
from rlt_lightning.run.catalogue.entry import Metric
from rlt_lightning.run.catalogue.evaluation import EVALUATION
from rlt_lightning.run.catalogue.performance import DATA, PERFORMANCE
from rlt_lightning.run.catalogue.policy import POLICY, ROLLOUT
from rlt_lightning.run.catalogue.rewards import REWARD, STUDENT

GROUP = "rlt_lightning.metrics"  # of the entry points of installed packages
OURS = (*REWARD, *STUDENT, *POLICY, *DISTILLATION, *ROLLOUT, *PERFORMANCE, *DATA, *EVALUATION)
entries = {metric.name: metric for metric in OURS}


def register(*metrics: Metric) -> None:
    """Add metrics to the catalogue, such as the terms of a reward that is not ours.

    A file that defines a reward calls this. `rlt report` loads no reward: it reads the entries from the run
    folder (see `saved`). An installed package may also name its entries in its pyproject.toml; then every
    command has them, whatever run it is about:

        [project.entry-points."rlt_lightning.metrics"]
        repetition = "my_package.rewards:REPETITION"

    Raises:
        ValueError: If a metric of this name is in the catalogue and says something else.
    """
    for metric in metrics:
        if entries.setdefault(metric.name, metric) != metric:
            raise ValueError(
                f"A metric needs a name that no other has, but {metric.name!r} is in the catalogue already. "
                "Choose another."
            )


@cache
def load_installed() -> None:
    """Register the metrics that installed packages name as entry points: a `Metric` or several each."""
    for point in entry_points(group=GROUP):
        found = point.load()
        register(*([found] if isinstance(found, Metric) else found))


def metrics() -> tuple[Metric, ...]:
    """Return every metric; metrics with the same prefix stand together."""
    load_installed()
    prefixes = list(dict.fromkeys(metric.prefix for metric in entries.values()))
    return tuple(sorted(entries.values(), key=lambda metric: prefixes.index(metric.prefix)))


def metric_of(name: str) -> Metric:
    """Return the entry of a metric; for a name that is not in the catalogue, an entry that has only the name.

    An unknown term of a reward gets the column in which an RLTReward records it.
    """
    load_installed()
    is_term = name.startswith("reward/")
    column = f"{name.removeprefix('reward/')}_reward" if is_term else ""
    return entries.get(name) or Metric(name, name, "", "", section="Reward" if is_term else "", column=column)


def base(name: str) -> str:
    """Return the training metric that a validation metric goes with; other names stay as they are."""
    return re.sub(r"/val_", "/", name)


def held_out(name: str) -> str:
    """Return the validation metric that goes with a training metric."""
    return name.replace("/", "/val_", 1)


def figures() -> dict[str, str]:
    """Return the columns of completions that are figures, in their order, each with its short name."""
    found = {metric.column: metric.label or metric.title for metric in metrics() if metric.column}
    return found | {column.name: column.label for column in (*TRACE, *TAUGHT)}
