"""Verbs that take the settings of another verb, and make no run folder.

rlt plan       the settings of `rlt fit`, or of `rlt test`
rlt check      those of `rlt fit`; scoring/check.py does the work
rlt explain    those of `rlt predict`; scoring/explain.py does the work
rlt teach      likewise, scoring/teach.py; a later setting overrides an earlier one:

    the settings of the run, or the model as its own student    `find_settings`
    --config files of the command line
    the server of --url, the teacher                            `build_words`
    all other options
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rlt_lightning.cli.parser import replace_config_names, split_words
from rlt_lightning.cli.stages import TRAINER_VERBS, RLTCommandLine, frozen_student
from rlt_lightning.commands.plan import PlanOptions, print_plan
from rlt_lightning.console import announce
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_formats
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.sources import MemoryRows, name_sources
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.datamodules.tokenize import TASKS
from rlt_lightning.engines.base import Sampling
from rlt_lightning.engines.client import WorkerClient, read_api_key
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.pretrained import is_model_folder, load_format
from rlt_lightning.run.jsonl import Row
from rlt_lightning.scoring.check import CheckOptions, check_run
from rlt_lightning.scoring.explain import ExplainOptions, explain, find_explanation
from rlt_lightning.scoring.teach import TeachOptions, read_problem, teach
from rlt_lightning.types import InputError, as_list

ANSWER_S = 10.0  # deadline of a server that is asked what it serves
RLT_MODULE, DATA_MODULE = "rlt_lightning.modules.RLTModule", "rlt_lightning.datamodules.StratosDataModule"
ENGINE, NO_PUSH = "rlt_lightning.engines.VLLMEngine", "rlt_lightning.engines.NoPush"
NO_REWARD = "rlt_lightning.scoring.one_problem.NoReward"
# Arguments that SFTModule and RLTModule share and that are not about training.
OF_BOTH_STAGES = (
    "micro_batch_tokens",
    "layout",
    "head",
    "dtype",
    "attn_implementation",
    "trust_remote_code",
    "seed",
)
USAGE = "rlt teach RUN_OR_FOLDER --question '…' --solution '…'"


class SharedSettingsCommandLine(RLTCommandLine):
    """A verb that takes the arguments of another verb, and one group of options more.

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
        self.config = parser.parse_args([self.settings_verb, *self.build_words(self.words)])
        self.spread_seed()
        self.share_gpus()

    def build_words(self, given: list[str]) -> list[str]:
        """Return what the parser reads for the words of the command line."""
        return given


class PlanCommandLine(SharedSettingsCommandLine):
    """`rlt plan`: the memory that a run would need. It loads no model and makes no folder.

    The parser of `rlt fit` reads the settings of `rlt predict` too; `rlt test` has other classes.
    """

    settings_verb, group = "fit", (PlanOptions, "plan")

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return `rlt test` for an evaluation, else `rlt fit`."""
        self.settings_verb = "test" if names_evaluation(self.words) else "fit"
        return super().subcommands()

    def before_instantiate_classes(self) -> None:
        """Make no run folder."""

    def instantiate_classes(self) -> None:
        """Make what loads nothing, and no trainer: its devices may not be here, so its settings must do."""
        config = self.config.clone()
        trainer = config[self.settings_verb].trainer.clone()
        for name in ("callbacks", "logger", "plugins", "profiler", "strategy"):
            config[self.settings_verb].trainer[name] = "auto" if name == "strategy" else None
        made = self.parser.instantiate_classes(config)[self.settings_verb]
        self.status = print_plan(trainer, made.model, made.data, made.rollouts, made.plan)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: the plan has been printed."""


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
        made = self.made
        lengths = {name: made.trainer[name] for name in ("max_steps", "max_epochs", "limit_train_batches")}
        machine = {name: made.trainer[name] for name in ("accelerator", "precision")}
        found = []
        for check in check_run(made.model, made.data, made.rollouts, made.check, lengths, **machine):
            print(check.line(), flush=True)
            found.append(check.status)
        self.status = int("fail" in found)
        counts = ", ".join(f"{found.count(status)} {status}" for status in dict.fromkeys(found))
        print(f"{len(found)} checks: {counts}")


