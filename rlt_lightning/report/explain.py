"""`rlt explain`: the reward of one explanation, term by term and token by token."""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.datamodules.bad_rows import BadRowError
from rlt_lightning.datamodules.rows import TRACE_COLUMN, parse_row
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.records.catalogue import metric_of
from rlt_lightning.records.jsonl import Row, rows_in
from rlt_lightning.records.rows import rollout_rows, token_columns
from rlt_lightning.report.page import data_of_rows, require_replaceable, write_page
from rlt_lightning.tags import CONTROL_CODES, TagStyle
from rlt_lightning.types import InputError, PromptBatch, as_list

# Terminal colours, from a token that the student expects to a token that surprises it most.
SHADES = ("", "\x1b[48;5;230m", "\x1b[48;5;222m", "\x1b[48;5;215m", "\x1b[48;5;209m", "\x1b[48;5;203m")
BLACK, RESET = "\x1b[30m", "\x1b[0m"
BOUNDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats at which the shades begin
# Replaces what controls a terminal, and marks of direction, which would reorder the shaded tokens;
# chat/screen.py keeps these marks.
MARKS = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
CONTROLS = {code: "\ufffd" for code in (*CONTROL_CODES, *MARKS) if chr(code) != "\n"}


@dataclass(frozen=True)
class ExplainOptions:
    """What `rlt explain` explains: an explanation of a row of data.source, or texts of your own.

    Args:
        row: Number of the row in data.source, from 1. Its explanation is its trace, data.trace_columns.
        rollouts: The rollouts.jsonl of a run with these data, to take the explanation of the row from.
        step: Iteration of that completion; None: the last iteration that has the row.
        completion: Number of that completion in its group, from 0.
        question: Replaces the row's question; needs a solution and an explanation too.
        solution: Replaces the row's solution.
        explanation: Replaces the row's explanation.
        top: Number of the explanation's tokens in the table, largest KL first; 0 for all.
        html: Also write a page to this file, with the value of every token.
    """

    row: int = 1
    rollouts: str | None = None
    step: int | None = None
    completion: int = 0
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
        if self.row < 1 or self.top < 0:
            raise InputError(
                f"explain.row must be at least 1 and explain.top at least 0, but are {self.row} and "
                f"{self.top}. Correct them."
            )


