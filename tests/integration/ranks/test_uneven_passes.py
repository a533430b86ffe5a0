"""Two ranks whose rows need different forwards still run all forwards together, and a failure ends both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from cases import full
from grpo import data, module, rollout_callback
from torch import Tensor, distributed
from trainers import bare_trainer

from rlt_lightning.rewards import Reward
from rlt_lightning.rewards.explanations import build_solution_pass
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Term
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.strategies import FSDP2
from rlt_lightning.types import InputError, Rollout


class OfOneRank(Reward):
    """Asks the student, and the policy's log-probs, only of the completions of rank 1."""

    judges = ("explanations",)

    def scoring_passes(self, rollout: Rollout, student: Student) -> list[ScoringPass]:
        if distributed.get_rank() == 0:
            return []
        prompt, ids = rollout.problem.teacher_prompt, rollout.completion.token_ids
        first, end = len(prompt), len(prompt) + len(ids)
        return [
            build_solution_pass(student, rollout.require_view(), 1.0),
            ScoringPass(POLICY, prompt, ids, {"mine": (first, end)}, rollout.problem.row, asks_engine=True),
        ]

    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> dict[str, Tensor]:
        columns = [step.tokens.get(name, {}) for name in ("solution", "mine")]
        values = [sum(float(column[row].mean()) for column in columns if row in column) for row in rows]
        read = torch.tensor(values, dtype=torch.float32)
        return {REWARD: read, Term("read"): read}


def fit_and_validate(rank: int, model: str, folder: str) -> None:
    trainer = bare_trainer(
        Path(folder), rollout_callback(), use_distributed_sampler=False, devices=2, strategy=FSDP2()
    )
    rows = data(model, Path(folder), val_rows=4, val_batch_size=2)
    rlt = module(model, reward=OfOneRank())
    trainer.fit(rlt, datamodule=rows)
    assert trainer.global_step == 1
    assert float(trainer.callback_metrics["reward/mean"]) < -1
    [figures] = trainer.validate(rlt, datamodule=rows)
    assert figures["reward/val_read"] < -1


def test_ranks_whose_rows_declare_different_reads_meet(tiny_model: str, tmp_path: Path) -> None:
    ranks.call(fit_and_validate, tmp_path, tiny_model, str(tmp_path))


class TooLongOnOneRank(OfOneRank):
    """Asks the student of completions of which those of rank 1 do not fit into its context."""

    def scoring_passes(self, rollout: Rollout, student: Student) -> list[ScoringPass]:
        read = build_solution_pass(student, rollout.require_view(), 1.0)
        too_long = [*read.rest, *[1] * 2048] if distributed.get_rank() else read.rest
        return [replace(read, rest=too_long, retokenized=True)]


def fail_on_both(rank: int, strategy: str, model: str, folder: str) -> None:
    callbacks = rollout_callback()
    options = {"devices": 2, "strategy": FSDP2() if strategy == "fsdp2" else strategy}
    trainer = bare_trainer(Path(folder), callbacks, use_distributed_sampler=False, **options)
    with pytest.raises(InputError, match=r"must fit into its context of 2048 tokens, but row \d+"):
        trainer.fit(module(model, reward=TooLongOnOneRank()), datamodule=data(model, Path(folder)))


@pytest.mark.parametrize("strategy", ["ddp", full("fsdp2")])
def test_a_completion_without_room_on_one_rank_ends_both(
    strategy: str, tiny_model: str, tmp_path: Path
) -> None:
    ranks.call(fail_on_both, tmp_path, strategy, tiny_model, str(tmp_path))