def names_evaluation(words: list[str]) -> bool:
    """Tell whether options, or configs that they name, choose the module of `rlt test`."""
    words = [part for word in replace_config_names(words) for part in word.split("=", 1)]
    named = [Path(value) for option, value in pairwise(words) if option == "--config"]
    texts = [*words, *(path.read_text() for path in named if path.is_file())]
    return any(re.search(r"^[^#\n]*\bEvaluationModule\b", text, re.MULTILINE) for text in texts)


class OneProblemCommandLine(SharedSettingsCommandLine):
    """A verb that scores one problem with the settings of `rlt predict`. It makes no run folder."""

    settings_verb = "predict"
    # The problem, and its number in its source: messages, seeds and the page name it.
    row: Row
    row_number: int

    def use_row(self, config: Namespace, row: Row, number: int, task: str) -> None:
        """Let the settings of `rlt predict` be of one row, whose place they do not name.

        Args:
            config: The settings, which are changed.
            row: The row.
            number: Its number in its source.
            task: What the row is made into.
        """
        self.row, self.row_number = row, number
        data = config.data.init_args
        data.update(Namespace(task=task, source=[row], trace_columns=[TRACE_COLUMN], max_rows=None))
        data.update(Namespace(val_batch_size=1, max_bad_frac=0.0, output_dir=None))
        # A strategy of the settings may need packages and processes that are not here.
        config.trainer.update(Namespace(logger=None, callbacks=None, strategy="auto"))

    def instantiate_classes(self) -> None:
        """Make module, data and engine, and no trainer: score_problems makes its own."""
        self.made = self.parser.instantiate_classes(self.config)[self.settings_verb]
        data: StratosDataModule = self.made.data
        data.sources = [MemoryRows([self.row], first=self.row_number)]

    def _run_subcommand(self, subcommand: str) -> None:
        """Score the problem, and print what came out."""
        raise NotImplementedError


class ExplainCommandLine(OneProblemCommandLine):
    """`rlt explain`: one explanation's reward, as `rlt predict` computes it."""

    group = (ExplainOptions, "explain")

    def before_instantiate_classes(self) -> None:
        """Find the explanation."""
        config = self.config["predict"]
        options = ExplainOptions(**config.explain.as_dict())
        score_given = bool(config.get("model.init_args.reward.init_args.score_given"))
        model, data = config.model.init_args, config.data.init_args.as_dict()
        students = as_list(frozen_student(config.model))
        chosen = choose_formats(FormatOptions.from_settings(data), model.get("teacher"), students)
        row = find_explanation(options, data, chosen[0].tags, score_given)
        self.use_row(config, row, options.row, "score")

    def _run_subcommand(self, subcommand: str) -> None:
        made = self.made
        explain(made.model, made.data, made.rollouts, made.explain, **made.trainer.as_dict())


