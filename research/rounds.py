"""Teach what only the solution tells: RLT against a student that has first learned from N traces.

    python research/rounds.py --output_dir DIR                       # make rounds: main arms, 3 seeds
    python research/rounds.py --output_dir DIR --arms "s16 rlt_s16"  # others
    python research/rounds.py --output_dir DIR --setting few64       # another setting

The task is `new` of ways.py, with its settings: the last step of each problem is an operation that no model
was pretrained on. Every student starts as the miniature and learns from traces of the same 512 problems:

    base           none
    sN             the first N traces of the warm-up teacher
    dN             the first N traces with the new step that the warm-up teacher itself has learned from
    oracle         right steps throughout
    rlt            traces of the warm-up teacher after RLT against the untrained student
    rlt_ARM        the same after RLT against the student of another arm, such as rlt_s64
    shuffled_ARM   control: with shuffled advantages
    wrong_ARM      control: RLT on problems with a wrong solution
    exact_ARM      RLT with the exact KL instead of its estimate from sampled tokens
    along_ARM      RLT with a frozen student that is updated during the run (student_sync.py)
    rejectK_ARM    right answers of an arm's student itself, of K samples a problem
    poolK_ARM      the same for four times as many problems, cut to 512 rows
    bestK_ARM      of K traces of the warm-up teacher the best by the reward under an arm's student
    exactbestK_ARM the same by the reward with the exact KL
    tN_ARM         control: an arm's traces sampled at temperature N: t0_s512, t0.3_rlt_s64, t1_best4_s64

Settings: `new`; `few64`, whose warm-up has 64 traces with the new step among traces of known steps;
`rare`, whose warm-up breaks off at most of the new steps, so that its likeliest trace does not take it;
`another_base`; `pieces`, whose tokenizer cuts words into pieces; `pieces_student`, where only students have
that tokenizer.

Its folder gets `rounds.json`, `rounds.md` and `rounds.svg`. Run it again after a crash: finished stages are
skipped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from arms import MINIATURES, SHUFFLED, Arms, Setting, measure_kinds, read
from figures import compute_difference, read_accuracy, split_rewards
from jobs import read_seeds
from plots import draw_accuracies
from stages import StageError, Stages
from tables import kinds_text, mean_kinds, plus_minus
from trace_kinds import parse_chain
from ways import NEW, build_parser

from rlt_lightning.run.jsonl import format_line, rewrite
from rlt_lightning.tasks.stepwise import CHAIN_WORDING, NEW_MIXTURE, TraceKind, chain_rows, draw_ending
from rlt_lightning.types import InputError

MAIN_ARMS = (
    *("base", "s64", "rlt", "rlt_s64", "shuffled_s64", "wrong_s64", "reject4_s64"),
    *("s512", "rlt_s512", "reject4_s512", "oracle"),
)
ARM = re.compile(
    r"base|oracle|rlt|(?P<part>[sd])(?P<dose>[1-9]\d*)"
    r"|(?P<method>rlt|shuffled|wrong|exact|along|(reject|pool|best|exactbest)[1-9]\d*)_(?P<of>.+)"
    r"|t(?P<temperature>\d(\.\d+)?)_(?P<written>(?!base|oracle|d\d|t\d).+)"
)
SETTINGS = {
    "new": NEW,
    "few64": replace(NEW, name="few64"),
    "rare": replace(NEW, name="rare"),
    "another_base": replace(NEW, name="another_base", base=MINIATURES["seed1"]),
    "pieces": replace(NEW, name="pieces", base=MINIATURES["pieces"]),
    "pieces_student": replace(NEW, name="pieces_student", student=MINIATURES["pieces"]),
}
NUM_NEW = {"few64": 64}  # traces of the warm-up that have the new step, where not all have it
LAST_HAZARD = {"rare": 0.8}  # chance that a right trace of the warm-up breaks off at the new step after all
BREAKS: tuple[TraceKind, ...] = ("filler", "leap", "wrong")
EXACT: dict[str, Any] = {"model__reward__kl_estimator": "exact"}
TRAINED: dict[str, dict[str, Any]] = {  # what a method's RLT differs in
    "rlt": {},
    "wrong": {},
    "shuffled": {"model__advantages": SHUFFLED},
    "exact": EXACT,
    "along": {"trainer__callbacks+": "student_sync.StudentSync"},
}
NAMES = {
    "base": "untrained",
    "oracle": "oracle: all steps right",
    "rlt": "RLT against the untrained student",
}
METHODS = {
    "rlt": "RLT against {of}",
    "shuffled": "control: RLT against {of}, shuffled advantages",
    "wrong": "control: RLT against {of}, wrong solutions",
    "exact": "RLT against {of}, exact KL",
    "along": "RLT against {of}, which learns along",
    "reject": "right answers of {of}, {number} samples",
    "pool": "right answers of {of} to 2,048 problems, {number} samples, cut to 512 rows",
    "best": "warm-up teacher, best of {number} by the reward under {of}",
    "exactbest": "warm-up teacher, best of {number} by the reward under {of}, exact KL",
}


class Rounds(Arms):
    """The arms of one seed."""

    def write_data(self) -> None:
        """Write the rows of all stages, those with known steps only, and those with a wrong solution."""
        super().write_data()
        setting = self.setting
        old = chain_rows(setting.num_test, 0, "test", None, setting.length)
        asked = ({key: row[key] for key in ("question", "answer")} for row in old)
        rewrite(self.data_file("old"), map(format_line, asked))
        rewrite(self.data_file("wrong"), map(format_line, show_wrong(read(self.data_file("rlt")), self.seed)))
        if num_new := NUM_NEW.get(setting.name):
            new = read(self.data_file("warmup"))[:num_new]
            num_known, seed = setting.num_warmup - num_new, 10 * self.seed + 1
            known = chain_rows(num_known, seed, "train", NEW_MIXTURE, setting.length)
            rows = [*new, *({key: row[key] for key in new[0]} for row in known)]
            rewrite(self.data_file("warmup"), map(format_line, rows))
        if hazard := LAST_HAZARD.get(setting.name):
            rows = break_last_steps(read(self.data_file("warmup")), hazard, self.seed)
            rewrite(self.data_file("warmup"), map(format_line, rows))

    def evaluate(self, arm: str, model: Path | str, greedy: bool = True, **options: Any) -> None:
        """Let an arm's student answer the held-out problems, and as many whose steps are all known."""
        super().evaluate(arm, model, greedy, **options)
        self.ask(f"{arm}/old", model, "old", rollouts__seed=self.seed)

    def run_arm(self, arm: str, samples: bool = False) -> None:
        """Make an arm's traces, train a student of them, and evaluate it."""
        if arm == "base":
            self.evaluate(arm, self.student_base)
        else:
            self.train_student(arm, self.make_traces(arm))

    def make_traces(self, arm: str, as_arm: str | None = None, **options: Any) -> Path:
        """Return the file that an arm's student learns from, made if it is not there.

        Args:
            arm: Name of the arm.
            as_arm: Name of the arm whose traces these are, if they are sampled in another way.
            options: How they are sampled.
        """
        match, name = read_arm(arm) if arm != "warmup" else None, as_arm or arm
        if match is None or arm == "oracle":
            return super().make_traces(arm)
        if match["written"]:
            temperature = {"rollouts__sampling__temperature": match["temperature"]}
            return self.make_traces(match["written"], arm, **temperature)
        if match["dose"]:
            return self.cut(name, self.make_all(match["part"] or "", **options), int(match["dose"]))
        student = self.model(match["of"] or "base")
        method, number = split_method(match["method"] or "rlt")
        if method == "reject":
            return self.answers(name, student, number, **options)
        if method == "pool":
            answers = self.answers(name, student, number, "pool", **options)
            return self.cut(name, answers, self.setting.num_traces)
        if method in ("best", "exactbest"):
            return self.explain(
                name,
                self.train_teacher("warmup"),
                student,
                rollouts__num_traces=number,
                distillation__select="best_reward",
                **(EXACT if method == "exactbest" else {}),
                **options,
            )
        return self.explain(name, self.train(arm, method, student), student, **options)

    def make_all(self, part: str, **options: Any) -> Path:
        """Return all traces that an arm takes the first of: by the warm-up teacher, or of its warm-up."""
        if part == "d":
            return self.data_file("warmup")
        if not options:
            return self.make_traces("warmup")
        name = "_".join(["traces", *map(str, options.values())])
        return self.generate("warmup", name, "raw", **options) / "distillation.jsonl"

    def cut(self, arm: str, traces: Path, number: int) -> Path:
        """Return a file of the first traces of another file."""
        path = self.data_file(arm)
        rewrite(path, traces.read_text().splitlines(keepends=True)[:number])
        return path

    def model(self, arm: str) -> Path | str:
        """Return an arm's student, made if it is not there."""
        if arm == "base":
            return self.student_base
        self.run_arm(arm)
        return self.folder / arm / "student" / "model"

    def train(self, arm: str, method: str, student: Path | str) -> Path:
        """Run RLT of the warm-up teacher against a student, and return the model."""
        folder = self.stages(
            f"{self.name}/{arm}/teacher",
            "fit",
            "laptop/rlt",
            model__teacher=self.train_teacher("warmup"),
            model__student=student,
            data__source=self.data_file("wrong" if method == "wrong" else "rlt"),
            trainer__max_steps=self.setting.num_iterations,
            **self.seeds,
            **TRAINED[method],
        )
        return folder / "model"

    def explain(self, arm: str, teacher: Path, student: Path | str, **options: object) -> Path:
        """Let a teacher explain the problems of `raw`, scored by a student; return the file of the traces."""
        return self.read_problems(
            arm, "laptop/generate", model__teacher=teacher, model__student=student, **options
        )

    def answers(
        self, arm: str, student: Path | str, number: int, source: str = "raw", **options: object
    ) -> Path:
        """Let a student answer the problems of a file, and return the file of its right answers."""
        return self.read_problems(
            arm, "laptop/rejection", source, model__teacher=student, rollouts__num_traces=number, **options
        )

    def read_problems(self, arm: str, config: str, source: str = "raw", **options: object) -> Path:
        """Run `rlt predict` on the problems of a file, and return the file of what was selected."""
        folder = self.stages(
            f"{self.name}/{arm}/traces",
            "predict",
            config,
            "README.md",
            data__source=self.data_file(source),
            **self.seeds,
            **options,
        )
        return folder / "distillation.jsonl"

    def rank(self, arm: str) -> list[dict[str, Any]]:
        """Return the warm-up teacher's traces with their rewards under an arm's student."""
        return read(self.explain(f"ranked_{arm}", self.train_teacher("warmup"), self.model(arm)))


