"""Reward each step of a chain beside the whole answer, such as "4 times 3 is 2" modulo 10: right 1, wrong -1.

    answer   <think> 4 times 3 is 2, 2 add 5 is 8. </think> ...
    steps            0 0     0  0 1  0 0   0 0  -1   0 ...         a value for each sampled token

Run: PYTHONPATH=examples rlt fit --config laptop/grpo --model step_reward.StepModule \\
    --model.reward step_reward.StepReward
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import RewardCredit, TokenCredit
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import Table
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.tags import decode_each

STEP = re.compile(r"(\d) ?(times|add) ?(\d) ?is ?(\d)")


class StepReward(CorrectnessReward):
    """The correctness reward, and a value of the last token of each step."""

    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> Table:
        """See `Reward.measure`."""
        tokenizer = student.format.tokenizer
        texts = [decode_each(tokenizer, step.token_ids(row)) for row in rows]
        step.put_tokens("steps", rows, list(map(judge_steps, texts)))
        return super().measure(step, rows, student)


def judge_steps(texts: list[str]) -> Tensor:
    """Return 1 where a right step ends, -1 where a wrong one does, else 0, (T,), from the tokens' texts."""
    ends, values = list(accumulate(map(len, texts))), torch.zeros(len(texts))
    for match in STEP.finditer("".join(texts)):
        before, name, number, after = match.groups()
        right = int(before) * int(number) if name == "times" else int(before) + int(number)
        last = next(i for i, end in enumerate(ends) if end >= match.end())
        values[last] = 1.0 if right % 10 == int(after) else -1.0
    return values


class StepModule(RLTModule):
    """Traditional RL with both."""

    credit = RewardCredit() + 0.3 * TokenCredit("steps")
