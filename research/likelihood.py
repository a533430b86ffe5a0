"""Rewards without a checker, in miniature: how probable does a thought make the solution?

    python research/likelihood.py --output_dir DIR               # make likelihood: three seeds
    python research/likelihood.py --output_dir DIR --arms "base verifree_warm" --tasks long

The problems are the finding's chains. In the task `short` the solution is one digit in a box; in `long` it is
the whole chain in words, then the box: 34 tokens. Each method trains on the same 512 problems, for as many
steps of as many samples, from two starts: the miniature (`METHOD_base`), and the same after 128 SFT traces
(`METHOD_warm`).

    base, warm     the starts themselves
    binary         stage R: 1 for a right digit in the box, whatever else stands there
    log_prob_sum   log p(solution), with the answer term
    log_prob_mean  the same, mean over tokens
    no_answer      log_prob_sum without the answer term
    rlpr           mean p(token), above the same without a thought
    verifree       p(solution), with the answer term
    nover          rank of the perplexity in the group
    opd_self       stage 4b: towards the start itself, which sees the solution
    rlt            RLT of a teacher against the start, then SFT on the traces of this teacher
    rlt_t0         control: the same, the traces written greedily
    warmup         control: SFT on the traces of that teacher before RLT, at temperature 0.7
    warmup_tN      control: written at temperature 0, 0.3 or 1
    best_of_N      control: of 4 or 16 at temperature 0.7 the best by RLT's reward under the start

The starts also answer each held-out problem 16 times: the most frequent answer needs no training.

Its folder gets `likelihood.json`, `likelihood.md` and `likelihood.svg`. Run it again after a crash: finished
stages are skipped.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import Arms, Setting, measure_kinds, read
from figures import compute_interval, read_accuracy, split_rewards
from jobs import read_seeds
from plots import legend_below
from stages import StageError, Stages
from tables import KIND_COLORS, kinds_text, mean_kinds, plus_minus
from trace_kinds import parse_chain
from ways import build_parser, cost, cost_table, require_names, run_in_turn

from rlt_lightning.judging.answers import solution_block
from rlt_lightning.run.jsonl import rewrite
from rlt_lightning.tags import R1
from rlt_lightning.tasks.stepwise import CHAIN_WORDING
from rlt_lightning.types import InputError

NUM_WARM = 128  # traces of the start `warm`
NUM_PROMPTS, GROUP_SIZE = 8, 8  # of a step
RATE = 5e-4  # peak learning rate of all students
TASKS = {
    "short": "the solution is a digit in a box",
    "long": "the solution is the chain in words, then the box",
}
SETTINGS = {task: Setting(task, student_lr=RATE) for task in TASKS}
MOST_TOKENS = {"short": 72, "long": 112}  # of thought and solution
STARTS = {"base": "the miniature", "warm": f"the miniature after {NUM_WARM} traces"}
START_COLORS = {"base": "#9db4c0", "warm": "#2a6f97"}
REWARDS: dict[str, dict[str, object]] = {
    "log_prob_sum": {"model__reward": "LogProbReward"},
    "log_prob_mean": {"model__reward": "LogProbReward", "model__reward__reduction": "mean"},
    "no_answer": {"model__reward": "LogProbReward", "model__answer_weight": 0},
    "rlpr": {"model__reward": "RLPRReward"},
    "verifree": {"model__reward": "VeriFreeReward"},
    "nover": {"model__reward": "NOVERReward"},
}
SEVERAL = {"distillation__select": "best_reward", "rollouts__num_traces": 4}
WRITTEN: dict[str, dict[str, object]] = {  # how a teacher writes the traces of an arm
    "rlt": {},
    "rlt_t0": {"rollouts__sampling__temperature": 0},
    "warmup": {},
    **{f"warmup_t{value}": {"rollouts__sampling__temperature": value} for value in (0, 0.3, 1)},
    "best_of_4": SEVERAL,
    "best_of_16": SEVERAL | {"rollouts__num_traces": 16},
}
NUM_VOTES = 16  # answers of a start to each problem
METHODS = {
    "binary": "right or wrong (stage R)",
    "log_prob_sum": "log-prob, sum",
    "log_prob_mean": "log-prob, mean",
    "no_answer": "log-prob, sum, no answer term",
    "rlpr": "RLPR",
    "verifree": "VeriFree",
    "nover": "NOVER",
    "opd_self": "self-distillation (stage 4b)",
    "rlt": "RLT teacher, then SFT",
    "rlt_t0": "RLT teacher at T 0, then SFT",
    "warmup": "warm-up teacher at T 0.7, then SFT",
    "warmup_t0": "warm-up teacher at T 0, then SFT",
    "warmup_t0.3": "warm-up teacher at T 0.3, then SFT",
    "warmup_t1": "warm-up teacher at T 1, then SFT",
    "best_of_4": "warm-up teacher, best of 4, then SFT",
    "best_of_16": "warm-up teacher, best of 16, then SFT",
}
ARMS = (*STARTS, *(f"{method}_{start}" for start in STARTS for method in METHODS))
PARTS = {"steps 1 to 5": (1, 5), "steps 6 to 20": (6, 20)}  # of the training, first and last step
# The loss of laptop/likelihood, for stage R.
PLAIN_GRADIENT = {
    "model__advantages": "rlt_lightning.numerics.LeaveOneOutAdvantages",
    "model__policy_loss": "rlt_lightning.numerics.DrGRPOLoss",
    "model__policy_loss__kl_coef": 0,
    "model__policy_loss__max_completion_length": 1,
}


STAGES = {  # what is paid for, and the stages it is the mean of
    name: tuple(f"{method}_{start}/{stage}" for method in methods for start in STARTS)
    for name, methods, stage in (
        ("a likelihood reward", tuple(REWARDS), "student"),
        ("stage R", ("binary",), "student"),
        ("self-distillation", ("opd_self",), "student"),
        ("RLT of a teacher", ("rlt",), "teacher"),
        ("its traces", ("rlt",), "traces"),
        ("SFT on them", ("rlt",), "student"),
    )
}


class Likelihood(Arms):
    """All stages of one task and one seed."""

    def write_data(self) -> None:
        """Write the rows of all stages; RLT trains on the problems of all other methods."""
        super().write_data()
        for name in ("warmup", "raw"):
            lines = [
                json.dumps(row | {"solution": self.solution(row)}) + "\n"
                for row in read(self.data_file(name))
            ]
            rewrite(self.data_file(name), lines)
            if name == "raw":
                rewrite(self.data_file("rlt"), lines)
            else:
                rewrite(self.data_file("warm"), lines[:NUM_WARM])

    def solution(self, row: dict[str, str]) -> str:
        """Return the solution of a problem in this task."""
        problem = parse_chain(row["question"])
        box = f"\\boxed{{{problem.answer}}}"
        return f"{CHAIN_WORDING.trace(problem.steps)}\n{box}" if self.setting.name == "long" else box

    def evaluate(self, arm: str, model: Path | str, greedy: bool = True, **options: Any) -> None:
        """Let an arm's student answer the held-out problems (stage 5)."""
        length = {"rollouts__sampling__max_completion_length": MOST_TOKENS[self.setting.name]}
        super().evaluate(arm, model, greedy, **length, **options)
        if arm in STARTS:
            votes = {"rollouts__num_samples": NUM_VOTES, "rollouts__seed": self.seed}
            self.ask(f"{arm}/votes", model, **votes, **length)

    def model(self, arm: str) -> Path | str:
        """Return an arm's student."""
        return self.student_base if arm == "base" else self.folder / arm / "student" / "model"

    def run_arm(self, arm: str, samples: bool = False) -> None:
        """Train an arm's student and evaluate it."""
        if arm == "base":
            self.evaluate(arm, self.student_base)
        elif arm == "warm":
            self.train_student(arm, self.data_file("warm"))
        else:
            method, _, start = arm.rpartition("_")
            self.evaluate(arm, self.train(arm, method, self.model(start)) / "model")

    def train(self, arm: str, method: str, start: Path | str) -> Path:
        """Run the stage of a method from a start, and return its folder."""
        shared = {
            "data__source": self.data_file("raw"),
            "trainer__max_steps": self.setting.num_iterations,
            "model__optimizer__lr": self.setting.student_lr,
            **self.seeds,
        }
        grouped = shared | {"data__prompts_per_step": NUM_PROMPTS, "model__group_size": GROUP_SIZE}
        name, length = f"{self.name}/{arm}/student", MOST_TOKENS[self.setting.name]
        if method in REWARDS:
            return self.stages(
                name, "fit", "laptop/likelihood", model__teacher=start, **grouped, **REWARDS[method]
            )
        if method == "binary":
            return self.stages(
                name,
                "fit",
                "laptop/grpo",
                model__teacher=start,
                rollouts__sampling__temperature=1.0,
                rollouts__sampling__max_completion_length=length,
                **grouped,
                **PLAIN_GRADIENT,
            )
        if method == "opd_self":
            return self.stages(
                name,
                "fit",
                "laptop/opd",
                model__pretrained=start,
                model__teacher="null",
                data__prompts_per_step=NUM_PROMPTS * GROUP_SIZE,
                rollouts__sampling__max_completion_length=length,
                **shared,
            )
        return self.stages(
            name,
            "fit",
            "laptop/sft",
            model__pretrained=start,
            data__source=self.explain(arm, method, start),
            model__optimizer__lr=self.setting.student_lr,
            data__seed=self.seed,
            model__seed=self.seed,
        )

    def explain(self, arm: str, method: str, start: Path | str) -> Path:
        """Let a teacher write an arm's traces, after RLT against a start if it has any; return their file."""
        problems = {"model__student": start, "data__source": self.data_file("raw"), **self.seeds}
        teacher = self.train_teacher("warmup")
        if method.startswith("rlt"):
            trained = self.stages(
                f"{self.name}/rlt_{arm.rpartition('_')[2]}/teacher",
                "fit",
                "laptop/rlt",
                model__teacher=teacher,
                trainer__max_steps=self.setting.num_iterations,
                **problems,
            )
            teacher = trained / "model"
        folder = self.stages(
            f"{self.name}/{arm}/traces",
            "predict",
            "laptop/generate",
            "README.md",
            model__teacher=teacher,
            **problems,
            **WRITTEN[method],
        )
        return folder / "distillation.jsonl"

    def run(self, arms: list[str]) -> None:
        """Run all stages of some arms, one after the other: they share their starts."""
        self.prepare()
        for arm in arms:
            self.run_arm(arm)


