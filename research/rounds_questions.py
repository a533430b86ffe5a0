"""Ask the models of rounds.py further questions: is it the reinforcement learning, and what has it taught?

    python research/rounds_questions.py --output_dir DIR --seeds "20 21"   # DIR: of rounds.py, or a new one

best of K   kinds of the best of 1 to 64 traces of a problem by the reward, k1 and exact, before and after RLT
ends        the number with which traces end whose teacher sees a wrong solution
hard        accuracy on problems that s64 never solves in 16 samples
other       accuracy of students of another base; words of a trace
tokens      where k1 and the exact KL differ: before, at and behind the token that leaves the right steps
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import fmean
from typing import Any, ClassVar, Literal

import driver
from arms import MINIATURES, Row, Setting, Table, read
from rounds import EXACT, NEW, Rounds, read_number, show_wrong
from trace_kinds import chain_kind, parse_chain

Estimator = Literal["k1", "exact"]
ESTIMATORS: dict[Estimator, dict[str, Any]] = {"k1": {}, "exact": EXACT}
DRAWS = (1, 2, 4, 8, 16, 64)  # traces of a problem to choose from
NUM_PROBLEMS = 128  # that have so many traces
NUM_SAMPLES = 16  # answers of s64 to each held-out problem
STUDENT = "s64"  # whose reward it is
DRAWN = ("warmup", "rlt_s64")  # whose teachers write many traces of a problem
SHOWN = (*DRAWN, "wrong_s64")  # whose teachers see wrong solutions


class Questions(Rounds):
    """The stages of one seed."""

    SETTINGS: ClassVar[dict[str, Setting]] = {"new": NEW}
    ARMS = ("warmup", "s64", "s512", "rlt_s64", "wrong_s64", "reject4_s64", "pool4_s64")

    def run_arm(self, arm: str) -> None:
        """Run all stages of an arm, and those that its figures need."""
        super().run_arm(arm)
        self.measure(arm)

    def measure(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures and what this page asks further."""
        traces, hard = read(self.make_traces(arm)), self.find_hard()
        other = self.fine_tune(f"{arm}/other", self.make_traces(arm), MINIATURES["seed1"])
        self.evaluate(f"{arm}/other", other)
        responses = read(self.folder / arm / "sampled" / "responses.jsonl")
        found = super().measure(arm) | {
            "problems never solved": len(hard),
            "accuracy on them": 100 * fmean(row["correct"] for row in responses if row["id"] in hard),
            "another base": self.read_accuracy(f"{arm}/other/sampled"),
            "words": fmean(len(row["reasoning_trace"].split()) for row in traces),
        }
        if arm in SHOWN:
            found |= measure_ends(self.explain_wrong(arm))
        for estimator in ESTIMATORS if arm in DRAWN else ():
            found |= {
                f"best of {n}, {estimator}": kinds for n, kinds in self.choose_best(arm, estimator).items()
            }
        return found

    def choose_best(self, arm: str, estimator: Estimator) -> dict[int, dict[str, float]]:
        """Return the kinds of the best of the first 1 to 64 traces of each problem, percent.

        Args:
            arm: Arm whose teacher writes them.
            estimator: Of the KL, k1 or exact: the traces are the same.
        """
        folder = self.explain(
            f"draws_{arm}_{estimator}/traces",
            self.find_teacher(arm),
            self.train_student(STUDENT),
            data__max_rows=NUM_PROBLEMS,
            rollouts__num_traces=max(DRAWS),
            distillation__select="best_reward",
            **ESTIMATORS[estimator],
        )
        chosen = choose_best(read(folder / "traces.jsonl"))
        return {number: self.measure_kinds(rows) for number, rows in chosen.items()}

    def find_teacher(self, arm: str) -> Any:
        """Return the teacher of an arm that has run."""
        return self.warm_up() if arm == "warmup" else self.folder / arm / "teacher" / "model"

    def explain_wrong(self, arm: str) -> list[Row]:
        """Return traces of an arm's teacher for problems with a wrong solution."""
        self.write_rows("raw_wrong", show_wrong(read(self.data_file("raw")), self.seed))
        name, student = f"wrongly_shown_{arm}/traces", self.train_student(STUDENT)
        return read(self.explain(name, self.find_teacher(arm), student, "raw_wrong") / "distillation.jsonl")

    def find_hard(self) -> set[str]:
        """Return the ids of the held-out problems that the student never solves in 16 samples."""
        often: dict[str, Any] = {"rollouts__num_samples": NUM_SAMPLES, "rollouts__seed": self.seed}
        folder = self.ask(f"{STUDENT}/often", self.train_student(STUDENT), **often)
        rows = read(folder / "responses.jsonl")
        return {row["id"] for row in rows} - {row["id"] for row in rows if row["correct"]}

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return the mean KL of the warm-up teacher's traces by kind and place."""
        tables = {}
        for estimator in ESTIMATORS:
            pooled: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
            for kind, parts in (some for one in ones for some in one.split_tokens(estimator)):
                for name, value in parts.items():
                    pooled[kind][name].append(value)
            tables[f"KL of the warm-up teacher's traces from {STUDENT}, {estimator}, nats"] = {
                kind: {name: fmean(values) for name, values in parts.items()}
                for kind, parts in pooled.items()
            }
        return tables

    def split_tokens(self, estimator: Estimator) -> list[tuple[str, dict[str, float]]]:
        """Return the KL of the warm-up's traces before, at and behind the token that leaves the steps.

        Returns:
            Kind of each trace, and sums over its tokens, nats. A trace of right steps leaves them nowhere:
            the first token of its last step counts.
        """
        from rlt_lightning import Teacher
        from rlt_lightning.engines.base import Sampling
        from rlt_lightning.rewards import RLTReward

        teacher = Teacher(
            self.warm_up(),
            str(self.train_student(STUDENT)),
            reward=RLTReward(kl_estimator=estimator),
            sampling=Sampling(temperature=0.7),
            tags="r1",
            teacher_system_prompt="",
            student_system_prompt="",
            accelerator="cpu",
        )
        columns = ("question", "solution", "reasoning_trace")
        rows = [{name: row[name] for name in columns} for row in self.rank(STUDENT)]
        found = []
        for row, score in zip(rows, teacher.score(rows), strict=True):
            kind, num_right = chain_kind(row["question"], row["reasoning_trace"])
            leaves = find_leaving(score.tokens, num_right)
            parts = {
                "before": sum(score.kl[:leaves]),
                "at": score.kl[leaves],
                "behind": sum(score.kl[leaves + 1 :]),
            }
            found.append((str(kind), parts | {"mean of a token": fmean(score.kl)}))
        return found


