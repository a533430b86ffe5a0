"""Rewards without a checker, in miniature: how probable does a thought make the solution?

    python research/likelihood.py --output_dir DIR               # make likelihood: three seeds
    python research/likelihood.py --output_dir DIR --arms "base verifree_warm" --settings long

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
    warmup_t0      control: SFT on the traces of that teacher before RLT, written greedily

The starts also answer each held-out problem 16 times: the most frequent answer needs no training.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import driver
from arms import PROMPTS_PER_STEP, Arms, Row, Setting, Table, read
from trace_kinds import parse_chain

from rlt_lightning.judging.answers import solution_block
from rlt_lightning.tags import R1
from rlt_lightning.tasks.stepwise import CHAIN_WORDING

NUM_WARM = 128  # traces of the start `warm`
STARTS = ("base", "warm")
MOST_TOKENS = {"short": 72, "long": 112}  # of thought and solution
REWARDS: dict[str, dict[str, object]] = {
    "log_prob_sum": {"model__reward": "LogProbReward"},
    "log_prob_mean": {"model__reward": "LogProbReward", "model__reward__reduction": "mean"},
    "no_answer": {"model__reward": "LogProbReward", "model__answer_weight": 0},
    "rlpr": {"model__reward": "RLPRReward"},
    "verifree": {"model__reward": "VeriFreeReward"},
    "nover": {"model__reward": "NOVERReward"},
}
METHODS = ("binary", *REWARDS, "opd_self", "rlt", "warmup_t0")
PARTS = {"steps 1 to 5": (1, 5), "steps 6 to 20": (6, 20)}  # of the training, first and last step
# The loss of laptop/likelihood, for stage R.
PLAIN_GRADIENT = {
    "model__advantages": "rlt_lightning.numerics.LeaveOneOutAdvantages",
    "model__policy_loss": "rlt_lightning.numerics.DrGRPOLoss",
    "model__policy_loss__kl_coef": 0,
    "model__policy_loss__max_completion_length": 1,
}


class Likelihood(Arms):
    """All stages of one task and one seed."""

    SETTINGS: ClassVar[dict[str, Setting]] = {
        task: Setting(task, student_lr=5e-4, num_votes=16) for task in MOST_TOKENS
    }
    ARMS = (*STARTS, *(f"{method}_{start}" for start in STARTS for method in METHODS))
    WITHOUT_TRACES = tuple(arm for arm in ARMS if not arm.startswith(("warm", "rlt_")))
    VOTED = STARTS

    @property
    def length(self) -> dict[str, int]:
        """Return the limit of thought and solution."""
        return {"rollouts__sampling__max_completion_length": MOST_TOKENS[self.setting.name]}

    def write_data(self) -> None:
        """Write the rows of all stages; RLT trains on the problems of all other methods."""
        super().write_data()
        for name in ("warmup", "raw"):
            rows = [row | {"solution": self.write_solution(row)} for row in read(self.data_file(name))]
            self.write_rows(name, rows)
            self.write_rows("rlt" if name == "raw" else "warm", rows if name == "raw" else rows[:NUM_WARM])

    def write_solution(self, row: Row) -> str:
        """Return the solution of a problem in this task."""
        problem = parse_chain(row["question"])
        box = f"\\boxed{{{problem.answer}}}"
        return f"{CHAIN_WORDING.trace(problem.steps)}\n{box}" if self.setting.name == "long" else box

    def evaluate(self, arm: str, model: Path | str, **options: Any) -> None:
        """Let an arm's student answer the held-out problems (stage 5)."""
        super().evaluate(arm, model, **self.length, **options)

    def train_student(self, arm: str) -> Path | str:
        """Return an arm's student."""
        if arm in STARTS:
            return super().train_student(arm)
        method, _, start = arm.rpartition("_")
        begin = self.train_student(start)
        options = {"data__source": self.data_file("raw"), "trainer__max_steps": self.setting.num_iterations}
        options |= {"model__optimizer__lr": self.setting.student_lr, **self.seeds}
        group_size = self.setting.group_size
        if method == "opd_self":
            options |= {"model__pretrained": begin, "model__teacher": "null", **self.length}
            options |= {"data__prompts_per_step": PROMPTS_PER_STEP * group_size}
            return self.stage(f"{arm}/student", "fit", "laptop/opd", **options) / "model"
        options |= {"data__prompts_per_step": PROMPTS_PER_STEP, "model__group_size": group_size}
        options |= {"model__teacher": begin}
        if method == "binary":
            options |= {"rollouts__sampling__temperature": 1.0, **self.length, **PLAIN_GRADIENT}
            return self.stage(f"{arm}/student", "fit", "laptop/grpo", **options) / "model"
        if method in REWARDS:
            options |= REWARDS[method]
            return self.stage(f"{arm}/student", "fit", "laptop/likelihood", **options) / "model"
        return self.fine_tune(arm, self.make_traces(arm), begin)

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's student learns from."""
        if arm == "warm":
            return self.data_file(arm)
        method, _, start = arm.rpartition("_")
        student = self.train_student(start)
        if method == "rlt":
            teacher, options = self.run_rlt(arm, student, "raw"), {}
        else:
            teacher, options = self.warm_up(), {"rollouts__sampling__temperature": 0}
        return self.explain(f"{arm}/traces", teacher, student, **options) / "distillation.jsonl"

    # Figures

    @staticmethod
    def find_thought(text: str) -> str:
        """Return the thought of an answer; all of it if its end is missing."""
        return text.rpartition(R1.thought_open)[2].partition(R1.thought_close)[0].strip()

    def measure(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures, and those of its thoughts and solutions.

        The log-prob is that of the whole reference solution after the sampled thought, at temperature 1.
        """
        # Here, since every process that judges answers imports this file.
        import torch
        from gates import Corpus

        from rlt_lightning.models.load import load_model, load_tokenizer

        tokenizer, model = load_tokenizer(self.student_base), load_model(str(self.train_student(arm)))
        corpus, thoughts = Corpus(tokenizer, 0), self.read_thoughts(arm)
        solutions = [self.write_solution(row) for row in thoughts]
        examples = [
            corpus.format.build_student_sft_example(
                1, row["question"], R1.wrap(row["reasoning_trace"]), R1.wrap(solution)
            )
            for row, solution in zip(thoughts, solutions, strict=True)
        ]
        ids, _ = corpus.batch(examples)
        with torch.no_grad():
            log_probs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        log_probs = log_probs.gather(2, ids[:, 1:, None])[:, :, 0]  # (problems, tokens)
        after = len(tokenizer.encode("\n" + R1.solution_close)) + 1  # tokens behind the solution
        sums = []
        for place, (example, solution) in enumerate(zip(examples, solutions, strict=True)):
            end = len(example.token_ids) - after - 1
            sums.append(float(log_probs[place, end - len(tokenizer.encode(solution)) : end].sum()))
        texts = {row["id"]: row["response"] for row in read(self.folder / arm / "sampled/responses.jsonl")}
        written = [solution_block(texts[name], R1).strip() for name in sorted(texts, key=number_of)]
        found = super().measure(arm) | {
            "whole": 100 * fmean(a == b for a, b in zip(written, solutions, strict=True)),
            "log p": fmean(sums),
            "length": fmean(len(tokenizer.encode(row["reasoning_trace"])) for row in thoughts),
            "thoughts": self.measure_kinds(thoughts),
        }
        rows = self.read_training(arm)
        lengths = {row["step"]: [] for row in rows}
        for row in rows:
            lengths[row["step"]].append(len(tokenizer.encode(row["reasoning_trace"])))
        for step in {1, 10, max(lengths, default=0)} & lengths.keys():
            found[f"length at step {step}"] = fmean(lengths[step])
        return found

    def read_training(self, arm: str) -> list[Row]:
        """Return the thoughts that an arm samples in its training; none if it does not sample thoughts."""
        if arm.rpartition("_")[0] not in ("binary", *REWARDS):
            return []
        rows = read(self.folder / arm / "student" / "rollouts.jsonl")
        return [row | {"reasoning_trace": self.find_thought(row["explanation"])} for row in rows]

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return what each kind of thought earns while training begins."""
        tables = {}
        for arm in arms:
            rows = [row for one in ones for row in one.read_training(arm)]
            for part, (first, last) in PARTS.items() if rows else ():
                some = [row for row in rows if first <= row["step"] <= last]
                tables[f"Mean reward of kinds of thoughts, {arm}, {part}"] = cls.measure_rewards(some)
        return tables


def number_of(name: str) -> int:
    """Return the number of a problem in the id of an answer."""
    return int(name.split("/")[1])


if __name__ == "__main__":
    sys.exit(driver.main("likelihood", __doc__, Likelihood, "short long"))
