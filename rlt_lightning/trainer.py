"""Lightning's Trainer with what every run of this project has: a folder, callbacks, checkpoints, metrics.csv.

None of it is needed to train: an unmodified `lightning.Trainer` with a RolloutCallback is enough
(docs/extend.md). Scripts and the command line make the same Trainer:

    script     Trainer(output_dir, callbacks=[…], …)
                 fit, …   enter_run_folder: choose and open the folder, lend it to the datamodule
                          Lightning's method of the same name
    rlt fit    choose and open the folder before any class is made (cli/stages.py)
               Trainer(RunFolder, callbacks of the settings, …)
                 fit      Lightning's method
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from rlt_lightning.callbacks import (
    Alarms,
    Checkpoint,
    DistillationWriter,
    EvaluationWriter,
    ModelExporter,
    ResponseCallback,
    RolloutCallback,
    RolloutRecorder,
)
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.checkpoints.run_folder import RunFolder, choose_run_folder, open_run_folder
from rlt_lightning.modules.checks import require_strategy
from rlt_lightning.run.metrics_csv import MetricsCSV
from rlt_lightning.run.ranks import find_global_rank, join_nodes, require_processes
from rlt_lightning.types import InputError, as_list, naming_full_disk

# The callbacks of every run, by the names of their settings: of `rlt test`, and of other verbs.
TESTING: dict[str, type[Callback]] = {"rollouts": ResponseCallback, "records": EvaluationWriter}
TRAINING: dict[str, type[Callback]] = {
    "rollouts": RolloutCallback,
    "checkpoint": Checkpoint,
    "export": ModelExporter,
    "recorder": RolloutRecorder,
    "alarms": Alarms,
    "distillation": DistillationWriter,
}
# Arguments of Lightning's Trainer that a run has unless others are set.
TRAINER_DEFAULTS: dict[str, Any] = {
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # our loader distributes the rows itself
}
# Warnings of other packages that say nothing about the user's run.
IGNORED_WARNINGS = (
    # Our loaders make batches of lists and want no workers.
    ".*does not have many workers.*",
    # Our checkpoint callback saves at the end of a step.
    ".*Using `?ModelCheckpoint`? with manual optimization.*",
    # The folder of a resumed run is not empty.
    ".*exists and is not empty.*",
    ".*have overridden `transfer_batch_to_device`.*",
    # No validation set was asked for.
    ".*Total length of `list` across ranks is zero.*",
    ".*defined a `validation_step` but have no `val_dataloader`.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
)
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # Of wandb: command line, terminal output, code, host and git remote stay here: each may hold a secret.
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_HOST": "-",
    "WANDB_X_DISABLE_META": "true",
}


def quiet_third_parties() -> None:
    """Silence tips, hardware lists and warnings that say nothing about the user's run."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed warns
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # It tells of a kernel that it has not found, even where nothing is quantised.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for pattern in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", pattern)


def in_run_folder(verb: str) -> Any:
    """Return Lightning's method of a verb, run in the folder of the run."""
    method: Callable[..., Any] = getattr(lightning.pytorch.Trainer, verb)

    @wraps(method)
    def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        call = signature(method).bind(self, *args, **kwargs)
        given = call.arguments
        data = given.get("datamodule") or given.get("train_dataloaders", given.get("dataloaders"))
        with self.enter_run_folder(verb, data, given.get("ckpt_path")) as given["ckpt_path"]:
            return method(*call.args, **call.kwargs)

    return run


