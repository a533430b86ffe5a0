"""`rlt teach`: what a teacher explains, what it is worth, and how the student reads every token of it.

read_problem     arguments, a file or standard input → one row and its number
teach            let the teacher explain it and its students score that, as `rlt predict` does
                 (one_problem.py); print, and write page and JSON
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.console import announce
from rlt_lightning.datamodules.rows import find_missing_columns, parse_row
from rlt_lightning.datamodules.sources import name_sources
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.engines.client import ADDRESS
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.scorer import Students
from rlt_lightning.numerics.rewards import Reward, RLTReward
from rlt_lightning.report.page import build_data_of_rows, require_replaceable, write_page
from rlt_lightning.run.jsonl import Row, append_rows, format_line
from rlt_lightning.run.metrics import COLUMNS
from rlt_lightning.run.rollout_rows import (
    build_token_columns,
    build_trace_rows,
    choose_student,
    describe_samples,
    identify_copy,
    rollout_rows,
    score_rows,
)
from rlt_lightning.scoring.explain import read_row
from rlt_lightning.scoring.one_problem import NoReward, ScoredBatch, compare_probabilities, score_problems
from rlt_lightning.scoring.text import (
    Terminal,
    build_legend,
    describe_change,
    describe_format,
    describe_problem,
    describe_scorer,
    describe_students,
    describe_terms,
    find_terminal,
    fold_after,
    fold_caveats,
    fold_plain,
    format_probability,
    list_caveats,
    list_terms,
    shade_tokens,
    show_solution,
    tabulate_kl,
)
from rlt_lightning.tags import STRATOS
from rlt_lightning.types import BadRowError, InputError, Scores

WAYS = (
    "Give --question '…' --solution '…', or --file FILE --row N, or pipe in a JSON object with question and "
    "solution."
)


@dataclass(frozen=True)
class TeachOptions:
    """What `rlt teach` explains and how it shows that.

    Args:
        question: The question. An empty text counts as none.
        solution: Its solution, which the teacher sees.
        file: Take question and solution from a row of this source instead: all that data.source takes.
        row: Number of the row in the file, from 1; without a file, in data.source. None: 1.
        num: Number of explanations; the one with the largest reward is marked.
        url: A vLLM server that serves the teacher, such as http://127.0.0.1:8000; None: this process samples.
        temperature: Of sampling; 0 is greedy. None: rollouts.sampling.temperature.
        max_tokens: Most tokens of an explanation; None: rollouts.sampling.max_completion_length. An
            explanation also ends at the end of the models' contexts.
        top: Number of the explanation's tokens in the table, largest KL first; 0 for all.
        html: Also write a page to this file, with the figure of every token.
        json: "true" prints a JSON row for each explanation in place of the text; a name adds the rows to
            that file.
    """

    question: str = ""
    solution: str = ""
    file: str | None = None
    row: int | None = None
    num: int = 1
    url: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    top: int = 10
    html: str | None = None
    json: bool | str = False

    def __post_init__(self) -> None:
        if (self.question or self.solution) and (self.file is not None or self.row is not None):
            raise InputError(
                "Either --file and --row name the problem, or --question and --solution are the problem, but "
                "both are given. Drop one of them."
            )
        if self.url is not None and not re.fullmatch(ADDRESS, self.url):
            raise InputError(
                "--url must be an address such as http://127.0.0.1:8000, without user and path, but is none. "
                "Correct it; a key goes into the environment variable VLLM_API_KEY."
            )
        for name, value, least in (("row", self.row, 1), ("num", self.num, 1), ("top", self.top, 0)):
            if value is not None and value < least:
                raise InputError(f"--{name} must be at least {least}, but is {value}. Raise it.")


def read_problem(options: TeachOptions, data: dict[str, Any]) -> tuple[int, Row]:
    """Return the number of the row to explain, from 1, and its columns.

    Standard input is read if question or solution is missing and no row is named. It is a JSON object, whose
    columns the options replace. Any other text is the one of question and solution that the options lack.

    Args:
        options: What to explain.
        data: Settings of the StratosDataModule.

    Raises:
        InputError: If there is no such row, or question or solution is missing.
    """
    if options.file is not None or options.row is not None:
        number = options.row or 1
        columns = read_row(number, data)
        if missing := find_missing_columns(columns, (), allows_completion=False):
            raise InputError(
                f"Row {number} of {name_sources(data['source'])} must have question and solution, or "
                f"conversations, but lacks {' and '.join(missing)}. Choose another."
            )
        return number, columns
    own = {name: getattr(options, name) for name in ("question", "solution") if getattr(options, name)}
    columns = own if len(own) == 2 else read_piped_columns(own)
    try:
        # Which tags there are changes nothing about texts without tags; the datamodule checks conversations.
        if columns.get("conversations") is None:
            parse_row(columns, STRATOS)
    except BadRowError as error:
        raise InputError(
            f"rlt teach needs a question and its solution, but {error.detail}. {WAYS}"
        ) from error
    return 1, columns


def read_piped_columns(own: Row) -> Row:
    """Return the columns of standard input, completed by the question or the solution of the options."""
    text = ""
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            text = sys.stdin.read().strip()
        except UnicodeError as error:
            raise InputError(f"Standard input must be text in UTF-8, but is not ({error}).") from error
    missing = [name for name in ("question", "solution") if name not in own]
    if not text:
        raise InputError(f"rlt teach needs a question and its solution, but has no {missing[0]}. {WAYS}")
    try:
        columns = json.loads(text)
    except ValueError as error:
        if len(missing) == 1:
            return own | {missing[0]: text}
        raise InputError(
            "Standard input must be a JSON object with question and solution, or plain text beside "
            f"--question or --solution, but is no JSON ({error}). {WAYS}"
        ) from error
    if isinstance(columns, dict):
        return columns | own
    if len(missing) == 1:  # a number, for one
        return own | {missing[0]: text}
    raise InputError(
        f"Standard input must be a JSON object with question and solution, but is {text:.40}. {WAYS}"
    )


def teach(
    module: RLTModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: TeachOptions,
    max_model_len: int = sys.maxsize,
    **trainer: Any,
) -> None:
    """Print a teacher's explanations of one problem with what they are worth, and write page and JSON.

    Args:
        module: The teacher, its students and the reward.
        data: The problem.
        rollouts: How explanations are sampled.
        options: How they are shown.
        max_model_len: Tokens of prompt and completion that the server takes, if one samples.
        trainer: Arguments of Lightning's Trainer.

    Raises:
        InputError: If a file cannot be written, or the models' contexts leave no room for an explanation.
    """
    if options.html:
        require_replaceable(Path(options.html))
    if isinstance(options.json, str) and not Path(options.json).parent.is_dir():
        raise InputError(f"--json {options.json} must lie in a folder that exists. Make it.")
    longest, with_empty = rollouts.sampling.max_completion_length, isinstance(module.reward, RLTReward)
    [scored] = score_problems(module, data, rollouts, with_empty, max_model_len, **trainer)
    explained = ExplainedProblem.from_scores(module, scored, data)
    rows = explained.build_rows(build_trace_rows(scored.batch, data, module.pretrained))
    if options.json is True:
        print("".join(map(format_line, rows)), end="", flush=True)
    else:
        print("\n".join(describe_explanations(explained, options.top, find_terminal())), flush=True)
    if cut := [row["num_tokens"] for row in rows if row["finish_reason"] == "length"]:
        shortened = rollouts.sampling.max_completion_length < longest
        setting = "the end of the models' contexts" if shortened else "--max_tokens"
        announce(f"cut after {max(cut)} tokens: {setting}")
    if isinstance(options.json, str):
        append_rows(Path(options.json), rows)
        announce(f"{options.json}: the same as JSON, added at its end")
    if options.html:
        caveats = list_caveats(module.reward) if isinstance(module.reward, RLTReward) else []
        page = build_data_of_rows(explained.rows, caveats, explained.facts)
        write_page(Path(options.html), "What the teacher explains", page)
        announce(f"{options.html}: the same as a page")


@dataclass(frozen=True)
class ExplainedProblem:
    """Explanations of one problem, and what their student makes of them.

    Attributes:
        rows: A row of rollouts.jsonl for each, with its tokens and the student's view where a student scores.
        empty: The same for an empty explanation; None without a student.
        parts: For each explanation, the terms that add up to its reward, by name.
        reward: The reward that scored them.
        teacher: The teacher's name.
        students: The students; their columns of the rows are NAME/LABEL if there are several.
        parts_of: The same as `parts` by each of several students.
    """

    rows: list[Row]
    empty: Row | None
    parts: list[dict[str, float]]
    reward: Reward
    teacher: str
    students: Students
    parts_of: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    @classmethod
    def from_scores(cls, module: RLTModule, scored: ScoredBatch, data: StratosDataModule) -> ExplainedProblem:
        """Collect what a scored batch of one problem has."""
        scores = scored.scores
        rows, empty = list(rollout_rows(scored.batch)), None
        parts_of = {label: list_parts(one) for label, one in scores.by_student.items()}
        if scored.empty is not None:
            rollouts, formats = scored.rollouts.rollouts, data.student_views.formats
            empty = score_rows(scored.empty)[0] | build_token_columns(rollouts[0], scored.empty, 0, formats)
            for i, rollout in enumerate(rollouts):
                rows[i] |= build_token_columns(rollout, scores, i, formats)
                rows[i] |= compare_probabilities(scored.empty, scores, i)
        if isinstance(module.reward, NoReward):
            rows = [{name: value for name, value in row.items() if name != "reward"} for row in rows]
        models = module.pretrained, module.students
        return cls(rows, empty, list_parts(scores), module.reward, *models, parts_of)

    @property
    def best(self) -> int:
        """Return the number of the explanation with the largest reward, from 0."""
        return max(range(len(self.rows)), key=lambda i: self.rows[i].get("reward", 0.0))

    @property
    def facts(self) -> dict[str, str]:
        """Return what scored the explanations, for the head of a page."""
        return describe_scorer(self.teacher, self.students, self.reward)

    def build_rows(self, traces: Iterable[Row]) -> list[Row]:
        """Return the rows of traces.jsonl with the tokens and the student's view, as far as there are any."""
        names = [column.name for column in (*COLUMNS["taught"], *COLUMNS["tokens"])]
        found = []
        for trace, row in zip(traces, self.rows, strict=True):
            own = (name for base in names for name in row if strip_label(name) == base)
            found.append(trace | {name: row[name] for name in own})
            if "reward" not in row:
                del found[-1]["reward"]
        return found


