"""`rlt explain`: what one explanation is worth to a student, by term and by token.

find_settings    RUN_OR_FOLDER ─▶ the settings with which its teacher explains
find_row         texts, a row of the data or a completion of a run ─▶ the row that is explained
explain          the row ─▶ score_problems, which samples an explanation if there is none ─▶ text and page
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.commands.report import KEY, render_completion, require_replaceable, write_page
from rlt_lightning.commands.scoring import score_problems
from rlt_lightning.console import has_styles
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.datamodules.sources import parse_sources, read_rows
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.datamodules.tokenize import TASKS
from rlt_lightning.metrics.catalogue import find_metric
from rlt_lightning.models.load import is_model_folder, load_format
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.rollout_rows import build_token_columns, choose_student, rollout_rows, score_rows
from rlt_lightning.numerics.rewards import Reduction, reduce_tokens
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.students import Students
from rlt_lightning.run.jsonl import Row, read_json_rows
from rlt_lightning.tags import CONTROL_CODES, TagStyle
from rlt_lightning.tasks.stepwise import describe_question
from rlt_lightning.types import BadRowError, InputError

RLT_MODULE, DATA_MODULE = "rlt_lightning.modules.RLTModule", "rlt_lightning.datamodules.StratosDataModule"
# Arguments that SFTModule and RLTModule share and that are not about training.
OF_BOTH_STAGES = (
    *("micro_batch_tokens", "layout", "head", "dtype", "attn_implementation", "trust_remote_code", "seed"),
)
# Terminal colours, from a token that the student expects to a token that surprises it most.
SHADES = ("", "\x1b[48;5;230m", "\x1b[48;5;222m", "\x1b[48;5;215m", "\x1b[48;5;209m", "\x1b[48;5;203m")
BLACK, RESET = "\x1b[30m", "\x1b[0m"
LEVELS = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats at which the shades begin
# Replaces what controls a terminal, and marks of direction, which would reorder the shaded tokens.
MARKS = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROLS = {code: "\ufffd" for code in (*CONTROL_CODES, *MARKS) if chr(code) != "\n"}


@dataclass(frozen=True)
class ExplainOptions:
    """What `rlt explain` explains: texts, a row of data.source, or a recorded completion of that row.

    Args:
        question: The question, in place of a row of the data. An empty text counts as none.
        solution: Its solution, which the teacher sees.
        explanation: The explanation. Without one a teacher that is named writes it; else it is the row's
            trace, data.trace_columns.
        row: Number of the row in data.source, from 1.
        recorded: The rollouts.jsonl of a run with these data, to take the explanation of the row from.
        step: Iteration of that completion; None: the last iteration that has the row.
        completion: Which of the row's completions it is, from 1.
        top: Number of the explanation's tokens in the table, largest KL first; 0 for all.
        html: Also write a page to this file, with the tokens' colours.
    """

    question: str = ""
    solution: str = ""
    explanation: str = ""
    row: int = 1
    recorded: str | None = None
    step: int | None = None
    completion: int = 1
    top: int = 20
    html: str | None = None

    def __post_init__(self) -> None:
        if bool(self.question) != bool(self.solution):
            raise InputError("--question and --solution need each other. Give both, or name a row by --row.")
        if self.recorded is not None and (self.question or self.explanation):
            raise InputError("Either --recorded has the explanation of a row, or texts are given. Drop one.")
        for name, least in (("row", 1), ("completion", 1), ("top", 0)):
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
        arguments, task = model["init_args"], data["init_args"]["task"]
        is_student = TASKS[task].role == "student"
        rollouts = {name: settings["rollouts"][name] for name in ("sampling", "seed", "max_resamples")}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} must be the config.yaml of a run of rlt fit, but is not. Name a model folder instead."
        ) from error
    if is_student:
        raise InputError(f"{folder} has trained a student (data.task {task}), which explains nothing.")
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


# The row


def find_row(
    options: ExplainOptions, data: dict[str, Any], tags: TagStyle, sample: bool, score_given: bool = False
) -> Row:
    """Return the row that is explained; its column `completion` is the explanation, if that is given.

    Args:
        options: What to explain.
        data: Settings of the StratosDataModule.
        tags: The teacher's tags.
        sample: Whether the teacher writes the explanation.
        score_given: Setting of the reward. If true, recorded tokens begin with the separator of the prompt.

    Raises:
        InputError: If there is no such row, or it has no explanation where one is needed.
    """
    own = {"question": options.question, "solution": options.solution}
    columns = own if options.question else read_row(options.row, data)
    closed = True
    if sample:
        require_usable(columns, tags, [])
        return columns
    if options.explanation:
        text = options.explanation.strip()
    elif options.recorded is not None:
        recorded = find_completion(Path(options.recorded), options)
        parsed = require_usable(columns, tags, [])
        if (recorded.get("question"), recorded.get("solution")) != (parsed.question, parsed.solution):
            raise InputError(
                f"{options.recorded} must be of a run with these data, but has another problem as row "
                f"{options.row}. Give the run's settings: --config RUN/config.yaml."
            )
        closed = recorded.get("finish_reason") == "stop"
        # Unlike the text, the tokens have the white space at the explanation's ends.
        tokens = recorded.get("thought_tokens")
        text = "".join(tokens) if tokens else str(recorded.get("explanation")).strip()
        text = text.removeprefix(tags.separator) if tokens and score_given else text
    else:
        name = TRACE_COLUMN if options.question else data["trace_columns"][0]
        text = require_usable(columns, tags, [name]).traces[name].strip()
    # An empty completion would be none, and the row's trace would be scored.
    end = tags.separator + tags.explanation_close
    row = {**columns, "completion": text + end * closed or "\n"}
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


def find_completion(path: Path, options: ExplainOptions) -> Row:
    """Return the completion of a rollouts.jsonl that the options name."""
    if not path.is_file():
        raise InputError(f"--recorded must be a rollouts.jsonl, but {path} is no file. Correct it.")
    of_row = [row for row in read_json_rows(path) if row.get("row") == options.row and "step" in row]
    step = options.step if options.step is not None else max((row["step"] for row in of_row), default=None)
    for row in of_row:
        if (row["step"], row.get("completion")) == (step, options.completion - 1):
            return row
    steps = sorted({row["step"] for row in of_row})
    raise InputError(
        f"{path} has no completion {options.completion} of row {options.row} at step {step}; it has that row "
        f"at the steps {steps}. Choose another --row, --step or --completion."
    )


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
            f"is {type(reward).__name__}. Choose a config with one, such as --config rank."
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
    caveats = list_caveats(reward, sampled=data.task == "rlt")
    print("\n".join([models, "", *describe_problem(row), *describe_students(row, module.students)]))
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


def describe_problem(row: Row) -> list[str]:
    """Return the lines of a problem: the question, what it leaves unsaid, and the solution."""
    about = describe_question(row["question"])
    lines = [f"Question: {row['question'].strip()}", *([f"  {about}"] if about else [])]
    return [line.translate(CONTROLS) for line in (*lines, f"Solution: {row['solution'].strip()}")]


def describe_students(row: Row, students: Students) -> list[str]:
    """Return a line for the reward of several students, and one for that of each; nothing for one."""
    labels = students.labels
    if len(labels) < 2:
        return []
    width = max(map(len, labels)) + 2
    how = "the smallest of" if students.reduction == "min" else "the weighted mean of"
    lines = ["", f"{'reward':<{width + 2}}{row['reward']:+.4f}  {how} {len(labels)} students"]
    for label, name, weight in zip(labels, students.names, students.weights, strict=True):
        words = name if students.reduction == "min" else f"weight {weight:g}, {name}"
        lines.append(f"  {label:<{width}}{row[f'reward/{label}']:+.4f}  {words}")
    return lines


def describe_worth(row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, top: int) -> list[str]:
    """Return the lines that say what an explanation is worth to one student.

    Args:
        row: A scored completion with its tokens, as the student sees it.
        empty: The empty explanation of the same problem, with its tokens.
        parts: The terms that add up to the reward, by name.
        reward: The reward that scored them.
        top: Number of the explanation's tokens in the table; 0 for all.
    """
    thought, kl = row["thought_tokens"], row["thought_kl"]
    solution, log_probs = row["solution_tokens"], row["solution_log_probs"]
    before, after = sum(empty["solution_log_probs"]), sum(log_probs)
    order = sorted(range(len(kl)), key=lambda i: -kl[i])[: top or None]
    return [
        "The student's probability of the whole solution, without and with the explanation:",
        f"  {math.exp(before):.4g} -> {math.exp(after):.4g} ({before:.4f} -> {after:.4f} nats), at "
        f"temperature {reward.student_temperature:g}",
        "",
        *describe_terms(row, empty, parts, reward),
        "",
        f"Explanation: KL of teacher from student ({reward.kl_estimator}), nats",
        shade_tokens(thought, kl),
        "",
        *tabulate(thought, {"KL": kl}, order),
        "",
        "Solution: the student's log-prob after the explanation, and after an empty one, nats",
        shade_tokens(solution, [-value for value in log_probs]),
        "",
        *tabulate(
            solution, {"log-prob": log_probs, "empty": empty["solution_log_probs"]}, range(len(solution))
        ),
    ]


def describe_terms(row: Row, empty: Row, parts: dict[str, float], reward: RLTReward) -> list[str]:
    """Return the reward and, below it, a line for each term that says what it consists of."""
    thought, kl = row["thought_tokens"], row["thought_kl"]
    solution, log_probs = row["solution_tokens"], row["solution_log_probs"]
    gain = row["solution_log_prob_reward"] - empty["solution_log_prob_reward"]
    less = f" - ({row['baseline']:.4f} of an empty explanation)" if "baseline" in row else ""
    of_solution = reduce_row(log_probs, reward.process_log_probs, reward.reduction)
    of_kl = reduce_row(kl or [0.0], reward.process_kl, reward.kl_reduction)
    made_of = {
        "solution": f"{reward.solution_weight:g} x ({reward.reduction} {of_solution:.4f} + "
        f"{reward.min_coef:g} x min {row['solution_log_prob_min']:.4f}{less}); the hardest token is "
        f"{describe_place(min, solution, log_probs)}; {gain:+.4f} against an empty explanation",
        "kl": f"-{reward.kl_weight:g} x ({reward.kl_reduction} {of_kl:.4f} + {reward.max_coef:g} x max "
        f"{row['kl_max']:.4f}); "
        + (f"the least natural token is {describe_place(max, thought, kl)}" if kl else "no token counts"),
        "format": "closed and not empty" if row["explanation"] else "empty",
    }
    if row["finish_reason"] != "stop":
        made_of["format"] = f"not closed after {row['num_tokens']} tokens"
    width = max(map(len, parts)) + 2
    lines = [f"{'reward':<{width + 2}}{row['reward']:+.4f}"]
    for name, value in parts.items():
        words = made_of.get(name) or find_metric(f"reward/{name}").meaning
        lines.append(f"  {name:<{width}}{value:+.4f}  {words}".rstrip())
    return lines


def reduce_row(
    values: list[float], process: Callable[[Tensor, Tensor], Tensor], reduction: Reduction
) -> float:
    """Return what a reward makes of one row's tokens, in place of their mean."""
    mask = torch.ones(1, len(values), dtype=torch.bool)
    return reduce_tokens(process(torch.tensor([values]), mask), mask, reduction).item()