# Figures


def find_thought(text: str) -> str:
    """Return the thought of an answer; all of it if its end is missing."""
    return text.rpartition(R1.thought_open)[2].partition(R1.thought_close)[0].strip()


def measure(one: Likelihood, arm: str) -> dict[str, Any]:
    """Return what the thoughts and solutions are that an arm's student samples for held-out problems.

    The log-prob is that of all tokens of the reference solution after the sampled thought, at temperature 1.
    """
    # Here, since every process that judges answers imports this file.
    import torch
    from gates import Corpus

    from rlt_lightning.models.load import load_model, load_tokenizer

    tokenizer, model = load_tokenizer(one.student_base), load_model(str(one.model(arm)))
    corpus, rows = Corpus(tokenizer, 0), read(one.data_file("test"))
    texts = [""] * len(rows)
    for row in read(one.folder / arm / "sampled" / "responses.jsonl"):
        texts[int(row["id"].split("/")[1]) - 1] = row["response"]
    thoughts, solutions = [find_thought(text) for text in texts], [one.solution(row) for row in rows]
    examples = [
        corpus.format.build_student_sft_example(1, row["question"], R1.wrap(thought), R1.wrap(solution))
        for row, thought, solution in zip(rows, thoughts, solutions, strict=True)
    ]
    ids, _ = corpus.batch(examples)
    with torch.no_grad():
        log_probs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    log_probs = log_probs.gather(2, ids[:, 1:, None])[:, :, 0]  # (problems, tokens)
    after = len(tokenizer.encode("\n" + R1.solution_close)) + 1  # tokens behind the solution
    found = []
    for place, (example, solution) in enumerate(zip(examples, solutions, strict=True)):
        end = len(example.token_ids) - after - 1
        found.append(float(log_probs[place, end - len(tokenizer.encode(solution)) : end].sum()))
    written = [solution_block(text, R1).strip() for text in texts]
    traces = [
        {"question": row["question"], "reasoning_trace": thought}
        for row, thought in zip(rows, thoughts, strict=True)
    ]
    return {
        "log_prob": fmean(found),
        "length": fmean(len(tokenizer.encode(thought)) for thought in thoughts),
        "whole": 100 * fmean(a == b for a, b in zip(written, solutions, strict=True)),
        "kinds": measure_kinds(traces),
    }