def read_number(solution: str) -> str:
    """Return the number in the box of a solution."""
    return solution.removeprefix("\\boxed{").removesuffix("}")


def show_wrong(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return rows with another digit as the solution."""
    rng = Random(seed)
    wrong = []
    for row in rows:
        right = int(read_number(row["solution"]))
        wrong.append(row | {"solution": f"\\boxed{{{(right + rng.randrange(1, 10)) % 10}}}"})
    return wrong


def break_last_steps(rows: list[dict[str, Any]], hazard: float, seed: int) -> list[dict[str, Any]]:
    """Return rows of which a right trace breaks off at its last step by chance, in the usual three ways."""
    rng, broken = Random(seed), []
    for row in rows:
        problem = parse_chain(row["question"])
        sentences, place = [*problem.steps], len(problem.steps) - 1
        if row["reasoning_trace"] == CHAIN_WORDING.trace(sentences) and rng.random() < hazard:
            weights = (NEW_MIXTURE.filler, NEW_MIXTURE.leap, 1 - NEW_MIXTURE.filler - NEW_MIXTURE.leap)
            [kind] = rng.choices(BREAKS, weights)
            sentences[place:] = draw_ending(problem, CHAIN_WORDING, place, kind, rng)
            row = row | {"reasoning_trace": CHAIN_WORDING.trace(sentences)}
        broken.append(row)
    return broken


def read_arm(arm: str) -> re.Match[str]:
    """Return the parts of an arm's name.

    Raises:
        InputError: If there is no such arm.
    """
    match = ARM.fullmatch(arm)
    if match is None:
        raise InputError(
            f"--arms may name base, sN, dN, oracle, rlt and METHOD_ARM, but names {arm}. Correct it."
        )
    if of := match["of"] or match["written"]:
        read_arm(of)
    return match


def split_method(method: str) -> tuple[str, int]:
    """Return reject, 4 for reject4; a method without a number has 0."""
    name = method.rstrip("0123456789")
    return name, int(method[len(name) :] or 0)


def name_arm(arm: str) -> str:
    """Return what an arm's student was trained on, for people."""
    match = read_arm(arm)
    if match["written"]:
        return f"{name_arm(match['written'])}, written at T {match['temperature']}"
    if match["dose"]:
        what = "the warm-up teacher" if match["part"] == "s" else "those it has learned from"
        return f"{arm}: {match['dose']} traces of {what}"
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
            "accuracy": [read_accuracy(one, arm) for one in ones],
            "greedy": [read_accuracy(one, arm, "greedy") for one in ones],
            "old": [read_accuracy(one, arm, "old") for one in ones],
        }
        if arm != "base":
            rows = [read(one.make_traces(arm)) for one in ones]
            found["arms"][arm] |= {"rows": [*map(len, rows)], "kinds": [*map(measure_kinds, rows)]}
    found["reward_by_kind"] = {}
    for arm in list_frozen(arms):
        rewards = split_rewards(row for one in ones for row in one.rank(arm))
        found["reward_by_kind"][arm] = {kind: fmean(values) for kind, values in rewards.items()}
    return found


