"""Callbacks that write the output of `rlt predict` batch by batch; a resumed run adds only what is missing.

data           rows                                    file          at the end
ScoringData    the source's rows, with their scores    scores.jsonl  groups by reward, or a comparison
TeacherRLData  a teacher's explanations of solutions   traces.jsonl  distillation.jsonl, .parquet, README.md
StudentRLData  a model's answers, each with a verdict  traces.jsonl  the same files, with right answers only
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.datamodules.bad_rows import list_rows
from rlt_lightning.datamodules.rows import QUESTION_COLUMNS, TRACE_COLUMN, keep_columns
from rlt_lightning.datamodules.stages import ScoringData, StudentRLData, TeacherRLData
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.rollout_rows import (
    build_token_columns,
    read_reference,
    resume_rows,
)
from rlt_lightning.run.data_card import ANSWERS, EXPLANATIONS, TABLE, write_data_card
from rlt_lightning.run.jsonl import Row, format_line, read_json_rows, rewrite
from rlt_lightning.run.ranking import split_into_groups, write_comparison, write_groups
from rlt_lightning.run.ranks import append_from_ranks
from rlt_lightning.tags import escape_half_pairs
from rlt_lightning.types import InputError, Problem, PromptBatch

Selection = Literal["first", "best_reward", "shortest", "all", "fits_context"]
WRITTEN = (TeacherRLData, StudentRLData)  # the data whose completions make a distillation set
TRACES, SELECTED, CARD = "traces.jsonl", "distillation.jsonl", "README.md"


class ScoreWriter(Callback):
    """Write the scores of `rlt predict` to `scores.jsonl`, input columns kept, batch by batch.

    It does nothing if the teacher writes the traces. A resumed run scores only what is missing.

    Args:
        per_token: Also write every token with its log-prob or KL, see `build_token_columns`.
        rank_groups: Divide the scored rows by reward into so many groups of equal size, each in a file. Not
            for several data.trace_columns: then the traces of one problem are compared.
    """

    def __init__(self, per_token: bool = False, rank_groups: int | None = None) -> None:
        self.per_token = per_token
        self.rank_groups = rank_groups

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out which rows an earlier run has finished; rows are written in the source's order."""
        if stage != "predict" or not isinstance(data := get_stratos_data(trainer), ScoringData):
            return
        if not hasattr(pl_module, "reward"):
            raise InputError(
                f"Scores are made by a module with a reward, but {type(pl_module).__name__}, the model, has "
                "none. Choose RLTModule, as in recipe_7b/score."
            )
        module: Any = pl_module
        if self.per_token and not module.reward.has_tokens:
            raise InputError(
                f"scores.per_token needs RLTReward, but model.reward is {type(pl_module.reward).__name__}, "
                "which asks no model. Set it to false."
            )
        if self.rank_groups is not None and len(data.trace_columns) == 1:
            split_into_groups([0.0] * len(data.items), self.rank_groups)
        problems, writes = data.problems[: len(data.items)], trainer.is_global_zero
        is_of = partial(is_scored_row_of, trace_columns=data.trace_columns)
        data.num_finished = resume_rows(self._path(trainer), problems, is_of, 1, data.val_batch_size, writes)
        warn_of_foreign_traces(data.items, pl_module)

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(get_stratos_data(trainer), ScoringData):
            return
        if self.per_token:
            module: Any = pl_module
            batch.step.bring_to_host(batch.step.shard)
            for i, row in enumerate(outputs):
                tokens = module.reward.list_tokens(batch.step, i, module.students)
                columns = build_token_columns(tokens, module.students)
                outputs[i] = {**keep_columns(row, columns), **columns}
        append_from_ranks(trainer, self._path(trainer), outputs)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rank and compare. Lightning does not call this after a failure."""
        if stage != "predict" or not trainer.is_global_zero:
            return
        data = get_stratos_data(trainer)
        if not isinstance(data, ScoringData):
            return
        rows, folder = list(read_json_rows(self._path(trainer))), self._path(trainer).parent
        terms = list_columns(pl_module)
        if self.rank_groups is not None and len(data.trace_columns) == 1:
            write_groups(rows, self.rank_groups, terms, folder)
        if len(data.trace_columns) == 2:
            problems = data.problems[: len(rows)]
            rollouts = [data.build_rollout(p, p.given_completion) for p in problems if p.given_completion]
            write_comparison(rows, rollouts, data.trace_columns, terms, folder)

    def _path(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "scores.jsonl"


def list_columns(module: Any) -> tuple[str, ...]:
    """Return the columns of scored rows that pages show, with the reward by each of several students."""
    labels = module.students.labels
    return (*module.reward.columns(), *(f"reward/{label}" for label in labels if len(labels) > 1))


def is_scored_row_of(row: Row, problem: Problem, trace_columns: Sequence[str]) -> bool:
    """Return whether a scored row has the texts of a problem's row; other columns may have been corrected."""
    names = (*QUESTION_COLUMNS, "solution", "conversations", "system", "completion", "trace_column")
    return has_columns(row, {name: problem.columns.get(name) for name in (*names, *trace_columns)})


