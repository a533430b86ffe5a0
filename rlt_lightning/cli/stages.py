"""Run `rlt fit|validate|predict|test` by Lightning's command line, in this order.

parse_arguments               read the configs and options; --seed sets the seeds
before_instantiate_classes    choose and make the run folder (run/folder.py)
instantiate_trainer           make the Trainer (trainer.py)
SaveConfig                    write config.yaml, before the models are loaded; of a run
                              that resumes, once its checkpoint is
after_fit, after_predict      print where the results are, and the next command
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from inspect import isabstract
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
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from torch.optim.lr_scheduler import LRScheduler

from rlt_lightning.cli.help import VERBS
from rlt_lightning.cli.parser import (
    NAME,
    OURS,
    OneLineParser,
    list_leaves,
    replace_config_names,
    split_words,
)
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.models.weights import trained_parameters
from rlt_lightning.modules import EvaluationModule
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.rollouts.step import POLICY, REFERENCE
from rlt_lightning.run.folder import (
    RunFolder,
    choose_run_folder,
    is_within,
    open_run_folder,
    require_same_run,
    tell_changes,
)
from rlt_lightning.run.ranks import announce_restart, find_global_rank, require_restartable
from rlt_lightning.run.redaction import redact
from rlt_lightning.run.shipped import read_next_command
from rlt_lightning.trainer import TESTING, TRAINER_DEFAULTS, TRAINING, Trainer
from rlt_lightning.types import InputError, as_list, missing_package, naming_full_disk
from rlt_lightning.version import __version__

TRAINER_VERBS: dict[str, set[str]] = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
    "validate": {"model", "dataloaders", "datamodule"},
    "predict": {"model", "dataloaders", "datamodule"},
    "test": {"model", "dataloaders", "datamodule"},
}
SEEDS = ("seed_everything", "data.init_args.seed", "model.init_args.seed", "rollouts.seed")
# The first process names the run folder in this environment variable for the processes that it starts.
RUN_FOLDER = "RLT_RUN_FOLDER"
# What a run leaves that the next stage takes, or a person reads.
OUTCOMES = (
    "model",
    "metrics.csv",
    "rollouts.jsonl",
    "distillation.jsonl",
    "traces.jsonl",
    "scores.jsonl",
)


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
        with naming_full_disk(path):
            self.parser.save(config, str(scratch), **options)
            scratch.replace(path)
        settings = redact(yaml.safe_load(path.read_text())) | {"code": find_code_version()}
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)

    def forget_resumption(self, folder: Path) -> Namespace:
        """Return the settings without resume, overwrite and a checkpoint of this folder.

        A run that is repeated from them must not resume or replace what lies in its own folder. If the first
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
    run_folder: Path | None = None
    # The same with its checkpoint, once it is open.
    choice: RunFolder
    # The verb whose parser is being built.
    verb = ""

    def __init__(self, args: Sequence[str] | None = None) -> None:
        """Run a command line.

        Args:
            args: The verb and its options; None: those of the process.
        """
        self.typed_verb, *self.words = (sys.argv[1:] if args is None else args) or [""]
        super().__init__(
            PolicyModule,
            StratosDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=None if args is None else [*args],
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the verb that was typed: building the parsers of the others takes time."""
        return {
            verb: TRAINER_VERBS[verb] for verb in TRAINER_VERBS if verb == self.typed_verb
        } or TRAINER_VERBS

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        """Build the parser of a verb: an evaluation has other classes than the training stages."""
        self.verb = subcommand
        if subcommand == "test":
            self._model_class, self._datamodule_class = EvaluationModule, EvaluationDataModule
        else:
            self._model_class, self._datamodule_class = PolicyModule, StratosDataModule
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        usage, parser.description, _ = VERBS[self.typed_verb]
        parser.usage = f"rlt {self.typed_verb} {usage}"
        for group in parser._action_groups:
            if any(action.dest == "ckpt_path" for action in group._group_actions):
                group.title = f"Further arguments of Lightning's Trainer.{subcommand}"  # else its docstring
        if subcommand == "test":
            parser.set_defaults({"verbose": False})  # the table says it
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run folder and the callbacks that every run has; link what would be written twice."""
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
        parser.link_arguments("model", "data.init_args.tokenizer", compute_fn=trained_model)
        for name, kind in (TESTING if self.verb == "test" else TRAINING).items():
            parser.add_lightning_class_args(kind, name)
        if self.verb != "test":
            parser.add_optimizer_args()
            parser.add_lr_scheduler_args((LRScheduler,))
        if self.verb == "test":
            parser.link_arguments("rollouts.num_samples", "data.init_args.num_samples")
            return
        for name in ("student_tokenizer", "teacher_tokenizer"):  # of the data that have it
            parser.link_arguments("model", f"data.init_args.{name}", compute_fn=frozen_student)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line, and let --seed set the other seeds."""
        require_whole_sets(self.words)
        require_module_of(self.typed_verb, self.words)
        words = self.words if self.verb == "test" else propose_data(self.words)
        self.config = parser.parse_args([self.typed_verb, *words])
        self.take_rollouts()
        self.spread_seed()

    def take_rollouts(self) -> None:
        """Read the settings of a RolloutCallback in trainer.callbacks as those of `rollouts`."""
        config = self.config[self.config.subcommand]
        name = (TESTING if self.config.subcommand == "test" else TRAINING)["rollouts"].__name__
        callbacks = as_list(config.trainer.callbacks)
        named = [callback for callback in callbacks if callback.class_path.rpartition(".")[2] == name]
        if len(named) > 1:
            raise InputError(f"A run has one {name}, but trainer.callbacks names {len(named)}. Remove one.")
        for callback in named:
            config.rollouts.update(callback.init_args)
            config.trainer.callbacks = [other for other in callbacks if other is not callback]

    def spread_seed(self) -> None:
        """Set every seed of this verb and its classes, except those that the command line names."""
        config = self.config[self.config.subcommand]
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
        require_loggers(as_list(config.trainer.logger))
        require_restartable(config.resume)
        verb = str(self.subcommand)
        default = "" if config.output_dir else self.name_run_folder(config.config)
        options = (config.get("ckpt_path"), config.resume, config.overwrite)
        self.choice = choice = choose_run_folder(verb, config.output_dir, default, *options)
        folder = RLTCommandLine.run_folder = choice.folder
        config.output_dir, config.ckpt_path = str(folder), choice.ckpt_path
        config.overwrite = choice.overwrite
        if find_global_rank() == 0:
            if choice.resume:
                settings = yaml.safe_load(self._parser(verb).dump(config, skip_validation=True))
                tell_changes(folder, settings) if verb == "fit" else require_same_run(folder, settings)
            open_run_folder(choice, [Path(str(path)) for path in config.config or []])
        # The config.yaml of a run names its folder here and as the save_dir of its loggers.
        before, config.trainer.default_root_dir = config.trainer.default_root_dir, str(folder)
        if "output_dir" in (config.data.get("init_args") or {}):
            config.data.init_args.output_dir = str(folder)
        for logger in as_list(config.trainer.logger):
            if hasattr(logger, "init_args") and logger.init_args.get("save_dir") in (None, ".", before):
                logger.init_args.save_dir = str(folder)
        # wandb stages tables there until they are uploaded; its own place is the home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb" / "data"))

    def name_run_folder(self, configs: list[Any] | None) -> str:
        """Name a run after its config and the time; processes that this one starts inherit the name."""
        launched = TorchElasticEnvironment.detect() or SLURMEnvironment.detect()
        # Each process would choose another name.
        if launched and RUN_FOLDER not in os.environ:
            raise InputError("A run that a launcher starts in several processes needs --output_dir. Set it.")
        name = Path(str(configs[0])).stem if configs else str(self.subcommand)
        return os.environ.setdefault(RUN_FOLDER, f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def after_instantiate_classes(self) -> None:
        """Let --optimizer and --lr_scheduler replace those of model.optimizer.

        LightningCLI would make them here, before there are weights.
        """
        config = self.config_init[self.subcommand]
        if config.get("optimizer") or config.get("lr_scheduler"):
            self.model.configure_optimizers = self.build_optimizers

    def build_optimizers(self) -> dict[str, Any]:
        """Return what --optimizer and --lr_scheduler name; a step of the schedule is an optimizer step.

        Raises:
            InputError: If one of them refuses its settings or the weights.
        """
        config, model = self.config_init[self.subcommand], self.model
        weights = [*trained_parameters(model.policy)]
        named, schedule = config.optimizer, config.lr_scheduler
        try:
            built = {"optimizer": instantiate_class(weights, named) if named else model.build_optimizer()}
            if schedule:
                built["lr_scheduler"] = {
                    "scheduler": instantiate_class(built["optimizer"], schedule),
                    "interval": "step",
                }
        except ValueError as error:
            raise InputError(
                f"--optimizer and --lr_scheduler must take their settings and the weights, but: {error}. "
                "Change them."
            ) from error
        return built

    def instantiate_trainer(self, **kwargs: Any) -> lightning.pytorch.Trainer:
        """Build this package's Trainer, which adds what every run has and no config needs to name."""
        config = self._get(self.config_init, "trainer")
        named = as_list(config["callbacks"])
        # A callback that trainer.callbacks names is in the place of the run's own of that class.
        keys = self._parser(self.subcommand).callback_keys
        for key, kind in (TESTING if self.subcommand == "test" else TRAINING).items():
            if any(isinstance(callback, kind) for callback in named):
                keys.remove(key)
        config["callbacks"] = named
        del config["default_root_dir"]  # the run folder
        # Until here it was Lightning's, its base class, whose settings the parser shows.
        self.trainer_class = Trainer
        trainer = super().instantiate_trainer(output_dir=self.choice, **kwargs)
        announce_restart()
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Do not let a checkpoint's hyper-parameters override the command line, as Lightning would."""

    def after_fit(self) -> None:
        """Print where the results are, and the next command."""
        if self.trainer.is_global_zero:
            print(f"\nDone: {self.trainer.global_step} steps.")
            self.print_end()

    def after_predict(self) -> None:
        """Print where the scores or traces are, and the next command."""
        if self.trainer.is_global_zero:
            print("\nDone.")
            self.print_end()

    def print_end(self) -> None:
        """Print what the run has left, and the next command that its config names."""
        folder = self.choice.folder
        for name in OUTCOMES:
            if (folder / name).exists():
                print(f"  {folder / name}")
        if self.subcommand == "fit":
            print(f"See it: rlt report {shlex.quote(str(folder))}")
        configs = [Path(str(path)) for path in self.config[self.subcommand].config or []]
        if command := read_next_command(configs, folder):
            print(f"Next: {command}")


def find_code_version() -> dict[str, Any]:
    """Return this package's version and, in a checkout, the commit and whether tracked files have changed."""
    folder = Path(__file__).parents[2]

    def git(*words: str) -> str | None:
        try:
            result = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
        except OSError:  # no git
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    found: dict[str, Any] = {"version": __version__}
    if (folder / ".git").exists() and (commit := git("rev-parse", "HEAD")):
        found |= {"commit": commit, "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    return found


def propose_data(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, and before them the data class that the named module proposes.

    What a config or a later option says of the data overrides it.
    """
    name = str(find_class(words, "model"))
    modules = {kind.__name__: kind for kind in list_leaves(PolicyModule)}
    kind: Any = modules.get(name)
    if kind is None and "." in name:
        with suppress(ImportError, AttributeError):  # the parser says it
            module, _, attribute = name.rpartition(".")
            kind = getattr(import_module(module), attribute)
    classes = [stage for stage in getattr(kind, "data_classes", ())[:1] if not isabstract(stage)]
    return [*(f"--data={stage.__module__}.{stage.__name__}" for stage in classes), *words]


def require_module_of(verb: str, words: Sequence[str]) -> None:
    """Raise InputError if configs and options name a module of ours that another verb runs."""
    path, _, name = str(find_class(words, "model")).rpartition(".")
    kinds = {kind.__name__: kind for base in (EvaluationModule, PolicyModule) for kind in list_leaves(base)}
    if name not in kinds or not f"{path or OURS}.".startswith(OURS):
        return
    is_test = issubclass(kinds[name], EvaluationModule)
    if is_test != (verb == "test"):
        does = "plans rlt fit and rlt predict" if verb == "plan" else "runs other modules"
        owner = "rlt test" if is_test else "rlt fit, rlt validate and rlt predict"
        raise InputError(f"rlt {verb} {does}, but {name} belongs to {owner}: see `rlt configs`.")


def find_class(words: Sequence[str], key: str) -> str | None:
    """Return the class that configs and options name last under a key; None if none does."""
    named = None
    for option in split_words(replace_config_names(words))[1]:
        name, value = option if len(option) == 2 else option[0].partition("=")[::2]
        settings: Any = None
        with suppress(yaml.YAMLError, OSError, UnicodeDecodeError):  # the parser says it
            if name in ("--config", "-c"):
                text = value
                if NAME.fullmatch(value):
                    # A pipe of the shell can be read only once, which the parser does.
                    text = "" if Path(value).is_fifo() else Path(value).read_text()
                settings = yaml.safe_load(text)
                settings = settings.get(key) if isinstance(settings, dict) else None
            elif name in (f"--{key}", f"--{key}.class_path"):
                settings = yaml.safe_load(value)
        named = (settings.get("class_path") if isinstance(settings, dict) else settings) or named
    return named


def trained_model(model: Any) -> str | None:
    """Return the name of the model whose tokenizer makes the data."""
    arguments = (model and model.get("init_args")) or {}
    return arguments.get("pretrained") or arguments.get("teacher")


def frozen_student(model: Any) -> str | list[str] | None:
    """Return the names of the frozen models that read completions, whose tokenizers the data need.

    Those are the students of RLTModule, and the teacher of a student that is trained as `pretrained`.
    """
    arguments = (model and model.get("init_args")) or {}
    if students := arguments.get("students"):
        return [*students]
    name = arguments.get("teacher" if "pretrained" in arguments else "student")
    return None if name in (POLICY, REFERENCE) else name


def require_whole_sets(words: list[str]) -> None:
    """Raise InputError if an option names one field of an evaluation set: jsonargparse drops the others."""
    for word in words:
        if match := re.match(r"--data(?:\.init_args)?\.sets\.([\w-]+)\.([\w.-]+)", word):
            name, field = match.groups()
            raise InputError(
                f"An option must give all fields of a set, but {match.group()} names one, and the others "
                f"would be lost. Write --data.sets.{name} '{{{field}: …, …}}', or change the set in a config."
            )


def require_loggers(loggers: list[Any]) -> None:
    """Check that what the loggers need is installed: the parser would not show the reason of theirs."""
    for name, package in (("TensorBoardLogger", "tensorboard"), ("WandbLogger", "wandb")):
        if any(name in str(logger) for logger in loggers) and find_spec(package) is None:
            raise missing_package(name, package, package, "leave the logger out")
