"""Teach what only the solution tells: RLT against a student that has first learned from N traces.

    python research/rounds.py --output_dir DIR                       # make rounds: main arms, 3 seeds
    python research/rounds.py --output_dir DIR --arms "s16 rlt_s16"  # others
    python research/rounds.py --output_dir DIR --settings few64      # another setting

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
`another_base`; `pieces`, whose tokenizer cuts words into pieces.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import driver
from arms import MINIATURES, SHUFFLED, Arms, Row, Setting, Table, read
from trace_kinds import parse_chain
from ways import NEW

from rlt_lightning.tasks.stepwise import CHAIN_WORDING, NEW_MIXTURE, TraceKind, chain_rows, draw_ending
from rlt_lightning.types import InputError

ARM = re.compile(
    r"base|oracle|warmup|rlt|(?P<part>[sd])(?P<dose>[1-9]\d*)"
    r"|((?P<method>rlt|shuffled|wrong|exact|along)|(?P<chosen>reject|pool|best|exactbest)(?P<number>[1-9]\d*))"
    r"_(?P<of>.+)"
    r"|t(?P<temperature>\d(\.\d+)?)_(?P<written>(?!base|oracle|d\d|t\d).+)"
)
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


class Rounds(Arms):
    """The arms of one seed."""

    SETTINGS: ClassVar[dict[str, Setting]] = {
        **{name: replace(NEW, name=name) for name in ("new", "few64", "rare")},
        "another_base": replace(NEW, name="another_base", base=MINIATURES["seed1"]),
        "pieces": replace(NEW, name="pieces", base=MINIATURES["pieces"]),
    }
    ARMS = (
        *("base", "s64", "rlt", "rlt_s64", "shuffled_s64", "wrong_s64", "reject4_s64"),
        *("s512", "rlt_s512", "reject4_s512", "oracle"),
    )

    @classmethod
    def check_arm(cls, arm: str) -> None:
        """Raise InputError if there is no such arm."""
        read_arm(arm)

    def write_data(self) -> None:
        """Write the rows of all stages, those with known steps only, and those with a wrong solution."""
        super().write_data()
        setting = self.setting
        old = chain_rows(setting.num_test, 0, "test", None, setting.length)
        self.write_rows("old", ({key: row[key] for key in ("question", "answer")} for row in old))
        self.write_rows("wrong", show_wrong(read(self.data_file("rlt")), self.seed))
        if num_new := NUM_NEW.get(setting.name):
            new = read(self.data_file("warmup"))[:num_new]
            num_known, seed = setting.num_warmup - num_new, 10 * self.seed + 1
            known = chain_rows(num_known, seed, "train", NEW_MIXTURE, setting.length)
            self.write_rows("warmup", [*new, *({key: row[key] for key in new[0]} for row in known)])
        if hazard := LAST_HAZARD.get(setting.name):
            self.write_rows("warmup", break_last_steps(read(self.data_file("warmup")), hazard, self.seed))

    def evaluate(self, arm: str, model: Path | str, **options: Any) -> None:
        """Let an arm's student answer the held-out problems, and as many whose steps are all known."""
        super().evaluate(arm, model, **options)
        self.ask(f"{arm}/old", model, "old", rollouts__seed=self.seed)

    def run_arm(self, arm: str) -> None:
        """Run all stages of an arm; students that RLT may be run against also score the warm-up's traces."""
        super().run_arm(arm)
        if is_frozen(arm):
            self.rank(arm)

    def make_traces(self, arm: str, as_arm: str | None = None, **options: Any) -> Path:
        """Return the file that an arm's student learns from.

        Args:
            arm: Name of the arm.
            as_arm: Name of the arm whose traces these are, if they are sampled in another way.
            options: How they are sampled.
        """
        match, name = read_arm(arm), as_arm or arm
        if arm in ("oracle", "warmup"):
            return super().make_traces(arm)
        if match["written"]:
            temperature = {"rollouts__sampling__temperature": match["temperature"]}
            return self.make_traces(match["written"], arm, **temperature)
        if match["dose"]:
            return self.cut(name, self.make_all(match["part"], **options), int(match["dose"]))
        student = self.train_student(match["of"] or "base")
        if match["chosen"] in ("reject", "pool"):
            source = "raw" if match["chosen"] == "reject" else "pool"
            number = {"rollouts__num_traces": int(match["number"])}
            answers = (
                self.answer(f"{name}/traces", student, source, **number, **options) / "distillation.jsonl"
            )
            return answers if source == "raw" else self.cut(name, answers, self.setting.num_traces)
        if match["chosen"]:
            several = {"rollouts__num_traces": int(match["number"]), "distillation__select": "best_reward"}
            options |= several | (EXACT if match["chosen"] == "exactbest" else {})
            teacher = self.warm_up()
        else:
            method = match["method"] or "rlt"
            problems = "wrong" if method == "wrong" else "rlt"
            teacher = self.run_rlt(arm, student, problems, **TRAINED[method])
        return self.explain(f"{name}/traces", teacher, student, **options) / "distillation.jsonl"

    def make_all(self, part: str, **options: Any) -> Path:
        """Return all traces that an arm takes the first of: by the warm-up teacher, or of its warm-up."""
        if part == "d":
            return self.data_file("warmup")
        name = "_".join(["traces", *map(str, options.values())])
        return self.explain(f"warmup/{name}", self.warm_up(), **options) / "distillation.jsonl"

    def cut(self, arm: str, traces: Path, number: int) -> Path:
        """Return a file of the first traces of another file."""
        return self.write_rows(arm, read(traces)[:number])

    def rank(self, arm: str) -> list[Row]:
        """Return the warm-up teacher's traces with their rewards under an arm's student."""
        folder = self.explain(f"ranked_{arm}/traces", self.warm_up(), self.train_student(arm))
        return read(folder / "distillation.jsonl")

    def measure(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures, accuracy on problems whose steps are all known among them."""
        return super().measure(arm) | {"known steps": self.read_accuracy(f"{arm}/old")}

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return what each kind of the warm-up teacher's traces earns under students."""
        return {
            f"Rewards of the warm-up teacher's traces under {arm}, nats": cls.measure_rewards(
                row for one in ones for row in one.rank(arm)
            )
            for arm in arms
            if is_frozen(arm)
        }


def is_frozen(arm: str) -> bool:
    """Return whether traces are ranked by an arm's student: the untrained one, sN and dN."""
    return arm == "base" or bool(read_arm(arm)["dose"])


def read_number(solution: str) -> str:
    """Return the number in the box of a solution."""
    return solution.removeprefix("\\boxed{").removesuffix("}")


def show_wrong(rows: list[Row], seed: int) -> list[Row]:
    """Return rows with another digit as the solution."""
    rng = Random(seed)
    wrong = []
    for row in rows:
        right = int(read_number(row["solution"]))
        wrong.append(row | {"solution": f"\\boxed{{{(right + rng.randrange(1, 10)) % 10}}}"})
    return wrong


def break_last_steps(rows: list[Row], hazard: float, seed: int) -> list[Row]:
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
        raise InputError(f"--arms may name those that --help lists, but names {arm}. Correct it.")
    if of := match["of"] or match["written"]:
        read_arm(of)
    return match


if __name__ == "__main__":
    sys.exit(driver.main("rounds", __doc__, Rounds, "new"))
