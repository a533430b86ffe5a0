"""The command line: Lightning's, plus the run folder, the linked arguments and one-line errors."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from rlt_lightning import __version__, callbacks
from rlt_lightning.callbacks.metrics import MetricsResume
from rlt_lightning.callbacks.progress import IterationBar
from rlt_lightning.checkpoints.choices import CHOICES, checkpoints_in
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.checkpoints.named import NamedCheckpoints
from rlt_lightning.cli import next_steps, ranks
from rlt_lightning.datamodules import EvaluationDataModule, StratosDataModule
from rlt_lightning.loggers.metrics_csv import MetricsCSV
from rlt_lightning.loggers.redaction import without_secrets
from rlt_lightning.modules import EvaluationModule
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.records.run_folder import (
    FINISHED_ROWS,
    open_run_folder,
    require_dead_start,
    require_same_run,
)
from rlt_lightning.types import InputError, as_list

VERBS: dict[str, set[str]] = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
    "validate": {"model", "dataloaders", "datamodule"},
    "predict": {"model", "dataloaders", "datamodule"},
    "test": {"model", "dataloaders", "datamodule"},
}
SEEDS = ("seed_everything", "data.init_args.seed", "model.init_args.seed", "rollouts.seed")
RUN_FOLDER = "RLT_RUN_FOLDER"  # environment variable, from the first process to those that it starts


class SaveConfig(SaveConfigCallback):
    """Write the resolved configuration to `config.yaml` in the run folder, and show it where metrics go."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on rank zero, before the models are loaded."""
        path = Path(trainer.default_root_dir) / "config.yaml"
        scratch = path.with_suffix(".tmp")  # a kill must not leave half of what a resumed run compares with
        self.parser.save(self.config, str(scratch), skip_none=False, overwrite=True, multifile=False)
        scratch.replace(path)
        settings = without_secrets(yaml.safe_load(path.read_text())) | {"code": code_version()}
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)


