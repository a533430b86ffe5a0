"""Write every metric of every step to metrics.csv, and read the file."""

from __future__ import annotations

import csv
import math
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

# Steps and values; None for a value that is not finite.
Curve = tuple[list[int], list[float | None]]


class MetricsCSV(Logger):
    """Write each step's metrics to `metrics.csv`, one row per step, columns added as metrics appear.

    Lightning's CSVLogger deletes an existing file, so a resumed run would lose its past; this one keeps it.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.rows: dict[int, dict[str, str]] = {}  # step -> metrics
        self.columns: list[str] = []  # of the file
        self.saved: set[int] = set()
        self.unsaved: set[int] = set()  # steps with metrics that the file does not have yet

    @property
    @override
    def name(self) -> str:
        return ""  # so that Lightning's ModelCheckpoint writes into `checkpoints/`, too

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has the resolved configuration."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = self.rows.setdefault(int(step or 0), {})
        row.update({name: repr(float(value)) for name, value in metrics.items()})
        self.unsaved.add(int(step or 0))

    @override
    @rank_zero_only
    def save(self) -> None:
        """Append the new rows; rewrite the file if a column is new or an old row has new cells."""
        # A start that failed leaves no empty file.
        if not self.unsaved:
            return
        names = {name for step in self.unsaved for name in self.rows[step]}
        if names <= set(self.columns) and not self.unsaved & self.saved:
            with open(self.path, "a", newline="") as file:
                rows = ({"step": step, **self.rows[step]} for step in sorted(self.unsaved))
                csv.DictWriter(file, self.columns).writerows(rows)
        else:
            self.columns = ["step", *sorted(names | set(self.columns) - {"step"})]
            scratch = self.path.with_suffix(".tmp")
            with open(scratch, "w", newline="") as file:
                writer = csv.DictWriter(file, self.columns)
                writer.writeheader()
                writer.writerows({"step": step, **row} for step, row in sorted(self.rows.items()))
            scratch.replace(self.path)
        self.saved |= self.unsaved
        self.unsaved = set()

    @rank_zero_only
    def resume_after(self, step: int) -> None:
        """Read what an earlier run wrote, up to a step, and drop the rest."""
        self.rows = {number: row for number, row in read_rows(self.path) if number <= step}
        self.saved = self.unsaved = set(self.rows)  # so that this rewrites the file
        if not self.rows:
            self.path.unlink(missing_ok=True)
        self.save()


def read_metrics(path: Path) -> dict[str, Curve]:
    """Read metrics.csv: a curve for each metric."""
    curves: dict[str, Curve] = {}
    for step, row in read_rows(path):
        for name, cell in row.items():
            value = float(cell)
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(value if math.isfinite(value) else None)
    return curves


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the step of each line of metrics.csv, and its cells that are not empty; nothing without a file.

    A kill may have torn the last line, which is left out.

    Raises:
        ValueError: If a cell is no number.
    """
    if path.exists():
        *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for row in csv.DictReader(whole):
            cells = {name: cell for name, cell in row.items() if cell and name != "step"}
            for cell in cells.values():
                float(cell)
            yield int(row["step"]), cells
