"""Commands that take the settings of another verb, and make no run folder and no trainer.

rlt plan       the settings of `rlt fit`, which include those of `rlt predict`; commands/plan.py does the work
rlt check      those of `rlt fit`; commands/check.py does the work
rlt explain    those of `rlt predict`; commands/explain.py does the work
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.stages import RLTCommandLine
from rlt_lightning.commands.check import CheckOptions, check_run
from rlt_lightning.commands.explain import ExplainOptions, change_stage, explain, find_row, find_settings
from rlt_lightning.commands.plan import PlanOptions, print_plan
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_formats
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.sources import MemoryRows, SourceReader, parse_sources
from rlt_lightning.datamodules.stages import ScoringData, TeacherRLData
from rlt_lightning.datamodules.stratos import find_models
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.rollouts.step import POLICY, REFERENCE
from rlt_lightning.types import as_list


class SettingsCommandLine(RLTCommandLine):
    """`rlt plan`, `rlt check` and `rlt explain`. The parser is that of another verb, with further options."""

    def __init__(self, args: list[str]) -> None:
        self.settings_verb, self.options, self.run = COMMANDS[args[0]]
        super().__init__(args)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the other verb."""
        return {self.settings_verb: {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the further options."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(*self.options)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line; a run or a model that stands first names settings, as a config does."""
        self.names_teacher = self.typed_verb == "explain" and not (self.words or ["-"])[0].startswith("-")
        if self.names_teacher:
            self.words[:1] = ["--config", json.dumps(find_settings(self.words[0]))]
        super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Make no run folder, and no part of a trainer, whose devices and packages may not be here."""
        config = self.config[self.settings_verb]
        self.trainer_settings = config.trainer.clone()
        parts = ("callbacks", "logger", "plugins", "profiler")
        config.trainer.update(Namespace(strategy="auto", **dict.fromkeys(parts)))
        if self.typed_verb == "check":
            config.rollouts.asynchronous = False
        if self.typed_verb == "explain":
            prepare_explanation(config, self.names_teacher)

    def instantiate_classes(self) -> None:
        """Make module, data and engine, but no trainer: a command makes its own, if any."""
        self.made = self.parser.instantiate_classes(self.config)[self.settings_verb]
        self.made.data.tokenizer_name, self.made.data.student_names = find_models(self.made.model)

    def _run_subcommand(self, subcommand: str) -> None:
        self.status = self.run(self.made, self.trainer_settings)


def run_plan(made: Namespace, trainer: Namespace) -> int:
    """Print the memory that a run would need, and return the exit status."""
    return print_plan(trainer, made.model, made.data, made.rollouts, made.checkpoint, made.plan)


def run_check(made: Namespace, trainer: Namespace) -> int:
    """Make the checks, print each as soon as it is made, and return 1 if one fails."""
    lengths = {name: trainer[name] for name in ("max_steps", "max_epochs", "limit_train_batches")}
    machine = {name: trainer[name] for name in ("accelerator", "precision")}
    has_failed = False
    for check in check_run(made.model, made.data, made.rollouts, made.check, lengths, **machine):
        print(check.line(), flush=True)
        has_failed |= check.status == "fail"
    return int(has_failed)


def run_explain(made: Namespace, trainer: Namespace) -> int:
    """Explain the row, and return 0."""
    options = ExplainOptions(**{field.name: made[field.name] for field in fields(ExplainOptions)})
    # Messages and seeds name the row by its number in its source.
    made.data.sources = [MemoryRows(made.data.sources[0].rows, first=options.row)]
    explain(made.model, made.data, made.rollouts, options, **made.trainer.as_dict())
    return 0


def prepare_explanation(config: Namespace, names_teacher: bool) -> None:
    """Let the settings of `rlt predict` explain one row.

    Args:
        config: The settings, which are changed.
        names_teacher: Whether a teacher was named: it writes the explanation if none is given.
    """
    model, data = config.model.init_args, config.data.init_args
    options = ExplainOptions(**{field.name: config[field.name] for field in fields(ExplainOptions)})
    sample = names_teacher and not options.explanation
    for source in () if options.question else parse_sources(data.source):
        SourceReader(data.split).open(source)  # before a hub is asked for a format
    names = model.get("students") or as_list(model.get("student"))
    students = [name for name in names if name not in (POLICY, REFERENCE)]
    chosen = choose_formats(FormatOptions.from_settings(data.as_dict()), model.get("teacher"), students)
    row = find_row(options, data.as_dict(), chosen[0].tags, sample)
    settings = {"class_path": config.data.class_path, "init_args": vars(data)}
    settings = change_stage(settings, TeacherRLData if sample else ScoringData)
    data = Namespace(**settings["init_args"])
    data.update(Namespace(source=[row], max_rows=None, val_batch_size=1, max_bad_frac=0.0, output_dir=None))
    if not sample:
        data.trace_columns = [TRACE_COLUMN]
    config.data = Namespace(class_path=settings["class_path"], init_args=data)
    config.rollouts.update(Namespace(num_traces=1, val_sampling=None, asynchronous=False))
    if config.rollouts.engine is None:  # a worker would start more slowly than one row is sampled
        config.rollouts.engine = Namespace(class_path=f"{HFEngine.__module__}.HFEngine")


# Command -> the verb whose settings it takes, the class and the name of its own options, and what it does.
COMMANDS: dict[str, tuple[str, tuple[type, str | None], Callable[[Namespace, Namespace], int]]] = {
    "plan": ("fit", (PlanOptions, "plan"), run_plan),
    "check": ("fit", (CheckOptions, "check"), run_check),
    "explain": ("predict", (ExplainOptions, None), run_explain),
}
