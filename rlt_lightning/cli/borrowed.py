"""Verbs that read the settings of another verb: `rlt plan` and `rlt explain`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.stages import VERBS, RLTCommandLine
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.planner import PlanOptions, make_plan, plan_page, read_setup, write_json
from rlt_lightning.records.jsonl import append_rows
from rlt_lightning.report.explain import Explainer, ExplainOptions, rows_to_score


class BorrowingCommandLine(RLTCommandLine):
    """A verb with the arguments of another one, and a group of its own."""

    lender: str  # the other verb
    group: tuple[type, str]  # class of the own options, and their name

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """The parser is the other verb's."""
        return {cls.lender: VERBS[cls.lender]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the own ones."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(*self.group)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        self.borrowed = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.borrowed

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the command line as the other verb's, under its own name."""
        self.borrowed.prog = f"rlt {sys.argv[1]}"
        self.config = parser.parse_args([self.lender, *sys.argv[2:]])
        self.spread_seed()


class PlanCommandLine(BorrowingCommandLine):
    """`rlt plan`: what `rlt fit` with the same arguments would need. Nothing is loaded, no folder is made."""

    lender, group = "fit", (PlanOptions, "plan")

    def before_instantiate_classes(self) -> None:
        """Make no run folder."""

    def instantiate_classes(self) -> None:
        """Make what loads nothing; of the trainer, whose devices may not be here, the settings will do."""
        config = self.config.clone()
        trainer = config["fit"].trainer.clone()
        for name in ("callbacks", "logger", "plugins", "profiler", "strategy"):
            config["fit"].trainer[name] = "auto" if name == "strategy" else None
        made = self.parser.instantiate_classes(config)["fit"]
        setup = read_setup(trainer, made.model, made.data, made.rollouts, made.plan)
        plan = make_plan(setup)
        print(plan_page(plan))
        if made.plan.json:
            write_json(plan, made.plan.json)
        self.status = 0 if plan.fits else 1

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""


class ExplainCommandLine(BorrowingCommandLine):
    """`rlt explain`: what `rlt predict` makes of one explanation, token by token. No run folder is made."""

    lender, group = "predict", (ExplainOptions, "explain")

    def before_instantiate_classes(self) -> None:
        """Put the explanation in the place of the source, in a folder that is gone at the end."""
        config = self.config["predict"]
        self.folder = TemporaryDirectory(prefix="rlt-explain-")
        warnings.filterwarnings("ignore", ".*not sampled by the teacher.*")  # said below the figures
        data, path = config.data.init_args, Path(self.folder.name) / "explained.jsonl"
        options = ExplainOptions(**config.explain.as_dict())
        score_given = bool(config.get("model.init_args.reward.init_args.score_given"))
        rows = rows_to_score(options, data.as_dict(), score_given)
        path.write_text("\n" * (options.row - 1))  # messages and the page name rows by their lines
        append_rows(path, rows)
        data.update(Namespace(task="score", source=str(path), trace_columns=[TRACE_COLUMN], max_rows=None))
        data.update(Namespace(val_batch_size=2, max_bad_frac=0.0, output_dir=None))
        config.trainer.update(Namespace(logger=False, callbacks=None, default_root_dir=self.folder.name))
        config.trainer.update(Namespace(devices=1, num_nodes=1, strategy="auto"))
        config.ckpt_path = None  # a resumed run's config.yaml names what it went on from
        config.scores.update(Namespace(rank_groups=None, per_token=False))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Only what prints."""
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(Explainer(self.config_init["predict"].explain))  # type: ignore[attr-defined]
        trainer.progress_bar_callback.disable()  # type: ignore[union-attr]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        with self.folder:
            super()._run_subcommand(subcommand)

    def after_predict(self) -> None:
        """The callback has said it."""