def list_caveats(reward: RLTReward, sampled: bool) -> list[str]:
    """Return what to know about the figures of tokens.

    Args:
        reward: The reward that has them.
        sampled: Whether the teacher itself wrote the explanation.
    """
    found = []
    if not sampled and reward.kl_estimator != "exact":
        found.append(
            f"{reward.kl_estimator} estimates a KL only on average over texts that this teacher sampled. For "
            "a text from elsewhere, add --model.reward.kl_estimator exact."
        )
    normalised = (reward.normalise_log_probs, reward.normalise_kl) != ("none", "none")
    if (reward.clip_log_probs, reward.clip_kl) != (None, None) or normalised:
        found.append("Values of tokens are before clipping and normalisation, the terms' after.")
    return found


# Tokens in a terminal


def describe_place(choose: Callable[..., int], tokens: list[str], values: list[float]) -> str:
    """Return the token with the smallest or largest value, and its place from 1."""
    place = choose(range(len(values)), key=values.__getitem__)
    return f"{quote_token(tokens[place])} (token {place + 1})"


def quote_token(token: str) -> str:
    """Return a token between quotes, its white space written out."""
    return json.dumps(token, ensure_ascii=False).translate(CONTROLS)


def shade_tokens(tokens: list[str], surprises: list[float]) -> str:
    """Return the text with each token's background by its value in nats; without colours the text."""
    texts = [token.translate(CONTROLS) for token in tokens]
    if not has_styles():
        return "".join(texts).strip("\n")
    shades = [SHADES[bisect_right(LEVELS, value)] for value in surprises]
    # A shade ends with its line: terminals would fill the rest of the row with it.
    marked = [
        f"{BLACK}{shade}{text}{RESET}".replace("\n", f"{RESET}\n{BLACK}{shade}") if shade else text
        for text, shade in zip(texts, shades, strict=True)
    ]
    return "".join(marked).strip("\n")


def tabulate(tokens: list[str], columns: dict[str, list[float]], places: Iterable[int]) -> list[str]:
    """Return a line for each token at these places: its place from 1, its values and its text."""
    lines = [f"{'token':>7}" + "".join(f"{name:>10}" for name in columns)]
    for i in places:
        numbers = "".join(f"{values[i]:>10.4f}" for values in columns.values())
        lines.append(f"{i + 1:>7}{numbers}  {quote_token(tokens[i])}")
    return lines
