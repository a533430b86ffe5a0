"""The interface of rewards: declare what models compute of a completion, measure it, score whole groups.

    scoring_passes  a completion ─▶ what each model is to compute of it                  (any rank)
    measure         tokens and texts of some rows ─▶ a table of these rows   (the rank that has the tokens)
    score           the table of all rows, group after group ─▶ with rewards         (alike on every rank)

The kinds of a table's columns say what they are for (rollouts/columns.py). Measuring and scoring are two
steps because tokens stay on the rank that computed them: ranks share only numbers, and a judge is asked once.
A reward that compares no completions may return all of the table from `measure`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Level, Table, Term
from rlt_lightning.rollouts.step import ScoringPass, StepBatch
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import Problem, Rollout


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


class CountedTokens(NamedTuple):
    """The tokens of one completion that a reward by a student counts, with their raw values.

    Attributes:
        explanation: K token ids of the policy, which r_KL counts.
        kl: Their KL of policy from student, nats.
        solution: S token ids of the student.
        solution_log_probs: The student's log-probs of them, nats.
    """

    explanation: list[int]
    kl: list[float]
    solution: list[int]
    solution_log_probs: list[float]


class Reward(ABC):
    """The worth of a completion; `model.reward` is one."""

    # The kinds of completions that it judges: `samples` of the data.
    judges: ClassVar[tuple[str, ...]] = ("explanations", "answers")
    # Whether a student reads completions for it.
    asks_student: ClassVar[bool] = True
    # Whether a completion's reward depends on the others of its group.
    compares: ClassVar[bool] = False
    # Whether it has values of single tokens; see `list_tokens`.
    has_tokens: ClassVar[bool] = False
    # Whether it can be a gain over an explanation that says nothing: an RLTReward with a `baseline`.
    has_baseline: ClassVar[bool] = False
    # Whether it tells which answers are right, in the columns of CorrectnessReward.
    judges_answers: ClassVar[bool] = False

    def scoring_passes(self, rollout: Rollout, student: Student) -> list[ScoringPass]:
        """Return the scoring passes of a completion."""
        return []

    @abstractmethod
    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> Table:
        """Return the table of n rows from their tokens and texts, (n,) each.

        Args:
            step: The step; it has the token columns of these rows.
            rows: Rows that this rank has read.
            student: The model that scores.
        """

    def score(self, table: Table, group_size: int) -> Table:
        """Return the table of all N rows with their rewards, (N,) each.

        Args:
            table: The result of `measure` for all rows; those of a group are adjacent.
            group_size: Completions of a group.
        """
        return table

    def columns(self) -> tuple[str, ...]:
        """Return the columns of scored rows that pages show: the reward and the terms that add up to it."""
        return ("reward",)

    def find_kl(self, temperature: float) -> KLOptions | None:
        """Return how its KL compares policy and student, for sampling at a temperature, if it has one."""
        return None

    def find_answer(self) -> AnswerScore | None:
        """Return the score of the answer term, if it has one: the gradient of `score_answers`."""
        return None

    def list_tokens(self, step: StepBatch, row: int) -> CountedTokens:
        """Return the tokens of a measured row with their values; only asked if it `has_tokens`."""
        raise NotImplementedError

    def check(self, problems: Sequence[Problem]) -> None:  # noqa: B027
        """Raise an InputError for problems that it cannot judge; called before a model is loaded."""

    def open(self, tags: TagStyle) -> None:  # noqa: B027
        """Start what may fail, such as processes, before anything is sampled.

        Args:
            tags: The tags of the completions.
        """

    def close(self) -> None:  # noqa: B027
        """Free processes and memory; safe to call twice."""


def build_table(terms: dict[str, Tensor], baseline: Tensor | None = None) -> Table:
    """Return a table with the reward, the terms that add up to it and, if there is one, the baseline."""
    reward = sum(terms.values(), start=torch.zeros_like(next(iter(terms.values()))))
    table: Table = {REWARD: reward} | {Term(name): values for name, values in terms.items()}
    return table if baseline is None else table | {Level("baseline"): baseline}
