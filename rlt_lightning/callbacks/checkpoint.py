"""Write checkpoints that a crash cannot damage; on resume, continue metrics.csv and dashboards from one."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from rlt_lightning.callbacks.evaluate_every import EvaluateEvery
from rlt_lightning.checkpoints.folder import (
    discard,
    discard_unfinished,
    name_checkpoint,
    read_best,
    write_best,
)
from rlt_lightning.console import announce, announce_writing
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.engines.base import EngineError
from rlt_lightning.models.weights import trained_parameters, weights_size
from rlt_lightning.run.interrupt import Interrupted
from rlt_lightning.run.metrics_csv import MetricsCSV
from rlt_lightning.types import InputError


class Checkpoint(ModelCheckpoint):
    """Keep the newest checkpoints and the best: weights, optimizer, schedule and data position.

    One is also written after the last iteration, and after each that brings a score to choose the best by;
    `best.json` beside them names the best. Ctrl-C or SIGTERM writes one after the iteration and ends the fit;
    a validation that a kill has prevented after a checkpoint is made up for on resume.

    Args:
        every_n_train_steps: Iterations between checkpoints; a crash costs at most so many.
        save_top_k: How many of the newest to keep; -1 keeps all. The disk must hold one more.
        train_time_interval: Instead of iterations, the time between checkpoints; 10 minutes if both are None.
        monitor: Metric that decides which is the best: of the validation, such as reward/val_mean, or of
            EvaluateEvery, such as eval/SET/pass_at_1; None: no best.
        mode: Whether the largest or the smallest value is the best.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        save_top_k: int = 1,
        train_time_interval: timedelta | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if monitor is not None and save_top_k == 0:
            raise InputError(
                "checkpoint.monitor needs checkpoints, but save_top_k is 0. Raise it, or drop one."
            )
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
        self.older_checkpoints: list[Path] = []
        # The metrics of the step that training resumes from.
        self.resumed_metrics: dict[str, float] = {}
        self.best_metric = monitor
        self.best_mode = mode
        self.best: dict[str, Any] = {}  # what best.json holds
        # Whether a validation was due after the checkpoint that training resumes from, and is still to come.
        self.owes_validation = False
        self.num_steps = 0  # of the whole run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write into the run folder, where `last` and `best` look for checkpoints."""
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.best_metric is not None:
            self._require_scores(trainer, pl_module, self.best_metric)

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoints."""
        return Path(str(self.dirpath))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember an earlier run's checkpoints: `last` must not find them after this run's first one."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            discard_unfinished(self.folder)
        self.num_steps = pl_module.total_steps()  # type: ignore[operator]
        self._resume_best(trainer)
        keeps_all = self.save_top_k == -1
        self.older_checkpoints = [] if keeps_all else sorted(self.folder.glob("step=*.ckpt"))
        if self.is_evaluated and self._is_written(trainer.global_step):
            # A kill may have come between this checkpoint and best.json.
            self._consider(trainer, self.resumed_metrics.get(str(self.best_metric), math.nan))

    def _resume_best(self, trainer: Trainer) -> None:
        """Read which checkpoint is the best, unless this run monitors something else, or began before it."""
        self.best = read_best(self.folder)
        if self.best.get("step", 0) > trainer.global_step or self.best.get("monitor") != self.best_metric:
            self.best = {}

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Run a validation that a killed run has missed."""
        if self.owes_validation:
            self._make_up_validation(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's own hook ignores the time where the module steps its optimizer itself.
        if not self._should_skip_saving_checkpoint(trainer) and self._is_due(trainer, pl_module):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self._last_time_checked = time.monotonic()
        written = self._last_global_step_saved == trainer.global_step
        if written and self.older_checkpoints and trainer.is_global_zero:
            kept = (name_checkpoint(trainer.global_step), self.best.get("checkpoint"))
            for path in self.older_checkpoints:
                if path.name not in kept:
                    discard(path)
            self.older_checkpoints = []
        if self.is_evaluated and self.best_metric in pl_module.step_metrics:  # type: ignore[operator]
            self._consider(trainer, float(trainer.callback_metrics[str(self.best_metric)]))

    def _is_due(self, trainer: Trainer, module: Any) -> bool:
        """Return whether a checkpoint of the iteration that has just been trained is to be written."""
        step, every = trainer.global_step, self._every_n_train_steps
        if self.is_evaluated:
            is_scored = self.best_metric in module.step_metrics
        else:
            is_scored = self.best_metric is not None and is_validation_next(trainer)
        if is_scored or (every and step % every == 0) or step >= self.num_steps or trainer.should_stop:
            return True
        if self._train_time_interval is None:
            return False
        waited_s = time.monotonic() - (self._last_time_checked or 0.0)
        return bool(trainer.strategy.broadcast(waited_s >= self._train_time_interval.total_seconds()))

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Record whether a validation follows, since the run may be killed before it."""
        checkpoint["validation_follows"] = is_validation_next(trainer)

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the score of the checkpoint to resume from, and whether a validation follows it."""
        self.resumed_metrics = checkpoint.get("step_metrics", {})
        self.owes_validation = checkpoint.get("validation_follows", False)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the validation missed by a run that was killed after its last checkpoint: no step is left."""
        if self.owes_validation:
            self._resume_best(trainer)
            self._make_up_validation(trainer)

    def _make_up_validation(self, trainer: Trainer) -> None:
        """Run the validation of the step that training resumes from, unless metrics.csv has its figures."""
        self.owes_validation = False
        rows = [
            log.rows.get(trainer.global_step, {}) for log in trainer.loggers if isinstance(log, MetricsCSV)
        ]
        is_missing = bool(rows) and not any("/val_" in name for row in rows for name in row)
        if not trainer.strategy.broadcast(is_missing):
            return
        announce(f"validating iteration {trainer.global_step}, after which the run was stopped")
        run_validation(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name this step's checkpoint as the best if its score is, then delete the former best."""
        super().on_validation_end(trainer, pl_module)
        if self.best_metric is None or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if self.is_evaluated:
            return
        if self.best_metric not in trainer.callback_metrics:
            names = ", ".join(sorted(name for name in trainer.callback_metrics if "/val" in name))
            raise InputError(
                f"checkpoint.monitor must be a metric of the validation, but is {self.best_metric}. Set it "
                f"to one of {names}."
            )
        self._consider(trainer, float(trainer.callback_metrics[self.best_metric]))

    @property
    def is_evaluated(self) -> bool:
        """Return whether scores come from EvaluateEvery; otherwise they come from validations."""
        return self.best_metric is not None and self.best_metric.startswith("eval/")

    def _is_written(self, step: int) -> bool:
        return (self.folder / name_checkpoint(step)).is_dir()

    def _require_scores(self, trainer: Trainer, module: Any, metric: str) -> None:
        """Check, before any model is loaded, that the monitored metric will come.

        Raises:
            InputError: If nothing brings it.
        """
        if not self.is_evaluated:
            if not get_stratos_data(trainer).val_items:
                raise InputError(
                    f"checkpoint.monitor {metric} needs held-out rows, but there are none. Set "
                    "data.val_rows or data.val_source."
                )
            return
        found = [c for c in trainer.callbacks if isinstance(c, EvaluateEvery)]  # type: ignore[attr-defined]
        if not found:
            raise InputError(
                f"checkpoint.monitor {metric} needs EvaluateEvery in trainer.callbacks, but it is not there. "
                "Add --config add/evaluate_every (docs/evaluate.md)."
            )
        every = [callback.every_n_steps for callback in found if metric in callback.names]
        if not every:
            names = ", ".join(name for callback in found for name in callback.names if "pass_at_1" in name)
            raise InputError(
                f"checkpoint.monitor must be a metric that EvaluateEvery logs, but is {metric}. Set it to "
                f"one of {names}."
            )

    def _consider(self, trainer: Trainer, score: float) -> None:
        """Name this step's checkpoint as the best if its score is, then delete the former best."""
        previous, step = self.best, trainer.global_step
        sign = 1 if self.best_mode == "max" else -1
        if not math.isfinite(score) or (previous and sign * (score - previous["score"]) <= 0):
            return
        self.best = {"checkpoint": name_checkpoint(step), "step": step}
        self.best |= {"monitor": self.best_metric, "score": score}
        if trainer.is_global_zero:
            write_best(self.folder, self.best)
            newest = [Path(path).name for path in (self.best_model_path, *self.best_k_models)]
            if previous and self.save_top_k != -1 and previous["checkpoint"] not in newest:
                discard(self.folder / previous["checkpoint"])

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        policy: Any = getattr(trainer.lightning_module, "policy", None)
        if policy is not None:
            trained = (parameter for _, parameter in trained_parameters(policy))
            announce_writing(Path(filepath), 3 * weights_size(trained))  # AdamW has two moments
        super()._save_checkpoint(trainer, filepath)

    @override
    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if Path(filepath).name != self.best.get("checkpoint"):
            super()._remove_checkpoint(trainer, filepath)

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
        self._save_checkpoint(trainer, str(self.folder / name_checkpoint(step)))


def is_validation_next(trainer: Trainer) -> bool:
    """Return whether Lightning validates after the iteration that has just been trained."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    progress: Any = loop.batch_progress.current
    if fetcher is None or progress.ready != progress.processed or not sum(trainer.num_val_batches):
        return False
    return bool(trainer.enable_validation and loop._should_check_val_fx(fetcher))


def run_validation(trainer: Trainer) -> None:
    """Validate in the middle of a fit, as Lightning does after an iteration."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    first_iteration, stage = connector._first_loop_iter, trainer.state.stage
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.state.stage = stage
    connector._first_loop_iter = first_iteration


class MetricsResume(Callback):
    """On resume, keep what metrics.csv and TensorBoard show up to the checkpoint's step.

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
        """Continue the files also if the run was killed after its last checkpoint, and no step is left."""
        if not self.has_resumed:
            self._resume(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the row of the iteration after which a signal stopped the run: Lightning logs too late."""
        if isinstance(exception, Interrupted):
            for logger in trainer.loggers:
                if isinstance(logger, MetricsCSV):
                    logger.log_metrics(self.last_row, trainer.global_step)

    def _resume(self, trainer: Trainer) -> None:
        self.has_resumed = True
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV) and trainer.global_step:
                logger.resume_after(trainer.global_step, self.last_row)
            elif isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                begin_tensorboard_session(logger.experiment, trainer.global_step + 1)


def begin_tensorboard_session(writer: Any, step: int) -> None:
    """Let TensorBoard drop what an earlier session wrote from this step on, since it is repeated."""
    # Imported here, so that a run without TensorBoard does not load it.
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer.file_writer.add_event(event_pb2.Event(step=step, session_log=start))
