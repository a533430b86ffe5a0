"""Three ways to teach: a teacher's traces, a teacher's judgement of answers, or the student's own judgement.

    python research/ways.py --output_dir DIR               # make ways: two tasks, three seeds
    python research/ways.py --output_dir DIR --seeds 10 --arms "base opd_warmup" --settings new

The finding's stages, on two tasks. In `known` the student can do every step; in `new` the last step of each
problem is an operation that it was never shown. Every student starts as the miniature, and takes equally many
optimizer steps on equally many answers, for the same problems. The arms are the finding's, all of which can
be named, and these:

    opd_warmup        on its own answers, towards the warm-up teacher, which sees the solution
    opd_rlt           towards the RLT teacher
    opd_self          towards itself before training, with the solution in view (self-distillation)
    opd_NAME_wrong    controls: the teacher sees the solution of another problem
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import driver
from arms import Arms, Row, Setting, Table, read
from finding import Finding
from trace_kinds import parse_chain

from rlt_lightning.tasks.stepwise import CHAIN_WORDING, NEW_MIXTURE, NEW_OPERATIONS

NEW = Setting(
    "new",
    last=NEW_OPERATIONS,
    mixture=NEW_MIXTURE,
    num_warmup_epochs=3,
    student_lr=5e-4,
    student_epochs=9,
)
PROMPTS = 16  # of an optimizer step, as in SFT
TEMPERATURE = 0.7  # of all sampling


class Ways(Finding):
    """The finding's stages of one task and one seed, with students that learn on their own answers."""

    SETTINGS: ClassVar[dict[str, Setting]] = {"known": Setting("known", student_lr=5e-4), "new": NEW}
    ARMS = (
        *("base", "warmup", "rlt", "warmup_t0", "best_of_4"),
        *("opd_warmup", "opd_rlt", "opd_self", "opd_warmup_wrong", "opd_rlt_wrong"),
    )
    WITHOUT_TRACES = (*Finding.WITHOUT_TRACES, *(arm for arm in ARMS if arm.startswith("opd_")))
    prepare = Arms.prepare  # no gates

    def train_student(self, arm: str) -> Path | str:
        """Return the student of an arm; some learn on their own answers (stage 4b)."""
        if not arm.startswith("opd_"):
            return super().train_student(arm)
        name = arm.removeprefix("opd_").removesuffix("_wrong")
        source = self.data_file("raw")
        if arm.endswith("_wrong"):
            source = self.write_rows("swapped", swap_solutions(read(source)))
        folder = self.stage(
            f"{arm}/student",
            "fit",
            "laptop/opd",
            model__pretrained=self.student_base,
            model__optimizer__lr=self.setting.student_lr,
            data__source=source,
            trainer__max_steps=self.setting.student_epochs * self.setting.num_traces // PROMPTS,
            model__teacher="null" if name == "self" else self.train_teacher(name),
            **self.seeds,
        )
        return folder / "model"

    def measure(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures, the kinds of its student's thoughts and standard errors among them."""
        found = super().measure(arm) | {"thoughts": self.measure_kinds(self.read_thoughts(arm))}
        if arm != "base" and (self.folder / "base/sampled/evaluation.json").exists():
            before = self.read_accuracy("base/sampled")
            found["standard errors above base"] = compute_errors(
                found["accuracy"], before, self.setting.num_test
            )
        return found

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return whether teachers use the solution that they see in the last step."""
        teachers = ["base", *(arm for arm in ("warmup", "rlt") if {arm, f"opd_{arm}"} & {*arms})]
        table: Table = {}
        for teacher in teachers:
            for shown, wrong in (("right", False), ("wrong", True)):
                found = [one.predict_last_step(teacher, wrong) for one in ones]
                table[f"{teacher}, shown a {shown} solution"] = {
                    name: fmean(some[name] for some in found) for name in found[0]
                }
        return {"Probability of numbers in the last step, %": table}

    def predict_last_step(self, teacher: str, wrong: bool) -> dict[str, float]:
        """Return how probable a teacher finds the last step's right number and the shown one, percent.

        It reads right steps up to that number, and sees the right solution or, if `wrong`, another digit.
        """
        # Here, since every process that judges answers imports this file.
        import torch
        from gates import Corpus

        from rlt_lightning.models.load import load_model, load_tokenizer

        name = self.base if teacher == "base" else str(self.train_teacher(teacher))
        model, tokenizer = load_model(name), load_tokenizer(name)
        corpus = Corpus(tokenizer, 0)
        problems = [parse_chain(row["question"]) for row in read(self.data_file("test"))]
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


def swap_solutions(rows: list[Row]) -> list[Row]:
    """Return rows with a different solution, that of the nearest row before, or else after."""
    swapped = []
    for place, row in enumerate(rows):
        others = [*reversed(rows[:place]), *rows[place:]]
        solution = next(other["solution"] for other in others if other["solution"] != row["solution"])
        swapped.append(row | {"solution": solution})
    return swapped


def compute_errors(after: float, before: float, number: int) -> float:
    """Return by how many standard errors over problems one accuracy in percent is above another.

    Where both are none or all, the error is 0: equal ones then differ by 0, others by infinity.
    """
    shares = after / 100, before / 100
    error = math.sqrt(sum(share * (1 - share) for share in shares) / number)
    difference = shares[0] - shares[1]
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


if __name__ == "__main__":
    sys.exit(driver.main("ways", __doc__, Ways, "known new"))
