"""Copy the metrics of runs into the results: FOLDER RUN ...; also compare the runs fp32_cpu and fp32."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from findings import note

COMPARED = ("reward/mean", "reward/solution", "policy/grad_norm", "policy/entropy")
BOUND = 0.02  # of the CPU's number, in fp32
# A column of metrics.csv and the word for it in the results.
SHOWN = {"reward/mean": "reward", "policy/loss": "loss", "policy/grad_norm": "grad_norm"}
SHOWN |= {f"perf/{name}": name for name in ("generate_s", "score_s", "train_s", "push_s", "train_peak_gib")}


def read_rows(run: Path) -> list[dict[str, str]]:
    """Return the metrics of a run's steps; none if it did not get that far."""
    file = run / "metrics.csv"
    if not file.exists():
        return []
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def read_curve(rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """Return the shown metrics by step, and how long each part of a step took."""
    curve = {word: [float(row[key]) for row in rows if row.get(key)] for key, word in SHOWN.items()}
    return {key: [float(f"{value:.4g}") for value in values] for key, values in curve.items() if values}


def largest_error(rows: list[dict[str, str]]) -> float:
    """Return the largest relative difference of the metrics that both rows have."""
    pairs = [(float(rows[0][key]), float(rows[1][key])) for key in COMPARED if all(r.get(key) for r in rows)]
    if not pairs:
        raise SystemExit(f"the runs have none of {COMPARED} in common: nothing to compare")
    return max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)


def main() -> None:
    folder, *names = sys.argv[1:]
    runs = {name: read_rows(Path(folder) / name) for name in names}
    for name, rows in runs.items():
        if rows:
            note(f"curve, {name}", None, steps=len(rows), **read_curve(rows))
    if runs.get("fp32_cpu") and runs.get("fp32"):
        error = largest_error([runs["fp32_cpu"][0], runs["fp32"][0]])
        note("first step in fp32, CPU and GPU", error < BOUND, largest_error=error, bound=BOUND)


if __name__ == "__main__":
    main()
