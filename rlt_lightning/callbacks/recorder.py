"""Record the completions of training in `rollouts.jsonl`, and some of them in W&B and TensorBoard.

A resumed run repeats the iterations after its checkpoint, so it first drops their rows from the file.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from typing_extensions import override

from rlt_lightning.modules.rollout_rows import build_token_columns, rollout_rows
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.run.jsonl import JsonRow, append_rows, keep_rows
from rlt_lightning.run.ranks import gather_rows


class RolloutRecorder(Callback):
    """Append every training completion with every reward term to `rollouts.jsonl`.

    Args:
        every_n_steps: Record the completions of every n-th iteration; 0 is off.
        tokens: Completions whose tokens are recorded with the student's value of each: every problem's best
            and worst, all, or none.
        shown_rows: Completions of an iteration that W&B gets as the table `completions` and TensorBoard as
            text, spread over its problems; 0 shows none.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        tokens: Literal["extremes", "all", "none"] = "extremes",
        shown_rows: int = 4,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.tokens = tokens
        self.shown_rows = shown_rows

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
        if getattr(batch, "rollouts", None) is None or not self.every_n_steps or step % self.every_n_steps:
            return
        # Each rank records what it has measured: only there are the tokens.
        measured = gather_rows(trainer, self._build_rows(step, batch.step, pl_module))
        rows = [row for _, row in sorted(measured, key=lambda numbered: numbered[0])]
        if trainer.is_global_zero:
            append_rows(self._path(trainer), rows)
            self._show(rows, trainer)

    def _show(self, rows: list[JsonRow], trainer: Trainer) -> None:
        """Send some of an iteration's rows to the dashboards, without the values of single tokens."""
        shown = rows[:: max(1, len(rows) // self.shown_rows)][: self.shown_rows] if self.shown_rows else []
        columns = [name for name, value in (shown or [{}])[0].items() if not isinstance(value, list)]
        data = [[row.get(name) for name in columns] for row in shown]
        for logger in trainer.loggers if data else []:
            if isinstance(logger, WandbLogger):
                logger.log_table("completions", columns, data, step=trainer.global_step)
            elif isinstance(logger, TensorBoardLogger):
                rows = [dict(zip(columns, row, strict=True)) for row in data]
                text = yaml.safe_dump(rows, sort_keys=False, allow_unicode=True)
                # As a block of code in Markdown, which keeps the lines.
                logger.experiment.add_text("completions", indent(text, "    "), trainer.global_step)

    def _build_rows(self, number: int, step: StepBatch, module: Any) -> list[tuple[int, JsonRow]]:
        """Return the records of the completions that this rank has measured, with their rows."""
        reward, rows = getattr(module, "reward", None), []
        has_tokens = reward is not None and reward.has_tokens
        chosen = self._choose_with_tokens(step.rewards.tolist(), step.group_size) if has_tokens else []
        chosen = [row for row in chosen if row in step.measured]
        step.bring_to_host(chosen)
        for row, columns in zip(step.measured, rollout_rows(step, step.measured), strict=True):
            if row in chosen:
                tokens = module.reward.list_tokens(step, row)
                columns |= build_token_columns(tokens, module.student)
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
