"""Facts that only the rows hold: which ways to make explanations help, and which need RLT? `make knowledge`.

    python research/knowledge.py --output_dir DIR --seeds "920 921 922"     # make knowledge, with SEEDS
    python research/knowledge.py --output_dir DIR --settings rows_256_right_3 --arms "quarter rlt_t0 oracle"

"start 4, add 2, blik, times 3, dorf, add 1, quern?" has the solution \\boxed{9 8 4}, the state after each
named operation. What a name means stands nowhere else. Arms without a teacher:

    base                untrained
    own_t0              its own greedy answers to the rows, right or wrong
    own_right_8         its first right one of eight sampled answers
    grpo, warm_grpo     RL for right answers, of the untrained student or after the raw traces
    verifree, log_prob  RL for thoughts that make the solution probable
    bare                the solutions without an explanation
    raw                 the few raw traces that there are

A teacher that no reward has touched:

    warmup, warmup_t0   warmed up on the raw traces, at temperature 0.7 and greedily

Arms that use RLT's reward without RL; all but best_of_8 and the filtered ones sample as much as RLT:

    best_of_equal       of 3 explanations of a row the best, as many as RLT samples; best_of_8: of 8
    quarter             of all these 3 N explanations of N rows the N / 4 best
    above               of the same, all above the threshold of the reward
    filtered            the teacher's base learns from the best eighth of the raw traces; filtered_above: from
                        those above the threshold
    expert              the warm-up teacher learns from the best eighth of two explanations a row and explains
                        all rows: expert iteration; expert_above: from those above the threshold

Arms of RL, and the bound:

    rlt                 RLT of the warm-up teacher
    shuffled            the same with advantages shuffled within each group
    solution_only       the same without r_KL (lambda 0)
    wrong               the same with wrong solutions
    oracle              a right explanation of every row

Any teacher's name takes `_t0`. Before RLT gates are checked. In setting `knowledge_64` RLT has twice as many
iterations, and the other ways as many more samples.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, ClassVar

import driver
from arms import PROMPTS_PER_STEP, TERMS, Arms, Row, Setting, Table, read
from finding import EXPERT_STEPS, Finding, take_best
from trace_kinds import list_names, named_chain_kind

from rlt_lightning.tags import R1
from rlt_lightning.tasks.named_chains import NUM_PAIRS, Facts, build_mixture, draw_facts, named_chain_rows
from rlt_lightning.types import InputError


@dataclass(frozen=True)
class NamedSetting(Setting):
    """A setting of named chains.

    Args:
        num_names: Names in the rows.
        num_warmup_names: Of them, those in the warm-up.
        right: Part of the raw traces with all steps right; 15 % leap, 15 % break off, the others are filler.
        rlt_lr: Peak learning rate of RLT.
        threshold: Least reward of a useful explanation, nats: the middle of the gap between the two heaps
            that the rewards of a teacher's explanations form.
    """

    num_names: int = 128
    num_warmup_names: int = 16
    right: float = 0.1
    rlt_lr: float = 4e-4
    threshold: float = -0.7


def build_setting(
    name: str, num_rows: int, num_raw: int, right: float, share: tuple[float, float]
) -> NamedSetting:
    """Return a setting.

    Args:
        name: Its name.
        num_rows: Rows with solutions, which a teacher explains.
        num_raw: Raw traces.
        right: Part of the raw traces with all steps right.
        share: Least and greatest share of right traces of the warm-up teacher.
    """
    return NamedSetting(
        name,
        base="named-chains-teacher",
        student="named-chains-student",
        right=right,
        num_warmup=num_raw,
        num_warmup_epochs=4,
        student_lr=1e-3,
        num_iterations=32,
        num_traces=num_rows,
        num_test=256,
        right_traces=share,
    )


KNOWLEDGE = build_setting("knowledge", 1024, 32, 0.10, (0.02, 0.15))
LONGER = replace(KNOWLEDGE, name="knowledge_64", num_iterations=64)
# Rows that a name is in: 24, 6, 2. Right raw traces that leave a teacher with about 10, 3 and 1 % right ones.
MAP = [
    build_setting(f"rows_{num_rows}_right_{share}", num_rows, 256, right, (0, 1))
    for num_rows in (1024, 256, 86)
    for share, right in ((10, 0.1), (3, 0.03), (1, 0.012))
]
# Tokens of explanations, and of answers: an explanation with all steps right has 52.
LENGTHS = {
    **dict.fromkeys(("laptop/rlt", "laptop/generate", "laptop/likelihood"), 76),
    **dict.fromkeys(("laptop/grpo", "laptop/evaluate"), 108),
}
STUDENT_STEPS, STUDENT_BATCH, MOST_EPOCHS = 128, 16, 32  # of a student, however many rows it has
FILTERED_STEPS = 48  # of a teacher that learns from filtered raw traces
REWARDS = {"verifree": "VeriFreeReward", "log_prob": "LogProbReward"}  # of laptop/likelihood
OWN = {"own_t0": (1, 0.0), "own_right_8": (8, 0.7)}  # number of answers, temperature
TEACHERS = (
    *("warmup", "filtered", "filtered_above", "expert", "expert_above"),
    *("rlt", "shuffled", "solution_only", "wrong"),
)
TEACHER = re.compile(rf"(?P<teacher>{'|'.join(TEACHERS)})(?P<greedy>_t0)?")
BEST = re.compile(r"best_of_(equal|8)")
STEPS_RIGHT, NAMED, COPIED, INFERRED, RECALLED, CLOSED = 0.99, 0.95, 0.99, 0.97, 0.95, 0.95  # gates
UNKNOWN = (-2.6, -2.2)  # nats of what an unknown name adds; ln 0.1 is -2.30
MOST_DIGITS = 0.2  # right after bare solutions; 0.1 by chance


class Knowledge(Finding):
    """The arms of one seed."""

    SETTINGS: ClassVar[dict[str, Setting]] = {setting.name: setting for setting in (KNOWLEDGE, LONGER, *MAP)}
    ARMS = (
        *("base", "own_t0", "own_right_8", "grpo", "warm_grpo", "verifree", "log_prob", "bare", "raw"),
        *("warmup", "warmup_t0", "best_of_equal", "best_of_8", "quarter", "above"),
        *("filtered_t0", "filtered_above_t0", "expert_t0", "expert_above_t0"),
        *("rlt", "rlt_t0", "shuffled", "solution_only", "wrong", "oracle"),
    )
    WITHOUT_TRACES = ("base", "grpo", "warm_grpo", *REWARDS)
    VOTED = ()
    TRAINING = ("warmup", "rlt")
    setting: NamedSetting

    def __init__(self, stages: Any, setting: Any, seed: int) -> None:
        super().__init__(stages, setting, seed)
        self.facts = draw_facts(seed, setting.num_names)
        self.classify = partial(named_chain_kind, self.facts)

    @classmethod
    def check_arm(cls, arm: str) -> None:
        """Raise InputError if there is no such arm."""
        if arm not in cls.ARMS and not TEACHER.fullmatch(arm):
            raise InputError(f"--arms may name those that --help lists, but names {arm}. Correct it.")

    def write_data(self) -> None:
        """Write the rows of all stages."""
        setting, seed = self.setting, 10 * self.seed
        shown = {name: self.facts[name] for name in [*self.facts][: setting.num_warmup_names]}
        rows = named_chain_rows(setting.num_traces, self.facts, seed + 3)
        self.write_rows("oracle", rows)
        self.write_rows("bare", (row | {"reasoning_trace": f"{row['answer']}."} for row in rows))
        rows = [{key: row[key] for key in ("question", "solution", "answer")} for row in rows]
        self.write_rows("rlt", rows)
        self.write_rows("wrong", map(self.show_wrong, rows))
        self.write_rows("warmup", self.draw_raw(shown, seed + 1))
        test = named_chain_rows(setting.num_test, self.facts, seed, "test")
        self.write_rows("test", ({key: row[key] for key in ("question", "answer")} for row in test))

    def draw_raw(self, facts: Facts, seed: int) -> list[Row]:
        """Draw raw traces, with the setting's exact part of each kind: few draws would differ too much."""
        setting = self.setting
        shares = {"steps": setting.right, "leap": 0.15, "broken": 0.15, "filler": 0.7 - setting.right}
        left = {kind: round(share * setting.num_warmup) for kind, share in shares.items()}
        mixture = build_mixture(setting.right, shares["filler"], shares["leap"])
        rows = []
        for row in named_chain_rows(8 * setting.num_warmup, facts, seed, "train", mixture):
            kind, num_right = self.classify(row["question"], row["reasoning_trace"])
            kind = "broken" if kind == "filler" and num_right else kind
            if left[kind]:
                left[kind] -= 1
                rows.append(row)
        return rows

    def show_wrong(self, row: Row) -> Row:
        """Return a row with another number in each place of its solution."""
        rng = Random(f"{self.seed} {row['question']}")
        digits = [(int(digit) + rng.randrange(1, 10)) % 10 for digit in row["answer"].split()]
        return row | {"solution": f"\\boxed{{{' '.join(map(str, digits))}}}"}

    def prepare(self) -> None:
        """Write the data, warm the teacher up, and check the gates.

        Raises:
            StageError: If one does not hold.
        """
        Arms.prepare(self)
        from gates import measure_named_base  # imports PyTorch

        teacher, student = measure_named_base(self.base), measure_named_base(self.student_base)
        rows = read(self.make_traces("warmup").with_name("traces.jsonl"))
        self.run_arm("bare")
        low, high = self.setting.right_traces
        self.check_gates(
            {  # the least and the greatest value
                "single steps right": (min(teacher["steps"], student["steps"]), STEPS_RIGHT, 1),
                "names of steps right": (
                    min(teacher["teacher_words"], student["student_words"]),
                    NAMED,
                    1,
                ),
                "solutions copied": (student["copies"], COPIED, 1),
                "what names add, inferred by the teacher": (teacher["teacher_operands"], INFERRED, 1),
                "what other names add, known by the student": (student["known_operands"], RECALLED, 1),
                "log-prob of what a name adds, student": (student["student_operand_nats"], *UNKNOWN),
                "right traces": (self.measure_kinds(rows)["steps"] / 100, low, high),
                "closed traces": (fmean(row["finish_reason"] == "stop" for row in rows), CLOSED, 1),
                "digits right after bare solutions": (self.measure_digits("bare"), 0, MOST_DIGITS),
                "held-out questions in training data": (self.count_overlaps(), 0, 0),
            }
        )

    # Stages

    def stage(self, name: str, verb: str, config: str, result: str | None = None, **options: Any) -> Path:
        """Run a stage, with the length of this task's texts, in a folder of this seed; return the folder."""
        if config in LENGTHS:
            options = {"rollouts__sampling__max_completion_length": LENGTHS[config], **options}
        if config == "laptop/sft":
            options["data__prompts_per_step"] = min(STUDENT_BATCH, len(read(options["data__source"])))
        return super().stage(name, verb, config, result, **options)

    def run_rlt(
        self, arm: str, student: Path | str | None = None, source: str = "rlt", **options: Any
    ) -> Path:
        """Train the warm-up teacher by RLT (stage 2), and return the model."""
        return super().run_rlt(arm, student, source, model__optimizer__lr=self.setting.rlt_lr, **options)

    def explain(
        self, name: str, teacher: Path, student: Path | str | None = None, source: str = "rlt", **options: Any
    ) -> Path:
        """Let a teacher explain all rows (stage 3); return the folder of its traces."""
        return super().explain(name, teacher, student, source, **options)

    def train_teacher(self, arm: str) -> Path:
        """Return the model of a teacher."""
        if arm == "wrong":
            return self.run_rlt(arm, source="wrong")
        what, _, how = arm.partition("_")
        if what not in ("filtered", "expert"):
            return super().train_teacher(arm)
        if what == "filtered":
            traces = self.score("warmup/scores", self.data_file("warmup"))
            start, num_steps = Path(self.base), FILTERED_STEPS
        else:
            traces, start, num_steps = self.list_expert_samples(), self.warm_up(), EXPERT_STEPS
        best = self.take_above(traces) if how else take_best(traces, len(traces) // 8)
        return self.teach(arm, start, best, num_steps)

    def take_above(self, traces: list[Row]) -> list[Row]:
        """Return the traces above the threshold, the best first; the best one if none is."""
        number = sum(row["reward"] > self.setting.threshold for row in traces)
        return take_best(traces, max(1, number))

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's student learns from."""
        if arm == "raw":
            return self.data_file("warmup")
        if arm in OWN:
            return self.answer_rows(arm, *OWN[arm])
        if best := BEST.fullmatch(arm):
            number = self.setting.num_equal if best[1] == "equal" else int(best[1])
            return self.write_rows(arm, [take_best(rows, 1)[0] for rows in self.list_samples(number)])
        if arm in ("quarter", "above"):
            traces = [row for rows in self.list_samples(self.setting.num_equal) for row in rows]
            quarter = self.setting.num_traces // 4
            return self.write_rows(
                arm, self.take_above(traces) if arm == "above" else take_best(traces, quarter)
            )
        if found := TEACHER.fullmatch(arm):
            greedy = {"rollouts__sampling__temperature": 0} if found["greedy"] else {}
            teacher = self.train_teacher(found["teacher"])
            return self.explain(f"{arm}/traces", teacher, **greedy) / "distillation.jsonl"
        return super().make_traces(arm)

    def answer_rows(self, arm: str, num_answers: int, temperature: float) -> Path:
        """Let the untrained student answer all rows; return each row's one answer, or right one."""
        asked = self.ask(
            f"{arm}/answers",
            self.student_base,
            "rlt",
            data__max_rows=self.setting.num_traces,
            rollouts__num_samples=num_answers,
            rollouts__sampling__temperature=temperature,
            rollouts__seed=self.seed,
        )
        questions = [row["question"] for row in read(self.data_file("rlt"))]
        answers: dict[str, Row] = {}
        for row in read(asked / "responses.jsonl"):
            if row["formatted"] and (row["correct"] or num_answers == 1):
                question = questions[int(row["id"].split("/")[1]) - 1]
                solution = row["response"].partition(R1.solution_open)[2].partition(R1.solution_close)[0]
                texts = {"reasoning_trace": self.find_thought(row["response"]), "solution": solution}
                answers.setdefault(
                    question, {"question": question} | {k: v.strip() for k, v in texts.items()}
                )
        return self.write_rows(arm, answers.values())

    def fine_tune(
        self,
        arm: str,
        traces: Path,
        start: Path | str | None = None,
        lr: float | None = None,
        epochs: int | None = None,
    ) -> Path:
        """Fine-tune the untrained student on traces (stage 4), for as many steps whatever their number."""
        passes = STUDENT_STEPS * STUDENT_BATCH // len(read(traces))
        return super().fine_tune(arm, traces, start, lr, epochs or min(MOST_EPOCHS, max(1, passes)))

    def train_student(self, arm: str) -> Path | str:
        """Return the student of an arm; one that has nothing to learn from stays as it is."""
        if arm in REWARDS:
            setting = self.setting
            folder = self.stage(
                f"{arm}/rewarded",
                "fit",
                "laptop/likelihood",
                model__teacher=self.student_base,
                model__reward=REWARDS[arm],
                data__source=self.data_file("rlt"),
                data__prompts_per_step=PROMPTS_PER_STEP,
                trainer__max_steps=setting.num_sampled // (PROMPTS_PER_STEP * setting.group_size),
                model__group_size=setting.group_size,
                **self.seeds,
            )
            return folder / "model"
        if arm in OWN and not read(self.make_traces(arm)):
            return self.student_base
        return super().train_student(arm)

    # Figures

    def measure(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures, and how many of what names add its student states right, in percent."""
        found = Arms.measure(self, arm)
        thoughts = self.read_thoughts(arm)
        stated = [
            f"{name} is add {self.facts[name]}" in row["reasoning_trace"]
            for row in thoughts
            for name in list_names(row["question"])
        ]
        return found | {"facts": 100 * fmean(stated)}

    def measure_digits(self, arm: str) -> float:
        """Return the share of right digits in an arm's sampled answers to held-out problems."""
        answers = [row["answer"].split() for row in read(self.data_file("test"))]
        num_right = 0
        for row in read(self.folder / arm / "sampled" / "responses.jsonl"):
            right = answers[int(row["id"].split("/")[1]) - 1]
            num_right += sum(a == b for a, b in zip((row["answer"] or "").split(), right, strict=False))
        return num_right / (NUM_PAIRS * len(answers))

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return what each kind of the warm-up teacher's traces earns."""
        by_kind = defaultdict(list)
        for one in ones:
            for row in read(one.make_traces("warmup")):
                kind, num_right = one.classify(row["question"], row["reasoning_trace"])
                by_kind["broken off" if kind == "filler" and num_right else kind].append(row)
        return {
            "Rewards of the warm-up teacher's traces, nats": {
                kind: {"number": len(rows)}
                | {name: fmean(row[key] for row in rows) for name, key in TERMS.items()}
                for kind, rows in sorted(by_kind.items())
            }
        }


if __name__ == "__main__":
    sys.exit(driver.main("knowledge", __doc__, Knowledge, "knowledge"))