def measure_training(one: Likelihood, arm: str) -> list[float]:
    """Return the mean length of the thoughts that an arm samples at each step of its training, tokens."""
    from rlt_lightning.models.load import load_tokenizer

    tokenizer, lengths = load_tokenizer(one.student_base), defaultdict(list)
    for row in read(one.folder / arm / "student" / "rollouts.jsonl"):
        lengths[row["step"]].append(len(tokenizer.encode(find_thought(row["explanation"]))))
    return [fmean(lengths[step]) for step in sorted(lengths)]


def rank_kinds(ones: list[Likelihood], arm: str, first: int, last: int) -> dict[str, dict[str, float]]:
    """Return the mean reward of each kind of thought in some steps of training, and its share in percent."""
    rewards = split_rewards(
        {
            "question": row["question"],
            "reasoning_trace": find_thought(row["explanation"]),
            "reward": row["reward"],
        }
        for one in ones
        for row in read(one.folder / arm / "student" / "rollouts.jsonl")
        if first <= row["step"] <= last
    )
    number = sum(map(len, rewards.values()))
    return {
        kind: {"reward": fmean(values), "share": 100 * len(values) / number}
        for kind, values in rewards.items()
    }


def read_set(folder: Path) -> dict[str, Any]:
    """Return what `rlt test` has found on the held-out problems."""
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())["sets"]["chains"]
    return found


