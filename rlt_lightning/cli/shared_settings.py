"""Verbs that take the settings of another verb, and make no run folder.

rlt plan       the settings of `rlt fit`, which include those of `rlt predict`; commands/plan.py does the work
rlt check      those of `rlt fit`; commands/check.py does the work
rlt explain    those of `rlt predict`; commands/explain.py does the work
"""

from __future__ import annotations

import json
import signal
from dataclasses import fields
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlt_lightning.cli.parser import split_words
from rlt_lightning.cli.stages import (
    TRAINER_VERBS,
    RLTCommandLine,
    frozen_student,
    propose_data,
    require_module_of,
)
from rlt_lightning.commands.check import CheckOptions, check_run
from rlt_lightning.commands.explain import ExplainOptions, change_stage, explain, find_row, find_settings
from rlt_lightning.commands.plan import PlanOptions, print_plan
from rlt_lightning.console import announce, wrap_line
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_formats
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.sources import MemoryRows, SourceReader, parse_sources
from rlt_lightning.datamodules.stages import ScoringData, TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.run.interrupt import TERMINATED
from rlt_lightning.types import InputError, as_list


class SharedSettingsCommandLine(RLTCommandLine):
    """A verb that takes the arguments of another verb, and one more group of options.

    Subclasses set `settings_verb`, the other verb, and `group`: the class of the further options and their
    name; with None they have no name before theirs.
    """

    settings_verb: str
    group: tuple[type, str | None]

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the other verb, whose parser this one uses."""
        return {self.settings_verb: TRAINER_VERBS[self.settings_verb]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the further options."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(*self.group)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        self.shared_parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.shared_parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line as the other verb's; messages name this one."""
        self.shared_parser.prog = f"rlt {self.typed_verb}"
        words = self.build_words(self.words)
        require_module_of(self.typed_verb, words)
        words = propose_data(words)
        self.config = parser.parse_args([self.settings_verb, *words])
        self.take_rollouts()
        self.spread_seed()

    def build_words(self, given: list[str]) -> list[str]:
        """Return the words that the parser reads in place of those of the command line."""
        return given

    def after_instantiate_classes(self) -> None:
        """Nothing is trained, so no optimizer is made."""


