"""Verbs that read the settings of another verb: `rlt plan`, `rlt explain` and, in teach.py, `rlt teach`."""

from __future__ import annotations

import re
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.parser import with_config_files
from rlt_lightning.cli.stages import VERBS, RLTCommandLine, frozen_student
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_formats
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.plan import PlanOptions, make_plan, plan_page, read_setup, write_json
from rlt_lightning.report.explain import Explainer, ExplainOptions, row_to_score
from rlt_lightning.run.jsonl import Row, append_rows
from rlt_lightning.run.run_folder import RunFolder
from rlt_lightning.types import as_list


class BorrowingCommandLine(RLTCommandLine):
    """A verb that takes the arguments of another verb, and one group of options more.

    Subclasses set `lender`, the other verb, and `group`: the class of the further options and their name;
    with None they have no name before theirs.
    """

    lender: str
    group: tuple[type, str | None]

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """Return the other verb, whose parser this one uses."""
        return {cls.lender: VERBS[cls.lender]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the further options."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(*self.group)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        self.borrowed = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.borrowed

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line as the other verb's; messages name this one."""
        self.borrowed.prog = f"rlt {sys.argv[1]}"
        self.config = parser.parse_args([self.lender, *self.words(sys.argv[2:])])
        self.spread_seed()
        self.share_gpus()

    def words(self, given: list[str]) -> list[str]:
        """Return what the parser reads for the words of the command line."""
        return given


class PlanCommandLine(BorrowingCommandLine):
    """`rlt plan`: the memory and time that a run would need. It loads no model and makes no folder.

    The parser of `rlt fit` reads the settings of `rlt predict` too; `rlt test` has other classes.
    """

    lender, group = "fit", (PlanOptions, "plan")

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """Return `rlt test` for an evaluation, else `rlt fit`."""
        cls.lender = "test" if names_evaluation(sys.argv[2:]) else "fit"
        return super().subcommands()

    def before_instantiate_classes(self) -> None:
        """Make no run folder."""

    def instantiate_classes(self) -> None:
        """Make what loads nothing, and no trainer: its devices may not be here, so its settings must do."""
        config = self.config.clone()
        trainer = config[self.lender].trainer.clone()
        for name in ("callbacks", "logger", "plugins", "profiler", "strategy"):
            config[self.lender].trainer[name] = "auto" if name == "strategy" else None
        made = self.parser.instantiate_classes(config)[self.lender]
        setup = read_setup(trainer, made.model, made.data, made.rollouts, made.plan)
        plan = make_plan(setup)
        print(plan_page(plan))
        if made.plan.json:
            write_json(plan, made.plan.json)
        self.status = 0 if plan.fits else 1

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: the plan has been printed."""


def names_evaluation(words: list[str]) -> bool:
    """Tell whether options, or configs that they name, choose the module of `rlt test`."""
    words = [part for word in with_config_files(words) for part in word.split("=", 1)]
    named = [Path(value) for option, value in pairwise(words) if option == "--config"]
    texts = [*words, *(path.read_text() for path in named if path.is_file())]
    return any(re.search(r"^[^#\n]*\bEvaluationModule\b", text, re.MULTILINE) for text in texts)


class OneProblemCommandLine(BorrowingCommandLine):
    """A verb that lets `rlt predict` work on one problem. It makes no run folder."""

    lender = "predict"

    def take(self, config: Namespace, row: Row, number: int, task: str) -> None:
        """Let the run work on one row, in one process and in a temporary folder.

        Args:
            config: The settings of `rlt predict`, which are changed.
            row: The row.
            number: Its number in its source: messages, seeds and the page name it.
            task: What the row is made into.
        """
        self.folder = TemporaryDirectory(prefix="rlt-")
        self.choice = RunFolder(Path(self.folder.name), None, resume=False, overwrite=False)
        path = Path(self.folder.name) / "problem.jsonl"
        path.write_text("\n" * (number - 1))
        append_rows(path, [row])
        data = config.data.init_args
        data.update(Namespace(task=task, source=str(path), trace_columns=[TRACE_COLUMN], max_rows=None))
        data.update(Namespace(val_batch_size=1, max_bad_frac=0.0, output_dir=None))
        config.trainer.update(Namespace(logger=False, callbacks=None, default_root_dir=self.folder.name))
        config.trainer.update(Namespace(devices=1, num_nodes=1, strategy="auto"))
        # The config.yaml of a run may name the checkpoint that it began with.
        config.ckpt_path = None
        config.scores.update(Namespace(rank_groups=None, per_token=False))

    def printer(self) -> Callback:
        """Return the callback that prints the result."""
        raise NotImplementedError

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the callback that prints the result, and show no progress."""
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(self.printer())  # type: ignore[attr-defined]
        trainer.progress_bar_callback.disable()  # type: ignore[union-attr]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        with self.folder:
            super()._run_subcommand(subcommand)

    def after_predict(self) -> None:
        """Print nothing: the callback has said it."""


class ExplainCommandLine(OneProblemCommandLine):
    """`rlt explain`: one explanation's reward, as `rlt predict` computes it."""

    group = (ExplainOptions, "explain")

    def before_instantiate_classes(self) -> None:
        """Score a file with this one explanation, in a temporary folder."""
        config = self.config["predict"]
        # The page says it below the figures.
        warnings.filterwarnings("ignore", ".*not sampled by the teacher.*")
        options = ExplainOptions(**config.explain.as_dict())
        score_given = bool(config.get("model.init_args.reward.init_args.score_given"))
        model, data = config.model.init_args, config.data.init_args.as_dict()
        students = as_list(frozen_student(config.model))
        chosen = choose_formats(FormatOptions.of_settings(data), model.get("teacher"), students)
        row = row_to_score(options, data, chosen[0].tags, score_given)
        self.take(config, row, options.row, "score")

    def printer(self) -> Explainer:
        """Return the callback that prints the explanation."""
        return Explainer(self.config_init["predict"].explain)
