"""Eleven faults, each planted into one place of the package, that the trajectories must notice.

A fault is a function that patches the package, listed with the kinds of run that must notice it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from rlt_lightning.callbacks import ReferenceSync
from rlt_lightning.modules import passes
from rlt_lightning.modules.passes import PassRunner
from rlt_lightning.numerics import TruncatedImportanceSampling, advantages, losses
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards import rlt as rlt_reward

Patch = pytest.MonkeyPatch


def scale_by_micro_batches(patch: Patch) -> None:
    """Divide each gradient by the number of micro-batches, as a loss that is a mean would need it."""
    right = PassRunner.updates

    def updates(self: Any, *arguments: Any) -> Any:
        micro_batches = list(right(self, *arguments))
        for term, micro in micro_batches:
            yield term, micro._replace(scale=micro.scale / len(micro_batches))

    patch.setattr(PassRunner, "updates", updates)


def turn_kl(patch: Patch) -> None:
    """Estimate the KL of the student from the teacher."""
    right = RLTReward.token_kl
    patch.setattr(RLTReward, "token_kl", lambda self, log_p, log_q: right(self, log_q, log_p))


def shift_mask(patch: Patch) -> None:
    """Count a completion's tokens without its first one."""
    right = passes.to_padded

    def to_padded(values: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        padded, mask = right(values, lengths)
        mask = mask.clone()
        mask[:, 0] = False
        return padded, mask

    patch.setattr(passes, "to_padded", to_padded)


def compare_across_problems(patch: Patch) -> None:
    """Compare completions with those of other problems, by reading the rewards' axes the wrong way."""
    right = advantages.split_groups

    def split_groups(rewards: Tensor, group_size: int) -> Tensor:
        return right(rewards, group_size).t().reshape(-1, group_size)

    patch.setattr(advantages, "split_groups", split_groups)


def drop_minimum(patch: Patch) -> None:
    """Give the solution's hardest token twice its weight."""
    right = rlt_reward.student_solution_reward

    def twice(log_probs: Tensor, mask: Tensor, min_coef: float, *rest: Any) -> Tensor:
        return right(log_probs, mask, 2 * min_coef, *rest)

    patch.setattr(rlt_reward, "student_solution_reward", twice)


def forget_student_temperature(patch: Patch) -> None:
    """Read the student's log-probs at temperature 1."""
    right = RLTReward.__post_init__

    def post_init(self: RLTReward) -> None:
        object.__setattr__(self, "student_temperature", 1.0)
        right(self)

    patch.setattr(RLTReward, "__post_init__", post_init)


def keep_reference(patch: Patch) -> None:
    """Never move the reference."""
    patch.setattr(ReferenceSync, "on_train_batch_end", lambda *_: None)


def average_micro_batches(patch: Patch) -> None:
    """Take means over a micro-batch's tokens instead of the step's."""
    right = losses.DAPOLoss.mean_weights

    def mean_weights(self: Any, mask: Tensor, num_tokens: Any, num_sequences: Any) -> Tensor:
        return right(self, mask, None, None)

    patch.setattr(losses.DAPOLoss, "mean_weights", mean_weights)


def drop_format_penalty(patch: Patch) -> None:
    """Forgive an explanation that is not closed."""
    right = RLTReward.__call__

    def call(self: RLTReward, *arguments: Any, **options: Any) -> Any:
        log_probs, mask, kl, kl_mask, format_ok, *rest = arguments
        return right(self, log_probs, mask, kl, kl_mask, format_ok | True, *rest, **options)

    patch.setattr(RLTReward, "__call__", call)


def remove_cap(patch: Patch) -> None:
    """Let importance weights be as large as they are."""
    right = TruncatedImportanceSampling.__init__

    def init(self: TruncatedImportanceSampling, *arguments: Any, **options: Any) -> None:
        right(self, *arguments, **options)
        self.cap = math.inf

    patch.setattr(TruncatedImportanceSampling, "__init__", init)


FAULTS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    scale_by_micro_batches: ("rlt_k1", "sft_student"),
    turn_kl: ("rlt_k1", "rlt_k3"),
    shift_mask: ("rlt_k1",),
    compare_across_problems: ("rlt_k1", "loss_dapo"),
    drop_minimum: ("rlt_k1",),
    forget_student_temperature: ("rlt_k1",),
    keep_reference: ("rlt_k1",),
    average_micro_batches: ("loss_dapo", "loss_dapo_symmetric"),
    drop_format_penalty: ("rlt_k1",),
    remove_cap: ("rlt_importance_sampling",),
}
