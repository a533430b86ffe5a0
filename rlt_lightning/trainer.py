"""The one place where a run is put together: run folder, loggers, checkpoints, completions, callbacks.

Scripts and the command line make the same Trainer:

    script     Trainer(output_dir, callbacks=[…], …)
                 fit, …   enter_run_folder: choose and open the folder, lend it to the datamodule
                          Lightning's method of the same name
    rlt fit    choose and open the folder before any class is made (cli/stages.py)
               Trainer(RunFolder, callbacks of the settings, …)
                 fit      Lightning's method
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from rlt_lightning.callbacks import (
    Alarms,
    Checkpoint,
    CompletionsTable,
    DistillationWriter,
    EvaluationWriter,
    ModelExporter,
    ResponseCallback,
    RolloutCallback,
    RolloutRecorder,
    ScoreWriter,
)
from rlt_lightning.callbacks.checkpoint import MetricsResume
from rlt_lightning.callbacks.interrupt import Interrupted
from rlt_lightning.callbacks.progress import choose_progress_bar
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.datamodules import EvaluationDataModule
from rlt_lightning.environment import (
    TRAINER_DEFAULTS,
    quiet_third_parties,
    require_accelerator,
    require_known_strategy,
    require_models,
    require_one_batch_size,
    require_own_clipping,
)
from rlt_lightning.metrics.catalogue import write_entries
from rlt_lightning.run.folder import (
    RunFolder,
    choose_run_folder,
    lock_folder,
    open_run_folder,
    remove_empty_folders,
)
from rlt_lightning.run.metrics_csv import MetricsCSV
from rlt_lightning.run.ranks import find_global_rank
from rlt_lightning.run.result import FitResult, read_fit_result
from rlt_lightning.types import InputError, as_list

# The callbacks of every run, by the names of their settings: those of `rlt test`, and those of other verbs.
TESTING: dict[str, type[Callback]] = {"rollouts": ResponseCallback, "records": EvaluationWriter}
TRAINING: dict[str, type[Callback]] = {
    "rollouts": RolloutCallback,
    "checkpoint": Checkpoint,
    "export": ModelExporter,
    "recorder": RolloutRecorder,
    "completions": CompletionsTable,
    "alarms": Alarms,
    "scores": ScoreWriter,
    "distillation": DistillationWriter,
}


class Trainer(lightning.pytorch.Trainer):
    """Lightning's Trainer for the modules of this package; a run equals that of `rlt` with the same settings.

    The first verb writes into `output_dir`, and each further one, such as `validate` after `fit`, into a
    folder of its name inside it. `fit` leaves the trained model in `output_dir/model`.

    Args:
        output_dir: The run folder. If it contains a run, resume or overwrite must be set. A RunFolder is
            open already, for the one verb that the trainer then runs.
        resume: Resume the run in output_dir; start it if there is none.
        overwrite: Replace the run in output_dir.
        callbacks: Further callbacks. Every run has those of `TRAINING`, or of `TESTING` for `test`: one of
            these classes replaces the run's own, as `Checkpoint(every_n_train_steps=10)`.
        logger: Further loggers; `metrics.csv` is always written.
        plugins: Further plugins.
        enable_progress_bar: Show Lightning's bar on a terminal, elsewhere a line per iteration.
        enable_checkpointing: Write checkpoints.
        options: All other arguments of `lightning.pytorch.Trainer`, such as max_steps, accelerator, devices.

    Raises:
        InputError: If two callbacks bring completions, the strategy is not known, or a step would be
            several batches.
    """

    def __init__(
        self,
        output_dir: str | Path | RunFolder,
        *,
        resume: bool = False,
        overwrite: bool = False,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | Iterable[Logger] | None = None,
        plugins: Any = None,
        enable_progress_bar: bool | None = True,
        enable_checkpointing: bool | None = True,
        **options: Any,
    ) -> None:
        quiet_third_parties()
        given = as_list(callbacks)
        require_known_strategy(options.get("strategy", "auto"))
        require_one_batch_size(options.get("accumulate_grad_batches", 1))
        require_own_clipping(options.get("gradient_clip_val"))
        require_accelerator(options.get("accelerator", "auto"))
        self._opened = output_dir if isinstance(output_dir, RunFolder) else None
        self.output_dir = output_dir.folder if isinstance(output_dir, RunFolder) else Path(output_dir)
        self.resume, self.overwrite = resume, overwrite
        self._is_open = False
        self._training = complete_callbacks(TRAINING, given)
        self._testing = complete_callbacks(TESTING, given)
        if enable_checkpointing is False:
            # Lightning refuses one that is given.
            self._training = [p for p in self._training if p in given or not isinstance(p, ModelCheckpoint)]
        named = [part for part in given if part not in [*self._training, *self._testing]]
        has_bar = enable_progress_bar is False or any(isinstance(part, ProgressBar) for part in named)
        bar = [] if has_bar else [choose_progress_bar()]
        self._metrics = MetricsCSV(str(self.output_dir))
        super().__init__(
            default_root_dir=self.output_dir,
            enable_progress_bar=enable_progress_bar,
            enable_checkpointing=enable_checkpointing,
            logger=[self._metrics, *as_list(logger)],
            plugins=[FolderCheckpointIO(), *as_list(plugins)],
            callbacks=[*named, *bar, MetricsResume(), *self._training],
            **(TRAINER_DEFAULTS | options),
        )

    @override
    def fit(  # type: ignore[override]
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> FitResult:
        """Train a module on a datamodule: `trainer.fit(module, data)`; ckpt_path may be last or best.

        Returns:
            What the run has learned, the same on every rank: its figures first and last.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the iteration is finished and its checkpoint written. A
                second Ctrl-C ends the process.
        """
        try:
            with self.enter_run_folder("fit", datamodule or train_dataloaders, ckpt_path, model) as path:
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, weights_only)
        except Interrupted as stop:
            if self._opened is not None:
                raise  # `rlt` says how to resume
            raise KeyboardInterrupt(
                f"{stop} To resume it: Trainer({str(self.output_dir)!r}, resume=True)"
            ) from None
        folder = Path(self.default_root_dir)
        # Only rank 0 is sure to see the files that it has just written.
        found = read_fit_result(folder) if self.is_global_zero else FitResult(folder)
        self.fit_result: FitResult = self.strategy.broadcast(found)
        return self.fit_result

    @override
    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Measure held-out rows: `trainer.validate(module, data)`."""
        with self.enter_run_folder("validate", datamodule or dataloaders, ckpt_path, model) as path:
            return super().validate(model, dataloaders, path, verbose, datamodule, weights_only)

    @override
    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Evaluate a student: `trainer.test(EvaluationModule(…), EvaluationDataModule(…))`."""
        with self.enter_run_folder("test", datamodule or dataloaders, ckpt_path, model) as path:
            return super().test(model, dataloaders, path, verbose, datamodule, weights_only)

    @override
    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = False,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | list[list[Any]] | None:
        """Write traces or scores into the run folder: `trainer.predict(module, data)`."""
        with self.enter_run_folder("predict", datamodule or dataloaders, ckpt_path, model) as path:
            options = (datamodule, return_predictions, path, weights_only)
            return super().predict(model, dataloaders, *options)

    @contextmanager
    def enter_run_folder(
        self, verb: str, data: Any, ckpt_path: str | Path | None, module: LightningModule | None = None
    ) -> Iterator[str | None]:
        """Open the folder of a verb, and lend its name to the datamodule; yield the checkpoint to load."""
        if self._opened is None:
            require_models(module)
        path = self._open(verb, None if ckpt_path is None else str(ckpt_path))
        own = self._testing if verb == "test" else self._training
        others = [part for part in self.callbacks if part not in [*self._training, *self._testing]]  # type: ignore[has-type]
        self.callbacks = sorted([*others, *own], key=place_in_order)
        if isinstance(data, EvaluationDataModule) and data.responses is None:
            data.num_samples = next(p.num_samples for p in own if isinstance(p, ResponseCallback))
        lends = getattr(data, "output_dir", "") is None
        if lends:
            data.output_dir = self.default_root_dir
        try:
            yield path
        except BaseException:
            remove_empty_folders()
            raise
        finally:
            if lends:
                data.output_dir = None

    def _open(self, verb: str, ckpt_path: str | None) -> str | None:
        """Open the folder of a verb, unless it is open, and return the checkpoint to load."""
        if self._opened is not None:
            return ckpt_path
        output_dir, again, is_fit = str(self.output_dir), self._is_open, verb == "fit"
        if again:
            choice = choose_run_folder(verb, output_dir, ckpt_path=ckpt_path, overwrite=not is_fit)
            choice = replace(choice, folder=self.output_dir if is_fit else self.output_dir / verb)
        else:
            choice = choose_run_folder(verb, output_dir, "", ckpt_path, self.resume, self.overwrite)
        if find_global_rank() == 0:
            if again and is_fit:  # it continues
                lock_folder(choice.folder)
            else:
                open_run_folder(choice)
            write_entries(choice.folder)
        self._is_open = True
        self._default_root_dir = str(choice.folder)
        metrics = self._metrics if choice.folder == self.output_dir else MetricsCSV(str(choice.folder))
        self.loggers = [metrics if isinstance(log, MetricsCSV) else log for log in self.loggers]
        return choice.ckpt_path


def complete_callbacks(kinds: dict[str, type[Callback]], given: list[Callback]) -> list[Callback]:
    """Return the callbacks of every run: the given ones, and a default one of each other class.

    Raises:
        InputError: If several bring completions.
    """
    found: list[Callback] = []
    for name, kind in kinds.items():
        own = [part for part in given if isinstance(part, kind)]
        if name == "rollouts" and len(own) > 1:
            raise InputError(
                f"Every run has one {kind.__name__}, but callbacks has {len(own)}. Remove all but one."
            )
        found += own or [kind()]
    return found


def place_in_order(callback: Callback) -> int:
    """Return where a callback stands among those of a run: settings are saved once all others checked them.

    Lightning, too, lets checkpoints be written last.
    """
    return 2 if isinstance(callback, ModelCheckpoint) else int(isinstance(callback, SaveConfigCallback))