def collect(ones: list[Likelihood], arms: list[str]) -> dict[str, Any]:
    """Return the figures of one task, one per seed: percent, nats and tokens."""
    found: dict[str, Any] = {}
    for arm in arms:
        measured = [measure(one, arm) for one in ones]
        found[arm] = {
            "accuracy": [read_accuracy(one, arm) for one in ones],
            "greedy": [read_accuracy(one, arm, "greedy") for one in ones],
            **{name: [some[name] for some in measured] for name in measured[0]},
        }
        if arm in STARTS:
            votes = [read_set(one.folder / arm / "votes") for one in ones]
            found[arm]["majority"] = [100 * some["maj_at_k"] for some in votes]
        if arm.rpartition("_")[0] in ("binary", *REWARDS):
            found[arm]["lengths"] = [measure_training(one, arm) for one in ones]
            found[arm]["rewarded"] = {name: rank_kinds(ones, arm, *steps) for name, steps in PARTS.items()}
    costs = {name: cost(ones, stages) for name, stages in STAGES.items()}
    return {"arms": found, "costs": {name: some for name, some in costs.items() if some}}


# Tables and picture


def name_arm(arm: str) -> str:
    """Return what an arm's student was trained by, for people."""
    return "nothing more" if arm in STARTS else METHODS[arm.rpartition("_")[0]]


def write_mean(values: list[float]) -> str:
    """Return a mean, with half of its interval if there are several seeds."""
    return f"{fmean(values):.2f}" + (f" ± {compute_interval(values):.2f}" if len(values) > 1 else "")


def table(figures: dict[str, Any], start: str) -> str:
    """Return the Markdown table of the students of one task that have the same start."""
    lines = [
        f"| trained by | accuracy at T 0.7, % (± 95 %) | greedy, % | maj@{NUM_VOTES}, % | whole solution, % "
        "| log p(held-out solution), nats | thought, tokens | in training: step 1 → 10 → last "
        "| its thoughts: steps / filler / leap / wrong / other, % |",
        "|" + "---|" * 9,
    ]
    for arm, found in figures["arms"].items():
        if arm != start and not arm.endswith(f"_{start}"):
            continue
        steps = [fmean(some) for some in zip(*found.get("lengths", [[]]), strict=True)]
        lengths = " → ".join(f"{steps[place]:.0f}" for place in (0, min(9, len(steps) - 1), -1) if steps)
        cells = [name_arm(arm), plus_minus(found["accuracy"]), f"{fmean(found['greedy']):.1f}"]
        cells.append(f"{fmean(found['majority']):.1f}" if "majority" in found else "")
        cells += [
            f"{fmean(found['whole']):.1f}",
            write_mean(found["log_prob"]),
            f"{fmean(found['length']):.0f}",
        ]
        lines.append(f"| {' | '.join([*cells, lengths, kinds_text(mean_kinds(found['kinds']))])} |")
    return "\n".join(lines)


def kinds_table(figures: dict[str, Any], start: str) -> str:
    """Return the Markdown table of what each kind of thought earns while training begins."""
    lines = [
        f"| {' | '.join(['reward', 'in training', *KIND_COLORS])} |",
        "|" + "---|" * (2 + len(KIND_COLORS)),
    ]
    for arm, found in figures["arms"].items():
        for part, kinds in found.get("rewarded", {}).items() if arm.endswith(f"_{start}") else ():
            cells = [
                f"{kinds[kind]['reward']:.2g} ({kinds[kind]['share']:.0f} %)" if kind in kinds else ""
                for kind in KIND_COLORS
            ]
            lines.append(f"| {' | '.join([name_arm(arm), part, *cells])} |")
    return "\n".join(lines)