def strip_label(column: str) -> str:
    """Return the name of a column without the label of a student."""
    return column.partition("/")[0]


def list_parts(scores: Scores) -> list[dict[str, float]]:
    """Return, for each completion, the terms that add up to its reward, by name."""
    parts = scores.terms.parts()
    return [{name: float(v[i]) for name, v in parts.items()} for i in range(len(scores.terms.reward))]


def describe_explanations(explained: ExplainedProblem, top: int, terminal: Terminal) -> list[str]:
    """Return the lines that a terminal shows: the problem, the explanations, and what the best is worth.

    Args:
        explained: The explanations of one problem.
        top: Number of the explanation's tokens in the table; 0 for all.
        terminal: What the lines are for.
    """
    rows, best = explained.rows, explained.best
    several = len(explained.students.names) > 1
    lines = describe_problem(rows[0], explained.facts, terminal)
    copies = group_copies(rows)
    for numbers in copies:
        row = rows[numbers[0]]
        lines += ["", *fold_after("", build_heading(row, numbers, len(rows), best in numbers), terminal)]
        if explained.empty is None:
            lines += fold_plain(row["explanation"], terminal)
        else:
            lines.append(shade_tokens(row["thought_tokens"], row["thought_kl"], terminal))
    if isinstance(explained.reward, NoReward):
        return [
            *lines,
            "",
            *fold_after("", "Without a student (model.student null) there is no reward.", terminal),
        ]
    if explained.empty is not None:
        whose = explained.students.labels[0] if several else "student"
        lines += build_legend(f"KL of teacher from {whose}", terminal)
    if len(copies) > 1:
        lines += ["", f"The largest reward, {describe_samples([best], len(rows))}:"]
    row, parts = rows[best], explained.parts[best]
    if explained.empty is None or not isinstance(explained.reward, RLTReward):
        return [*lines, "", *list_terms(row["reward"], parts, {}, terminal)]
    if several:
        lines += ["", *describe_students(row, explained.students, terminal)]
    for label in explained.students.labels:
        own, empty = (choose_student(one, label) for one in (row, explained.empty))
        terms = explained.parts_of[label][best] if several else parts
        lines += ["", f"{label}:"] if several else []
        lines += describe_worth(own, empty, terms, explained.reward, top, terminal)
    return [*lines, *fold_caveats(list_caveats(explained.reward), terminal)]


