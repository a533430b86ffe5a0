"""Note the results of the science call so far, from FOLDER/finding and FOLDER/own_rows.

If a run was cut short, it notes the stages that have ended.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from findings import note

from rlt_lightning.commands.own_rows import STUDENTS, count_sampled, count_trained, read_seconds
from rlt_lightning.run.jsonl import read_json_rows


def note_finding(folder: Path) -> None:
    """Note each arm of the finding with its seeds' accuracies in percent."""
    with suppress(FileNotFoundError):
        for arm, figures in json.loads((folder / "finding.json").read_text())["arms"].items():
            note(f"finding, {arm}", None, **figures)
    if (folder / "times.jsonl").exists():
        note(
            "finding, seconds",
            None,
            stages={row["stage"]: row["seconds"] for row in read_json_rows(folder / "times.jsonl")},
        )


def note_own_rows(folder: Path) -> None:
    """Note each student's accuracy in percent, and each stage's seconds and tokens."""
    for name in STUDENTS:
        figures: dict[str, Any] = {}
        for how in ("greedy", "sampled"):
            file = folder / f"evaluate_{name}_{how}" / "evaluation.json"
            if file.exists():
                result = json.loads(file.read_text())["sets"]["test"]
                figures |= {how: 100 * result["pass_at_1"], "problems": result["num_problems"]}
        if figures:
            note(f"own rows, student of {name}", None, **figures)
    for stage, seconds in read_seconds(folder / "seconds.tsv").items():
        tokens = {"sampled": count_sampled(folder / stage), "trained": count_trained(folder / stage)}
        note(f"own rows, stage {stage}", None, seconds=seconds, **tokens)


def main() -> None:
    folder = Path(sys.argv[1])
    note_finding(folder / "finding")
    note_own_rows(folder / "own_rows")


if __name__ == "__main__":
    main()
