"""Ask the models of rounds.py further questions: is it the reinforcement learning, and what has it taught?

    python research/rounds_questions.py --output_dir DIR --seeds "20 21"   # DIR: of rounds.py, or a new one

best of K   kinds of the best of 1 to 64 traces of a problem by the reward, k1 and exact, before and after RLT
tokens      where k1 and the exact KL differ: before, at and after the token that leaves the right steps
solution    the number with which traces end whose teacher sees a wrong solution
students    accuracy on problems that s64 never solves, accuracy of students of another base, words of a trace

Its folder gets `questions.md` and `questions.json`. Run it again after a crash: finished stages are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from arms import MINIATURES, measure_kinds, read
from figures import read_accuracy
from jobs import read_seeds
from rounds import EXACT, NEW, Rounds, name_arm, read_number, show_wrong
from stages import StageError, Stages
from tables import kinds_text, mean_kinds
from trace_kinds import chain_kind, parse_chain

from rlt_lightning.run.jsonl import format_line, rewrite
from rlt_lightning.types import InputError

ARMS = ("s64", "s512", "rlt_s64", "reject4_s64", "pool4_s64")  # whose students are asked further
Estimator = Literal["k1", "exact"]
ESTIMATORS: dict[Estimator, dict[str, Any]] = {"k1": {}, "exact": EXACT}
DRAWS = (1, 2, 4, 8, 16, 64)  # traces of a problem to choose from
NUM_PROBLEMS = 128  # that have so many traces
NUM_SAMPLES = 16  # answers of s64 to each held-out problem
STUDENT = "s64"  # whose reward it is
OTHER_BASE = MINIATURES["seed1"]


class Questions(Rounds):
    """The stages of one seed."""

    def draw(self, teacher: str, estimator: Estimator) -> list[dict[str, Any]]:
        """Return many traces of each of some problems, with their rewards under the student.

        Args:
            teacher: Arm whose teacher writes them; "warmup": the warm-up teacher.
            estimator: Of the KL, k1 or exact: the traces are the same.
        """
        name = f"draws_{teacher}_{estimator}"
        distilled = self.read_problems(
            name,
            "laptop/generate",
            model__teacher=self.folder / teacher / "teacher" / "model",
            model__student=self.model(STUDENT),
            data__max_rows=NUM_PROBLEMS,
            rollouts__num_traces=max(DRAWS),
            distillation__select="best_reward",
            **ESTIMATORS[estimator],
        )
        return read(distilled.with_name("traces.jsonl"))

    def explain_wrong(self, arm: str) -> list[dict[str, Any]]:
        """Return traces of an arm's teacher for problems with a wrong solution."""
        rewrite(
            self.data_file("raw_wrong"), map(format_line, show_wrong(read(self.data_file("raw")), self.seed))
        )
        traces = self.read_problems(
            f"wrongly_shown_{arm}",
            "laptop/generate",
            "raw_wrong",
            model__teacher=self.folder / arm / "teacher" / "model",
            model__student=self.model(STUDENT),
        )
        return read(traces)

    def find_hard(self) -> set[str]:
        """Return the ids of the held-out problems that the student never solves in 16 samples."""
        often: dict[str, Any] = {"rollouts__num_samples": NUM_SAMPLES, "rollouts__seed": self.seed}
        rows = read(self.ask(f"{STUDENT}/often", self.model(STUDENT), **often) / "responses.jsonl")
        return {row["id"] for row in rows} - {row["id"] for row in rows if row["correct"]}

    def teach_other(self, arm: str) -> float:
        """Return the accuracy of a student of another base that an arm's traces have trained, percent."""
        other, base, traces = f"{arm}/other", self.student_base, self.make_traces(arm)
        self.student_base = OTHER_BASE
        self.train_student(other, traces, greedy=False)
        self.student_base = base
        return read_accuracy(self, other)

    def run(self) -> dict[str, Any]:
        """Run all stages and return the seed's figures."""
        self.prepare()
        for arm in (*ARMS, "wrong_s64"):
            self.run_arm(arm)
        hard = self.find_hard()
        return {
            "best_of": {
                f"{teacher}, {name}": choose_best(self.draw(teacher, name))
                for teacher in ("warmup", "rlt_s64")
                for name in ESTIMATORS
            },
            "ends": {
                arm: measure_ends(self.explain_wrong(arm)) for arm in ("warmup", "rlt_s64", "wrong_s64")
            },
            "num_hard": len(hard),
            "students": {
                arm: {
                    "hard": measure_hard(read(self.folder / arm / "sampled" / "responses.jsonl"), hard),
                    "other": self.teach_other(arm),
                    "words": fmean(
                        len(row["reasoning_trace"].split()) for row in read(self.make_traces(arm))
                    ),
                }
                for arm in ARMS
            },
        }


