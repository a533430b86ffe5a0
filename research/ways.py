"""Three ways to teach: a teacher's traces, a teacher's judgement of answers, or the student's own judgement.

    python research/ways.py --output_dir DIR               # make ways: two tasks, three seeds
    python research/ways.py --output_dir DIR --seeds 10    # others

The finding's stages, on two tasks. In `known` the student can do every step; in `new` the last step of each
problem is an operation that it was never shown. Every student starts as the miniature, and takes equally many
optimizer steps on equally many answers, for the same problems:

    base              the student before training
    warmup, rlt       SFT on traces of the warm-up teacher, of the RLT teacher, at temperature 0.7
    warmup_tN, rlt_tN controls: written at temperature 0, 0.3 or 1
    best_of_N         control: the best of 4 or 16 of the warm-up teacher by the reward, under the base
    opd_warmup        on its own answers, towards the warm-up teacher, which sees the solution
    opd_rlt           towards the RLT teacher
    opd_self          towards itself before training, with the solution in view (self-distillation)
    opd_live          towards itself as it is now, with the solution in view
    opd_NAME_wrong    controls: the teacher sees the solution of another problem

Its folder gets `ways.json`, `ways.md` and `ways.svg`. Run it again after a crash: finished stages are
skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import Arms, Setting, measure_kinds, read
from figures import compute_difference, count_right_steps, read_accuracy
from plots import draw_accuracies
from stages import StageError, Stages
from tables import kinds_text, mean_kinds, plus_minus
from trace_kinds import parse_chain

from rlt_lightning.tags import R1
from rlt_lightning.tasks.stepwise import CHAIN_WORDING, NEW_MIXTURE, NEW_OPERATIONS

KNOWN = Setting("known", student_lr=5e-4)
NEW = Setting(
    "new",
    last=NEW_OPERATIONS,
    mixture=NEW_MIXTURE,
    num_warmup_epochs=3,
    student_lr=5e-4,
    student_epochs=9,
)
TASKS = {"known": "every step is known", "new": "the last step is new"}
WRONG: dict[str, object] = {"data__view__wrong_solutions": "true"}
ON_POLICY: dict[str, tuple[str | None, dict[str, object]]] = {  # teacher (None: oneself) and options
    "opd_warmup": ("warmup", {}),
    "opd_rlt": ("rlt", {}),
    "opd_self": (None, {}),
    "opd_live": (None, {"model__teacher_weights": "live"}),
    "opd_warmup_wrong": ("warmup", WRONG),
    "opd_rlt_wrong": ("rlt", WRONG),
    "opd_self_wrong": (None, WRONG),
}
WRITTEN: dict[str, tuple[str, dict[str, object]]] = {  # teacher, and how it writes
    **{
        f"{teacher}_t{value}": (teacher, {"rollouts__sampling__temperature": value})
        for teacher in ("warmup", "rlt")
        for value in (0, 0.3, 1)
    },
    **{
        f"best_of_{number}": (
            "warmup",
            {"rollouts__num_traces": number, "distillation__select": "best_reward"},
        )
        for number in (4, 16)
    },
}
ARMS = ("base", "warmup", "rlt", *WRITTEN, *ON_POLICY)
NAMES = {
    "base": "before training",
    "warmup": "SFT on the warm-up teacher's traces",
    "rlt": "SFT on the RLT teacher's traces",
    **{
        f"{teacher}_t{value}": f"SFT on the {name} teacher's traces, written at T {value}"
        for teacher, name in (("warmup", "warm-up"), ("rlt", "RLT"))
        for value in (0, 0.3, 1)
    },
    **{f"best_of_{number}": f"SFT on the warm-up teacher's best of {number}" for number in (4, 16)},
    "opd_warmup": "on-policy, warm-up teacher",
    "opd_rlt": "on-policy, RLT teacher",
    "opd_self": "on-policy, itself before training",
    "opd_live": "on-policy, itself as it is",
    "opd_warmup_wrong": "control: warm-up teacher, wrong solutions",
    "opd_rlt_wrong": "control: RLT teacher, wrong solutions",
    "opd_self_wrong": "control: itself before training, wrong solutions",
}
TEACHERS = {"base": "the student before training", "warmup": "warm-up teacher", "rlt": "RLT teacher"}
PROMPTS = 16  # of an optimizer step, as in SFT
TEMPERATURE = 0.7  # of all sampling
STAGES = {  # what is paid for, and the stages it is the mean of
    "warm-up of the teacher": ("warmup/teacher",),
    "RLT of the teacher": ("rlt/teacher",),
    "traces of a teacher": ("warmup/traces", "rlt/traces"),
    "SFT of a student on traces": ("warmup/student", "rlt/student"),
    "on-policy training of a student": tuple(f"{arm}/student" for arm in ON_POLICY),
}


class Ways(Arms):
    """The finding's stages of one task and one seed, with students that learn on their own answers."""

    def run_arm(self, arm: str, samples: bool = False) -> None:
        """Train an arm's student and evaluate it."""
        if arm in ON_POLICY:
            teacher, options = ON_POLICY[arm]
            trained = self.stages(
                f"{self.name}/{arm}/student",
                "fit",
                "laptop/opd",
                model__pretrained=self.student_base,
                model__optimizer__lr=self.setting.student_lr,
                data__source=self.data_file("raw"),
                trainer__max_steps=self.setting.student_epochs * self.setting.num_traces // PROMPTS,
                model__teacher=self.train_teacher(teacher) if teacher else "null",
                **self.seeds,
                **options,
            )
            self.evaluate(arm, trained / "model")
        else:
            super().run_arm(arm, samples)

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's students learn from; some are written in another way."""
        if arm not in WRITTEN:
            return super().make_traces(arm)
        teacher, options = WRITTEN[arm]
        return self.generate(teacher, f"traces_{arm}", "raw", **options) / "distillation.jsonl"

    def run(self, arms: list[str]) -> None:
        """Run all stages of some arms."""
        self.prepare()
        for arm in arms:
            self.run_arm(arm)


