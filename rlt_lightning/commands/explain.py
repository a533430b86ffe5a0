"""`rlt explain`: what one explanation is worth to a student, by term and by token.

find_settings    RUN_OR_FOLDER ─▶ the settings with which its teacher explains
find_row         texts, or a row of the data ─▶ the row that is explained
explain          the row ─▶ score_problems, which samples an explanation if there is none ─▶ text and page
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.commands.report import KEY, render_completion, require_replaceable, write_page
from rlt_lightning.commands.scoring import score_problems
from rlt_lightning.console import make_printable
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.datamodules.sources import parse_sources, read_rows
from rlt_lightning.datamodules.stages import TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.metrics.catalogue import find_metric
from rlt_lightning.models.load import is_model_folder, load_format
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.rollout_rows import build_token_columns, choose_student, rollout_rows, score_rows
from rlt_lightning.rewards import RLTReward
from rlt_lightning.run.jsonl import Row
from rlt_lightning.tags import TagStyle
from rlt_lightning.tasks.stepwise import describe_question
from rlt_lightning.types import BadRowError, InputError

RLT_MODULE, DATA_MODULE = "rlt_lightning.modules.RLTModule", "rlt_lightning.datamodules.TeacherRLData"
# Arguments that SFTModule and RLTModule share and that are not about training.
OF_BOTH_STAGES = (
    *("micro_batch_tokens", "layout", "head", "dtype", "attn_implementation", "trust_remote_code", "seed"),
)


@dataclass(frozen=True)
class ExplainOptions:
    """What `rlt explain` explains: texts, or a row of data.source.

    Args:
        question: The question, in place of a row of the data. An empty text counts as none.
        solution: Its solution, which the teacher sees.
        explanation: The explanation. Without one a teacher that is named writes it; else it is the row's
            trace, of the first of data.trace_columns if the data are ScoringData.
        row: Number of the row in data.source, from 1.
        top: Number of the explanation's tokens in the table, largest KL first; 0 for all.
        html: Also write a page to this file, with the tokens' colours.
    """

    question: str = ""
    solution: str = ""
    explanation: str = ""
    row: int = 1
    top: int = 20
    html: str | None = None

    def __post_init__(self) -> None:
        if bool(self.question) != bool(self.solution):
            raise InputError("--question and --solution need each other. Give both, or name a row by --row.")
        for name, least in (("row", 1), ("top", 0)):
            if (value := getattr(self, name)) < least:
                raise InputError(f"--{name} must be at least {least}, but is {value}. Raise it.")


# The teacher


def find_settings(name: str) -> dict[str, Any]:
    """Return the settings with which a teacher explains: its run's, or with itself as the student.

    A model that was trained as a teacher is no student: without its run it has none.

    Args:
        name: A run, a model folder, a hub id, or a model that comes with the package.

    Raises:
        InputError: If it is a run that explains nothing, or no folder where one is meant.
    """
    folder = Path(name).expanduser()
    is_model = is_model_folder(folder)
    run = folder.parent if is_model and folder.resolve().name == "model" else folder
    if (run / "config.yaml").is_file() and (run != folder or not is_model):
        return read_run_settings(run)
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
        arguments, stage = model["init_args"], load_class(data["class_path"])
        is_student = stage.role == "student"
        rollouts = {name: settings["rollouts"][name] for name in ("sampling", "seed", "max_resamples")}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise InputError(
            f"{path} must be the config.yaml of a run of rlt fit, but is not. Name a model folder instead."
        ) from error
    if is_student:
        raise InputError(f"{folder} has trained a student ({stage.__name__}), which explains nothing.")
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
    data = change_stage(data, TeacherRLData)
    trainer = {name: trainer[name] for name in ("accelerator", "precision")}
    return {"model": model, "data": data, "rollouts": rollouts, "trainer": trainer}


def change_stage(data: dict[str, Any], stage: type[StratosDataModule]) -> dict[str, Any]:
    """Return class_path and init_args of data for another stage's class, with the settings that both have."""
    if issubclass(load_class(data["class_path"]), stage):
        return data
    parser = ArgumentParser()
    parser.add_class_arguments(stage, fail_untyped=False)
    known = vars(parser.get_defaults())
    settings = {name: value for name, value in data["init_args"].items() if name in known}
    return {"class_path": f"{stage.__module__}.{stage.__name__}", "init_args": settings}