class RLTCommandLine(LightningCLI):
    """`rlt fit|validate|predict|test --config FILE [--config OVERLAY …] [--KEY VALUE …]`."""

    status = 0  # of the process, at its end
    run_folder: Path | None = None
    verb = ""  # whose parser is being built

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the verbs, or only the one that the command line names: each takes time to build."""
        named = [verb for verb in VERBS if verb in sys.argv[1:2]]
        return {verb: VERBS[verb] for verb in named or VERBS}

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
            help="Go on with the run in output_dir from what it has finished; start it if there is none.",
        )
        parser.add_argument(
            "--seed",
            type=NonNegativeInt | None,
            default=None,
            help="Sets the seeds of data, model, rollouts and all else, but for those that are options too.",
        )
        parser.link_arguments("model", "data.init_args.tokenizer", compute_fn=trained_model)
        if self.verb == "test":
            parser.add_lightning_class_args(callbacks.ResponseCallback, "rollouts")
            parser.add_lightning_class_args(callbacks.EvaluationWriter, "records")
            parser.link_arguments("rollouts.num_samples", "data.init_args.num_samples")
            return
        parser.add_lightning_class_args(callbacks.RolloutCallback, "rollouts")
        parser.add_lightning_class_args(callbacks.Checkpoint, "checkpoint")
        parser.add_lightning_class_args(callbacks.ModelExporter, "export")
        parser.add_lightning_class_args(callbacks.RolloutRecorder, "recorder")
        parser.add_lightning_class_args(callbacks.CompletionsTable, "completions")
        parser.add_lightning_class_args(callbacks.Alarms, "alarms")
        parser.add_lightning_class_args(callbacks.ScoreWriter, "scores")
        parser.add_lightning_class_args(callbacks.DistillationWriter, "distillation")
        parser.link_arguments("model", "data.init_args.student_tokenizer", compute_fn=frozen_student)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line, and let --seed set the others."""
        super().parse_arguments(parser, args)
        self.spread_seed()

    def spread_seed(self) -> None:
        """Set the seeds that this verb and its classes have, but for those that are options themselves."""
        config = self.config[self.config.subcommand]
        if config.seed is None:
            return
        options = {word.partition("=")[0].replace(".init_args", "") for word in sys.argv}
        for name in SEEDS:
            if name in config and f"--{name.replace('.init_args', '')}" not in options:
                config[name] = int(config.seed)
        config.seed = None  # config.yaml repeats the run: there it would win over a seed that was an option

    def before_instantiate_classes(self) -> None:
        """Choose and check the run folder, before anything is built."""
        config = self.config[self.subcommand]
        if config.get("ckpt_path") in CHOICES and not config.output_dir:
            raise InputError(f"--ckpt_path {config.ckpt_path} needs --output_dir, the run to go on with.")
        if config.resume and not config.output_dir:
            raise InputError("--resume needs --output_dir, the run to go on with.")
        folder = Path(config.output_dir or self.default_run_folder(config.config))
        if self.subcommand == "fit" and config.resume:
            config.ckpt_path, config.overwrite = "last", True
        resumes_or_starts = self.subcommand == "fit" and config.overwrite and config.ckpt_path == "last"
        if resumes_or_starts and not checkpoints_in(folder / "checkpoints"):
            config.ckpt_path = None
        if config.get("ckpt_path") in CHOICES:
            config.ckpt_path = str(CHOICES[config.ckpt_path](folder / "checkpoints"))
            folder /= "" if self.subcommand == "fit" else str(self.subcommand)  # leave the run as it is
        elif config.get("ckpt_path") and not Path(config.ckpt_path).exists():
            raise InputError(
                f"--ckpt_path must be last, best or a checkpoint that exists, but is {config.ckpt_path}."
            )
        config.output_dir = str(folder)
        RLTCommandLine.run_folder = folder
        if global_rank() == 0:
            ckpt_path = config.get("ckpt_path")  # only a checkpoint of this folder goes on with its run
            resume = bool(ckpt_path) and self.subcommand == "fit"
            resume = resume and folder.resolve() in Path(ckpt_path).resolve().parents
            if self.subcommand != "fit" and config.resume:
                resume = any((folder / name).exists() for name in FINISHED_ROWS)
                if resume:
                    require_same_run(folder, yaml.safe_load(self._parser(self.subcommand).dump(config)))
            if config.resume and not resume:
                require_dead_start(folder)
                config.overwrite = True
            open_run_folder(folder, resume, config.overwrite)
        config.trainer.default_root_dir = str(folder)
        if "output_dir" in (config.data.get("init_args") or {}):
            config.data.init_args.output_dir = str(folder)
        for logger in as_list(config.trainer.logger):
            if hasattr(logger, "init_args") and logger.init_args.get("save_dir") in (None, "."):
                logger.init_args.save_dir = str(folder)

    def default_run_folder(self, configs: list[Any] | None) -> str:
        """Name a run after its config and the time; processes that this one starts inherit the name."""
        launched = TorchElasticEnvironment.detect() or SLURMEnvironment.detect()
        if launched and RUN_FOLDER not in os.environ:  # each process would name its own
            raise InputError("A run that a launcher starts in several processes needs --output_dir. Set it.")
        name = Path(str(configs[0])).stem if configs else str(self.subcommand)
        return os.environ.setdefault(RUN_FOLDER, f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add what every run has and no config needs to name."""
        config = self._get(self.config_init, "trainer")
        named = as_list(config["callbacks"])
        of_every_run = (callbacks.RolloutCallback, callbacks.ResponseCallback)
        for other in (callback for callback in named if isinstance(callback, of_every_run)):
            raise InputError(
                f"Every run has one {type(other).__name__}, but trainer.callbacks names another. Remove it "
                "there; its settings are those under rollouts."
            )
        require_known_strategy(config["strategy"])
        config["logger"] = [MetricsCSV(config["default_root_dir"]), *as_list(config["logger"])]
        config["plugins"] = [FolderCheckpointIO(), *as_list(config["plugins"])]
        config["callbacks"] = [ranks.FailureReport(), *named, IterationBar(), MetricsResume()]
        trainer = super().instantiate_trainer(**kwargs)
        ranks.watch_over(trainer)
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Do not let a checkpoint's hyper-parameters override the command line, as Lightning would."""

    def after_fit(self) -> None:
        """Say where everything is and what to do next."""
        if not self.trainer.is_global_zero:
            return
        config = self.config[self.subcommand]
        folder = Path(config.output_dir)
        adapter = (folder / "model" / "adapter_config.json").exists()
        model = "the trained model, an ordinary Hugging Face folder"
        model = "the trained adapter, as peft and vLLM read it" if adapter else model
        steps = self.trainer.global_step
        print(f"\nDone: {steps} step{'s' if steps > 1 else ''}.")
        for name, meaning in (
            ("model", model),
            ("metrics.csv", "every metric of every step"),
            ("rollouts.jsonl", "every completion with its reward terms"),
            ("checkpoints", f"to go on: --output_dir {folder} --resume true"),
        ):
            if (folder / name).exists():
                print(f"  {folder / name}: {meaning}")
        print(f"See it: {next_steps.program()} report {shlex.quote(str(folder))}")
        if not (folder / "model").exists() or adapter:
            return
        if following := next_steps.after_fit(config, self.on_cpu, self.datamodule.items):
            print(f"Next: {following}")

    @property
    def on_cpu(self) -> bool:
        """Whether the run's models were on a CPU."""
        return bool(self.trainer.strategy.root_device.type == "cpu")

    def after_predict(self) -> None:
        """Say where the scores, or the traces, are."""
        config = self.config[self.subcommand]
        folder = Path(config.output_dir)
        print("\nDone:")
        for name, meaning in (
            ("scores.jsonl", "every row with its reward and the terms of it"),
            (
                "groups.json",
                "groups of equal size by reward: rows in groups/, plot in groups.svg",
            ),
            ("comparison.md", "where one trace beats the other most; all problems: comparison.jsonl"),
            ("traces.jsonl", "every trace with every term of its reward"),
            (
                "distillation.jsonl",
                "the traces that were selected; also as distillation.parquet",
            ),
            ("README.md", "the data card"),
        ):
            if (folder / name).exists():
                print(f"  {folder / name}: {meaning}")
        traces = folder / "distillation.jsonl"
        if traces.exists() and (following := next_steps.after_generation(config, self.on_cpu, traces)):
            print(f"Next: {following}")


def code_version() -> dict[str, Any]:
    """Of this package: its version and, in a checkout, the commit and whether files of it were changed."""
    folder = Path(__file__).parents[1]

    def git(*words: str) -> str | None:
        try:
            result = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
        except OSError:  # there is no git
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    found: dict[str, Any] = {"version": __version__}
    if (folder / ".git").exists() and (commit := git("rev-parse", "HEAD")):
        found |= {"commit": commit, "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    return found


def global_rank() -> int:
    """Rank of this process, from what its launcher has set; 0 before anything is launched."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def trained_model(model: Any) -> str | None:
    """The model whose tokenizer the data are made with."""
    arguments = (model and model.get("init_args")) or {}
    return arguments.get("teacher") or arguments.get("pretrained")


def frozen_student(model: Any) -> str | None:
    """The student's name, so that its vocabulary is compared before any model is loaded."""
    return ((model and model.get("init_args")) or {}).get("student")


def require_known_strategy(strategy: Any) -> None:
    """Check that steps of several micro-batches, and our checkpoints, work under a strategy."""
    known = isinstance(strategy, (NamedCheckpoints, DDPStrategy, SingleDeviceStrategy))
    if not known and strategy not in ("auto", "ddp"):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise InputError(
            f"trainer.strategy must be auto, ddp or an overlay's, but is {name}. For weights in shards add "
            "--config configs/overlays/fsdp2.yaml or zero3.yaml; docs/scaling.md lists all overlays."
        )