class TeachCommandLine(OneProblemCommandLine):
    """`rlt teach`: a teacher's explanation of one problem, with its reward. It makes no run folder."""

    group = (TeachOptions, None)
    # Tokens that the server takes, if one samples.
    max_model_len = sys.maxsize
    needs_policy = True

    def build_words(self, given: list[str]) -> list[str]:
        """Return the options of `rlt predict` for a teacher, in the order of the drawing above."""
        bare, options = split_words(given)
        if len(bare) > 1:
            raise InputError(
                f"rlt teach takes one teacher, but got {', '.join(bare)}. Put question and "
                "solution, each between quotes, after --question and --solution."
            )
        named = [(option[0].partition("=")[0], option) for option in options]
        names = {name for name, _ in named}
        configs = [option for name, option in named if name in ("--config", "-c")]
        others = [option for name, option in named if name not in ("--config", "-c")]
        if not (bare or configs or names & {"--help-all", "--model"}):
            raise InputError(
                f"rlt teach needs a teacher: {USAGE}. It is a run, a model folder, a hub id, miniature or "
                "smollm2-135m."
            )
        words = [word for option in configs for word in option]
        if bare:
            settings = find_settings(bare[0])
            teacher = settings["model"]["init_args"]["teacher"]
            words = ["--config", json.dumps(settings), *words, f"--model.teacher={teacher}"]
        urls = [
            "".join(value) or word.partition("=")[2] for word, *value in others if word.startswith("--url")
        ]
        if any(urls):
            words += [f"--rollouts.engine={ENGINE}", f"--rollouts.engine.urls={json.dumps(urls[-1:])}"]
            words += [f"--rollouts.engine.push={NO_PUSH}", "--rollouts.engine.launch=null"]
        return words + [word for option in others for word in option]

    def before_instantiate_classes(self) -> None:
        """Find the problem, and let the run sample explanations of it in a temporary folder."""
        config = self.config["predict"]
        model, data, rollouts = config.model.init_args, config.data.init_args, config.rollouts
        if "teacher" not in model:
            raise InputError(
                f"rlt teach needs model.class_path {RLT_MODULE}, but it is {config.model.class_path}. Name "
                f"the teacher instead: {USAGE}."
            )
        self.options = options = TeachOptions(**{f.name: config[f.name] for f in fields(TeachOptions)})
        if options.file is not None:
            data.update(Namespace(source=options.file, max_rows=None))
        number, columns = read_problem(options, data.as_dict())
        named = options.file is not None or options.row is not None
        self.problem = f"Row {number} of {name_sources(data.source)}" if named else "The problem"
        self.use_row(config, columns, number, "rlt")
        rollouts.update(Namespace(num_traces=options.num, val_sampling=None, asynchronous=False))
        if options.temperature is not None:
            rollouts.sampling.temperature = options.temperature
        if options.max_tokens is not None:
            rollouts.sampling.max_completion_length = options.max_tokens
        if frozen_student(config.model) is None and asks_student(model.reward):
            model.reward = Namespace(class_path=NO_REWARD, init_args=Namespace())
        if options.url is not None:
            self.ask_server(options.url, model, rollouts)

    def ask_server(self, url: str, model: Namespace, rollouts: Namespace) -> None:
        """Ask the server what it takes, and load the teacher here too only if r_KL needs its weights."""
        engine = rollouts.engine.init_args
        client = WorkerClient(url, engine.served_model, read_api_key(engine.api_key_env), own_weights=True)

        async def ask() -> tuple[int, bool]:
            context = await client.fetch_context(ANSWER_S)
            return context, await client.reports_sampled_log_probs(0, ANSWER_S)

        self.max_model_len, exact = asyncio.run(ask())
        reason = explain_need_of_weights(model, rollouts, exact)
        self.needs_policy = reason is not None
        if not exact:
            engine.log_probs = "trainer"
        if reason is not None:
            announce(f"r_KL needs the teacher's weights here too, since {reason}")

    def _run_subcommand(self, subcommand: str) -> None:
        made = self.made
        made.model.needs_policy = self.needs_policy
        self.require_usable(made.data)
        options, settings = self.options, made.trainer.as_dict()
        teach(made.model, made.data, made.rollouts, options, self.max_model_len, **settings)

    def require_usable(self, data: StratosDataModule) -> None:
        """Let the datamodule read the problem, and say in one line why it cannot."""
        try:
            data.setup("predict")
        except InputError as error:
            bad = [fault for report in getattr(data, "reports", []) for _, fault in report.bad]
            if not bad:
                raise
            raise InputError(f"{self.problem} cannot be used: {bad[0].detail}. Correct it.") from error