class PlanCommandLine(SharedSettingsCommandLine):
    """`rlt plan`: the memory that a run would need. It loads no model and makes no folder."""

    settings_verb, group = "fit", (PlanOptions, "plan")

    def before_instantiate_classes(self) -> None:
        """Make no run folder."""

    def instantiate_classes(self) -> None:
        """Make what loads nothing, and no trainer: its devices may not be here, so its settings must do."""
        config = self.config.clone()
        trainer = config[self.settings_verb].trainer.clone()
        for name in ("callbacks", "logger", "plugins", "profiler", "strategy"):
            config[self.settings_verb].trainer[name] = "auto" if name == "strategy" else None
        if config[self.settings_verb].get("optimizer"):
            announce("the plan counts the states of AdamW, not those of --optimizer")
        made = self.parser.instantiate_classes(config)[self.settings_verb]
        self.status = print_plan(trainer, made.model, made.data, made.rollouts, made.checkpoint, made.plan)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: the plan has been printed."""


def terminate(number: int, frame: Any) -> None:
    """End at once, as `rlt` ends when it is terminated."""
    raise SIGTERMException(TERMINATED)


class CheckCommandLine(SharedSettingsCommandLine):
    """`rlt check`: whether `rlt fit` with these settings can teach anything. It makes no run folder."""

    settings_verb, group = "fit", (CheckOptions, "check")

    def before_instantiate_classes(self) -> None:
        """Make no run folder."""

    def instantiate_classes(self) -> None:
        """Make module, data and engine, and no trainer: score_problems makes its own, in one process."""
        config = self.config.clone()
        trainer = config["fit"].trainer
        for name in ("callbacks", "logger", "plugins", "profiler", "strategy"):
            trainer[name] = "auto" if name == "strategy" else None
        config["fit"].rollouts.asynchronous = False
        self.made = self.parser.instantiate_classes(config)["fit"]

    def _run_subcommand(self, subcommand: str) -> None:
        """Make the checks, and print each as soon as it is made."""
        # Between its trainers too: otherwise the system ends it, without a word.
        signal.signal(signal.SIGTERM, terminate)
        made = self.made
        lengths = {name: made.trainer[name] for name in ("max_steps", "max_epochs", "limit_train_batches")}
        machine = {name: made.trainer[name] for name in ("accelerator", "precision")}
        statuses = []
        for check in check_run(made.model, made.data, made.rollouts, made.check, lengths, **machine):
            print(wrap_line(check.line(), indent=16), flush=True)
            statuses.append(check.status)
        self.status = int("fail" in statuses)
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        print(f"{len(statuses)} checks: {counts}")


class ExplainCommandLine(SharedSettingsCommandLine):
    """`rlt explain`: what an explanation is worth, given or written by a teacher. It makes no run folder.

    A later setting overrides an earlier one:

        the settings of RUN_OR_FOLDER     `find_settings`
        --config files
        the teacher of RUN_OR_FOLDER
        all other options
    """

    settings_verb, group = "predict", (ExplainOptions, None)
    names_teacher = False

    def build_words(self, given: list[str]) -> list[str]:
        """Return the options of `rlt predict`: a named teacher's settings, configs, then all others."""
        bare, options = split_words(given)
        if len(bare) > 1:
            raise InputError(
                f"rlt explain takes one teacher, but got {', '.join(bare)}. Put question and solution, each "
                "between quotes, after --question and --solution."
            )
        named: dict[bool, list[str]] = {True: [], False: []}  # whether an option is a config -> its words
        for option in options:
            named[option[0].partition("=")[0] in ("--config", "-c")] += option
        configs, others = named[True], named[False]
        if not bare:
            return [*configs, *others]
        self.names_teacher = True
        settings = find_settings(bare[0])
        teacher = settings["model"]["init_args"]["teacher"]
        return ["--config", json.dumps(settings), *configs, f"--model.teacher={teacher}", *others]

    def before_instantiate_classes(self) -> None:
        """Find the row that is explained; a teacher that is named writes the explanation if none is given."""
        config = self.config["predict"]
        model, data = config.model.init_args, config.data.init_args
        self.options = options = ExplainOptions(**{f.name: config[f.name] for f in fields(ExplainOptions)})
        sample = self.names_teacher and not options.explanation
        students = as_list(frozen_student(config.model))
        for source in () if options.question else parse_sources(data.source):
            SourceReader(data.split).open(source)  # before a hub is asked for a format
        chosen = choose_formats(FormatOptions.from_settings(data.as_dict()), model.get("teacher"), students)
        self.row = find_row(options, data.as_dict(), chosen[0].tags, sample)
        settings = {"class_path": config.data.class_path, "init_args": vars(data)}
        settings = change_stage(settings, TeacherRLData if sample else ScoringData)
        data = Namespace(**settings["init_args"])
        data.update(Namespace(source=[self.row], max_rows=None, val_batch_size=1, max_bad_frac=0.0))
        data.update(Namespace(output_dir=None, **({} if sample else {"trace_columns": [TRACE_COLUMN]})))
        config.data = Namespace(class_path=settings["class_path"], init_args=data)
        config.rollouts.update(Namespace(num_traces=1, val_sampling=None, asynchronous=False))
        if config.rollouts.engine is None:  # a worker would start more slowly than one row is sampled
            config.rollouts.engine = Namespace(class_path=f"{HFEngine.__module__}.HFEngine")
        # A strategy of the settings may need packages and processes that are not here.
        config.trainer.update(Namespace(logger=None, callbacks=None, strategy="auto"))

    def instantiate_classes(self) -> None:
        """Make module, data and engine, and no trainer: score_problems makes its own."""
        self.made = self.parser.instantiate_classes(self.config)[self.settings_verb]
        data: StratosDataModule = self.made.data
        # Messages and seeds name the row by its number in its source.
        data.sources = [MemoryRows([self.row], first=self.options.row)]

    def _run_subcommand(self, subcommand: str) -> None:
        made = self.made
        explain(made.model, made.data, made.rollouts, self.options, **made.trainer.as_dict())
