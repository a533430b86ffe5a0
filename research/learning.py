"""Does the reward rise? Explanations of the same problems before and after training.

python research/learning.py runs/warmup_traces runs/rlt_traces runs/control_traces
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import mean, stdev

from arms import TERMS, Row, read


def rise(before: list[Row], after: list[Row], term: str) -> tuple[float, float]:
    """Return the mean difference of a term, after minus before, and its standard error over problems."""
    if [row["question"] for row in before] != [row["question"] for row in after]:
        raise SystemExit("Both must explain the same problems in the same order: are the runs finished?")
    differences = [b[term] - a[term] for a, b in zip(before, after, strict=True)]
    return mean(differences), stdev(differences) / math.sqrt(len(differences))


def main(folders: list[str]) -> None:
    """Print what rose between folders of `rlt predict`: with the teacher before training, then after."""
    before, *others = [read(Path(folder) / "traces.jsonl") for folder in folders]
    for name, after in zip(folders[1:], others, strict=True):
        for term, key in (TERMS | {"format": "format_reward", "closed": "closed"}).items():
            difference, error = rise(before, after, key)
            means = [mean(row[key] for row in rows) for rows in (before, after)]
            print(f"{name}: {term} {means[0]:.2f} -> {means[1]:.2f}, rise {difference:+.2f} +- {error:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