# Figures


def thoughts(one: Arms, arm: str) -> dict[str, float]:
    """Return the kinds of the thoughts that an arm's student samples for held-out problems, in percent."""
    questions = [row["question"] for row in read(one.data_file("test"))]
    rows = read(one.folder / arm / "sampled" / "responses.jsonl")
    return measure_kinds(
        [
            {
                "question": questions[int(row["id"].split("/")[1]) - 1],
                "reasoning_trace": row["response"]
                .partition(R1.thought_open)[2]
                .partition(R1.thought_close)[0],
            }
            for row in rows
        ]
    )


def standard_errors(one: Arms, arm: str) -> float:
    """Return by how many standard errors over problems one seed's student is better than before training.

    Where both solve none or all, the error is 0: equal students then differ by 0, others by infinity.
    """
    shares = [read_accuracy(one, name) / 100 for name in (arm, "base")]
    error = math.sqrt(sum(p * (1 - p) for p in shares) / one.setting.num_test)
    difference = shares[0] - shares[1]
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def last_step(one: Ways, teacher: str, wrong: bool) -> dict[str, float]:
    """Return the probability that a teacher gives the last step's right number and the shown one, percent.

    It reads right steps up to that number, and sees the right solution or, if `wrong`, another digit.
    """
    # Here, since every process that judges answers imports this file.
    import torch
    from gates import Corpus

    from rlt_lightning.models.load import load_model, load_tokenizer

    name = one.base if teacher == "base" else str(one.train_teacher(teacher))
    model, tokenizer = load_model(name), load_tokenizer(name)
    corpus = Corpus(tokenizer, 0)
    problems = [parse_chain(row["question"]) for row in read(one.data_file("test"))]
    right = [int(problem.answer) for problem in problems]
    shown = [(digit + (1 + place % 9) * wrong) % 10 for place, digit in enumerate(right)]
    examples = [
        corpus.example(
            replace(problem, answer=str(digit)), CHAIN_WORDING.trace(problem.steps), as_teacher=True
        )
        for problem, digit in zip(problems, shown, strict=True)
    ]
    ids, _ = corpus.batch(examples)
    [equals] = tokenizer.encode(" is")
    places = [row.nonzero()[-1, 0] for row in ids == equals]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[torch.arange(len(ids)), torch.stack(places)]
    digits = torch.tensor([tokenizer.encode(f" {digit}")[0] for digit in range(10)])
    probs = (logits / TEMPERATURE).softmax(-1)[:, digits]  # (problems, 10)
    found = {"right": torch.tensor(right), "shown": torch.tensor(shown)}
    return {key: float(100 * probs.gather(1, some[:, None]).mean()) for key, some in found.items()}