def choose_best(rows: list[Row]) -> dict[int, list[Row]]:
    """Return of each problem's first 1 to 64 traces the one with the best reward."""
    by_problem: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_problem[row["question"]].append(row)
    return {
        number: [max(some[:number], key=lambda row: row["reward"]) for some in by_problem.values()]
        for number in DRAWS
    }


def measure_ends(rows: list[Row]) -> dict[str, float]:
    """Return how often a trace ends with the number shown, with the right one, and with another, percent."""
    ends = dict.fromkeys(("ends with number shown", "right number", "another", "no number"), 0)
    for row in rows:
        last = row["reasoning_trace"].rstrip(".").split()[-1]
        if not last.isdigit():
            ends["no number"] += 1
        elif last == read_number(row["solution"]):
            ends["ends with number shown"] += 1
        else:
            ends["right number" if last == parse_chain(row["question"]).answer else "another"] += 1
    return {name: 100 * number / len(rows) for name, number in ends.items()}


def find_leaving(tokens: list[str], num_right: int) -> int:
    """Return the place of the first token behind so many right steps, or of the last step's."""
    starts = [0, *(number + 1 for number, token in enumerate(tokens) if token.strip() == ",")]
    return starts[min(num_right, len(starts) - 1)]


if __name__ == "__main__":
    sys.exit(driver.main("questions", __doc__, Questions, "new"))
