"""Commands that take the settings of `rlt fit`, and make no run folder and no trainer.

rlt plan       its settings include those of `rlt predict`; commands/plan.py does the work
rlt check      commands/check.py does the work
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.stages import RLTCommandLine
from rlt_lightning.commands.check import CheckOptions, check_run
from rlt_lightning.commands.plan import PlanOptions, print_plan
from rlt_lightning.datamodules.stratos import find_models


class SettingsCommandLine(RLTCommandLine):
    """`rlt plan` and `rlt check`. The parser is that of `rlt fit`, with further options."""

    # LightningCLI looks its methods up, and calls none.
    trainer: Any = Trainer

    def __init__(self, args: Sequence[str]) -> None:
        self.options, self.run = COMMANDS[args[0]]
        super().__init__(args)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the other verb."""
        return {"fit": {"model", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the further options."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(self.options, self.typed_verb)

    def before_instantiate_classes(self) -> None:
        """Make no run folder, and no part of a trainer, whose devices and packages may not be here."""
        config = self.config["fit"]
        self.trainer_settings = config.trainer.clone()
        parts = ("callbacks", "logger", "plugins", "profiler")
        config.trainer.update(Namespace(strategy="auto", **dict.fromkeys(parts)))
        if self.typed_verb == "check":
            config.rollouts.asynchronous = False

    def instantiate_classes(self) -> None:
        """Make module, data and engine, but no trainer: a command makes one, if any."""
        self.config_init = self.parser.instantiate(self.config)
        made = self.config_init["fit"]
        self.model, self.datamodule = made.model, made.data
        made.data.tokenizer_name, made.data.reader_name = find_models(made.model)

    def fit(self, **options: Any) -> None:
        """Run the command, in place of Lightning's method."""
        self.status = self.run(self.config_init["fit"], self.trainer_settings)

    def after_fit(self) -> None:
        """Print nothing more."""


def run_check(made: Namespace, trainer: Namespace) -> int:
    """Make the checks, print each as soon as it is made, and return 1 if one fails."""
    lengths = {name: trainer[name] for name in ("max_steps", "max_epochs", "limit_train_batches")}
    machine = {name: trainer[name] for name in ("accelerator", "precision")}
    statuses = []
    for check in check_run(made.model, made.data, made.rollouts, made.check, lengths, **machine):
        print(check.line(), flush=True)
        statuses.append(check.status)
    print(f"{len(statuses)} checks: {statuses.count('fail')} failed")
    return int("fail" in statuses)


# Command -> the class of its options, and what it does.
COMMANDS: dict[str, tuple[type, Callable[[Namespace, Namespace], int]]] = {
    "plan": (PlanOptions, print_plan),
    "check": (CheckOptions, run_check),
}
