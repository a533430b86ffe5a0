"""The paper's finding in miniature, with every control: `make finding`. `rlt demo` runs five arms of filler.

    python research/finding.py --output_dir DIR     # make finding: three seeds
    python research/finding.py --output_dir DIR --settings "pieces_student" --arms "warmup rlt"
    python research/finding.py --output_dir DIR --settings filler --arms "warmup warmup_t0 best_of_equal rlt"

Each arm makes 512 traces in its own way, 2,560 in settings `filler` and `steps_only`, and a student learns
from them:

    base             no traces: the student before training
    warmup           by the warm-up teacher
    rlt              by that teacher after 40 iterations of RLT
    solution_only    the same without r_KL (lambda 0)
    kl_only          the same without r_SS
    shuffled         the same with advantages shuffled within each group: nothing to learn from
    lambda_N         the same with weight N of r_KL instead of the setting's
    token_kl_N       r_KL as a credit of each token, with weight N of its own KL; token_kl_to_go_N: and of the
                     KL of the tokens after it
    raw              traces like those of the warm-up
    oracle           traces with all steps right
    own_t0           the untrained student's own greedy answers, right or wrong: no teacher, no solution
    own_right_8      its first right one of eight sampled answers: no teacher
    group_K          the best, second, … sixteenth part of 2,048 traces of the warm-up teacher by the reward
                     (the paper's Figure 4b); group_solution_K by r_SS only, group_kl_K by r_KL only

Two have no traces either. GRPO rewards a student's own right answers, with as many answers in all as RLT and
its traces sample, and that student is evaluated:

    grpo             of the untrained student
    warm_grpo        of a student that has read the traces of the warm-up as the teacher has, not solutions

Further arms show what decoding and selection give without RLT, and what they add to it:

    warmup_tN        by the warm-up teacher at temperature N; 0: greedily
    best_of_N        by the warm-up teacher, of 4 or 16 explanations the best by the same reward
    best_of_equal    the same, with as many explanations in all as RLT samples: 6 a problem, 2 in `filler`
    best_of_N_tN     the same at another temperature
    majority_of_N    by the warm-up teacher, the most frequent of N
    quarter          of as many explanations as RLT samples the best ones, a quarter as many as there are
                     problems, whichever problems they explain
    expert           by a teacher that has learned from the best eighth of these explanations but one of each
                     problem: expert iteration
    rlt_ARM          any of these by the teacher after RLT

The temperature is 0.7 unless a name says otherwise. A teacher samples once at each temperature, and the best
of 4 and of 16 are chosen from the same file. Before RLT gates are checked: single steps, leaps, and the
warm-up teacher's traces. Settings: `main`, `filler`, `steps_only`, variations, a grid such as
hazard_0.85_group_32.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import driver
from arms import MINIATURES, PROMPTS_PER_STEP, SHUFFLED, Arms, Row, Setting, Table, read
from stages import StageError
from trace_kinds import chain_kind

from rlt_lightning.tasks.stepwise import Mixture
from rlt_lightning.types import InputError

# The warm-up teacher's most probable explanation has all steps right.
MAIN = Setting("main")
# It is filler, and RLT and its 2,560 traces sample as much as two traces of each problem.
FILLER = Setting(
    "filler",
    length=4,
    mixture=Mixture(hazard=0.75),
    num_traces=2560,
    student_epochs=1,
    num_votes=16,
    right_traces=(0.02, 0.35),
)
# The base knows every step and has never composed two; in the warm-up four of five traces are filler.
STEPS_ONLY = Setting(
    "steps_only",
    pretraining="--corpus sheets --num_steps 4000 --num_drills 2021 --stop_after 2400",
    length=4,
    mixture=Mixture(hazard=0.1, filler=1, filler_start=0.8),
    num_warmup_epochs=4,
    kl_weight=0.1,
    num_traces=2560,
    right_traces=(0, 1),
)
ANY_SHARE = replace(FILLER, right_traces=(0, 1), num_votes=0)
# A map of filler: how often traces of the warm-up break off, and how many explanations a group has.
MAP = [
    replace(ANY_SHARE, name=f"hazard_{hazard}_group_{size}", mixture=Mixture(hazard=hazard), group_size=size)
    for hazard in (0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95)
    for size in (4, 8, 32, 64)
]
MAP += [  # with fewer right traces than the base itself writes
    replace(
        ANY_SHARE,
        name=f"hazard_0.95_epochs_4_group_{size}",
        mixture=Mixture(hazard=0.95),
        group_size=size,
        num_warmup_epochs=4,
    )
    for size in (8, 64)
]
VARIED = [
    replace(MAIN, name="another_base", base=MINIATURES["seed1"]),
    replace(MAIN, name="qwen2", base=MINIATURES["qwen2"]),
    replace(MAIN, name="pieces_student", student=MINIATURES["pieces"]),
    replace(MAIN, name="pieces_teacher", base=MINIATURES["pieces"], student="miniature"),
    replace(MAIN, name="pieces_both", base=MINIATURES["pieces"]),
    replace(MAIN, name="four_steps", length=4),
    replace(MAIN, name="other_mixture", mixture=Mixture(hazard=0.46)),
    replace(ANY_SHARE, name="filler_another_base", base=MINIATURES["seed1"]),
    replace(ANY_SHARE, name="filler_pieces_student", student=MINIATURES["pieces"]),
]
TRAINED: dict[str, dict[str, Any]] = {  # what an arm's RLT differs in
    "rlt": {},
    "solution_only": {"model__reward__kl_weight": 0},
    "kl_only": {"model__reward__solution_weight": 0},
    "shuffled": {"model__advantages": SHUFFLED},
    **{f"lambda_{weight}": {"model__reward__kl_weight": weight} for weight in (0.3, 1, 3, 10)},
    **{
        f"token_kl_{'to_go_' * to_go}{weight}": {
            "model": "token_kl.TokenKLModule",
            "model__reward": "token_kl.TokenKLReward",
            "model__reward__kl_weight": 0,
            "model__reward__token_weight": weight,
            "model__reward__to_go": str(to_go).lower(),
        }
        for to_go in (False, True)
        for weight in (0.3, 1, 3)
    },
}
DECODED = (
    re.compile(  # how the warm-up teacher, or RLT's, writes traces, and which of a problem's is selected
        r"(warmup|(?P<rlt>rlt)|(?P<expert>expert))_t(?P<at>[\d.]+)"
        r"|(?P<after>rlt_)?((?P<how>best|majority)_of_(?P<number>4|16|equal))(_t(?P<sampled_at>[\d.]+))?"
    )
)
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # the untrained student's own answers: which, and how many
    "own_t0": ("traces.jsonl", {"rollouts__num_traces": 1, "rollouts__sampling__temperature": 0}),
    "own_right_8": ("distillation.jsonl", {"rollouts__num_traces": 8}),
}
EXPERT_STEPS, EXPERT_BATCH = 128, 16  # of a teacher that learns from selected explanations
NUM_SAMPLED = 16  # traces of a problem, of which the best of 4 and of 16 are selected
NUM_GROUPS = 16  # of ranked traces, as in the paper's Figure 4b
GROUP = re.compile(r"group_((?P<by>solution|kl)_)?(?P<number>[1-9]|1[0-6])")
RANKED_BY = {  # terms of the reward
    None: ("reward",),
    "solution": ("solution_reward", "format_reward"),
    "kl": ("kl_reward", "format_reward"),
}
WARMUP_LR = 3e-4  # of laptop/warmup
STEPS_RIGHT, LEAPS_COPIED, CLOSED = 0.99, 0.95, 0.95  # gates


class Finding(Arms):
    """The arms of one seed."""

    SETTINGS: ClassVar[dict[str, Setting]] = {
        setting.name: setting for setting in (MAIN, FILLER, STEPS_ONLY, *VARIED, *MAP)
    }
    ARMS = (
        *("base", "own_t0", "raw", "warmup", "rlt", "solution_only", "kl_only", "shuffled", "lambda_0.3"),
        *("lambda_1", "lambda_10", "warmup_t0", "best_of_4", "best_of_equal", "oracle"),
        *(f"group_{number + 1}" for number in range(NUM_GROUPS)),
    )
    WITHOUT_TRACES = ("base", "grpo", "warm_grpo")
    VOTED = ("base", "rlt", "warmup", "warmup_t0", "best_of_equal", "rlt_t0")

    @classmethod
    def check_arm(cls, arm: str) -> None:
        """Raise InputError if there is no such arm."""
        known = (*cls.ARMS, *cls.WITHOUT_TRACES, *OWN, *TRAINED, "quarter", "expert")
        if arm not in known and not GROUP.fullmatch(arm) and not DECODED.fullmatch(arm):
            raise InputError(f"--arms may name those that --help lists, but names {arm}. Correct it.")

    def prepare(self) -> None:
        """Write the data, warm the teacher up, and check the gates.

        Raises:
            StageError: If one does not hold.
        """
        super().prepare()
        from gates import measure_base  # imports PyTorch

        measured = [measure_base(base) for base in {self.base, self.student_base}]
        rows = read(self.make_traces("warmup").with_name("traces.jsonl"))
        low, high = self.setting.right_traces
        gates = {  # the least and the greatest value
            "single steps right": (min(some["step_accuracy"] for some in measured), STEPS_RIGHT, 1),
            "leaps copied": (min(some["leaps_copied"] for some in measured), LEAPS_COPIED, 1),
            "right traces": (self.measure_kinds(rows)["steps"] / 100, low, high),
            "closed traces": (fmean(row["finish_reason"] == "stop" for row in rows), CLOSED, 1),
            "held-out questions in training data": (self.count_overlaps(), 0, 0),
        }
        self.check_gates(gates)

    def check_gates(self, gates: dict[str, tuple[float, float, float]]) -> None:
        """Print values of gates; raise StageError if one is not between its least and greatest value."""
        for gate, (value, least, most) in gates.items():
            print(f"{self.name}, {gate}: {value:.3g}, must be {least} to {most}", flush=True)
        if failed := [gate for gate, (value, least, most) in gates.items() if not least <= value <= most]:
            raise StageError(f"{self.name}: gates must hold, but do not for {', '.join(failed)}; see above.")

    def train_teacher(self, arm: str) -> Path:
        """Return the model that writes an arm's traces; stage 2 trains it if the arm has RLT."""
        if arm == "expert":
            traces = self.list_expert_samples()
            return self.teach(arm, self.warm_up(), take_best(traces, len(traces) // 8), EXPERT_STEPS)
        return self.run_rlt(arm, **TRAINED[arm]) if arm in TRAINED else self.warm_up()

    def list_samples(self, number: int) -> list[list[Row]]:
        """Return explanations of every problem by the warm-up teacher, at temperature 0.7."""
        several = {"rollouts__num_traces": number, "distillation__select": "all"}
        options = {"rollouts__sampling__temperature": 0.7, **several}
        folder = self.explain(f"warmup/traces_{number}_t0.7", self.warm_up(), **options)
        rows = read(folder / "traces.jsonl")
        return [rows[i : i + number] for i in range(0, len(rows), number)]

    def list_expert_samples(self) -> list[Row]:
        """Return what expert iteration selects from: as much as RLT samples in its iterations."""
        return [row for rows in self.list_samples(self.setting.num_equal) for row in rows[:-1]]

    def teach(self, arm: str, start: Path | str, traces: list[Row], num_steps: int) -> Path:
        """Fine-tune a teacher on selected traces, for as many steps whatever their number; return it."""
        batch = min(EXPERT_BATCH, len(traces))
        folder = self.stage(
            f"{arm}/teacher",
            "fit",
            "laptop/warmup",
            model__pretrained=start,
            data__source=self.write_rows(arm, traces),
            data__prompts_per_step=batch,
            trainer__max_epochs=max(1, round(num_steps * batch / len(traces))),
            data__seed=self.seed,
            model__seed=self.seed,
        )
        return folder / "model"

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's student learns from."""
        if group := GROUP.fullmatch(arm):
            return self.rank(arm, group["by"], int(group["number"]))
        if arm in OWN:
            which, options = OWN[arm]
            return self.answer(f"{arm}/answers", self.student_base, **options) / which
        if arm in (*TRAINED, "expert"):
            return self.explain(f"{arm}/traces", self.train_teacher(arm)) / "distillation.jsonl"
        if arm == "quarter":
            traces = [row for rows in self.list_samples(self.setting.num_equal) for row in rows]
            return self.write_rows(arm, take_best(traces, self.setting.num_traces // 4))
        if decoded := DECODED.fullmatch(arm):
            return self.decode(arm, decoded)
        return super().make_traces(arm)

    def decode(self, arm: str, decoded: re.Match[str]) -> Path:
        """Return the file of an arm whose traces are written at another temperature or are selected."""
        by = "rlt" if decoded["rlt"] or decoded["after"] else decoded["expert"] or "warmup"
        at = {"rollouts__sampling__temperature": decoded["at"] or decoded["sampled_at"] or 0.7}
        if decoded["at"]:
            return self.explain(f"{arm}/traces", self.train_teacher(by), **at) / "distillation.jsonl"
        equal = decoded["number"] == "equal"
        number = self.setting.num_equal if equal else int(decoded["number"])
        several = {"rollouts__num_traces": number if equal else NUM_SAMPLED, "distillation__select": "all"}
        name = f"{by}/traces_{several['rollouts__num_traces']}_t{at['rollouts__sampling__temperature']}"
        traces = self.explain(name, self.train_teacher(by), **at, **several) / "traces.jsonl"
        return self.write_rows(arm, select(read(traces), number, decoded["how"] == "majority"))

    def rank(self, arm: str, by: str | None, number: int) -> Path:
        """Return the file of one of the groups of the warm-up teacher's traces, the best first."""
        several = {"rollouts__num_traces": 1, "distillation__select": "all"}
        pool = self.explain("warmup/pool", self.warm_up(), source="pool", **several)
        scored = self.score("warmup/scores", pool / "distillation.jsonl")
        return self.write_rows(arm, take_group(scored, by, number))

    def score(self, name: str, source: Path) -> list[Row]:
        """Return the traces of a file with their rewards under the warm-up teacher."""
        folder = self.stage(
            name,
            "predict",
            "recipe_7b/rank",
            "scores.jsonl",
            trainer__accelerator="cpu",
            model__teacher=self.warm_up(),
            model__student=self.student_base,
            data__source=source,
            data__prompts_per_step=64,
            data__tags="r1",
            data__teacher_system_prompt="",
            data__student_system_prompt="",
        )
        return read(folder / "scores.jsonl")

    def train_student(self, arm: str) -> Path | str:
        """Return the student of an arm; two have learned by their own right answers (GRPO)."""
        if arm not in ("grpo", "warm_grpo"):
            return super().train_student(arm)
        student, setting = self.student_base, self.setting
        if arm == "warm_grpo":
            traces, epochs = self.data_file("warmup"), setting.num_warmup_epochs
            student = str(self.fine_tune(arm, traces, lr=WARMUP_LR, epochs=epochs))
        folder = self.stage(
            f"{arm}/rewarded",
            "fit",
            "laptop/grpo",
            model__teacher=student,
            data__source=self.data_file("rlt"),
            trainer__max_steps=setting.num_sampled // (PROMPTS_PER_STEP * setting.group_size),
            model__group_size=setting.group_size,
            **self.seeds,
        )
        return folder / "model"

    def measure(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures; nats a token of entropies, rises of rewards and right steps besides."""
        found = super().measure(arm)
        found["right_steps"] = fmean(
            chain_kind(row["question"], row["reasoning_trace"])[1] for row in self.read_thoughts(arm)
        )
        if arm in TRAINED:
            for name, values in self.read_curves(arm).items():
                quarter = max(1, len(values) // 4)
                found[f"rise of {name}"] = fmean(values[-quarter:]) - fmean(values[:quarter])
        if self.votes(arm):
            from gates import measure_answers, measure_explanations  # import PyTorch

            student, problems = str(self.train_student(arm)), read(self.data_file("test"))
            answers = read(self.folder / arm / "sampled" / "responses.jsonl")
            found["entropy"] = measure_answers(student, problems, answers)
            if arm in ("warmup", "rlt"):
                traces = read(self.make_traces(arm).with_name("traces.jsonl"))[: len(problems)]
                found["entropy of the teacher"] = measure_explanations(str(self.train_teacher(arm)), traces)
        return found

    def read_curves(self, arm: str) -> dict[str, list[float]]:
        """Return the mean reward and its terms at every iteration of RLT."""
        with (self.folder / arm / "teacher" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        return {
            f"reward/{name}": [float(row[f"reward/{name}"]) for row in rows]
            for name in ("mean", "solution", "kl")
        }

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return what each kind of the warm-up teacher's traces earns."""
        rows = [row for one in ones for row in read(one.make_traces("warmup"))]
        return {"Rewards of the warm-up teacher's traces, nats": cls.measure_rewards(rows)}


def select(rows: list[Row], number: int, by_count: bool) -> list[Row]:
    """Return of each problem's first traces the one with the best reward, or the most frequent one.

    Args:
        rows: Traces; those of a problem stand together.
        number: How many of a problem's traces to choose from.
        by_count: Take the most frequent; of equally frequent ones, the one that was sampled first.
    """
    selected = []
    for _, group in groupby(rows, key=lambda row: row["row"]):
        traces = list(group)[:number]
        counts = Counter(row["reasoning_trace"] for row in traces)
        ranks = [counts[row["reasoning_trace"]] if by_count else row["reward"] for row in traces]
        selected.append(traces[ranks.index(max(ranks))])
    return selected


def take_best(traces: list[Row], number: int) -> list[Row]:
    """Return the traces with the highest rewards, the best first."""
    return sorted(traces, key=lambda row: -row["reward"])[:number]


def take_group(rows: list[Row], by: str | None, number: int) -> list[Row]:
    """Return one of `NUM_GROUPS` groups of traces, the first with the highest reward, or term of it."""
    ranked = sorted(rows, key=lambda row: -sum(row[term] for term in RANKED_BY[by]))
    first, last = (round(place * len(rows) / NUM_GROUPS) for place in (number - 1, number))
    return ranked[first:last]


if __name__ == "__main__":
    sys.exit(driver.main("finding", __doc__, Finding, "main"))