def load_class(path: str) -> Any:
    """Import the class that a class_path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


# The row


def find_row(options: ExplainOptions, data: dict[str, Any], tags: TagStyle, sample: bool) -> Row:
    """Return the row that is explained; its column `completion` is the explanation, if that is given.

    Args:
        options: What to explain.
        data: Settings of the data.
        tags: The teacher's tags.
        sample: Whether the teacher writes the explanation.

    Raises:
        InputError: If there is no such row, or it has no explanation where one is needed.
    """
    texts = {"question": options.question, "solution": options.solution}
    columns = texts if options.question else read_row(options.row, data)
    if sample:
        require_usable(columns, tags, [])
        return columns
    text = options.explanation.strip()
    if not text:
        name = TRACE_COLUMN if options.question else data.get("trace_columns", [TRACE_COLUMN])[0]
        text = require_usable(columns, tags, [name]).traces[name].strip()
    row = {**columns, "completion": text + tags.separator + tags.explanation_close}
    require_usable(row, tags, [TRACE_COLUMN], allows_completion=True)
    return row


def require_usable(columns: Row, tags: TagStyle, traces: list[str], allows_completion: bool = False) -> Any:
    """Return the texts of a row, or say in one line what it lacks."""
    try:
        return parse_row(columns, tags, traces, allows_completion=allows_completion)
    except BadRowError as error:
        raise InputError(
            f"What is explained cannot be used: {error.detail}. Choose another --row, or give the text by "
            "--question, --solution, --explanation; a teacher that is named writes an explanation."
        ) from error


def read_row(number: int, data: dict[str, Any]) -> Row:
    """Return the columns of a row; its number counts through all sources."""
    first = 1
    for source in parse_sources(data["source"]):
        rows = read_rows(source, data["split"], data["num_embedded_rows"], data["seed"], data["max_rows"])
        if number < first + rows[-1][0]:
            columns = dict(rows).get(number + 1 - first)
            if isinstance(columns, dict):
                return dict(columns)
            reason = columns.detail if columns else "it is blank"
            raise InputError(f"Row {number} of {source} cannot be used: {reason}. Choose another.")
        first += rows[-1][0]
    raise InputError(f"--row must be one of data.source, 1 to {first - 1}, but is {number}. Choose another.")


# What it is worth


def explain(
    module: RLTModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: ExplainOptions,
    **trainer: Any,
) -> None:
    """Print the reward of an explanation, and write it as a page.

    Args:
        module: The teacher, its students and the reward.
        data: The row; with its explanation, to be scored, or without one, to be sampled.
        rollouts: How the explanation is sampled.
        options: How the reward is shown.
        trainer: Arguments of Lightning's Trainer.

    Raises:
        InputError: If no reward asks a student, or the page would replace another file.
    """
    reward = getattr(module, "reward", None)
    if reward is None or not reward.has_tokens:
        raise InputError(
            "`rlt explain` shows what a student makes of tokens, so model.reward must be an RLTReward, but "
            f"is {type(reward).__name__}. Choose a config with one, such as --config recipe_7b/rank."
        )
    if options.html:
        require_replaceable(Path(options.html))
    [scored] = score_problems(module, data, rollouts, with_empty=True, **trainer)
    assert scored.empty is not None
    assert scored.step.score is not None
    assert scored.empty.score is not None
    students = module.students
    [row] = rollout_rows(scored.step, [0])
    row |= build_token_columns(reward.list_tokens(scored.step, 0, students), students)
    empty = score_rows(scored.empty.score)[0]
    empty |= build_token_columns(reward.list_tokens(scored.empty, 0, students), students)
    by_student = scored.step.score.by_student
    models = (
        f"teacher {module.pretrained}, student{'s' * bool(by_student)} {', '.join(module.students.names)}"
    )
    caveats = list_caveats(reward, sampled=isinstance(data, TeacherRLData))
    problem = [f"Question: {show(row['question'])}", f"Solution: {show(row['solution'])}"]
    if about := describe_question(row["question"]):
        problem.insert(1, f"  {about}")
    print("\n".join([models, "", *problem]))
    if by_student:
        print(f"\nreward {row['reward']:+.4f} of all students")
    cards = []
    # With one student, its scores are those of the batch.
    for label, scores in by_student.items() or [("", scored.step.score)]:
        parts = {name: float(values[0]) for name, values in scores.terms.items()}
        seen, without = choose_student(row, label), choose_student(empty, label)
        print(
            "\n".join(
                [f"\n{label}:"] * bool(label)
                + ["", *describe_worth(seen, without, parts, reward, options.top)]
            )
        )
        cards.append(f"<h2>{escape(label)}</h2>" * bool(label) + render_completion(seen))
    print("".join(f"\n{caveat}\n" for caveat in caveats), end="", flush=True)
    if options.html:
        notes = "".join(f"<p>{escape(text)}</p>" for text in (models, *caveats))
        write_page(Path(options.html), "One explanation, token by token", notes + KEY + "".join(cards))
        print(f"\n{options.html}: the same as a page")


def describe_worth(row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, top: int) -> list[str]:
    """Return the lines that say what an explanation is worth to one student.

    Args:
        row: A scored completion with its tokens, as the student sees it.
        empty: The empty explanation of the same problem, with its tokens.
        parts: The terms that add up to the reward, by name.
        reward: The reward that scored them.
        top: Number of the explanation's tokens in the table; 0 for all.
    """
    kl, log_probs, without = row["thought_kl"], row["solution_log_probs"], empty["solution_log_probs"]
    before, after = sum(without), sum(log_probs)
    order = sorted(range(len(kl)), key=lambda i: -kl[i])[: top or None]
    width = max(map(len, parts)) + 2
    return [
        "The student's probability of the solution, without and with the explanation:",
        f"  {math.exp(before):.4g} -> {math.exp(after):.4g} ({before:.4f} -> {after:.4f} nats), at "
        f"temperature {reward.student_temperature:g}",
        "",
        f"{'reward':<{width + 2}}{row['reward']:+.4f}",
        *(
            f"  {name:<{width}}{value:+.4f}  {find_metric(f'reward/{name}').meaning}"
            for name, value in parts.items()
        ),
        "",
        f"Explanation: KL of teacher from student ({reward.kl_estimator}), nats",
        show("".join(row["thought_tokens"]).strip("\n")),
        "",
        *tabulate(row["thought_tokens"], {"KL": kl}, order),
        "",
        "Solution: the student's log-prob after the explanation and an empty one, nats",
        *tabulate(row["solution_tokens"], {"log-prob": log_probs, "empty": without}, range(len(log_probs))),
    ]


def list_caveats(reward: RLTReward, sampled: bool) -> list[str]:
    """Return caveats about the figures per token.

    Args:
        reward: The reward that has them.
        sampled: Whether the teacher itself wrote the explanation.
    """
    caveats = []
    if not sampled and reward.kl_estimator != "exact":
        caveats.append(
            f"{reward.kl_estimator} estimates a KL only on average over texts that this teacher sampled. For "
            "a text from elsewhere, add --model.reward.kl_estimator exact."
        )
    normalised = (reward.normalise_log_probs, reward.normalise_kl) != ("none", "none")
    if (reward.clip_log_probs, reward.clip_kl) != (None, None) or normalised:
        caveats.append("Values of tokens are before clipping and normalisation, the terms' after.")
    return caveats


def show(text: str) -> str:
    """Return a text's lines without characters that would control a terminal."""
    return "\n".join(map(make_printable, text.strip().split("\n")))


def tabulate(tokens: list[str], columns: dict[str, list[float]], places: Iterable[int]) -> list[str]:
    """Return a line for each token at these places: its place from 1, its values and its text."""
    lines = [f"{'token':>7}" + "".join(f"{name:>10}" for name in columns)]
    for i in places:
        numbers = "".join(f"{values[i]:>10.4f}" for values in columns.values())
        lines.append(f"{i + 1:>7}{numbers}  {make_printable(json.dumps(tokens[i], ensure_ascii=False))}")
    return lines
