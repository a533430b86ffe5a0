"""Teach what only the solution tells: RLT against a student that has first learned from N traces.

    python examples/finding/rounds.py --output_dir DIR                       # make rounds: main arms, 3 seeds
    python examples/finding/rounds.py --output_dir DIR --arms "s16 rlt_s16"  # others

The task is `new` of ways.py, with its settings: the last step of each problem is an operation that no model
was pretrained on. Every student starts as the miniature and learns from traces of the same 512 problems:

    base           none
    sN             the first N traces of the warm-up teacher; it is the frozen student of the arms METHOD_sN
    rlt            traces of the warm-up teacher after RLT against the untrained student
    rlt_sN         the same after RLT against the student sN
    shuffled_sN    control: with shuffled advantages
    wrong_sN       control: RLT on problems with a wrong solution
    exact_sN       with the exact KL instead of one sampled token's
    rejectK_sN     right answers of the student sN itself, of K samples a problem
    bestK_sN       of K traces of the warm-up teacher the best by the reward under the student sN
    oracle         right steps throughout

Its folder gets `rounds.json`, `rounds.md` and `rounds.svg`. Run it again after a crash: finished stages are
skipped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from plots import draw_accuracies
from ways import NEW, build_parser

from rlt_lightning.demo.arms import SHUFFLED, Arms, measure_kinds, read
from rlt_lightning.demo.figures import accuracy, difference, split_rewards
from rlt_lightning.demo.page import kinds_text, mean_kinds, plus_minus
from rlt_lightning.demo.run import read_seeds
from rlt_lightning.demo.stages import StageError, Stages
from rlt_lightning.run.jsonl import rewrite
from rlt_lightning.types import InputError

MAIN_ARMS = (
    *("base", "s64", "rlt", "rlt_s64", "shuffled_s64", "wrong_s64", "reject4_s64"),
    *("s512", "rlt_s512", "reject4_s512", "oracle"),
)
ARM = re.compile(
    r"base|oracle|rlt|s(?P<dose>\d+)|(?P<method>rlt|shuffled|wrong|exact|(reject|best)[1-9]\d*)_s(?P<of>\d+)"
)
TRAINED: dict[str, dict[str, Any]] = {  # what a method's RLT differs in
    "rlt": {},
    "wrong": {},
    "shuffled": {"model__advantages": SHUFFLED},
    "exact": {"model__reward__kl_estimator": "exact"},
}
NAMES = {
    "base": "untrained",
    "oracle": "oracle: all steps right",
    "rlt": "RLT against the untrained student",
}
METHODS = {
    "rlt": "RLT against s{of}",
    "shuffled": "control: RLT against s{of}, shuffled advantages",
    "wrong": "control: RLT against s{of}, wrong solutions",
    "exact": "RLT against s{of}, exact KL",
    "reject": "right answers of s{of}, {number} samples",
    "best": "warm-up teacher, best of {number} by the reward under s{of}",
}


class Rounds(Arms):
    """The arms of one seed."""

    def write_data(self) -> None:
        """Write the rows of all stages, and those of RLT with another digit as the solution."""
        super().write_data()
        rng = Random(self.seed)
        lines = []
        for row in read(self.data("rlt")):
            right = int(row["solution"].removeprefix("\\boxed{").removesuffix("}"))
            shown = (right + rng.randrange(1, 10)) % 10
            lines.append(json.dumps(row | {"solution": f"\\boxed{{{shown}}}"}) + "\n")
        rewrite(self.data("wrong"), lines)

    def arm(self, arm: str, samples: bool = False) -> None:
        """Make an arm's traces, train a student of them, and evaluate it."""
        if arm == "base":
            self.evaluate(arm, self.student_base)
        else:
            self.student(arm, self.traces(arm))

    def traces(self, arm: str) -> Path:
        """Return the file that an arm's student learns from, made if it is not there."""
        match = read_arm(arm) if arm != "warmup" else None
        if match is None or arm == "oracle":
            return super().traces(arm)
        if match["dose"]:
            few = self.data(arm)
            rewrite(few, self.traces("warmup").read_text().splitlines(keepends=True)[: int(match["dose"])])
            return few
        student = self.dose(int(match["of"])) if match["of"] else self.student_base
        method, number = split_method(match["method"] or "rlt")
        if method == "reject":
            return self.answers(arm, student, number)
        if method == "best":
            return self.explain(
                arm,
                self.teacher("warmup"),
                student,
                rollouts__num_traces=number,
                distillation__select="best_reward",
            )
        return self.explain(arm, self.train(arm, method, student), student)

    def dose(self, number: int) -> Path:
        """Return the student of the first `number` traces of the warm-up teacher, made if it is not there."""
        arm = f"s{number}"
        self.arm(arm)
        return self.folder / arm / "student" / "model"

    def train(self, arm: str, method: str, student: Path | str) -> Path:
        """Run RLT of the warm-up teacher against a student, and return the model."""
        folder = self.stages(
            f"{self.name}/{arm}/teacher",
            "fit",
            "quickstart",
            model__teacher=self.teacher("warmup"),
            model__student=student,
            data__source=self.data("wrong" if method == "wrong" else "rlt"),
            trainer__max_steps=self.setting.num_iterations,
            **self.seeds,
            **TRAINED[method],
        )
        return folder / "model"

    def explain(self, arm: str, teacher: Path, student: Path | str, **options: object) -> Path:
        """Let a teacher explain the problems of `raw`, scored by a student; return the file of the traces."""
        return self.read_problems(
            arm, "miniature_generate", model__teacher=teacher, model__student=student, **options
        )

    def answers(self, arm: str, student: Path | str, number: int) -> Path:
        """Let a student answer the problems of `raw`, and return the file of its right answers."""
        return self.read_problems(
            arm, "miniature_rejection", model__teacher=student, rollouts__num_traces=number
        )

    def read_problems(self, arm: str, config: str, **options: object) -> Path:
        """Run `rlt predict` on the problems of `raw`, and return the file of what was selected."""
        folder = self.stages(
            f"{self.name}/{arm}/traces",
            "predict",
            config,
            "README.md",
            data__source=self.data("raw"),
            **self.seeds,
            **options,
        )
        return folder / "distillation.jsonl"

    def rank(self, dose: int) -> list[dict[str, Any]]:
        """Return the warm-up teacher's traces with their rewards under a student; dose 0: untrained."""
        student = self.dose(dose) if dose else self.student_base
        return read(self.explain(f"ranked_s{dose}", self.teacher("warmup"), student))


