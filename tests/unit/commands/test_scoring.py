"""r_KL counts the tokens that the teacher sampled and, if the setting says so, those that it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.passes import PassRunner, score_rollouts
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY
from rlt_lightning.types import Completion, ModelView, Problem, Rollout, Rollouts

# Log-probs by token id: 5 and 6 are the separator that is given, 7 and 8 the explanation, 9 the solution.
TEACHER = {5: -0.1, 6: -0.2, 7: -1.0, 8: -2.0}
STUDENT = {5: -10.1, 6: -6.2, 7: -1.5, 8: -1.0, 9: -0.5}


def score(score_given: bool, teacher_runs: list[int]) -> Any:
    """The tokens and the reward of one rollout; `teacher_runs` gets what the teacher is asked for."""

    def teacher(function: Any, packed: Any, *arguments: Any) -> Any:
        teacher_runs.extend(packed.targets.tolist())
        return torch.tensor([TEACHER[token] for token in packed.targets.tolist()]), None

    def student(function: Any, packed: Any, *arguments: Any) -> Any:
        return torch.tensor([STUDENT[token] for token in packed.targets.tolist()]), None

    problem = Problem(1, "q", "s", [1], [5, 6], [2], [3], [9])
    completion = Completion([7, 8, 4], [TEACHER[7], TEACHER[8], -0.3], "stop")
    view = ModelView(problem, completion, [7, 8], num_tokens=2, num_own=2)
    rollout = Rollout(problem, completion, text="So.", closed=True, view=view)
    models = {"fake": Model(student), POLICY: Model(teacher)}
    runner = PassRunner(models, torch.device("cpu"), micro_batch_tokens=100)
    reward = RLTReward(score_given=score_given)
    step = score_rollouts(runner, reward, Student.of("fake"), Rollouts([rollout], 1, 0, 0.7))
    return reward.list_tokens(step, 0), step.rewards.item()


def test_given_tokens_are_not_in_the_kl() -> None:
    # k1 of 7 and 8: -1 + 1.5 = 0.5 and -2 + 1 = -1. r_KL = -0.25 + 0.01 * 0.5 = -0.245, r_SS = -0.505.
    teacher_runs: list[int] = []
    tokens, reward = score(False, teacher_runs)
    assert teacher_runs == []  # no pass over the prompts
    assert tokens.explanation == [7, 8]
    assert tokens.kl == pytest.approx([0.5, -1.0])
    assert reward == pytest.approx(-0.505 + 3 * 0.245)


def test_score_given_puts_them_in() -> None:
    # k1 of 5 and 6: 10 and 6. r_KL = (10 + 6 + 0.5 - 1) / 4 + 0.01 * 10 = 3.975.
    teacher_runs: list[int] = []
    tokens, reward = score(True, teacher_runs)
    assert teacher_runs == [5, 6]
    assert tokens.explanation == [5, 6, 7, 8]
    assert tokens.kl == pytest.approx([10.0, 6.0, 0.5, -1.0])
    assert reward == pytest.approx(-0.505 - 3 * 3.975)
