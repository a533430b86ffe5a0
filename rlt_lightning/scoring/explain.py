"""`rlt explain`: the reward of one explanation, term by term and token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.datamodules.sources import parse_sources, read_rows
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.numerics.likelihood import LikelihoodReward
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.report.page import build_data_of_rows, require_replaceable, write_page
from rlt_lightning.run.jsonl import Row, read_json_rows
from rlt_lightning.run.rollout_rows import build_token_columns, choose_student, rollout_rows, score_rows
from rlt_lightning.scoring.one_problem import compare_probabilities, score_problems
from rlt_lightning.scoring.text import (
    Terminal,
    build_legend,
    describe_change,
    describe_problem,
    describe_scorer,
    describe_students,
    describe_terms,
    find_terminal,
    fold_caveats,
    list_caveats,
    shade_tokens,
    show_solution,
    tabulate_kl,
)
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import BadRowError, InputError


@dataclass(frozen=True)
class ExplainOptions:
    """What `rlt explain` explains: an explanation of a row of data.source, or texts of your own.

    Args:
        row: Number of the row in data.source, from 1. Its explanation is its trace, data.trace_columns.
        rollouts: The rollouts.jsonl of a run with these data, to take the explanation of the row from.
        step: Iteration of that completion; None: the last iteration that has the row.
        completion: Which of the row's samples it is, from 1 as in the report.
        question: Replaces the row's question; needs a solution and an explanation too.
        solution: Replaces the row's solution.
        explanation: Replaces the row's explanation.
        top: Number of the explanation's tokens in the table, largest KL first; 0 for all.
        html: Also write a page to this file, with the value of every token.
    """

    row: int = 1
    rollouts: str | None = None
    step: int | None = None
    completion: int = 1
    question: str | None = None
    solution: str | None = None
    explanation: str | None = None
    top: int = 20
    html: str | None = None

    def __post_init__(self) -> None:
        if self.question is not None and None in (self.solution, self.explanation):
            raise InputError(
                "explain.question needs explain.solution and explain.explanation too, since no row has them. "
                "Add them, or name a row of data.source by --explain.row."
            )
        if self.rollouts is not None and self.explanation is not None:
            raise InputError(
                "Either explain.rollouts or explain.explanation has the explanation, but both are set."
            )
        if self.completion < 1:
            raise InputError(
                f"explain.completion counts samples from 1, as the report does, but is {self.completion}. "
                "Add 1 to the column `completion` of rollouts.jsonl, which counts from 0."
            )
        if self.row < 1 or self.top < 0:
            raise InputError(
                f"explain.row must be at least 1 and explain.top at least 0, but are {self.row} and "
                f"{self.top}. Correct them."
            )


def find_explanation(
    options: ExplainOptions, data: dict[str, Any], tags: TagStyle, score_given: bool = False
) -> Row:
    """Return a row of a source whose completion is the explanation in question.

    Args:
        options: What to explain.
        data: Settings of the StratosDataModule.
        tags: The teacher's tags.
        score_given: Setting of the reward. If true, recorded tokens begin with the separator of the prompt.

    Raises:
        InputError: If there is no such row, or it has no explanation.
    """
    end = tags.separator + tags.explanation_close
    columns = {} if options.question is not None else read_row(options.row, data)
    if options.solution is not None and columns.get("conversations") is not None:
        raise InputError(
            f"explain.solution must replace a column solution, but row {options.row} is a conversation. Add "
            "explain.question and explain.explanation."
        )
    closed = True
    if options.explanation is not None:
        text = options.explanation.strip()
    elif options.rollouts is not None:
        recorded = find_completion(options)
        require_same_problem(recorded, columns, tags, options)
        closed = recorded.get("finish_reason") == "stop"
        # Unlike the text, the tokens have the white space at the explanation's ends.
        tokens = recorded.get("thought_tokens")
        text = "".join(tokens) if tokens else str(recorded.get("explanation")).strip()
        if tokens and score_given:
            text = text.removeprefix(tags.separator)
    else:
        name = data["trace_columns"][0]
        try:
            text = parse_row(columns, tags, [name]).traces[name].strip()
        except BadRowError as error:
            raise InputError(
                f"Row {options.row} must have an explanation to score, but {error.detail}. Give one by "
                "--explain.explanation or --explain.rollouts."
            ) from error
    texts = {"question": options.question, "solution": options.solution}
    columns |= {name: text for name, text in texts.items() if text is not None}
    # An empty completion would be none, and the row's trace would be scored.
    row = {**columns, "completion": text + end * closed or "\n"}
    try:
        parse_row(row, tags, [TRACE_COLUMN], allows_completion=True)
    except BadRowError as error:
        raise InputError(f"What is explained must be usable, but {error.detail}. Correct it.") from error
    return row


def require_same_problem(recorded: Row, columns: Row, tags: TagStyle, options: ExplainOptions) -> None:
    """Check that a recorded completion is for the problem of this row of the data."""
    try:
        row = parse_row(columns, tags)
    except BadRowError as error:
        raise InputError(f"Row {options.row} must be usable, but {error.detail}. Choose another.") from error
    if (recorded.get("question"), recorded.get("solution")) != (row.question, row.solution):
        raise InputError(
            f"{options.rollouts} must be of a run with these data, but has another problem as row "
            f"{options.row}. Give the run's settings: --config RUN/config.yaml."
        )


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
    raise InputError(
        f"The row must be one of data.source, 1 to {first - 1}, but is {number}. Choose another."
    )


def find_completion(options: ExplainOptions) -> Row:
    """Return the recorded completion that the options name."""
    path = Path(str(options.rollouts))
    if not path.is_file():
        raise InputError(f"explain.rollouts must be a rollouts.jsonl, but {path} is no file. Correct it.")
    of_row = [row for row in read_json_rows(path) if row.get("row") == options.row and "step" in row]
    step = options.step if options.step is not None else max((row["step"] for row in of_row), default=None)
    for row in of_row:
        if (row["step"], row.get("completion")) == (step, options.completion - 1):
            return row
    steps = sorted({row["step"] for row in of_row})
    raise InputError(
        f"{path} must have sample {options.completion} of row {options.row}"
        + (f" at step {options.step}" if options.step is not None else "")
        + f", but has that row at {'steps ' + ', '.join(map(str, steps)) if steps else 'no step'}. Choose "
        "another explain.row, explain.step or explain.completion."
    )


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
        data: The row with the explanation, to be scored.
        rollouts: The callback of every run; nothing is sampled.
        options: How the reward is shown.
        trainer: Arguments of Lightning's Trainer.

    Raises:
        InputError: If no reward asks a student, or the page would replace another file.
    """
    if not hasattr(module, "reward"):
        raise InputError(
            f"`rlt explain` shows a reward, but {type(module).__name__}, the model, has none. Choose a "
            "config with RLTModule, such as --config rank."
        )
    if not isinstance(module.reward, RLTReward):
        reads = "reads only the solution" if isinstance(module.reward, LikelihoodReward) else "asks no model"
        raise InputError(
            "`rlt explain` shows what a student makes of tokens, but model.reward is "
            f"{type(module.reward).__name__}, which {reads}. Choose a config with an RLTReward, such as "
            "--config rank."
        )
    if options.html:
        require_replaceable(Path(options.html))
    [scored] = score_problems(module, data, rollouts, with_empty=True, **trainer)
    assert scored.empty is not None
    formats = data.student_views.formats
    [row], [rollout] = rollout_rows(scored.batch), scored.rollouts.rollouts
    row |= build_token_columns(rollout, scored.scores, 0, formats)
    row |= compare_probabilities(scored.empty, scored.scores, 0)
    empty = score_rows(scored.empty)[0] | build_token_columns(rollout, scored.empty, 0, formats)
    terminal, by_student = find_terminal(), scored.scores.by_student
    facts = describe_scorer(module.pretrained, module.students, module.reward)
    print("\n".join([*describe_problem(row, facts, terminal), ""]))
    if by_student:
        print("\n".join([*describe_students(row, module.students, terminal), ""]))
    # With one student, its scores are those of the batch.
    for label, scores in by_student.items() or [("", scored.scores)]:
        parts = {name: float(values[0]) for name, values in scores.terms.parts().items()}
        pair = choose_student(row, label), choose_student(empty, label)
        if by_student:
            print(f"\n{label}:\n")
        print(describe_explanation(*pair, parts, module.reward, options.top, terminal), flush=True)
    if options.html:
        page = build_data_of_rows([row], list_caveats(module.reward, any_text=True), facts)
        write_page(Path(options.html), "One explanation, token by token", page)
        print(f"\n{options.html}: the same as a page")


def describe_explanation(
    row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, top: int, terminal: Terminal
) -> str:
    """Return the explained reward as text for the terminal.

    Args:
        row: A scored completion with its tokens.
        empty: The empty explanation of the same problem, with its tokens.
        parts: The terms that add up to the reward, by name.
        reward: The reward that scored them.
        top: Number of the explanation's tokens in the table; 0 for all.
        terminal: What the text is for.
    """
    lines = [
        *describe_change(row, reward, terminal),
        "",
        *describe_terms(row, empty, parts, reward, terminal),
        "",
        f"Explanation: KL of teacher from student ({reward.kl_estimator}), nats",
        shade_tokens(row["thought_tokens"], row["thought_kl"], terminal),
        *build_legend("KL", terminal),
        "",
        *tabulate_kl(row, top),
        "",
        *show_solution(row, empty, terminal),
    ]
    return "\n".join(lines + fold_caveats(list_caveats(reward, any_text=True), terminal))