def has_columns(row: Row, columns: Row) -> bool:
    """Return whether a row that was read from a file has these columns, as the file holds them."""
    return format_line({name: row.get(name) for name in columns}) == format_line(columns)


def is_sampled_by(teacher: str, problem: Problem) -> bool:
    """Return whether a row names this teacher as the one that wrote its trace, by any path of its folder."""
    columns = problem.columns
    named = columns.get("teacher") if columns.get("trace_column", TRACE_COLUMN) == TRACE_COLUMN else None
    return isinstance(named, str) and Path(named).resolve() == Path(teacher).resolve()


def warn_of_foreign_traces(items: Sequence[Any], module: Any) -> None:
    """Warn if a sampled estimator of the KL is used for traces that the teacher has not sampled."""
    of_kl = module.reward.find_kl(temperature=1.0)
    if of_kl is None:
        return
    foreign = sum(not is_sampled_by(str(module.pretrained), problem) for problem in items)
    if foreign and of_kl.kl_estimator != "exact":
        rank_zero_warn(
            f"{foreign} of {len(items)} traces were not sampled by the teacher {module.pretrained} (their "
            f"column teacher does not name it). The mean of their log-ratios ({of_kl.kl_estimator}) is no "
            "KL and may be negative, so that nonsense can win. Rank such traces by the exact KL, with "
            "--config recipe_7b/rank; see docs/pipeline.md."
        )