def read_arm(arm: str) -> re.Match[str]:
    """Return the parts of an arm's name.

    Raises:
        InputError: If there is no such arm.
    """
    if match := ARM.fullmatch(arm):
        return match
    raise InputError(f"--arms may name base, sN, rlt, METHOD_sN and oracle, but names {arm}. Correct it.")


def split_method(method: str) -> tuple[str, int]:
    """Return reject, 4 for reject4; a method without a number has 0."""
    name = method.rstrip("0123456789")
    return name, int(method[len(name) :] or 0)


def name_arm(arm: str) -> str:
    """Return what an arm's student was trained on, for people."""
    match = read_arm(arm)
    if match["dose"]:
        return f"s{match['dose']}: {match['dose']} traces of the warm-up teacher"
    if match["method"] is None:
        return NAMES[arm]
    method, number = split_method(match["method"])
    return METHODS[method].format(of=match["of"], number=number)


# Figures


def collect(ones: list[Rounds], arms: list[str]) -> dict[str, Any]:
    """Return the figures, one per seed; accuracies and kinds are in percent, rewards in nats."""
    found: dict[str, Any] = {"unit": "percent", "seeds": [one.seed for one in ones], "arms": {}}
    for arm in arms:
        found["arms"][arm] = {
            "accuracy": [accuracy(one, arm) for one in ones],
            "greedy": [accuracy(one, arm, "greedy") for one in ones],
        }
        if arm != "base":
            rows = [read(one.traces(arm)) for one in ones]
            found["arms"][arm] |= {"rows": [*map(len, rows)], "kinds": [*map(measure_kinds, rows)]}
    doses = sorted({int(match["dose"]) for arm in arms if (match := read_arm(arm))["dose"]})
    found["reward_by_kind"] = {}
    for dose in (0, *doses):
        rewards = split_rewards(row for one in ones for row in one.rank(dose))
        name = f"s{dose}" if dose else "base"
        found["reward_by_kind"][name] = {kind: fmean(values) for kind, values in rewards.items()}
    return found