def describe_worth(
    row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, top: int, terminal: Terminal
) -> list[str]:
    """Return the lines that say what an explanation is worth to one student.

    The arguments are those of `describe_explanation`.
    """
    return [
        "",
        *describe_change(row, reward, terminal),
        "",
        *describe_terms(row, empty, parts, reward, terminal),
        "",
        *fold_after("", f"KL of teacher from student ({reward.kl_estimator}) by token, nats", terminal),
        *tabulate_kl(row, top),
        "",
        *show_solution(row, empty, terminal),
    ]


def group_copies(rows: list[Row]) -> list[list[int]]:
    """Return the numbers, from 0, of identical explanations together, in the order of the first of each."""
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(identify_copy(row, row["explanation"]), []).append(number)
    return [*groups.values()]


def build_heading(row: Row, numbers: list[int], num_rows: int, best: bool) -> str:
    """Return the line above an explanation.

    Args:
        row: The explanation, or the first of identical ones.
        numbers: Their numbers, from 0.
        num_rows: Number of all explanations.
        best: Whether it has the largest reward.
    """
    size = f"{row['num_tokens']} tokens, {describe_format(row)}"
    if num_rows == 1:
        return f"Explanation ({size}):"
    samples = describe_samples(numbers, num_rows)
    samples = samples[0].upper() + samples[1:]
    if "reward" not in row:
        return f"{samples} ({size}):"
    figures = [f"reward {row['reward']:+.4f}"]
    # Of several students each has its own, below.
    if "student_log_prob_after" in row and not any(name.startswith("student_prob_after/") for name in row):
        before, after = (format_probability(row[f"student_log_prob_{name}"]) for name in ("before", "after"))
        figures.append(f"the student's probability of the solution {before} -> {after}")
    figures += [] if row["finish_reason"] == "stop" else [describe_format(row)]
    return (
        f"{samples}{'; largest reward' if best and len(numbers) < num_rows else ''} ({', '.join(figures)}):"
    )
