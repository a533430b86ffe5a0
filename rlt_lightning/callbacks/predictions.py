"""Write the output of `rlt predict` batch by batch; a resumed run adds only what is missing.

data           rows                                    file          at the end
ScoringData    the source's rows, with their scores    scores.jsonl
TeacherRLData  a teacher's explanations of solutions   traces.jsonl  distillation.jsonl, README.md
StudentRLData  a model's answers, each with a verdict  traces.jsonl  the same files, with right answers only
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.checkpoints.card import CARD, write_data_card
from rlt_lightning.datamodules.bad_rows import list_rows
from rlt_lightning.datamodules.rows import QUESTION_COLUMNS, TRACE_COLUMN, find_tag, keep_columns
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.modules.rollout_rows import build_token_columns, read_reference
from rlt_lightning.run.jsonl import JsonRow, format_line, read_json_rows, read_whole_rows, rewrite
from rlt_lightning.run.ranks import append_from_ranks
from rlt_lightning.types import InputError, Problem

Selection = Literal["first", "best_reward", "shortest", "all", "fits_context"]
WRITTEN = ("explanations", "answers")  # the samples of data whose rows are written
SELECTED = "distillation.jsonl"


class DistillationWriter(Callback):
    """Write what `rlt predict` scores or samples, and turn what a model samples into a distillation set.

    `scores.jsonl` gets the scores of given traces, with the columns of the source. `traces.jsonl` gets every
    sampled explanation with every term of its reward, or every answer with its verdict; at the end the
    callback makes `distillation.jsonl` and a data card of it. To make them with another `select`, repeat the
    run with `--resume true`. Only right answers are ever selected.

    Args:
        select: Which traces of a problem to take. `first`, `best_reward`, `shortest` and `all` mean what they
            say; `fits_context` takes the best trace that fits a student or, if none fits, the shortest. A
            choice needs several traces; one greedy trace costs less (docs/pipeline.md, what to do first).
            A trace that is empty or holds a tag, which stage 4 refuses, is never taken.
        per_problem: Most traces of a problem; `all` takes all.
        min_reward: Least reward of a selected trace, nats. With it only traces that fit a student are
            selected; a problem without one is left out.
        per_token: Also write every token of scored traces with its log-prob or KL, see `build_token_columns`.
    """

    def __init__(
        self,
        select: Selection = "fits_context",
        per_problem: int = 1,
        min_reward: float | None = None,
        per_token: bool = False,
    ) -> None:
        if per_problem < 1:
            raise InputError(f"distillation.per_problem must be at least 1, not {per_problem}.")
        self.select: Selection = select
        self.per_problem = per_problem
        self.min_reward = min_reward
        self.per_token = per_token
        self.path: Path | None = None  # of the rows, if this run writes any
        self.num_finished = 0  # items that an interrupted prediction has finished; the datamodule asks for it

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out what an earlier run has finished; rows are in order, a problem's traces together."""
        self.path, self.num_finished = None, 0
        data = get_stratos_data(trainer)
        if stage != "predict" or getattr(data, "samples", "") not in WRITTEN:
            return
        name = "scores.jsonl" if data.brings_completions else "traces.jsonl"
        self.path = Path(trainer.default_root_dir) / name
        num_traces = 1
        if data.brings_completions:
            self._require_scores(pl_module)
        else:
            num_traces = RolloutCallback.of(trainer).num_traces
        if data.samples == "answers" and getattr(pl_module, "reward", None) is not None:
            require_verdicts(pl_module)
        is_of = partial(is_row_of, data=data)
        problems, writes = data.problems[: len(data.items)], trainer.is_global_zero
        self.num_finished = resume_rows(self.path, problems, is_of, num_traces, data.val_batch_size, writes)
        if data.brings_completions:
            warn_of_foreign_traces(data.items, pl_module)

    def _require_scores(self, module: Any) -> None:
        """Check that the module scores, and token by token if that is asked for."""
        if getattr(module, "reward", None) is None:
            raise InputError(
                f"Scores are made by a module with a reward, but {type(module).__name__}, the model, has "
                "none. Choose RLTModule, as in recipe_7b/score."
            )
        if self.per_token and not module.reward.has_tokens:
            raise InputError(
                f"distillation.per_token needs RLTReward, but model.reward is {type(module.reward).__name__}"
                ", which asks no model. Set it to false."
            )

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
        if self.path is None:
            return
        if self.per_token and get_stratos_data(trainer).brings_completions:
            module: Any = pl_module
            batch.step.bring_to_host(batch.step.shard)
            for i, row in enumerate(outputs):
                tokens = module.reward.list_tokens(batch.step, i)
                columns = build_token_columns(tokens, module.student)
                outputs[i] = {**keep_columns(row, columns), **columns}
        append_from_ranks(trainer, self.path, outputs)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the distillation set. Lightning does not call this after a failure."""
        if self.path is None or not trainer.is_global_zero:
            return
        data = get_stratos_data(trainer)
        if data.brings_completions:
            return
        folder, is_answers = self.path.parent, data.samples == "answers"
        rows = list(read_json_rows(self.path))
        is_candidate = is_usable if is_answers else partial(is_readable, data)
        candidates = [row for row in rows if is_candidate(row)]
        if self.min_reward is not None:
            candidates = [row for row in candidates if row["fits"] and row["reward"] >= self.min_reward]
        # Without candidates the file is written too: it must not have the rows of an earlier selection.
        rewrite(folder / SELECTED, map(format_line, self.select_traces(candidates)))
        if not candidates:
            lower = "" if self.min_reward is None else "lower distillation.min_reward, "
            raise InputError(
                f"A distillation set must have at least one row, but none of the {len(rows)} traces in "
                f"{self.path} can be one. Raise rollouts.num_traces or max_completion_length, {lower}give an "
                "example in data.teacher_system_prompt or take a better model."
            )
        usable = {row["row"] for row in candidates if row["fits"]}
        if unusable := sorted({row["row"] for row in rows} - usable):
            rank_zero_warn(
                f"{len(unusable)} of {len(data.items)} problems have no trace from which a student can learn "
                f"({list_rows(unusable)}). Raise rollouts.num_traces, max_completion_length or max_resamples"
                ", or data.student_context."
            )
        metadata: dict[str, Any] = {}
        for part in (pl_module, data, RolloutCallback.of(trainer)):
            metadata |= part.build_card_metadata()  # type: ignore[operator]
        metadata["selection"] = f"{self.select}, per problem {self.per_problem}"
        if self.min_reward is not None:
            metadata["selection"] += f", reward at least {self.min_reward:g}"
        title = "A model's own right answers" if is_answers else "Explanations of a teacher"
        rewrite(folder / CARD, [write_data_card(title, metadata, SELECTED)])

    def select_traces(self, rows: Iterable[JsonRow]) -> Iterator[JsonRow]:
        """Yield the selected traces of each problem, best first. The traces of a problem stand together."""
        for _, group in groupby(rows, key=lambda row: row["row"]):
            yield from self._select(list(group))

    def _select(self, traces: list[JsonRow]) -> list[JsonRow]:
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


def is_row_of(row: JsonRow, problem: Problem, data: StratosDataModule) -> bool:
    """Return whether a row of the file was written for a problem.

    A scored row has the texts of the problem's row; other columns may have been corrected.
    """
    if data.brings_completions:
        texts = ("solution", "conversations", "system", "completion", "trace_column", *data.trace_columns)
        columns = {name: problem.columns.get(name) for name in (*QUESTION_COLUMNS, *texts)}
    else:
        expected = (
            read_reference(problem) if data.samples == "answers" else {"solution": problem.solution.strip()}
        )
        columns = {"row": problem.row, "question": problem.question, **expected}
    # As the file holds them.
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


def require_verdicts(module: Any) -> None:
    """Check that the reward says which answers are right."""
    if not module.reward.judges_answers:
        raise InputError(
            "`rlt predict` keeps right answers, so with StudentRLData model.reward must be "
            f"CorrectnessReward, but is {type(module.reward).__name__}. Set it, and model.student to null."
        )


def is_readable(data: StratosDataModule, row: JsonRow) -> bool:
    """Return whether stage 4 takes an explanation, be it cut off: it has text, and no tag in it."""
    trace, chat_format = row["reasoning_trace"], data.format
    return bool(trace.strip()) and find_tag(trace, chat_format.tags, chat_format.student_tags) is None


def is_usable(row: JsonRow) -> bool:
    """Return whether an answer is right and has two parts, and a student can learn from it."""
    return bool(row["solution"]) and row["correct"] > 0 and bool(row["fits"])


def resume_rows(
    path: Path,
    problems: Sequence[Problem],
    is_of: Callable[[JsonRow, Problem], bool],
    rows_per_problem: int,
    batch_size: int,
    writes: bool,
) -> int:
    """Keep the rows of the batches that an earlier run finished, and return how many problems these are.

    Args:
        path: JSONL file of that run, its rows in the order of the problems.
        problems: All problems of this run.
        is_of: Whether a row belongs to a problem.
        rows_per_problem: A problem with fewer rows was not finished.
        batch_size: Problems of a batch. The rows of a batch that was not finished are dropped: scored in
            another batch, they would differ by rounding.
        writes: Whether to drop them from the file. All ranks read it, and one writes.

    Raises:
        InputError: If the rows belong to other problems.
    """
    lines: list[str] = []
    belongs: list[bool] = []
    for line, row in read_whole_rows(path):
        position = len(lines) // rows_per_problem
        belongs.append(position < len(problems) and is_of(row, problems[position]))
        lines.append(line)
    num_finished = len(lines) // rows_per_problem
    if not all(belongs[: num_finished * rows_per_problem]):
        raise InputError(
            f"A resumed run must have the rows that it began with, but {path} has rows of other problems. "
            "Restore data.source, or choose another --output_dir."
        )
    if num_finished < len(problems):
        num_finished -= num_finished % batch_size
    if writes and path.exists():
        rewrite(path, lines[: num_finished * rows_per_problem])
    return num_finished