class Trainer(lightning.pytorch.Trainer):
    """Lightning's Trainer for the modules of this package; a run equals that of `rlt` with the same settings.

    All verbs of a trainer write into `output_dir`. `fit` leaves the trained model in `output_dir/model`. The
    first Ctrl-C stops a fit with SystemExit(130) once its iteration is finished and its checkpoint written;
    SIGTERM does so with SystemExit(143).

    Args:
        output_dir: The run folder. If it contains a run, resume or overwrite must be set. A RunFolder is
            open already, for the one verb that the trainer then runs.
        resume: Resume the run in output_dir; start it if there is none.
        overwrite: Replace the run in output_dir.
        options: Arguments of `lightning.pytorch.Trainer`. `callbacks` add to those of `TRAINING`, or of
            `TESTING` for `test`, or replace one of the same class; `logger` and `plugins` add to the run's
            own.

    Raises:
        InputError: If a callback of every run is there twice, or a strategy does not work.
    """

    fit, validate, test, predict = map(in_run_folder, ("fit", "validate", "test", "predict"))

    def __init__(
        self,
        output_dir: str | Path | RunFolder,
        *,
        resume: bool = False,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        quiet_third_parties()
        options = TRAINER_DEFAULTS | options
        if options.get("barebones"):
            raise InputError("trainer.barebones would leave out checkpoints and metrics. Remove it.")
        join_nodes(int(options.get("num_nodes") or 1))
        self._opened = output_dir if isinstance(output_dir, RunFolder) else None
        self.output_dir = output_dir.folder if isinstance(output_dir, RunFolder) else Path(output_dir)
        self.resume, self.overwrite = resume, overwrite
        self._is_open = False
        named = as_list(options.pop("callbacks", None))
        missing = build_missing(named, with_checkpoints=options.get("enable_checkpointing") is not False)
        if options.get("enable_progress_bar") is not False and not any(
            isinstance(part, ProgressBar) for part in named
        ):
            named.append(TQDMProgressBar())  # Lightning's choice, Rich's, shows nothing in a log
        self._metrics = MetricsCSV(str(self.output_dir))
        options["logger"] = [self._metrics, *as_list(options.get("logger"))]
        options["plugins"] = [FolderCheckpointIO(), *as_list(options.get("plugins"))]
        # Lightning moves Checkpoint behind all others.
        options["callbacks"] = [*named, *missing]
        super().__init__(default_root_dir=self.output_dir, **options)
        require_strategy(self.strategy)
        require_processes(self)
        for logger in self.loggers:
            if isinstance(logger, WandbLogger) and find_global_rank() == 0:
                log_in(logger)

    @contextmanager
    def enter_run_folder(self, verb: str, data: Any, ckpt_path: str | Path | None) -> Iterator[str | None]:
        """Open the run folder, and lend its name to the datamodule; yield the checkpoint to load."""
        path = None if ckpt_path is None else str(ckpt_path)
        if self._opened is None:
            path = self._open(verb, path)
        lends = getattr(data, "output_dir", "") is None
        if lends:
            data.output_dir = self.default_root_dir
        names = name_wandb_run(Path(self.default_root_dir))
        os.environ.update(names)
        try:
            with naming_full_disk(Path(self.default_root_dir)):
                yield path
        finally:
            for name in names:
                os.environ.pop(name, None)
            if lends:
                data.output_dir = None

    def _open(self, verb: str, ckpt_path: str | None) -> str | None:
        """Open the run folder with the first verb, and return the checkpoint to load."""
        output_dir, is_first = str(self.output_dir), not self._is_open
        choice = choose_run_folder(verb, output_dir, "", ckpt_path, self.resume and is_first, self.overwrite)
        if is_first:
            if find_global_rank() == 0:
                open_run_folder(choice)
            self._default_root_dir = str(choice.folder)
            self._metrics.path = choice.folder / "metrics.csv"
        self._is_open = True
        return choice.ckpt_path


def log_in(logger: WandbLogger) -> None:
    """Log in to W&B now, not once rows and models are there, and say what Lightning's logger would not."""
    import wandb

    if logger._log_model:
        rank_zero_warn(
            "WandbLogger's log_model uploads nothing: it takes checkpoints of one file, and these are "
            "folders. Upload the run's model/ by `wandb artifact put --type model`."
        )
    try:
        if not logger._offline and os.environ.get("WANDB_MODE", "online") == "online":
            wandb.login(verify=False)
    except wandb.Error as error:
        raise InputError(f"WandbLogger: {error} Or set WANDB_MODE=offline.") from error


def name_wandb_run(folder: Path) -> dict[str, str]:
    """Return the environment that names a W&B run after its folder, in the group of the folder's parent.

    A resumed run continues one. What is set by the user stays.
    """
    folder = folder.absolute()
    names = {"WANDB_NAME": folder.name, "WANDB_RUN_GROUP": folder.parent.name}
    for path in sorted(folder.glob("wandb/*run-*-*"))[:1]:
        names["WANDB_RUN_ID"] = path.name.rpartition("-")[2]
    return {name: value for name, value in names.items() if name not in os.environ}


def build_missing(named: list[Callback], with_checkpoints: bool) -> list[Callback]:
    """Return the callbacks that every run has and that are not named, with their defaults.

    Each is idle in the verbs that are not its own.

    Raises:
        InputError: If one is there twice, as where a config names it besides its section.
    """
    missing = []
    for kind in (*TRAINING.values(), *TESTING.values()):
        number = sum(isinstance(part, kind) for part in named)
        if number > 1:
            raise InputError(
                f"A run has one {kind.__name__}, but callbacks has {number}. Remove all but one; in a config "
                "set its section instead."
            )
        if not number and (with_checkpoints or kind is not Checkpoint):
            missing.append(kind())
    return missing
