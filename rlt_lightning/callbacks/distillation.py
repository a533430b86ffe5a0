"""Write what a model samples as it comes, and the distillation set made of it.

A teacher writes explanations of solutions (`data.task` rlt). The usual pipeline instead samples answers of
the model itself and keeps right ones (`data.task` student_rl): their rows are in answer_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.callbacks.answer_rows import (
    answer_counts,
    answer_recipe,
    answer_rows,
    is_answer_to,
    may_be_kept,
)
from rlt_lightning.callbacks.recorder import require_one_process
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.datamodules.bad_rows import list_rows
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.modules.text_reward import CorrectnessReward
from rlt_lightning.run.data_card import ANSWERS, EXPLANATIONS, TABLE, write_data_card
from rlt_lightning.run.jsonl import Row, append_rows, rewrite, rows_in, to_line
from rlt_lightning.run.rollout_rows import completion_columns, resume_rows, score_rows
from rlt_lightning.types import InputError, Problem, PromptBatch

Selection = Literal["first", "best_reward", "shortest", "all", "fits_context"]
TRACES, SELECTED, CARD = "traces.jsonl", "distillation.jsonl", "README.md"


class DistillationWriter(Callback):
    """Write what a model samples and make a distillation set of it; do nothing if rows bring their traces.

    `traces.jsonl` gets every explanation with every term of its reward, or every answer with its verdict,
    batch by batch; a resumed run samples only what is missing. At the end the callback makes
    `distillation.jsonl`, `distillation.parquet` and a data card of it. To make them with another `select`,
    repeat the run with `--resume true`. Only right answers are ever selected.

    Args:
        select: Which traces of a problem to take. `first`, `best_reward`, `shortest` and `all` mean what they
            say; `fits_context` takes the best trace that fits a student or, if none fits, the shortest.
        per_problem: Most traces of a problem; `all` takes all.
    """

    def __init__(self, select: Selection = "fits_context", per_problem: int = 1) -> None:
        if per_problem < 1:
            raise InputError(f"distillation.per_problem must be at least 1, but is {per_problem}. Raise it.")
        self.select: Selection = select
        self.per_problem = per_problem

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out what an earlier run has finished: the rows come in order, a problem's traces together."""
        data = stratos_of(trainer)
        if stage != "predict" or data.task not in ("rlt", "student_rl"):
            return
        is_answers = data.task == "student_rl"
        if is_answers and isinstance(pl_module, RLTModule):
            require_verdicts(pl_module)
        require_one_process(trainer)
        num_traces = RolloutCallback.of(trainer).num_traces
        problems, is_of = data.problems[: len(data.items)], is_answer_to if is_answers else is_trace_of
        data.num_finished = resume_rows(self._folder(trainer) / TRACES, problems, is_of, num_traces)

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
        data = stratos_of(trainer)
        if data.task in ("rlt", "student_rl"):
            make_rows = trace_rows if data.task == "rlt" else answer_rows
            append_rows(self._folder(trainer) / TRACES, make_rows(batch, data, str(pl_module.pretrained)))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the set. Lightning does not call this after a failure."""
        data = stratos_of(trainer)
        if stage != "predict" or data.task not in ("rlt", "student_rl"):
            return
        folder, is_answers = self._folder(trainer), data.task == "student_rl"
        rows = list(rows_in(folder / TRACES))
        candidates = [row for row in rows if may_be_kept(row)] if is_answers else rows
        if not candidates:
            reasons = [f"{number} {what}" for what, number in answer_counts(rows, 0).items() if number]
            raise InputError(
                f"A distillation set must have at least one row, but none of the {len(rows)} traces in "
                f"{folder / TRACES} can be one ({', '.join(reasons) or 'there is none'}). Raise "
                "rollouts.num_traces or max_completion_length, or take a better model."
            )
        selected = list(self.selected(candidates))
        rewrite(folder / SELECTED, map(to_line, selected))
        write_parquet(selected, folder / TABLE)
        usable = {row["row"] for row in candidates if row["fits"]}
        if unusable := sorted({row["row"] for row in rows} - usable):
            rank_zero_warn(nothing_to_learn(unusable, len(data.items), is_answers))
        recipe = pl_module.recipe() | data.recipe() | RolloutCallback.of(trainer).recipe()  # type: ignore[operator]
        recipe["selection"] = f"{self.select}, per problem {self.per_problem}"
        if is_answers:
            counts = answer_recipe(rows, len(data.items)) | answer_counts(rows, len(selected))
            card = write_data_card(ANSWERS, recipe, counts, selected, ("pass_rate",), TABLE)
        else:
            counts = trace_counts(rows, selected, len(data.items))
            terms = pl_module.reward.columns()  # type: ignore[union-attr, operator]
            card = write_data_card(EXPLANATIONS, recipe, counts, selected, terms, TABLE)
        rewrite(folder / CARD, [card])

    def selected(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the chosen traces of each problem, best first. The traces of a problem stand together."""
        for _, group in groupby(rows, key=lambda row: row["row"]):
            yield from self._chosen(list(group))

    def _chosen(self, traces: list[Row]) -> list[Row]:
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
    if not isinstance(module.reward, CorrectnessReward):
        raise InputError(
            "`rlt predict` keeps right answers, so with data.task student_rl model.reward must be "
            f"CorrectnessReward, but is {type(module.reward).__name__}. Set it, and model.student to null."
        )


def nothing_to_learn(rows: list[int], num_problems: int, is_answers: bool) -> str:
    """Return a line about the problems without a trace for a student."""
    if is_answers:
        return (
            f"{len(rows)} of {num_problems} problems have no right answer that fits a student "
            f"({list_rows(rows)}). Raise rollouts.num_traces to find more."
        )
    return (
        f"{len(rows)} of {num_problems} problems have no trace that fits a student ({list_rows(rows)}). "
        "Raise max_completion_length or max_resamples of rollouts, or data.student_context."
    )


def trace_counts(rows: list[Row], selected: list[Row], num_problems: int) -> dict[str, Any]:
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


def trace_rows(batch: PromptBatch, data: Any, teacher: str) -> Iterator[Row]:
    """Yield a row per trace: the source's columns, the trace, its Bespoke-Stratos form, and its scores."""
    assert batch.rollouts is not None
    assert batch.scores is not None
    for i, (rollout, terms) in enumerate(zip(batch.rollouts.rollouts, score_rows(batch.scores), strict=True)):
        problem = rollout.problem
        kept = {name: value for name, value in problem.columns.items() if name != "completion"}
        yield {
            **kept,
            "row": problem.row,
            "trace": i % batch.rollouts.group_size,
            "question": problem.question,
            "solution": problem.solution.strip(),
            "reasoning_trace": rollout.text,
            **data.format.conversation(problem, rollout.text),
            **terms,
            **completion_columns(rollout, data),
            "teacher": teacher,
        }


def write_parquet(rows: list[Row], path: Path) -> None:
    """Write rows as a complete Parquet file or not at all; a column of several types holds JSON."""
    import datasets
    import pyarrow  # type: ignore[import-untyped]

    datasets.disable_progress_bars()
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        table = datasets.Dataset.from_dict(columns, on_mixed_types="use_json")
    except (OverflowError, pyarrow.ArrowException) as error:
        raise InputError(
            f"A Parquet table must be able to hold the source's columns, but cannot ({error}). {SELECTED} is "
            f"complete; for {path}, correct the source's columns and start again."
        ) from error
    scratch = path.with_suffix(".tmp")
    table.to_parquet(str(scratch))
    scratch.replace(path)