class DistillationWriter(Callback):
    """Write what a model samples and turn it into a distillation set; do nothing if rows have traces.

    `traces.jsonl` gets every explanation with every term of its reward, or every answer with its verdict,
    batch by batch; a resumed run samples only what is missing. At the end the callback makes
    `distillation.jsonl`, `distillation.parquet` and a data card of it. To make them with another `select`,
    repeat the run with `--resume true`. Only right answers are ever selected.

    Args:
        select: Which traces of a problem to take. `first`, `best_reward`, `shortest` and `all` mean what they
            say; `fits_context` takes the best trace that fits a student or, if none fits, the shortest. A
            choice needs several traces; one greedy trace costs less (docs/pipeline.md, what to do first).
        per_problem: Most traces of a problem; `all` takes all.
        min_reward: Least reward of a selected trace, nats. With it only traces that fit a student are
            selected; a problem without one is left out.
    """

    def __init__(
        self, select: Selection = "fits_context", per_problem: int = 1, min_reward: float | None = None
    ) -> None:
        if per_problem < 1:
            raise InputError(f"distillation.per_problem must be at least 1, but is {per_problem}. Raise it.")
        self.select: Selection = select
        self.per_problem = per_problem
        self.min_reward = min_reward

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out what an earlier run has finished; rows are in order, a problem's traces together."""
        if stage != "predict" or not isinstance(data := get_stratos_data(trainer), WRITTEN):
            return
        is_answers = isinstance(data, StudentRLData)
        if is_answers and isinstance(pl_module, RLTModule):
            require_verdicts(pl_module)
        num_traces = RolloutCallback.of(trainer).num_traces
        problems, is_of = data.problems[: len(data.items)], is_answer_to if is_answers else is_trace_of
        size, writes = data.val_batch_size, trainer.is_global_zero
        path = self._folder(trainer) / TRACES
        data.num_finished = resume_rows(path, problems, is_of, num_traces, size, writes)

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
        if isinstance(get_stratos_data(trainer), WRITTEN):
            append_from_ranks(trainer, self._folder(trainer) / TRACES, outputs)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the distillation set. Lightning does not call this after a failure."""
        if stage != "predict" or not trainer.is_global_zero:
            return
        data = get_stratos_data(trainer)
        if not isinstance(data, WRITTEN):
            return
        folder, is_answers = self._folder(trainer), isinstance(data, StudentRLData)
        rows = list(read_json_rows(folder / TRACES))
        candidates = [row for row in rows if is_usable(row)] if is_answers else rows
        if self.min_reward is not None:
            candidates = [row for row in candidates if row["fits"] and row["reward"] >= self.min_reward]
        if not candidates:
            counted = count_answers(rows, 0) if is_answers else count_rejected(rows)
            reasons = [f"{number} {what}" for what, number in counted.items() if number]
            lower = "" if self.min_reward is None else "lower distillation.min_reward, "
            raise InputError(
                f"A distillation set must have at least one row, but none of the {len(rows)} traces in "
                f"{folder / TRACES} can be one ({', '.join(reasons) or 'there is none'}). Raise "
                f"rollouts.num_traces or max_completion_length, {lower}give an example in "
                "data.teacher_system_prompt or take a better model."
            )
        selected = list(self.select_traces(candidates))
        rewrite(folder / SELECTED, map(format_line, selected))
        write_parquet(selected, folder / TABLE)
        usable = {row["row"] for row in candidates if row["fits"]}
        if unusable := sorted({row["row"] for row in rows} - usable):
            rank_zero_warn(explain_unusable(unusable, len(data.items), is_answers, self.min_reward))
        metadata: dict[str, Any] = {}
        for part in (pl_module, data, RolloutCallback.of(trainer)):
            metadata |= part.build_card_metadata()  # type: ignore[operator]
        metadata["selection"] = f"{self.select}, per problem {self.per_problem}"
        if self.min_reward is not None:
            metadata["selection"] += f", reward at least {self.min_reward:g}"
        if is_answers:
            counts = describe_answers(rows, len(data.items)) | count_answers(rows, len(selected))
            card = write_data_card(ANSWERS, metadata, counts, selected, ("pass_rate",), TABLE)
        else:
            counts = count_traces(rows, selected, len(data.items))
            terms = pl_module.reward.columns()  # type: ignore[union-attr, operator]
            card = write_data_card(EXPLANATIONS, metadata, counts, selected, terms, TABLE)
        rewrite(folder / CARD, [card])

    def select_traces(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the selected traces of each problem, best first. The traces of a problem stand together."""
        for _, group in groupby(rows, key=lambda row: row["row"]):
            yield from self._select(list(group))

    def _select(self, traces: list[Row]) -> list[Row]:
        if self.select == "all":
            return traces
        if self.select == "shortest":
            traces = sorted(traces, key=lambda row: row["student_tokens"])
        elif self.select == "fits_context":
            fitting = [row for row in traces if row["fits"]]
            traces = fitting or [min(traces, key=lambda row: row["student_tokens"])]
        if self.select in ("best_reward", "fits_context"):
            traces = sorted(traces, key=lambda row: -row["reward"])
        return traces[: self.per_problem]

    def _folder(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir)


def require_verdicts(module: RLTModule) -> None:
    """Check that the reward says which answers are right."""
    if not module.reward.judges_answers:
        raise InputError(
            "`rlt predict` keeps right answers, so with StudentRLData model.reward must be "
            f"CorrectnessReward, but is {type(module.reward).__name__}. Set it, and model.student to null."
        )


def explain_unusable(
    rows: list[int], num_problems: int, is_answers: bool, min_reward: float | None = None
) -> str:
    """Return a line about the problems that have no trace from which a student could learn."""
    if is_answers:
        return (
            f"{len(rows)} of {num_problems} problems have no right answer that fits a student "
            f"({list_rows(rows)}). Raise rollouts.num_traces to find more."
        )
    if min_reward is not None:
        return (
            f"{len(rows)} of {num_problems} problems are left out: no trace fits a student and earns at "
            f"least {min_reward:g} ({list_rows(rows)}). Raise rollouts.num_traces to keep more."
        )
    return (
        f"{len(rows)} of {num_problems} problems have no trace that fits a student ({list_rows(rows)}). "
        "Raise max_completion_length or max_resamples of rollouts, or data.student_context."
    )