def cost(ones: list[Ways], stages: tuple[str, ...]) -> dict[str, float]:
    """Return the mean optimizer steps, sampled tokens and wall seconds of stages that have ended."""
    ran = [one.folder / stage for one in ones for stage in stages]
    folders = [folder for folder in ran if folder.with_name(f"{folder.name}.seconds").exists()]
    found: dict[str, list[float]] = {"optimizer_steps": [], "sampled_tokens": [], "seconds": []}
    for folder in folders:
        metrics = folder / "metrics.csv"
        found["optimizer_steps"].append(len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0)
        samples = [path for name in ("rollouts", "traces") if (path := folder / f"{name}.jsonl").exists()]
        found["sampled_tokens"].append(sum(row["num_tokens"] for path in samples for row in read(path)))
        found["seconds"].append(float(folder.with_name(f"{folder.name}.seconds").read_text()))
    return {name: fmean(values) for name, values in found.items() if values}


def collect(ones: list[Ways], arms: list[str]) -> dict[str, Any]:
    """Return the figures of one task, one per seed; accuracies and kinds are in percent."""
    found: dict[str, Any] = {}
    for arm in arms:
        found[arm] = {
            "accuracy": [read_accuracy(one, arm) for one in ones],
            "greedy": [read_accuracy(one, arm, "greedy") for one in ones],
            "thoughts": [thoughts(one, arm) for one in ones],
            "right_steps": [count_right_steps(one, arm) for one in ones],
        }
        if arm != "base":
            found[arm]["standard_errors"] = [standard_errors(one, arm) for one in ones]
    costs = {name: cost(ones, stages) for name, stages in STAGES.items()}
    teachers = ("base", *(arm for arm in ("warmup", "rlt") if {arm, f"opd_{arm}"} & {*arms}))
    last = {
        teacher: {
            name: [last_step(one, teacher, wrong) for one in ones]
            for name, wrong in (("right solution", False), ("wrong solution", True))
        }
        for teacher in teachers
    }
    traces = {
        arm: [measure_kinds(read(one.make_traces(arm))) for one in ones]
        for arm in ("warmup", "rlt", *WRITTEN)
        if arm in arms
    }
    costs = {name: some for name, some in costs.items() if some}
    return {"arms": found, "traces": traces, "last_step": last, "costs": costs}


# Tables and picture


def table(figures: dict[str, Any]) -> str:
    """Return the Markdown table of one task's students."""
    arms = figures["arms"]
    lines = [
        "| student | accuracy at T 0.7, % (± 95 %) | minus before training, points | standard errors, each "
        "seed | greedy, % (± 95 %) | its thoughts: steps / filler / leap / wrong / other, % |",
        "|" + "---|" * 6,
    ]
    for arm, found in arms.items():
        gain = errors = ""
        if "standard_errors" in found:
            mean, half = compute_difference(arms, arm, "base")
            gain = f"{mean:+.1f} ± {half:.1f}"
            errors = ", ".join(f"{error:+.1f}" for error in found["standard_errors"])
        cells = (NAMES[arm], plus_minus(found["accuracy"]), gain, errors, plus_minus(found["greedy"]))
        lines.append(f"| {' | '.join(cells)} | {kinds_text(mean_kinds(found['thoughts']))} |")
    return "\n".join(lines)


def contrasts(figures: dict[str, Any]) -> str:
    """Return the Markdown table of the differences that answer the question."""
    arms = figures["arms"]
    pairs = [
        ("opd_rlt", "rlt"),
        ("opd_warmup", "warmup"),
        ("rlt", "warmup_t0"),
        ("rlt", "best_of_4"),
        ("warmup_t0", "warmup"),
        ("opd_rlt", "warmup_t0"),
        ("opd_rlt", "opd_self"),
        ("opd_warmup", "opd_self"),
        *((arm, f"{arm}_wrong") for arm in ("opd_rlt", "opd_warmup", "opd_self")),
    ]
    how = "paired by seed" if len(arms["base"]["accuracy"]) > 1 else "over problems"
    lines = [f"| difference | points (± 95 %, {how}) |", "|---|---|"]
    for arm, other in pairs:
        if {arm, other} <= arms.keys():
            mean, half = compute_difference(arms, arm, other)
            lines.append(f"| {NAMES[arm]} − {NAMES[other]} | {mean:+.1f} ± {half:.1f} |")
    return "\n".join(lines)


