"""Checkpoints that a crash cannot spoil."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from rlt_lightning.checkpoints import discard, discard_unfinished
from rlt_lightning.engines.base import EngineError


class Checkpoint(ModelCheckpoint):
    """Keep the newest checkpoints of the trained weights, optimizer, schedule and data position.

    Args:
        dirpath: Folder; the run's `checkpoints/` by default.
        every_n_train_steps: Optimizer steps between checkpoints: what a crash can cost.
        save_top_k: How many of the newest to keep; -1 keeps all.
        train_time_interval: Instead of steps, the time between checkpoints.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every_n_train_steps: int | None = 1,
        save_top_k: int = 1,
        train_time_interval: timedelta | None = None,
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename="step={step:06d}",
            monitor="step" if save_top_k > 1 else None,  # the newest k are those with the largest step
            mode="max",
            auto_insert_metric_name=False,
            save_top_k=save_top_k,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            save_on_train_epoch_end=False,
        )
        self.superseded: list[Path] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember what an earlier run left: `last` must not find it once this run has checkpoints."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            discard_unfinished(Path(str(self.dirpath)))
        keeps_all = self.save_top_k == -1
        self.superseded = [] if keeps_all else sorted(Path(str(self.dirpath)).glob("step=*.ckpt"))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        written = self._last_global_step_saved == trainer.global_step
        if written and self.superseded and trainer.is_global_zero:
            newest = Path(str(self.dirpath)) / f"step={trainer.global_step:06d}.ckpt"
            for path in self.superseded:
                if path != newest:
                    discard(path)
            self.superseded = []

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """When rollouts fail, keep the last finished iteration, whatever `every_n_train_steps` is."""
        if not isinstance(exception, EngineError) or trainer.state.fn != TrainerFn.FITTING:
            return
        loader: Any = trainer.train_dataloader
        if loader is None or not loader.in_use:
            return  # nothing was done: the checkpoint that the run came from is the last finished iteration
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready > progress.completed:  # this iteration's batch is taken, and to be taken again
            loader.rewind()
        self.save_on_exception = True
        super().on_exception(trainer, pl_module, exception)
