"""The interface of rewards: declare what models compute of a completion, measure it, score whole groups.

    reads     a completion ─▶ what each model is to compute of it                        (any rank)
    measure   tokens and texts of some rows ─▶ numbers of each row         (the rank that has the tokens)
    score     the numbers of all rows, group after group ─▶ rewards and terms        (alike on every rank)

Measuring and scoring are two steps because tokens stay on the rank that computed them: ranks share only
numbers, and a judge is asked once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from rlt_lightning.numerics.students import combine_terms
from rlt_lightning.rewards.students import Student, Students
from rlt_lightning.rollouts.step import Read, Score, StepBatch
from rlt_lightning.types import Problem, RewardTerms, Rollout

# Names that a subclass may not give to a term: metrics under reward/, and recorded columns with _reward cut
# off.
TAKEN_NAMES = frozenset(
    {
        *("mean", "std", "group_std", "zero_std_frac", "solution", "kl", "format", "solution_log_prob"),
        *("solution_log_prob_mean", "solution_log_prob_min", "kl_mean", "kl_max", "baseline"),
        *("correct", "formatted", "timed_out"),  # of traditional RL
        "efficiency",  # of NOVER
    }
)
# Columns of a recorded completion that are no figures of its reward.
COMPLETION_COLUMNS = frozenset(
    {
        *("step", "row", "completion", "policy_version", "question", "solution", "explanation"),
        *("finish_reason", "num_tokens", "seed", "worker"),
    }
)


class KLOptions(Protocol):
    """How r_KL compares the policy with a student; an RLTReward has these options."""

    @property
    def kl_estimator(self) -> Literal["k1", "k3", "exact"]:
        """Return how the KL is estimated."""

    @property
    def score_given(self) -> bool:
        """Return whether the separator at the prompt's end counts."""

    @property
    def teacher_temperature(self) -> float:
        """Return the temperature of the policy's log-probs."""

    def token_kl(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Estimate the KL of each token from the log-probs of both models, nats."""


class AnswerScore(Protocol):
    """A score of the solution that the policy can ascend itself, where it is the student."""

    @property
    def temperature(self) -> float | None:
        """Return the temperature of the solution's log-probs; None: that of sampling."""

    def score_answers(self, log_probs: Tensor, token_mask: Tensor, closed: Tensor) -> Tensor:
        """Return the scores of n solutions, (n,), from the log-probs of their tokens, (n, S), nats.

        Args:
            log_probs: Log-probs after the completion.
            token_mask: True on solution tokens.
            closed: Whether a completion ended with its tag, bool, (n,).
        """


class ReadTokens(NamedTuple):
    """The tokens of one completion that a reward by one student counts, with their raw values.

    Attributes:
        thought: K token ids of the policy, which r_KL counts.
        kl: Their KL of policy from student, nats.
        solution: S token ids of the student.
        solution_log_probs: The student's log-probs of them, nats.
    """

    thought: list[int]
    kl: list[float]
    solution: list[int]
    solution_log_probs: list[float]


class Reward(ABC):
    """What a completion is worth; `model.reward` is one."""

    # What the reward judges: `samples` of the data that it fits.
    judges: ClassVar[tuple[str, ...]] = ("explanations", "answers")
    # Whether a student reads completions for it.
    asks_student: ClassVar[bool] = True
    # Whether a completion's reward depends on the others of its group.
    compares: ClassVar[bool] = False
    # Whether it has values of single tokens; see `list_tokens`.
    has_tokens: ClassVar[bool] = False
    # Whether it tells which answers are right, in the columns of CorrectnessTerms.
    judges_answers: ClassVar[bool] = False

    def reads(self, rollout: Rollout, students: Students) -> dict[str, Read]:
        """Return what models are to compute of a completion, by the name of the token column."""
        return {}

    @abstractmethod
    def measure(self, step: StepBatch, rows: Sequence[int], students: Students) -> dict[str, Tensor]:
        """Return numbers of n rows from their tokens and texts, (n,) each.

        Args:
            step: The step; it has the token columns of these rows.
            rows: Rows that this rank has read.
            students: Who reads.
        """

    @abstractmethod
    def score(self, step: StepBatch, students: Students) -> Score:
        """Return rewards and terms of all N rows from their numbers; no tokens, no texts."""

    def columns(self) -> tuple[str, ...]:
        """Return the columns of scored rows that pages show: the reward and the terms that add up to it."""
        return ("reward",)

    def find_kl(self, temperature: float) -> KLOptions | None:
        """Return how its KL compares policy and student, for sampling at a temperature, if it has one."""
        return None

    def find_answer(self) -> AnswerScore | None:
        """Return the score of the answer term, if it has one: the gradient of `score_answers`."""
        return None

    def list_tokens(self, step: StepBatch, row: int, students: Students) -> list[ReadTokens]:
        """Return the tokens of a measured row with their values, by each student."""
        return []

    def check(self, problems: Sequence[Problem]) -> None:  # noqa: B027
        """Raise an InputError for problems that it cannot judge; called before a model is loaded."""

    def close(self) -> None:  # noqa: B027
        """Free processes and memory; safe to call twice."""


class StudentReward(Reward):
    """A reward by students, each of which gives all terms: their rewards become one."""

    terms_type: ClassVar[type[RewardTerms]]

    def list_numbers(self, terms: RewardTerms, student: Student) -> dict[str, Tensor]:
        """Return the numbers of terms, (n,), by the names that `build_terms` reads."""
        values = {field.name: getattr(terms, field.name) for field in fields(terms)}
        numbers = {student.name(name): v for name, v in values.items() if isinstance(v, Tensor)}
        extra = student.name("extra")
        return numbers | {f"{extra}/{name}": v for name, v in values.get("extra", {}).items()}

    def build_terms(self, step: StepBatch, student: Student) -> Any:
        """Return the terms of all rows by a student, (N,), from what `list_numbers` gave."""
        names = [field.name for field in fields(self.terms_type)]
        terms: dict[str, Any] = {
            name: step.numbers[student.name(name)] for name in names if student.name(name) in step.numbers
        }
        start = student.name("extra") + "/"
        extra = {n.removeprefix(start): v for n, v in step.numbers.items() if n.startswith(start)}
        return self.terms_type(**terms | ({"extra": extra} if "extra" in names else {}))

    def score(self, step: StepBatch, students: Students) -> Score:
        """Return the reward of one student, or that of several by `Students.reduction`."""
        each = [self.build_terms(step, student) for student in students]
        if len(each) == 1:
            return Score.of(each[0])
        combined = combine_terms(each, students.weights, students.reduction)
        return Score.of(combined, dict(zip(students.labels, each, strict=True)))