def count_rejected(rows: list[Row]) -> dict[str, int]:
    """Count by reason the explanations that a minimum reward leaves out; the counts add up to all of them."""
    closed = [row for row in rows if row["closed"]]
    fitting = sum(bool(row["fits"]) for row in rows)
    return {
        "not closed": len(rows) - len(closed),
        "closed, but empty, with tags or too long": len(closed) - fitting,
        "below distillation.min_reward": fitting,
    }


def count_traces(rows: list[Row], selected: list[Row], num_problems: int) -> dict[str, Any]:
    """Return the counts of explanations, for a data card."""
    return {
        "problems": f"{len({row['row'] for row in rows})} of {num_problems}",
        "traces sampled": len(rows),
        "traces in this set": len(selected),
        "closed by the teacher": f"{sum(row['closed'] for row in selected)} of {len(selected)}",
        "fit a student as a whole": f"{sum(row['fits'] for row in selected)} of {len(selected)}",
    }


def is_trace_of(row: Row, problem: Problem) -> bool:
    """Return whether a trace was written for a problem."""
    return (row["row"], row["question"], row["solution"]) == (
        problem.row,
        problem.question,
        problem.solution.strip(),
    )


def write_parquet(rows: list[Row], path: Path) -> None:
    """Write rows as a complete Parquet file or not at all; see `build_column`."""
    import datasets

    datasets.disable_progress_bars()
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [build_column(name, [row.get(name) for row in rows]) for name in names]
    scratch = path.with_suffix(".tmp")
    datasets.concatenate_datasets(columns, axis=1).to_parquet(str(scratch))
    scratch.replace(path)


def build_column(name: str, values: list[Any]) -> Any:
    """Return a data set of one column; of several types, or of values that Parquet cannot hold, as JSON.

    It cannot hold integers beyond 64 bits, half a surrogate pair, or lists in lists in lists and so on.
    """
    import datasets
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import read_schema  # type: ignore[import-untyped]

    name = escape_half_pairs(name).replace("\0", r"\u0000")
    try:
        column = datasets.Dataset.from_dict({name: values}, on_mixed_types="use_json")
        column.select([]).to_parquet(written := BytesIO())
        read_schema(written)
    except (pyarrow.ArrowException, OSError, OverflowError, RecursionError, ValueError):
        texts = [None if value is None else json.dumps(value) for value in values]
        return datasets.Dataset.from_dict({name: texts})
    return column


def is_answer_to(row: Row, problem: Problem) -> bool:
    """Return whether an answer was written for a problem with the same question and reference."""
    return has_columns(row, {"row": problem.row, "question": problem.question, **read_reference(problem)})


def is_split(row: Row) -> bool:
    """Return whether an answer has a thought and a solution."""
    return bool(row["solution"])


def is_usable(row: Row) -> bool:
    """Return whether an answer is right, and a student can learn from it."""
    return is_split(row) and row["correct"] > 0 and bool(row["fits"])


def count_answers(rows: list[Row], num_kept: int) -> dict[str, int]:
    """Return how many answers were kept and why the others were not; the counts add up to all answers."""
    unformatted = sum(not is_split(row) for row in rows)
    wrong = sum(is_split(row) and not row["correct"] for row in rows)
    usable = sum(map(is_usable, rows))
    return {
        "kept": num_kept,
        "unformatted": unformatted,
        "wrong": wrong,
        "right, but open or too long": len(rows) - unformatted - wrong - usable,
        "right, but not selected": usable - num_kept,
    }


def describe_answers(rows: list[Row], num_problems: int) -> dict[str, Any]:
    """Return the figures of all answers, for a data card."""
    rates = {row["row"]: row["pass_rate"] for row in rows}
    return {
        "problems": f"{len(rates)} of {num_problems}",
        "answers sampled": len(rows),
        "mean pass rate": f"{fmean(rates.values()):.4f}",
        "problems with a right answer": sum(rate > 0 for rate in rates.values()),
        "problems with only right answers": sum(rate == 1 for rate in rates.values()),
    }
