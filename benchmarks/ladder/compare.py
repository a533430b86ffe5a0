"""Compare the first step of two runs: NAME RUN RUN BOUND."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from common import note

SHOWN = ("reward/mean", "reward/solution", "reward/kl", "policy/loss", "policy/entropy", "policy/grad_norm")
COMPARED = ("reward/mean", "reward/solution", "policy/grad_norm", "policy/entropy")


def first_row(run: str) -> dict[str, str]:
    """Return the metrics of a run's first step."""
    with open(Path(run) / "metrics.csv", newline="") as file:
        return next(csv.DictReader(file))


def largest_error(rows: list[dict[str, str]]) -> float:
    """Return the largest relative difference of the metrics that both rows have."""
    pairs = [(float(rows[0][key]), float(rows[1][key])) for key in COMPARED if all(r.get(key) for r in rows)]
    if not pairs:
        raise SystemExit(f"the runs have none of {COMPARED} in common: nothing to compare")
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)


def main() -> None:
    name, *runs, bound = sys.argv[1:]
    rows = [first_row(run) for run in runs]
    error = largest_error(rows)
    figures = {key: [float(row[key]) for row in rows] for key in SHOWN if all(row.get(key) for row in rows)}
    note(name, error < float(bound), largest_error=error, bound=float(bound), **figures)
    sys.exit(error >= float(bound))


if __name__ == "__main__":
    main()
