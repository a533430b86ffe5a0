"""Planted faults that the learning test must notice: each breaks one part of the training of a stage."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from rlt_lightning.commands.demo import run_rlt


def sign_of_kl(words: list[str], log: Path) -> None:
    """Reward what is unnatural to the student."""
    from rlt_lightning.numerics import rewards

    right = rewards.student_kl_penalty
    rewards.student_kl_penalty = lambda *arguments: -right(*arguments)
    run_rlt(words, log)


def shuffled_advantages(words: list[str], log: Path) -> None:
    """Give each completion the advantage of its neighbour in the group."""
    from rlt_lightning.numerics.advantages import GroupNormalisedAdvantages

    right = GroupNormalisedAdvantages.compare
    GroupNormalisedAdvantages.compare = lambda self, groups: right(self, groups).roll(1, dims=1)
    run_rlt(words, log)


def spans_off_by_one(words: list[str], log: Path) -> None:
    """Score each token by the state behind it instead of the one before it."""
    from rlt_lightning.modules import passes

    right = passes.compute_log_probs

    def late(model: Any, packed: Any, *arguments: Any) -> Any:
        return right(model, dataclasses.replace(packed, predictors=packed.predictors + 1), *arguments)

    passes.compute_log_probs = late
    run_rlt(words, log)


def stale_weights(words: list[str], log: Path) -> None:
    """Sample with the weights that the teacher had at the start."""
    from rlt_lightning.engines.hf import HFEngine

    def start(self: HFEngine, model: Any, tokenizer: Any, folder: Path) -> None:
        self.model, self.tokenizer = copy.deepcopy(model), tokenizer

    HFEngine.start = start
    HFEngine.update_weights = lambda self, tensors, version: setattr(self, "policy_version", version)
    run_rlt(words, log)