def find_settings(name: str) -> dict[str, Any]:
    """Return the settings with which a teacher explains: its run's, or with itself as the student.

    A model that was trained as a teacher is no student: without its run, or with the run of a script, which
    records no settings, it explains without a reward.

    Args:
        name: A run, a model folder, a hub id, or a model that comes with the package.

    Raises:
        InputError: If it is a folder without a model, or no folder where one is meant.
    """
    folder = Path(name).expanduser()
    is_model = is_model_folder(folder)
    run = folder.parent if is_model and folder.resolve().name == "model" else folder
    if (run / "config.yaml").is_file() and (run != folder or not is_model):
        return read_run_settings(run)
    if folder.is_dir() and not is_model and (folder / "model").is_dir():  # a script's run
        announce(
            f"{folder} has no config.yaml, since a script made it: its student, reward and sampling are not "
            f"known. {folder / 'model'} explains; --model.student STUDENT adds the reward."
        )
        return find_settings(str(folder / "model"))
    if folder.is_dir() and not is_model:
        raise InputError(
            f"The teacher must be a run, with config.yaml and model/, or a model folder, with config.json, "
            f"but {name} is neither. Name another folder."
        )
    recorded = load_format(name)
    student = None if recorded is not None and recorded.role == "teacher" else name
    model = {"class_path": RLT_MODULE, "init_args": {"teacher": name, "student": student}}
    return {"model": model, "data": {"class_path": DATA_MODULE}}


def read_run_settings(folder: Path) -> dict[str, Any]:
    """Return what a run's `config.yaml` says of models, reward, format and sampling, for its `model/`.

    The engine is left out: the workers of a run end with it.

    Raises:
        InputError: If the run has no model, or has trained a student.
    """
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text())
        model, data, trainer = settings["model"], settings["data"], settings["trainer"]
        arguments, task = model["init_args"], data["init_args"]["task"]
        is_student = TASKS[task].role == "student"
        rollouts = {name: settings["rollouts"][name] for name in ("sampling", "seed", "max_resamples")}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} must be the config.yaml of a run of rlt fit, but is not. Name a model folder instead."
        ) from error
    if is_student:
        raise InputError(
            f"{folder} has trained a student, which explains nothing (data.task {task}). Ask it: rlt chat "
            f"--model.path {folder / 'model'}"
        )
    if not (folder / "model").is_dir():
        raise InputError(
            f"{folder} must have a model/, but has none. Make it from a checkpoint: rlt export --ckpt_path "
            f"{folder} --output_dir {folder / 'model'}"
        )
    if "teacher" not in arguments:  # of stage 1, whose model began as the students' does
        kept = {name: value for name, value in arguments.items() if name in OF_BOTH_STAGES}
        student = {"student": arguments["pretrained"], "student_dtype": arguments["dtype"]}
        model = {"class_path": RLT_MODULE, "init_args": kept | student}
    model["init_args"] |= {"teacher": str(folder / "model"), "lora": None}
    data["init_args"]["task"] = "rlt"
    trainer = {name: trainer[name] for name in ("accelerator", "precision")}
    return {"model": model, "data": data, "rollouts": rollouts, "trainer": trainer}


def asks_student(reward: Namespace) -> bool:
    """Return whether a reward of the settings is computed with a student."""
    module, _, name = reward.class_path.rpartition(".")
    return issubclass(getattr(importlib.import_module(module), name), RLTReward)


def explain_need_of_weights(model: Namespace, rollouts: Namespace, exact: bool) -> str | None:
    """Return why r_KL needs the teacher's weights although a server samples; None if it does not.

    Args:
        model: Arguments of the RLTModule.
        rollouts: Arguments of the RolloutCallback.
        exact: Whether the server reports log-probs at the sampling temperature.
    """
    if not asks_student(model.reward):
        return None
    reward, sampling = model.reward.init_args, Sampling(**rollouts.sampling.as_dict())
    if reward.kl_estimator == "exact":
        return "reward.kl_estimator is exact"
    if reward.score_given:
        return "reward.score_given counts tokens that no server sampled"
    if model.teacher_log_probs == "recompute" or rollouts.engine.init_args.log_probs == "trainer":
        return "model.teacher_log_probs or the engine's log_probs says so"
    if sampling.temperature != reward.teacher_temperature or sampling.truncates:
        return "it samples otherwise than at reward.teacher_temperature"
    if not exact:
        return "the server was not started with --logprobs-mode processed_logprobs"
    return None