def teacher_table(figures: dict[str, Any]) -> str:
    """Return the Markdown table of what teachers write, and whether they use the solution that they see."""
    lines = [
        "| teacher | its traces: steps / filler / leap / wrong / other, % | last step: p(right number), % "
        "| shown a wrong solution: p(right number), % | p(number shown), % |",
        "|" + "---|" * 5,
    ]
    for teacher, found in figures["last_step"].items():
        kinds = figures["traces"].get(teacher)
        sound, misled = found["right solution"], found["wrong solution"]
        values = [fmean(one["right"] for one in sound)]
        values += [fmean(one[key] for one in misled) for key in ("right", "shown")]
        cells = (TEACHERS[teacher], kinds_text(mean_kinds(kinds)) if kinds else "")
        lines.append(f"| {' | '.join([*cells, *(f'{value:.1f}' for value in values)])} |")
    for arm, kinds in figures["traces"].items():
        if arm in WRITTEN:
            lines.append(f"| {NAMES[arm]} | {kinds_text(mean_kinds(kinds))} | | | |")
    return "\n".join(lines)


def cost_table(figures: dict[str, Any]) -> str:
    """Return the Markdown table of what each stage takes."""
    lines = ["| stage | optimizer steps | sampled tokens | seconds |", "|---|---|---|---|"]
    for name, found in figures["costs"].items():
        steps, tokens, seconds = (found[key] for key in ("optimizer_steps", "sampled_tokens", "seconds"))
        lines.append(f"| {name} | {steps:.0f} | {tokens:,.0f} | {seconds:.0f} |")
    return "\n".join(lines)


def page(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = []
    for task, found in figures["tasks"].items():
        tables = (table(found), contrasts(found), teacher_table(found), cost_table(found))
        parts += [f"### {TASKS[task].capitalize()}", *tables]
    return "\n\n".join(parts) + "\n"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the accuracies of all arms, a panel for each task."""
    from matplotlib.figure import Figure

    tasks = figures["tasks"]
    num_arms = max(len(found["arms"]) for found in tasks.values())
    figure = Figure(figsize=(4 + 4 * len(tasks), 1.4 + 0.32 * num_arms), layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axes, (task, found) in zip(panels, tasks.items(), strict=True):
        draw_accuracies(axes, found["arms"], [NAMES[arm] for arm in found["arms"]][::-1])
        axes.set_title(TASKS[task].capitalize())
    figure.savefig(path)


# The command


def build_parser(about: str | None, arms: str) -> argparse.ArgumentParser:
    """Return the parser of a comparison's script: what it is about, and what its help says of `--arms`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", default="", help="such as '10 11 12'; '0 1 2' by default")
    parser.add_argument("--arms", default="", help=arms)
    return parser


def main() -> int:
    """Run the arms of both tasks for all seeds, and write what came out."""
    parser = build_parser(__doc__, "such as 'base opd_rlt'; all by default")
    parser.add_argument("--tasks", default=" ".join(TASKS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="stages side by side")
    options = parser.parse_args()
    arms, tasks = options.arms.split() or list(ARMS), options.tasks.split()
    arms = list(dict.fromkeys(["base", *arms]))  # all are compared with it
    seeds = [int(word) for word in options.seeds.split() or "012"]
    try:
        require_names(arms, ARMS, tasks, TASKS)
        run(options.output_dir, seeds, arms, tasks, options.workers)
    except StageError as error:
        print(f"ways: {error}", file=sys.stderr)
        return 1
    return 0


def require_names(arms: Iterable[str], known: Iterable[str], tasks: Iterable[str], of: Iterable[str]) -> None:
    """Check that arms and tasks are `known` ones, and those `of` the script.

    Raises:
        StageError: Naming those that there are not.
    """
    if unknown := {*arms} - {*known} | {*tasks} - {*of}:
        raise StageError(
            f"ARMS may name {', '.join(known)}, tasks {', '.join(of)}, but they name "
            f"{', '.join(sorted(unknown))}. Correct it."
        )


def run_in_turn(ones: dict[str, list[Any]], arms: list[str], num_workers: int) -> None:
    """Run all stages, several side by side: a seed of each task, then the next seed."""
    in_turn = [one for pair in zip(*ones.values(), strict=True) for one in pair]
    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(lambda one: one.run(arms), in_turn))


def run(folder: Path, seeds: list[int], arms: list[str], tasks: list[str], num_workers: int) -> None:
    """Run all stages, then write `ways.json`, `ways.md` and `ways.svg`, and print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(folder)
    stages.start()
    settings = {setting.name: setting for setting in (KNOWN, NEW)}
    ones = {task: [Ways(stages, settings[task], seed) for seed in seeds] for task in tasks}
    run_in_turn(ones, arms, num_workers)
    found = {task: collect(some, arms) for task, some in ones.items()}
    figures = {"unit": "percent", "seeds": seeds, "tasks": found}
    (folder / "ways.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "ways.md").write_text(page(figures))
    draw(figures, folder / "ways.svg")
    print(page(figures))


if __name__ == "__main__":
    sys.exit(main())