def build_page(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    arms = figures["arms"]
    several = len(figures["seeds"]) > 1
    over = f"{len(figures['seeds'])} seeds" if several else "over problems"
    lines = [
        f"| student trained on | accuracy at T 0.7, % (± 95 %, {over}) | by seed | greedy, % | rows "
        "| traces: steps / filler / leap / wrong / other, % |",
        "|" + "---|" * 6,
    ]
    for arm, found in arms.items():
        by_seed = ", ".join(f"{value:.1f}" for value in found["accuracy"])
        cells = [name_arm(arm), plus_minus(found["accuracy"]), by_seed, f"{fmean(found['greedy']):.1f}"]
        if arm == "base":
            cells += ["", ""]
        else:
            low, high = min(found["rows"]), max(found["rows"])
            cells += [str(low) if low == high else f"{low} to {high}", kinds_text(mean_kinds(found["kinds"]))]
        lines.append(f"| {' | '.join(cells)} |")
    how = "paired by seed" if several else "over problems"
    differences = [f"| difference | points (± 95 %, {how}) |", "|---|---|"]
    for arm in arms:
        of = read_arm(arm)["of"]
        if of and f"s{of}" in arms:
            mean, half = difference(arms, arm, f"s{of}")
            differences.append(f"| {name_arm(arm)} − s{of} | {mean:+.1f} ± {half:.1f} |")
    ranked = figures["reward_by_kind"]
    kinds = [
        kind for kind in ("steps", "filler", "leap", "wrong") if any(kind in some for some in ranked.values())
    ]
    rewards = [f"| frozen student | {' | '.join(kinds)} |", "|" + "---|" * (1 + len(kinds))]
    for name, some in ranked.items():
        cells = [f"{some[kind]:.2f}" if kind in some else "" for kind in kinds]
        rewards.append(f"| {'untrained' if name == 'base' else name} | {' | '.join(cells)} |")
    heading = "Mean reward of the warm-up teacher's traces by their kind, nats:"
    return "\n\n".join(["\n".join(lines), "\n".join(differences), heading, "\n".join(rewards)]) + "\n"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the accuracy of each arm's students."""
    from matplotlib.figure import Figure

    arms = figures["arms"]
    figure = Figure(figsize=(9, 1.4 + 0.32 * len(arms)), layout="constrained")
    axes = figure.subplots()
    taught = [arm for arm in arms if arm.startswith("rlt_s")]
    draw_accuracies(axes, arms, [name_arm(arm) for arm in arms][::-1], taught)
    figure.savefig(path)


# The command


def main() -> int:
    """Run the arms for all seeds, and write what came out."""
    options = build_parser(__doc__, f"'{' '.join(MAIN_ARMS)}' by default").parse_args()
    try:
        arms = list(dict.fromkeys(["base", *(options.arms.split() or MAIN_ARMS)]))
        for arm in arms:
            read_arm(arm)
        run(options.output_dir, read_seeds([options.seeds], (0, 1, 2)), arms)
    except (InputError, StageError) as error:
        print(f"rounds: {error}", file=sys.stderr)
        return 1
    return 0


def run(folder: Path, seeds: list[int], arms: list[str]) -> None:
    """Run all stages, then write `rounds.json`, `rounds.md` and `rounds.svg`, and print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(folder)
    stages.start()
    ones = [Rounds(stages, NEW, seed) for seed in seeds]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: run_seed(one, arms), ones))
    figures = collect(ones, arms)
    rewrite(folder / "rounds.json", [json.dumps(figures, indent=1) + "\n"])
    page = build_page(figures)
    rewrite(folder / "rounds.md", [page])
    draw(figures, folder / "rounds.svg")
    print(page)


def run_seed(one: Rounds, arms: list[str]) -> None:
    """Run all stages of a seed, one after the other: arms share their students."""
    one.prepare()
    for arm in arms:
        one.arm(arm)
        if (dose := read_arm(arm)["dose"]) is not None:
            one.rank(int(dose))
    one.rank(0)


if __name__ == "__main__":
    sys.exit(main())
