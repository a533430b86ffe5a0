"""Callbacks that record the completions of training in `rollouts.jsonl` and in W&B.

A resumed run repeats the iterations after its checkpoint, so it first drops their rows from the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from rlt_lightning.modules.rollout_rows import (
    build_token_columns,
    rollout_rows,
    spread_evenly,
)
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.run.jsonl import Row, append_rows, keep_rows
from rlt_lightning.types import InputError, PromptBatch

T = TypeVar("T")

TABLE = "completions"  # name of the table in W&B
NOT_SHOWN = ("policy_version", "seed", "worker")
# The table in W&B is sent again when it has grown by this factor, so that all uploads together stay small.
GROWTH = 1.1
MOST_ROWS = 10_000  # that W&B shows of a table


class RolloutRecorder(Callback):
    """Append every training completion with every reward term to `rollouts.jsonl`.

    Args:
        every_n_steps: Record the completions of every n-th iteration; 0 is off.
        tokens: Completions whose tokens are recorded with the student's value of each: every problem's best
            and worst, all, or none.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        tokens: Literal["extremes", "all", "none"] = "extremes",
    ) -> None:
        self.every_n_steps = every_n_steps
        self.tokens = tokens

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the iterations that a killed run recorded after the checkpoint: they are repeated."""
        if trainer.is_global_zero:
            keep_rows(self._path(trainer), lambda row: row["step"] <= trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step  # one batch is one RL iteration is one optimizer step
        if not isinstance(batch, PromptBatch) or not self.every_n_steps or step % self.every_n_steps:
            return
        # Each rank records what it has measured: only there are the tokens.
        measured = gather_rows(self._build_rows(step, batch.step, pl_module), trainer)
        rows = [row for _, row in sorted(measured, key=lambda numbered: numbered[0])]
        if trainer.is_global_zero:
            append_rows(self._path(trainer), rows)

    def _build_rows(self, number: int, step: StepBatch, module: Any) -> list[tuple[int, Row]]:
        """Return what is recorded of the completions that this rank has measured, with their rows."""
        reward, rows = getattr(module, "reward", None), []
        has_tokens = reward is not None and reward.has_tokens
        chosen = self._choose_with_tokens(step.rewards.tolist(), step.group_size) if has_tokens else []
        chosen = [row for row in chosen if row in step.measured]
        step.bring_to_host(chosen)
        for row, columns in zip(step.measured, rollout_rows(step, step.measured), strict=True):
            if row in chosen:
                tokens = module.reward.list_tokens(step, row, module.students)
                columns |= build_token_columns(tokens, module.students)
            rows.append((row, {"step": number, **columns}))
        return rows

    def _choose_with_tokens(self, rewards: list[float], group_size: int) -> list[int]:
        """Return the rows of the completions whose tokens are recorded."""
        if self.tokens != "extremes":
            return list(range(len(rewards))) if self.tokens == "all" else []
        groups = [range(i, i + group_size) for i in range(0, len(rewards), group_size)]
        return sorted({choose(group, key=rewards.__getitem__) for group in groups for choose in (min, max)})

    def _path(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "rollouts.jsonl"


class CompletionsTable(Callback):
    """Show some training completions of each iteration in W&B, as one table; without W&B do nothing.

    W&B keeps whole tables, so each upload has all rows of this session and no iteration replaces another.

    Args:
        every_n_steps: Show completions of every n-th iteration; 0 shows none.
        num_completions: Completions per iteration, evenly spread over its problems and their groups.
    """

    def __init__(self, every_n_steps: int = 1, num_completions: int = 4) -> None:
        if every_n_steps < 0 or num_completions < 1:
            raise InputError(
                "completions.every_n_steps must be >= 0 and num_completions >= 1, but are "
                f"{every_n_steps} and {num_completions}. every_n_steps 0 switches the table off."
            )
        self.every_n_steps = every_n_steps
        self.num_completions = num_completions
        self.rows: list[Row] = []  # of the table
        self.num_new = 0  # rows since the last upload

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not isinstance(batch, PromptBatch) or not self.every_n_steps or step % self.every_n_steps:
            return
        if not self._wandb(trainer):
            return
        rows = gather_rows([{"iteration": step, **row} for row in build_table_rows(batch)], trainer)
        if not trainer.is_global_zero:
            return
        shown = spread_evenly(rows, self.num_completions)
        self.rows = [*self.rows, *shown][-MOST_ROWS:]
        self.num_new += len(shown)
        if self.num_new >= (GROWTH - 1) * (len(self.rows) - self.num_new):
            self._send(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._send(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._send(trainer)

    def _send(self, trainer: Trainer) -> None:
        """Upload the table to W&B if it has new rows."""
        if not self.num_new:
            return
        columns = [*self.rows[0]]
        data = [[row.get(column) for column in columns] for row in self.rows]
        for logger in self._wandb(trainer):
            logger.log_table(TABLE, columns, data, step=self.rows[-1]["iteration"])
        self.num_new = 0

    def _wandb(self, trainer: Trainer) -> list[WandbLogger]:
        return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def build_table_rows(batch: PromptBatch) -> list[Row]:
    """Build one row per completion: its texts, the reward and its terms, and lengths in tokens."""
    rows = []
    step = batch.step
    for rollout, row in zip(step.rollouts(step.logged), rollout_rows(step, step.logged), strict=True):
        shown = {n: v for n, v in row.items() if n not in NOT_SHOWN and not isinstance(v, list)}
        lengths = {
            "closed": rollout.closed,
            "prompt_tokens": len(rollout.problem.teacher_prompt),
            "solution_tokens": len(rollout.problem.solution_ids),
        }
        rows.append({"problem": shown.pop("row"), **shown, **lengths})
    return rows


def gather_rows(rows: list[T], trainer: Trainer) -> list[T]:
    """Return the rows of all ranks on rank 0; on other ranks nothing."""
    if trainer.world_size == 1:
        return rows
    parts: list[list[T]] | None = [[] for _ in range(trainer.world_size)] if trainer.is_global_zero else None
    torch.distributed.gather_object(rows, parts, dst=0)
    return [row for part in parts or [] for row in part]
