"""RLT against the usual pipelines, in miniature: each student learns from equally many rows of one kind.

    python research/pipelines.py --output_dir DIR               # three seeds
    python research/pipelines.py --output_dir DIR --seeds 10    # others

The stages and settings are the finding's, with these arms:

    raw         traces of uneven quality, as they are; every solution is right
    unjudged    the base's first answer to each problem, right or wrong
    rejection   the base's first right answer of eight to each problem
    shortest    its shortest right answer
    warmup      explanations of the warm-up teacher
    rlt         explanations of that teacher after 40 iterations of RLT

Its folder gets `pipelines.json` and `pipelines.md`. Run it again after a crash: finished stages are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from arms import Arms, Setting, measure_kinds, read
from figures import NAMES, compute_difference, read_accuracy
from stages import StageError, Stages
from tables import kinds_text, plus_minus

PIPELINES = {
    "raw": NAMES["raw"],
    "unjudged": "own answers, not judged",
    "rejection": "own right answers, the first",
    "shortest": "own right answers, the shortest",
    "warmup": NAMES["warmup"],
    "rlt": NAMES["rlt"],
}
SELECT = {"rejection": "first", "shortest": "shortest"}
POOL = 2  # problems that are answered for each row, so that enough of them have a right answer


class Pipelines(Arms):
    """The finding's stages of one seed, with the usual pipeline's traces beside those of teachers."""

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's students learn from."""
        if arm in SELECT:
            return self.first_rows(arm, read(self.answers(arm) / "distillation.jsonl"))
        if arm == "unjudged":
            answers = read(self.answers("rejection") / "traces.jsonl")
            return self.first_rows(arm, [row for row in answers if row["trace"] == 0 and row["solution"]])
        return super().make_traces(arm)

    def answers(self, arm: str) -> Path:
        """Let the base answer the problems of the pool, and keep right answers as an arm does."""
        return self.stages(
            f"{self.name}/{arm}/answers",
            "predict",
            "laptop/rejection",
            "README.md",
            model__teacher=self.base,
            data__source=self.data_file("pool"),
            data__max_rows=POOL * self.setting.num_traces,
            distillation__select=SELECT[arm],
            **self.seeds,
        )

    def first_rows(self, arm: str, rows: list[dict[str, Any]]) -> Path:
        """Write as many rows as every student learns from.

        Raises:
            StageError: If there are fewer.
        """
        if len(rows) < self.setting.num_traces:
            raise StageError(f"{arm} must have {self.setting.num_traces} rows, but has {len(rows)}.")
        path = self.data_file(arm)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[: self.setting.num_traces]))
        return path

    def run(self, names: list[str]) -> None:
        """Run all stages of some arms."""
        self.write_data()
        if {"warmup", "rlt"} & set(names):
            self.prepare()
        for arm in names:
            self.run_arm(arm)


def main() -> int:
    """Run the arms for all seeds, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", default="0 1 2")
    parser.add_argument("--arms", default=" ".join(PIPELINES))
    parser.add_argument("--rows", type=int, default=Setting().num_traces, help="rows a student learns from")
    options = parser.parse_args()
    names, seeds = options.arms.split(), [int(word) for word in options.seeds.split()]
    setting = replace(Setting(), num_traces=options.rows)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    stages = Stages(options.output_dir)
    stages.start()
    ones = [Pipelines(stages, setting, seed) for seed in seeds]
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda one: one.run(names), ones))
    except StageError as error:
        print(f"pipelines: {error}", file=sys.stderr)
        return 1
    show(options.output_dir, ones, names)
    return 0


def show(folder: Path, ones: list[Pipelines], names: list[str]) -> None:
    """Write figures and table, and print the table."""
    arms = {
        arm: {
            "accuracy": [read_accuracy(one, arm) for one in ones],
            "greedy": [read_accuracy(one, arm, "greedy") for one in ones],
            "kinds": measure_kinds([row for one in ones for row in read(one.make_traces(arm))]),
        }
        for arm in names
    }
    figures = {"unit": "percent", "seeds": [one.seed for one in ones], "arms": arms}
    (folder / "pipelines.json").write_text(json.dumps(figures, indent=1) + "\n")
    lines = [
        "| student trained on | accuracy at T 0.7, % (± 95 %) | greedy, % | RLT minus it, points (± 95 %) "
        "| traces: steps / filler / leap / wrong / other, % |",
        "|---|---|---|---|---|",
    ]
    for arm, found in arms.items():
        mean, half = compute_difference(arms, "rlt", arm) if "rlt" in arms else (float("nan"), float("nan"))
        behind = "" if arm == "rlt" else f"{mean:+.1f} ± {half:.1f}"
        cells = (PIPELINES[arm], plus_minus(found["accuracy"]), plus_minus(found["greedy"]), behind)
        lines.append(f"| {' | '.join(cells)} | {kinds_text(found['kinds'])} |")
    (folder / "pipelines.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