def list_frozen(arms: list[str]) -> list[str]:
    """Return the arms whose students are ranked by: the untrained one, sN and dN."""
    return ["base", *(arm for arm in arms if read_arm(arm)["dose"])]


def build_page(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    arms = figures["arms"]
    several = len(figures["seeds"]) > 1
    over = f"{len(figures['seeds'])} seeds" if several else "over problems"
    lines = [
        f"| student trained on | accuracy at T 0.7, % (± 95 %, {over}) | by seed | greedy, % "
        "| known steps, % | rows | traces: steps / filler / leap / wrong / other, % |",
        "|" + "---|" * 7,
    ]
    for arm, found in arms.items():
        by_seed = ", ".join(f"{value:.1f}" for value in found["accuracy"])
        cells = [name_arm(arm), plus_minus(found["accuracy"]), by_seed]
        cells += [f"{fmean(found[name]):.1f}" for name in ("greedy", "old")]
        if arm == "base":
            cells += ["", ""]
        else:
            low, high = min(found["rows"]), max(found["rows"])
            cells += [str(low) if low == high else f"{low} to {high}", kinds_text(mean_kinds(found["kinds"]))]
        lines.append(f"| {' | '.join(cells)} |")
    how = "paired by seed" if several else "over problems"
    differences = [f"| difference | points (± 95 %, {how}) |", "|---|---|"]
    for arm in arms:
        match = read_arm(arm)
        of = match["of"] or match["written"]
        if of in arms:
            mean, half = compute_difference(arms, arm, of)
            differences.append(f"| {name_arm(arm)} − {of} | {mean:+.1f} ± {half:.1f} |")
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
    taught = [arm for arm in arms if arm.startswith("rlt_")]
    draw_accuracies(axes, arms, [name_arm(arm) for arm in arms][::-1], taught)
    figure.savefig(path)


# The command


def main() -> int:
    """Run the arms for all seeds, and write what came out."""
    parser = build_parser(__doc__, f"'{' '.join(MAIN_ARMS)}' by default")
    parser.add_argument("--setting", choices=SETTINGS, default="new")
    options = parser.parse_args()
    try:
        arms = list(dict.fromkeys(["base", *(options.arms.split() or MAIN_ARMS)]))
        for arm in arms:
            read_arm(arm)
        run(options.output_dir, SETTINGS[options.setting], read_seeds([options.seeds], (0, 1, 2)), arms)
    except (InputError, StageError) as error:
        print(f"rounds: {error}", file=sys.stderr)
        return 1
    return 0


def run(folder: Path, setting: Setting, seeds: list[int], arms: list[str]) -> None:
    """Run all stages, then write `rounds.json`, `rounds.md` and `rounds.svg`, and print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(folder)
    stages.start()
    ones = [Rounds(stages, setting, seed) for seed in seeds]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
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
        one.run_arm(arm)
    for arm in list_frozen(arms):
        one.rank(arm)


if __name__ == "__main__":
    sys.exit(main())
