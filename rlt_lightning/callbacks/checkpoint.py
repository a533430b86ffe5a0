"""Write checkpoints that a crash cannot damage, and keep metrics.csv in step with them."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from rlt_lightning.checkpoints.folder import discard, discard_unfinished, name_checkpoint
from rlt_lightning.engines.base import EngineError
from rlt_lightning.run.metrics_csv import MetricsCSV


class Checkpoint(ModelCheckpoint):
    """Keep the newest checkpoints: weights, optimizer, schedule and data position.

    One is also written after the last iteration. Ctrl-C or SIGTERM writes one after the iteration and ends
    the fit. Lightning's ModelCheckpoint, with a monitor, keeps the best beside them.

    Args:
        every_n_train_steps: Iterations between checkpoints; a crash costs at most so many.
        save_top_k: How many of the newest to keep; -1 keeps all. The disk must hold one more.
        train_time_interval: Instead of iterations, the time between checkpoints; 10 minutes if both are None.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        save_top_k: int = 1,
        train_time_interval: timedelta | None = None,
    ) -> None:
        if every_n_train_steps is None and train_time_interval is None:
            train_time_interval = timedelta(minutes=10)
        super().__init__(
            filename="step={step:06d}",
            monitor="step" if save_top_k > 1 else None,  # the newest k have the largest steps
            mode="max",
            auto_insert_metric_name=False,
            save_top_k=save_top_k,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            save_on_train_epoch_end=False,
            enable_version_counter=False,  # a run that went back replaces the later checkpoints
        )
        self.every_n_steps, self.interval = every_n_train_steps, train_time_interval
        self.last_saved_s = 0.0  # on the clock
        self.older_checkpoints: list[Path] = []
        self.num_steps = 0  # of the whole run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write into the run folder, where `last` looks for checkpoints."""
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoints."""
        return Path(str(self.dirpath))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember an earlier run's checkpoints: `last` must not find them after this run's first one.

        Drop what metrics.csv shows of later steps: they are repeated.
        """
        self.last_saved_s = time.monotonic()
        if trainer.is_global_zero:
            discard_unfinished(self.folder)
        self.num_steps = pl_module.total_steps()  # type: ignore[operator]
        keeps_all = self.save_top_k == -1
        self.older_checkpoints = [] if keeps_all else sorted(self.folder.glob("step=*.ckpt"))
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV) and trainer.global_step:
                logger.resume_after(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's hook ignores the time where the module steps its optimizer itself.
        if not trainer.fast_dev_run and self.is_due(trainer):  # type: ignore[attr-defined]
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self.last_saved_s = time.monotonic()
        written = self._last_global_step_saved == trainer.global_step
        if written and self.older_checkpoints and trainer.is_global_zero:
            for path in self.older_checkpoints:
                if path.name != name_checkpoint(trainer.global_step):
                    discard(path)
            self.older_checkpoints = []

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint of the iteration that has just been trained is to be written."""
        step, every = trainer.global_step, self.every_n_steps
        if self._last_global_step_saved == step:
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
        step = trainer.global_step
        if loader is None or not loader.in_use or self._last_global_step_saved == step:
            return
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        # This batch was served and not trained on: serve it again.
        if progress.current.ready > progress.current.processed:
            loader.rewind()
            for count in (progress.current, progress.total):
                count.ready = count.started = count.processed
        trainer.save_checkpoint(self.folder / name_checkpoint(step))
