"""Run `rlt fit|validate|predict|test` by Lightning's command line, in this order.

parse_arguments               read the configs and options; --seed sets the seeds
before_instantiate_classes    choose and make the run folder (checkpoints/run_folder.py)
instantiate_trainer           make the Trainer (trainer.py)
SaveConfig                    write config.yaml, before the models are loaded; of a run that resumes, once
                              its checkpoint is
after_fit, after_predict      print where the results are, and the next command
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeTuple,
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.optim import Optimizer

from rlt_lightning.checkpoints.run_folder import (
    RunFolder,
    choose_run_folder,
    compare_settings,
    is_within,
    open_run_folder,
    read_settings,
)
from rlt_lightning.cli.parser import ConfigParser
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.models.weights import trained_parameters
from rlt_lightning.modules import EvaluationModule
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.run import __version__
from rlt_lightning.run.ranks import find_global_rank
from rlt_lightning.run.redaction import redact
from rlt_lightning.run.shipped import read_next_command
from rlt_lightning.trainer import TESTING, TRAINER_DEFAULTS, TRAINING, Trainer
from rlt_lightning.types import InputError, as_list, first_line

TRAINER_VERBS = LightningCLI.subcommands()
# Settings of the data that the run sets from those of its module or engine; with their defaults.
DERIVED_SETTINGS = {"tokenizer": None, "student_tokenizer": None, "teacher_tokenizer": None, "num_samples": 1}
SEEDS = ("seed_everything", "data.init_args.seed", "model.init_args.seed", "rollouts.seed")
# The first process names the run folder in this environment variable for the processes that it starts.
RUN_FOLDER = "RLT_RUN_FOLDER"


class SaveConfig(SaveConfigCallback):
    """Write the resolved configuration to `config.yaml` in the run folder, and show it where metrics go."""

    def setup(self, trainer: lightning.pytorch.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that all ranks have found the same checkpoint, then write the file, unless a run resumes."""
        found = self.config.ckpt_path
        if (first := trainer.strategy.broadcast(found)) != found:
            raise InputError(
                f"All ranks must load the same checkpoint, but rank 0 found {first} and rank "
                f"{trainer.global_rank} found {found}. The nodes' shared disk shows changes late: start "
                "again in a minute."
            )
        if not (stage == "fit" and is_within(Path(trainer.default_root_dir), found)):
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: lightning.pytorch.Trainer, pl_module: LightningModule) -> None:
        """Write the file of a run that resumes: only now has its checkpoint been accepted."""
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: lightning.pytorch.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file, on rank 0."""
        path = Path(trainer.default_root_dir) / "config.yaml"
        # A kill must not leave half a file, from which a run would be resumed, explained or tested.
        scratch = path.with_suffix(".tmp")
        # What was parsed has been validated.
        options = {"skip_unset": False, "skip_validation": True, "overwrite": True, "multifile": False}
        config = self.forget_resumption(path.parent)
        self.parser.save(config, str(scratch), **options)
        scratch.replace(path)
        settings = redact(yaml.safe_load(path.read_text())) | {"version": __version__}
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)

    def forget_resumption(self, folder: Path) -> Namespace:
        """Return the settings without resume, overwrite and a checkpoint of this folder.

        A run that is repeated from them must not resume or replace what lies in its folder. If the first
        start had the checkpoint of another run, that stays.
        """
        config = self.config.clone()
        config.resume = config.overwrite = False
        if is_within(folder, config.get("ckpt_path")):
            path = folder / "config.yaml"
            first = yaml.safe_load(path.read_text()).get("ckpt_path") if path.exists() else None
            config.ckpt_path = None if is_within(folder, first) else first
        return config


class RLTCommandLine(LightningCLI):
    """`rlt fit|validate|predict|test --config FILE [--config OVERLAY …] [--KEY VALUE …]`."""

    # The exit status of the process.
    status = 0
    # The run folder with its checkpoint, once it is open.
    choice: RunFolder

    def __init__(self, args: Sequence[str] | None = None) -> None:
        """Run a command line.

        Args:
            args: The verb and its options; None: those of the process.
        """
        self.typed_verb, *self.words = (sys.argv[1:] if args is None else args) or [""]
        is_test = self.typed_verb == "test"
        self.run_callbacks = TESTING if is_test else TRAINING
        super().__init__(
            EvaluationModule if is_test else PolicyModule,
            EvaluationDataModule if is_test else StratosDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=ConfigParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=None if args is None else [*args],
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the verb that was typed: building the parsers of the others takes time."""
        verb = self.typed_verb
        return {verb: TRAINER_VERBS[verb]} if verb in TRAINER_VERBS else TRAINER_VERBS

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and the callbacks that every run has."""
        parser.add_argument(
            "--output_dir", type=str | None, default=None, help="Run folder; runs/<config>-<time> by default."
        )
        parser.add_argument(
            "--overwrite", type=bool, default=False, help="Replace the run that lies in output_dir."
        )
        parser.add_argument(
            "--resume",
            type=bool,
            default=False,
            help="Resume the run in output_dir after what it has finished; start it if there is none.",
        )
        parser.add_argument(
            "--seed",
            type=NonNegativeInt | None,
            default=None,
            help="Set the seeds of data, model, rollouts and all else; --data.seed and the like override it.",
        )
        for name, kind in self.run_callbacks.items():
            parser.add_lightning_class_args(kind, name)
        if self.typed_verb != "test":
            parser.add_optimizer_args((Optimizer,))
            parser.add_lr_scheduler_args(LRSchedulerTypeTuple)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line, and let --seed set the other seeds."""
        for word in self.words:
            if match := re.match(r"--data(?:\.init_args)?\.sets\.[\w-]+\.", word):
                raise InputError(
                    f"An option must give all fields of a set, since jsonargparse drops the others, but "
                    f"{match.group()} names one. Change the set in a config."
                )
        self.config = parser.parse_args([*self.subcommands(), *self.words])
        config = self.config[self.config.subcommand]
        self.spread_seed(config)
        for name, default in DERIVED_SETTINGS.items():
            if config.data.init_args.get(name, default) != default:
                raise InputError(f"data.{name} follows from model or rollouts. Remove it.")

    def spread_seed(self, config: Namespace) -> None:
        """Set every seed of this verb and its classes, except those that the command line names."""
        if config.seed is None:
            return
        options = {word.partition("=")[0].replace(".init_args", "") for word in self.words}
        for name in SEEDS:
            if name in config and f"--{name.replace('.init_args', '')}" not in options:
                config[name] = int(config.seed)
        # A run repeated from config.yaml would let it override a seed that was an option.
        config.seed = None

    def before_instantiate_classes(self) -> None:
        """Choose and make the run folder before anything is built."""
        config = self.config[self.subcommand]
        verb = str(self.subcommand)
        default = "" if config.output_dir else self.name_run_folder(config.config)
        options = (config.get("ckpt_path"), config.resume, config.overwrite)
        self.choice = choice = choose_run_folder(verb, config.output_dir, default, *options)
        folder = choice.folder
        config.output_dir, config.ckpt_path = str(folder), choice.ckpt_path
        config.overwrite = choice.overwrite
        if find_global_rank() == 0:
            if choice.resume:
                settings = yaml.safe_load(self.parser.dump(self.config, skip_validation=True))[verb]
                compare_settings(folder, settings, verb)
            open_run_folder(choice)
        # The config.yaml of a run names its folder here and as the save_dir of its loggers.
        before, config.trainer.default_root_dir = config.trainer.default_root_dir, str(folder)
        for logger in as_list(config.trainer.logger):
            if hasattr(logger, "init_args") and logger.init_args.get("save_dir") in (None, ".", before):
                logger.init_args.save_dir = str(folder)

    def name_run_folder(self, configs: list[Any] | None) -> str:
        """Name a run after its config and the time; processes that this one starts inherit the name."""
        launched = SLURMEnvironment.detect() or os.environ.get("WORLD_SIZE", "1") != "1"
        # Each process would choose another name.
        if launched and RUN_FOLDER not in os.environ:
            raise InputError("A run that a launcher starts in several processes needs --output_dir. Set it.")
        name = Path(str(configs[0])).stem if configs else str(self.subcommand)
        return os.environ.setdefault(RUN_FOLDER, f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def instantiate_trainer(self, **kwargs: Any) -> lightning.pytorch.Trainer:
        """Build this package's Trainer, which adds what every run has and no config needs to name."""
        self.use_optimizer()
        del self.config_init[self.subcommand].trainer["default_root_dir"]  # the run folder
        # Until here it was Lightning's, its base class, whose settings the parser shows.
        self.trainer_class = Trainer
        return super().instantiate_trainer(output_dir=self.choice, **kwargs)

    def use_optimizer(self) -> None:
        """Let --optimizer replace AdamW; Lightning would build it now, before there are weights."""
        settings = self.config_init[self.subcommand]
        optimizer, schedule = settings.get("optimizer"), settings.get("lr_scheduler")
        if schedule and (not optimizer or schedule["class_path"].endswith(".ReduceLROnPlateau")):
            raise InputError(
                "lr_scheduler must be one of torch.optim.lr_scheduler that follows steps and not a metric, "
                f"of an optimizer that is set too, but is {schedule['class_path']} of "
                f"{optimizer and optimizer['class_path']}. Set optimizer, or model.optimizer.scheduler."
            )
        if optimizer:
            module: Any = self.model
            module.optimizer_name = optimizer["class_path"]
            module.configure_optimizers = partial(build_named, module, optimizer, schedule)

    def _parse_ckpt_path(self) -> None:
        """Do not let a checkpoint's hyper-parameters override the command line, as Lightning would."""

    def after_fit(self) -> None:
        """Print where the results are, and the next command."""
        self.after_predict()
        if self.trainer.is_global_zero:
            print(f"See it: rlt report {shlex.quote(str(self.choice.folder))}")

    def after_predict(self) -> None:
        """Print where the scores or traces are, and the next command."""
        if self.trainer.is_global_zero:
            print(f"\nDone: {self.choice.folder}")
            config = self.config[self.subcommand]
            configs = [Path(str(path)) for path in config.config or []]
            source = config.data.init_args.get("source")
            chosen = isinstance(source, str) and any(word.startswith("--data.source") for word in self.words)
            options = (find_strategy(config), source if chosen else None)
            if command := read_next_command(configs, self.choice.folder, *options):
                print(f"Next: {command}")


def find_strategy(config: Namespace) -> str:
    """Return the strategy of a run or, if it has none, of the run that trained its teacher."""
    strategy, teacher = config.trainer.strategy, config.model.init_args.get("teacher")
    if strategy == "auto" and teacher:
        strategy = read_settings(Path(teacher).parent).get("trainer", {}).get("strategy")
    return str(strategy)


def build_named(module: PolicyModule, optimizer: Any, schedule: Any) -> Any:
    """Return the optimizer of the settings for the trained weights, with its schedule if one is set."""
    try:
        made = instantiate_class([p for _, p in trained_parameters(module.policy)], optimizer)
    except ValueError as error:
        raise InputError(
            f"optimizer: {first_line(error)}. Choose another class; torch.optim.Muon takes matrices only, as "
            "LoRA's (--config add/lora)."
        ) from error
    return [made], [instantiate_class(made, schedule)] if schedule else []
