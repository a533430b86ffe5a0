"""Resume metrics.csv and the dashboards: the numbers of a run survive a crash."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from rlt_lightning.run.metrics_csv import MetricsCSV
from rlt_lightning.run.wandb_logger import WandbLogger


class MetricsResume(Callback):
    """On resume, keep the rows of metrics.csv, and what TensorBoard shows, up to the checkpoint's step.

    Lightning logs a step after it has written the step's checkpoint, so the checkpoint carries that step's
    row: a kill between the two loses nothing.
    """

    def __init__(self) -> None:
        self.last_row: dict[str, float] = {}
        self.has_resumed = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        names: dict[str, Any] = pl_module.step_metrics  # type: ignore[assignment]
        self.last_row = {name: float(trainer.callback_metrics[name]) for name in names}  # means over ranks

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["step_metrics"] = self.last_row

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.last_row = checkpoint.get("step_metrics", {})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resume(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume a run that was killed after its last checkpoint: it has no step to train any more."""
        if not self.has_resumed:
            self._resume(trainer)

    def _resume(self, trainer: Trainer) -> None:
        self.has_resumed = True
        rows: dict[int, dict[str, str]] = {}  # of metrics.csv, the first logger of every run
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV) and trainer.global_step:
                logger.resume_after(trainer.global_step, self.last_row)
                rows = logger.rows
            elif isinstance(logger, WandbLogger):
                logger.catch_up(rows)
            elif isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                begin_session(logger.experiment, trainer.global_step + 1)


def begin_session(writer: Any, step: int) -> None:
    """Let TensorBoard drop what an earlier session wrote from this step on: it is made again."""
    # Imported here, so that a run without TensorBoard does not load it.
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer.file_writer.add_event(event_pb2.Event(step=step, session_log=start))
