"""Rewards that need only a completion's text, such as the correctness reward of traditional RL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from rlt_lightning.judging.judge import Judge
from rlt_lightning.rewards.base import COMPLETION_COLUMNS, TAKEN_NAMES, Reward
from rlt_lightning.rewards.students import Students
from rlt_lightning.rollouts.step import Score, StepBatch
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import NO_TERM, InputError, RewardTerms, Rollout

# The columns of a Score, in its order.
KINDS = ("terms", "levels", "figures", "columns")


class TextReward(Reward, ABC):
    """A reward that asks no model, chosen by its class: `--model.reward my_package.MyReward`."""

    asks_student = False

    @abstractmethod
    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> RewardTerms:
        """Reward N completions.

        Args:
            rollouts: N rollouts with their `text` and their `problem`, whose row is `problem.columns`.
            tags: The tags in the texts.

        Returns:
            The reward and its terms, each (N,), on the CPU.
        """

    def measure(self, step: StepBatch, rows: Sequence[int], students: Students) -> dict[str, Tensor]:
        """Return the numbers that are logged and recorded; keep what was found in the texts."""
        terms = judge_texts(self, step.rollouts(rows), students.formats[0].tags)
        for column in fields(terms):
            if column.metadata == NO_TERM:
                values = getattr(terms, column.name)
                step.texts.setdefault(column.name, {}).update(zip(rows, values, strict=True))
        numbers = {"reward": terms.reward}
        kinds = (terms.parts(), terms.baselines(), terms.details(), terms.recorded())
        for kind, columns in zip(KINDS, kinds, strict=True):
            numbers |= {f"{kind}/{name}": values for name, values in columns.items()}
        return numbers

    def score(self, step: StepBatch, students: Students) -> Score:
        """Return what `measure` did of all rows."""
        terms, levels, figures, columns = (
            {n.removeprefix(f"{kind}/"): v for n, v in step.numbers.items() if n.startswith(f"{kind}/")}
            for kind in KINDS
        )
        return Score(step.numbers["reward"], terms, levels, figures, columns)


@dataclass(frozen=True)
class CorrectnessTerms(RewardTerms):
    """The reward of each answer and its terms; all (N,), 1 for yes and 0 for no.

    Attributes:
        correct: Whether the answer is right.
        formatted: Whether thought and solution stand between their tags.
        timed_out: Whether judging reached its limit of time or memory, so that the answer counts as wrong.
        answers: The answer that was found in each text; None where there is none.
    """

    correct: Tensor
    formatted: Tensor
    timed_out: Tensor
    answers: list[str | None] = field(default_factory=list, metadata=NO_TERM)


class CorrectnessReward(TextReward):
    """What traditional RL trains on, and RLT is compared with (RLT, arXiv:2506.08388, section 2).

    Answers are judged as in evaluation: a row has `answer`, or a `solution` that holds one.

    Args:
        right: Reward of a well-formed right answer.
        wrong: Reward of a well-formed wrong answer.
        unformatted: Reward of an answer whose thought and solution are not between their tags.

    Raises:
        InputError: If a better answer would earn less.
    """

    judges = ("answers",)
    judges_answers = True

    def __init__(self, right: float = 1.0, wrong: float = -0.5, unformatted: float = -1.0) -> None:
        if not unformatted <= wrong < right:
            raise InputError(
                "reward.right must be above wrong, and unformatted not above wrong, but they are "
                f"{right}, {wrong} and {unformatted}. The paper has 1, -0.5 and -1."
            )
        self.right = right
        self.wrong = wrong
        self.unformatted = unformatted
        # It is made when the tags are known.
        self.judge: Judge | None = None

    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> CorrectnessTerms:
        """See `TextReward`."""
        if self.judge is None:
            self.judge = Judge(tags)
        verdicts = self.judge.judge_all((r.text, r.problem.reference) for r in rollouts)
        correct = torch.tensor([float(verdict.correct) for verdict in verdicts])
        formatted = torch.tensor([float(verdict.formatted) for verdict in verdicts])
        timed_out = torch.tensor([float(verdict.timed_out) for verdict in verdicts])
        judged = torch.where(correct > 0, self.right, self.wrong)
        reward = torch.where(formatted > 0, judged, self.unformatted)
        answers = [verdict.answer for verdict in verdicts]
        return CorrectnessTerms(reward, correct, formatted, timed_out, answers)

    def close(self) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()


def judge_texts(reward: TextReward, rollouts: list[Rollout], tags: TagStyle) -> RewardTerms:
    """Return the reward's terms for N rollouts.

    Raises:
        InputError: If a term has the name of another metric or column.
    """
    terms = reward(rollouts, tags)
    names = terms.recorded().keys() - {"reward"}
    taken = TAKEN_NAMES - {field.name for field in fields(CorrectnessTerms)}
    if clashes := sorted(names & (taken | COMPLETION_COLUMNS)):
        raise InputError(
            f"The terms of {type(reward).__name__} must have names that no metric and no column of "
            f"rollouts.jsonl has, but have {', '.join(clashes)}. Choose others."
        )
    return terms