def choose_best(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the kinds of the best by reward of the first 1 to 64 traces of each problem, percent."""
    by_problem: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_problem[row["question"]].append(row)
    return {
        number: measure_kinds(
            [max(some[:number], key=lambda row: row["reward"]) for some in by_problem.values()]
        )
        for number in DRAWS
    }


def measure_ends(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how often a trace ends with the number shown, with the right one, and with another, percent."""
    ends = {"shown": 0, "right": 0, "another": 0, "none": 0}
    for row in rows:
        last = row["reasoning_trace"].rstrip(".").split()[-1]
        if not last.isdigit():
            ends["none"] += 1
        elif last == read_number(row["solution"]):
            ends["shown"] += 1
        elif last == parse_chain(row["question"]).answer:
            ends["right"] += 1
        else:
            ends["another"] += 1
    return {name: 100 * number / len(rows) for name, number in ends.items()}


def measure_hard(responses: list[dict[str, Any]], hard: set[str]) -> float:
    """Return how many of the hard problems a student solves, percent."""
    return 100 * fmean(row["correct"] for row in responses if row["id"] in hard)


# Tokens


def split_tokens(one: Questions, estimator: Estimator) -> dict[str, dict[str, list[float]]]:
    """Return the KL of the warm-up teacher's traces before, at and behind the token that leaves the steps.

    Returns:
        By kind: sums over the tokens of a trace, nats. A trace of right steps leaves them nowhere: the first
        token of its last step counts.
    """
    from rlt_lightning import Teacher
    from rlt_lightning.engines.base import Sampling
    from rlt_lightning.rewards import RLTReward

    teacher = Teacher(
        one.train_teacher("warmup"),
        str(one.model(STUDENT)),
        reward=RLTReward(kl_estimator=estimator),
        sampling=Sampling(temperature=0.7),
        tags="r1",
        teacher_system_prompt="",
        student_system_prompt="",
        accelerator="cpu",
    )
    columns = ("question", "solution", "reasoning_trace")
    rows = [{name: row[name] for name in columns} for row in one.rank(STUDENT)]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, score in zip(rows, teacher.score(rows), strict=True):
        kind, num_right = chain_kind(row["question"], row["reasoning_trace"])
        leaves = find_leaving(score.tokens, num_right)
        parts = {"before": score.kl[:leaves], "at": [score.kl[leaves]], "behind": score.kl[leaves + 1 :]}
        for name, values in parts.items():
            found[kind][name].append(sum(values))
        found[kind]["per token"].append(fmean(score.kl))
    return found


def find_leaving(tokens: list[str], num_right: int) -> int:
    """Return the place of the first token behind so many right steps, or of the last step's."""
    starts = [0, *(number + 1 for number, token in enumerate(tokens) if token.strip() == ",")]
    return starts[min(num_right, len(starts) - 1)]


# The page


def build_page(found: list[dict[str, Any]], tokens: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    best = [f"| best of | {' | '.join(found[0]['best_of'])} |", "|" + "---|" * (1 + len(found[0]["best_of"]))]
    for number in DRAWS:
        kinds = (mean_kinds([one["best_of"][name][number] for one in found]) for name in found[0]["best_of"])
        best.append(f"| {number} | {' | '.join(map(kinds_text, kinds))} |")
    split = ["| KL, nats | kind | before | at | behind | mean of a token |", "|---|---|---|---|---|---|"]
    for estimator, by_kind in tokens.items():
        for kind, parts in by_kind.items():
            split.append(f"| {estimator} | {kind} | {' | '.join(f'{v:.2f}' for v in parts.values())} |")
    ends = ["| teacher | number shown | right number | another | no number |", "|---|---|---|---|---|"]
    for arm in found[0]["ends"]:
        cells = (f"{fmean(one['ends'][arm][name] for one in found):.1f}" for name in found[0]["ends"][arm])
        ends.append(f"| {arm} | {' | '.join(cells)} |")
    numbers = ", ".join(str(one["num_hard"]) for one in found)
    students = [
        f"| student trained on | solves of the problems that {STUDENT} never solves in {NUM_SAMPLES} samples "
        f"({numbers}), % | another base, % | words of a trace |",
        "|---|---|---|---|",
    ]
    for arm in ARMS:
        hard, other, words = (
            [one["students"][arm][name] for one in found] for name in ("hard", "other", "words")
        )
        by_seed = (", ".join(f"{value:.1f}" for value in values) for values in (hard, other))
        students.append(f"| {name_arm(arm)} | {' | '.join(by_seed)} | {fmean(words):.1f} |")
    return "\n\n".join("\n".join(lines) for lines in (best, split, ends, students)) + "\n"


def average_tokens(ones: list[Questions]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the means of `split_tokens` over all traces of all seeds."""
    means: dict[str, dict[str, dict[str, float]]] = {}
    for estimator in ESTIMATORS:
        pooled: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for one in ones:
            for kind, parts in split_tokens(one, estimator).items():
                for name, values in parts.items():
                    pooled[kind][name] += values
        means[estimator] = {
            kind: {name: fmean(values) for name, values in pooled[kind].items()}
            for kind in ("steps", "filler", "leap", "wrong")
            if kind in pooled
        }
    return means


def main() -> int:
    """Run all stages for all seeds, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", default="", help="such as '10 11 12'; '0 1 2' by default")
    options = parser.parse_args()
    folder: Path = options.output_dir
    stages = Stages(folder)
    stages.start()
    try:
        ones = [Questions(stages, NEW, seed) for seed in read_seeds([options.seeds], (0, 1, 2))]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = list(pool.map(Questions.run, ones))
    except (InputError, StageError) as error:
        print(f"rounds_questions: {error}", file=sys.stderr)
        return 1
    tokens = average_tokens(ones)
    figures = {"seeds": [one.seed for one in ones], "by_seed": found, "tokens": tokens}
    rewrite(folder / "questions.json", [json.dumps(figures, indent=1) + "\n"])
    page = build_page(found, tokens)
    rewrite(folder / "questions.md", [page])
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