def build_page(figures: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = []
    for task, found in figures["tasks"].items():
        parts.append(f"### {task.capitalize()}: {TASKS[task]}")
        for start in STARTS:
            if start not in found["arms"]:
                continue
            parts += [f"From {STARTS[start]}:", table(found, start)]
            parts += ["Mean reward of a kind of thought, and its share:", kinds_table(found, start)]
        parts.append(cost_table(found))
    return "\n\n".join(parts) + "\n"


def draw_bars(axes: Any, arms: dict[str, Any], key: str) -> None:
    """Draw a figure of each method's students, a bar for each start; the starts are dotted lines."""
    methods = [method for method in METHODS if any(f"{method}_{start}" in arms for start in STARTS)][::-1]
    for number, (start, color) in enumerate(START_COLORS.items()):
        if start in arms:
            axes.axvline(fmean(arms[start][key]), color=color, linestyle=":")
        places = [place for place, method in enumerate(methods) if f"{method}_{start}" in arms]
        values = [arms[f"{methods[place]}_{start}"][key] for place in places]
        errors = [compute_interval(some) if len(some) > 1 or key == "accuracy" else 0.0 for some in values]
        heights = [place + 0.2 - 0.4 * number for place in places]
        label = f"from {STARTS[start]} (dotted: that before)"
        axes.barh(
            heights, [fmean(some) for some in values], 0.38, xerr=errors, color=color, capsize=2, label=label
        )
    axes.set_yticks(range(len(methods)), [METHODS[method] for method in methods])


def draw_lengths(axes: Any, arms: dict[str, Any]) -> None:
    """Draw the length of the thoughts over training: solid from the miniature, dashed after the traces."""
    for number, method in enumerate(("binary", *REWARDS)):
        label: str | None = METHODS[method]
        for start, style in zip(STARTS, ("-", "--"), strict=True):
            if f"{method}_{start}" in arms:
                lengths = [fmean(some) for some in zip(*arms[f"{method}_{start}"]["lengths"], strict=True)]
                axes.plot(range(1, len(lengths) + 1), lengths, style, color=f"C{number}", label=label)
                label = None
    axes.set(xlabel="step", ylabel="tokens", title="Length of the thoughts in training")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw accuracy, log-prob of held-out solutions and length of thoughts, a row for each task."""
    from matplotlib.figure import Figure

    tasks = figures["tasks"]
    figure = Figure(figsize=(14, 4.4 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 3, squeeze=False)
    for (left, middle, right), (task, found) in zip(panels, tasks.items(), strict=True):
        draw_bars(left, found["arms"], "accuracy")
        left.set(xlim=(0, 105), xlabel="held-out problems solved at T 0.7, %")
        left.set_title(f"{task.capitalize()}: {TASKS[task]}", loc="left")
        draw_bars(middle, found["arms"], "log_prob")
        middle.set(yticklabels=[], xlabel="log p(held-out solution), nats")
        draw_lengths(right, found["arms"])
    legend_below(panels[-1, 0], 1)
    legend_below(panels[-1, 2], 3, title="solid from the miniature, dashed after traces")
    figure.savefig(path)


# The command


def main() -> int:
    """Run the arms of both tasks for all seeds, and write what came out."""
    parser = build_parser(__doc__, "such as 'base verifree_base'; all by default")
    parser.add_argument("--tasks", default=" ".join(TASKS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="stages side by side")
    options = parser.parse_args()
    arms, tasks = list(dict.fromkeys(options.arms.split() or ARMS)), options.tasks.split()
    try:
        require_names(arms, ARMS, tasks, TASKS)
        run(options.output_dir, read_seeds([options.seeds], (0, 1, 2)), arms, tasks, options.workers)
    except (InputError, StageError) as error:
        print(f"likelihood: {error}", file=sys.stderr)
        return 1
    return 0


def run(folder: Path, seeds: list[int], arms: list[str], tasks: list[str], num_workers: int) -> None:
    """Run all stages, then write `likelihood.json`, `.md` and `.svg`, and print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(folder)
    stages.start()
    # Starts before what is trained from them.
    arms = [start for start in STARTS if start in arms or any(arm.endswith(f"_{start}") for arm in arms)] + [
        arm for arm in arms if arm not in STARTS
    ]
    ones = {task: [Likelihood(stages, SETTINGS[task], seed) for seed in seeds] for task in tasks}
    run_in_turn(ones, arms, num_workers)
    figures = {"seeds": seeds, "tasks": {task: collect(some, arms) for task, some in ones.items()}}
    rewrite(folder / "likelihood.json", [json.dumps(figures, indent=1) + "\n"])
    page = build_page(figures)
    rewrite(folder / "likelihood.md", [page])
    draw(figures, folder / "likelihood.svg")
    print(page)


if __name__ == "__main__":
    sys.exit(main())