def rows_to_score(
    options: ExplainOptions, data: dict[str, Any], tags: TagStyle, score_given: bool = False
) -> list[Row]:
    """Return two rows of a source: the explanation in question and, to compare with, an empty one.

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
    completion = text + end * closed or "\n"
    rows = [{**columns, "completion": completion}, {**columns, "completion": end}]
    try:
        parse_row(rows[0], tags, [TRACE_COLUMN], allows_completion=True)
    except BadRowError as error:
        raise InputError(f"What is explained must be usable, but {error.detail}. Correct it.") from error
    return rows


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
    for source in as_list(data["source"]):
        rows = read_rows(source, data["split"], data["num_embedded_rows"], data["seed"], data["max_rows"])
        if number < first + rows[-1][0]:
            columns = dict(rows).get(number + 1 - first)
            if isinstance(columns, dict):
                return dict(columns)
            reason = columns.detail if columns else "it is blank"
            raise InputError(f"Row {number} of {source} cannot be used: {reason}. Choose another.")
        first += rows[-1][0]
    raise InputError(f"explain.row must be a row of data.source, 1 to {first - 1}, but is {number}.")


def find_completion(options: ExplainOptions) -> Row:
    """Return the recorded completion that the options name."""
    path = Path(str(options.rollouts))
    if not path.is_file():
        raise InputError(f"explain.rollouts must be a rollouts.jsonl, but {path} is no file. Correct it.")
    of_row = [row for row in rows_in(path) if row.get("row") == options.row and "step" in row]
    step = options.step if options.step is not None else max((row["step"] for row in of_row), default=None)
    for row in of_row:
        if (row["step"], row.get("completion")) == (step, options.completion):
            return row
    steps = sorted({row["step"] for row in of_row})
    raise InputError(
        f"{path} must have completion {options.completion} of row {options.row}"
        + (f" at step {options.step}" if options.step is not None else "")
        + f", but has that row at {'steps ' + ', '.join(map(str, steps)) if steps else 'no step'}. Choose "
        "another explain.row, explain.step or explain.completion."
    )


class Explainer(Callback):
    """Print the explained reward, and write it as a page."""

    def __init__(self, options: ExplainOptions) -> None:
        self.options = options

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        reward: Any = pl_module.reward
        if not isinstance(reward, RLTReward):
            raise InputError(
                f"`rlt explain` shows what a student makes of tokens, but model.reward is "
                f"{type(reward).__name__}, which asks no model. Choose a config with an RLTReward, such as "
                "configs/rank.yaml."
            )
        if self.options.html:
            require_replaceable(Path(self.options.html))

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert batch.rollouts is not None
        assert batch.scores is not None
        tokenizer = stratos_of(trainer).format.tokenizer
        rows = list(rollout_rows(batch))
        for i, rollout in enumerate(batch.rollouts.rollouts):
            rows[i] |= token_columns(rollout, batch.scores, i, tokenizer)
        parts = {name: float(values[0]) for name, values in batch.scores.terms.parts().items()}
        reward: Any = pl_module.reward
        text = explained(rows[0], rows[1], parts, reward, self.options.top, sys.stdout.isatty())
        print(text, flush=True)
        if self.options.html:
            write_page(Path(self.options.html), "One explanation, token by token", data_of_rows(rows[:1]))
            print(f"\n{self.options.html}: the same as a page")


def explained(
    row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, top: int, colours: bool
) -> str:
    """Return the explained reward as text for the terminal.

    Args:
        row: A scored completion with its tokens.
        empty: The empty explanation of the same problem, with its tokens.
        parts: The terms that add up to the reward, by name.
        reward: The reward that scored them.
        top: Number of the explanation's tokens in the table; 0 for all.
        colours: Whether to shade the texts.
    """
    thought, kl = row["thought_tokens"], row["thought_kl"]
    solution, log_probs = row["solution_tokens"], row["solution_log_probs"]
    gain = row["solution_log_prob_reward"] - empty["solution_log_prob_reward"]
    made_of = {
        "solution": f"{reward.solution_weight:g} x (mean {row['solution_log_prob_mean']:.4f} + "
        f"{reward.min_coef:g} x min {row['solution_log_prob_min']:.4f}); the hardest token is "
        f"{place_of(min, solution, log_probs)}; {gain:+.4f} against an empty explanation",
        "kl": f"-{reward.kl_weight:g} x (mean {row['kl_mean']:.4f} + {reward.max_coef:g} x max "
        f"{row['kl_max']:.4f}); "
        + (f"the least natural token is {place_of(max, thought, kl)}" if kl else "no token counts"),
        "format": format_of(row),
    }
    width = max(map(len, parts)) + 2
    lines = [f"{'reward':<{width + 2}}{row['reward']:+.4f}"]
    lines += [
        f"  {name:<{width}}{value:+.4f}  {made_of.get(name) or metric_of(f'reward/{name}').meaning}".rstrip()
        for name, value in parts.items()
    ]
    lines += [
        "",
        f"Explanation: KL of teacher from student ({reward.kl_estimator}), nats",
        *shaded(thought, kl, colours),
        "",
        *table(thought, {"KL": kl}, sorted(range(len(kl)), key=lambda i: -kl[i])[: top or None]),
        "",
        "Solution: the student's log-prob after the explanation, and after an empty one, nats",
        *shaded(solution, [-value for value in log_probs], colours),
        "",
        *table(solution, {"log-prob": log_probs, "empty": empty["solution_log_probs"]}, range(len(solution))),
    ]
    if reward.kl_estimator != "exact":
        lines.append(
            f"\n{reward.kl_estimator} is a KL on average over texts that the teacher samples. "
            "For any text there is kl_estimator exact."
        )
    if (reward.clip_log_probs, reward.clip_kl) != (None, None) or "none" not in (
        reward.normalise_log_probs,
        reward.normalise_kl,
    ):
        lines.append("\nValues of tokens are before clipping and normalisation, the terms' after.")
    return "\n".join(lines)


def format_of(row: Row) -> str:
    """Return whether a completion is closed and not empty, in words."""
    if row["finish_reason"] != "stop":
        return "not closed"
    return "closed and not empty" if row["explanation"] else "empty"


def place_of(choose: Callable[..., int], tokens: list[str], values: list[float]) -> str:
    """Return the token with the smallest or largest value, and its place from 1."""
    place = choose(range(len(values)), key=values.__getitem__)
    return f"{visible(tokens[place])} (token {place + 1})"


def visible(token: str) -> str:
    """Return a token between quotes, its white space written out."""
    return json.dumps(token, ensure_ascii=False).translate(CONTROLS)


def shaded(tokens: list[str], surprise: list[float], colours: bool) -> list[str]:
    """Return the text with each token's background by its value in nats, and a legend; or just the text."""
    texts = [token.translate(CONTROLS) for token in tokens]
    if not colours:
        return ["".join(texts).strip("\n")]
    shades = [SHADES[bisect_right(BOUNDS, value)] for value in surprise]
    # A shade ends with its line: terminals would fill the rest of the row with it.
    marked = [
        f"{BLACK}{shade}{text}{RESET}".replace("\n", f"{RESET}\n{BLACK}{shade}") if shade else text
        for text, shade in zip(texts, shades, strict=True)
    ]
    legend = (f"{BLACK}{shade} {bound:g} {RESET}" for shade, bound in zip(SHADES[1:], BOUNDS, strict=True))
    return ["".join(marked).strip("\n"), "from " + "".join(legend) + " nats"]


def table(tokens: list[str], columns: dict[str, list[float]], places: Iterable[int]) -> list[str]:
    """Return a line for each token at these places: its place from 1, its values and its text."""
    lines = [f"{'token':>7}" + "".join(f"{name:>10}" for name in columns)]
    for i in places:
        numbers = "".join(f"{values[i]:>10.4f}" for values in columns.values())
        lines.append(f"{i + 1:>7}{numbers}  {visible(tokens[i])}")
    return lines
