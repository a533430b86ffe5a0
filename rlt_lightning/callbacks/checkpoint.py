"""Write checkpoints that a crash cannot damage, and keep metrics.csv in step with them."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from rlt_lightning.checkpoints.folder import discard, discard_unfinished, name_checkpoint
from rlt_lightning.engines.base import EngineError
from rlt_lightning.run.metrics_csv import MetricsCSV
from rlt_lightning.types import InputError


class Checkpoint(LightningCheckpoint):
    """Keep the newest checkpoints: weights, optimizer, schedule and data position.

    One is also written after the last iteration. Ctrl-C or SIGTERM writes one after the iteration and ends
    the fit. Lightning's ModelCheckpoint, with a monitor, keeps the best beside them.

    Args:
        every_n_train_steps: Iterations between checkpoints; a crash costs at most so many.
        save_top_k: How many of the newest to keep; -1 keeps all. The disk must hold one more.
        train_time_interval: Instead of iterations, the time between checkpoints; 10 minutes if both are None.
    """

    # `setup` sets it.
    folder: Path

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        save_top_k: int = 1,
        train_time_interval: timedelta | None = None,
    ) -> None:
        both = every_n_train_steps is not None and train_time_interval is not None
        if both or save_top_k < -1 or (every_n_train_steps or 1) < 1:
            raise InputError(
                "checkpoint.every_n_train_steps must be at least 1, or train_time_interval set in its place, "
                f"and save_top_k at least -1, but they are {every_n_train_steps}, {train_time_interval} and "
                f"{save_top_k}. Correct them."
            )
        if every_n_train_steps is None and train_time_interval is None:
            train_time_interval = timedelta(minutes=10)
        self.save_top_k = save_top_k
        self.every_n_steps, self.interval = every_n_train_steps, train_time_interval
        self.saved_step = 0  # the optimizer step of the newest checkpoint
        self.last_saved_s = 0.0  # on the clock
        self.written: list[Path] = []  # in this fit, the newest last
        self.older: list[Path] = []  # of an earlier run
        self.num_steps = 0  # of the whole run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write into the run folder, where `last` looks for checkpoints."""
        self.folder = Path(trainer.default_root_dir) / "checkpoints"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember an earlier run's checkpoints: `last` must not find them after this run's first one.

        Drop what metrics.csv shows of later steps: they are repeated.
        """
        self.last_saved_s = time.monotonic()
        if trainer.is_global_zero:
            discard_unfinished(self.folder)
        self.num_steps = pl_module.total_steps()  # type: ignore[operator]
        self.saved_step, self.written = 0, []
        self.older = sorted(self.folder.glob("step=*.ckpt"))
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV) and trainer.global_step:
                logger.resume_after(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fast_dev_run or not self.is_due(trainer):  # type: ignore[attr-defined]
            return
        self.save(trainer)
        if self.save_top_k == -1 or not trainer.is_global_zero:
            return
        for path in [*self.older, *self.written[: -self.save_top_k]]:
            if path != self.written[-1]:
                discard(path)
        self.older, self.written = [], self.written[-self.save_top_k :]

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint of the last finished iteration; all ranks call this together."""
        path = self.folder / name_checkpoint(trainer.global_step)
        trainer.save_checkpoint(path)
        self.written.append(path)
        self.saved_step, self.last_saved_s = trainer.global_step, time.monotonic()

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint of the iteration that has just been trained is to be written."""
        step, every = trainer.global_step, self.every_n_steps
        if not self.save_top_k or self.saved_step == step:
            return False
        if (every and step % every == 0) or step >= self.num_steps or trainer.should_stop:
            return True
        if self.interval is None:
            return False
        waited_s = time.monotonic() - self.last_saved_s
        return bool(trainer.strategy.broadcast(waited_s >= self.interval.total_seconds()))

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the step's row: Lightning logs it after its checkpoint, and a run may end in between."""
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.log_metrics(pl_module.step_metrics, trainer.global_step)  # type: ignore[arg-type]
                logger.save()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """When sampling fails, save the last finished iteration, whatever `every_n_train_steps` is."""
        if isinstance(exception, EngineError) and trainer.state.fn == TrainerFn.FITTING:
            self.save_finished_iteration(trainer)

    def save_finished_iteration(self, trainer: Trainer) -> None:
        """Write a checkpoint of the last finished iteration, unless there is one or none was finished.

        All ranks call this together; `Interrupt` does so before it stops them.
        """
        loader: Any = trainer.train_dataloader
        if loader is None or not loader.in_use or self.saved_step == trainer.global_step:
            return
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        # This batch was served and not trained on: serve it again.
        if progress.current.ready > progress.current.processed:
            loader.rewind()
            for count in (progress.current, progress.total):
                count.ready = count.started = count.processed
        self.save(trainer)
