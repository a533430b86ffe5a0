"""Rewards that need only a completion's text, such as the correctness reward of traditional RL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from rlt_lightning.judging.judge import Judge
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Column, Level, Table, Text, columns_of
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import InputError, Rollout


class TextReward(Reward, ABC):
    """A reward that asks no model, chosen by its class: `--model.reward my_package.MyReward`."""

    asks_student = False

    @abstractmethod
    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> dict[Column, Any]:
        """Reward N completions.

        Args:
            rollouts: N rollouts with their `text` and their `problem`, whose row is `problem.columns`.
            tags: The tags in the texts.

        Returns:
            The table (rollouts/columns.py): `REWARD` and further columns such as `Level(name)`, each (N,), on
            the CPU. A list `Text(name)` has what was found in each text.
        """

    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> Table:
        """Return the table; keep the findings in the texts."""
        table = self(step.rollouts(rows), student.format.tags)
        for name, values in columns_of(table, Text).items():
            step.texts.setdefault(name, {}).update(zip(rows, values, strict=True))
        return {column: values for column, values in table.items() if not isinstance(column, Text)}


class CorrectnessReward(TextReward):
    """The reward of traditional RL, with which RLT is compared (RLT, arXiv:2506.08388, section 2).

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

    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> dict[Column, Any]:
        """See `TextReward`; levels are 1 for yes and 0 for no.

        `timed_out` is whether judging reached its limit of time or memory, so that the answer counts as
        wrong; `answers` the answer that was found in each text, None where there is none.
        """
        if self.judge is None:
            self.open(tags)
        assert self.judge is not None
        verdicts = self.judge.judge_all((r.text, r.problem.reference) for r in rollouts)
        levels: dict[Column, Any] = {
            Level(name): torch.tensor([float(getattr(verdict, name)) for verdict in verdicts])
            for name in ("correct", "formatted", "timed_out")
        }
        judged = torch.where(levels[Level("correct")] > 0, self.right, self.wrong)
        return {
            REWARD: torch.where(levels[Level("formatted")] > 0, judged, self.unformatted),
            **levels,
            Text("answers"): [verdict.answer for verdict in verdicts],
        }

    def open(self, tags: TagStyle) -> None:
        """Start the judge's processes."""
        self.judge = Judge(tags)
        self.judge.start()

    def close(self) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()
