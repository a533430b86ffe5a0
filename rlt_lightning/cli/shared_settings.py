"""Verbs that take the settings of another verb, and make no run folder.

rlt plan       the settings of `rlt fit`, which include those of `rlt predict`; commands/plan.py does the work
rlt check      those of `rlt fit`; commands/check.py does the work
"""

from __future__ import annotations

import signal
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlt_lightning.cli.stages import (
    TRAINER_VERBS,
    RLTCommandLine,
    propose_data,
    require_module_of,
)
from rlt_lightning.commands.check import CheckOptions, check_run
from rlt_lightning.commands.plan import PlanOptions, print_plan
from rlt_lightning.console import announce, wrap_line
from rlt_lightning.run.interrupt import TERMINATED


class SharedSettingsCommandLine(RLTCommandLine):
    """A verb that takes the arguments of another verb, and one more group of options.

    Subclasses set `settings_verb`, the other verb, and `group`: the class of the further options and their
    name.
    """

    settings_verb: str
    group: tuple[type, str]

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
        require_module_of(self.typed_verb, self.words)
        self.config = parser.parse_args([self.settings_verb, *propose_data(self.words)])
        self.take_rollouts()
        self.spread_seed()

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
