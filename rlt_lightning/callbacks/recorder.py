"""Callbacks that record every completion with its reward, and the scores of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.numerics.rewards import RLTReward
from rlt_lightning.run.jsonl import Row, append_rows, keep_rows, rows_in
from rlt_lightning.run.ranking import split_into_groups, write_comparison, write_groups
from rlt_lightning.run.rollout_rows import gather_rows, resume_rows, rollout_rows, score_rows, token_columns
from rlt_lightning.types import InputError, Problem, PromptBatch


class RolloutRecorder(Callback):
    """Append every training completion with every reward term to `rollouts.jsonl`.

    Args:
        every_n_steps: Record the completions of every n-th iteration; 0 is off.
        tokens: Completions whose tokens are recorded with the student's value of each: every problem's best
            and worst, all, or none.
    """

    def __init__(
        self, every_n_steps: int = 1, tokens: Literal["extremes", "all", "none"] = "extremes"
    ) -> None:
        self.every_n_steps = every_n_steps
        self.tokens = tokens

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the iterations that a killed run recorded after the checkpoint: they are made again."""
        if trainer.is_global_zero:
            keep_rows(self._path(trainer), lambda row: row["step"] <= trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step  # one batch is one RL iteration is one optimizer step
        if not isinstance(batch, PromptBatch) or not self.every_n_steps or step % self.every_n_steps:
            return
        rows = [{"step": step, **row} for row in rollout_rows(batch)]
        assert batch.rollouts is not None
        assert batch.scores is not None
        if batch.scores.kl:  # empty if the reward asks no model
            formats = stratos_of(trainer).readers.formats
            for i in self._with_tokens([row["reward"] for row in rows], batch.rollouts.group_size):
                rows[i] |= token_columns(batch.rollouts.rollouts[i], batch.scores, i, formats)
        rows = gather_rows(rows, trainer)
        if trainer.is_global_zero:
            append_rows(self._path(trainer), rows)

    def _with_tokens(self, rewards: list[float], group_size: int) -> list[int]:
        """Return the positions of the completions whose tokens are recorded."""
        if self.tokens != "extremes":
            return list(range(len(rewards))) if self.tokens == "all" else []
        groups = [range(i, i + group_size) for i in range(0, len(rewards), group_size)]
        return sorted({choose(group, key=rewards.__getitem__) for group in groups for choose in (min, max)})

    def _path(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "rollouts.jsonl"


class ScoreWriter(Callback):
    """Write the scores of `rlt predict` to `scores.jsonl`, input columns kept, batch by batch.

    It does nothing if the teacher writes the traces. A resumed run scores only what is missing.

    Args:
        per_token: Also write every token with its log-prob or KL, see `token_columns`.
        rank_groups: Divide the scored rows by reward into so many groups of equal size, each in a file, and
            plot them. Not for several data.trace_columns: then the traces of one problem are compared.
    """

    def __init__(self, per_token: bool = False, rank_groups: int | None = None) -> None:
        self.per_token = per_token
        self.rank_groups = rank_groups

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out what an earlier run has finished: the rows come in the source's order."""
        data = stratos_of(trainer)
        if stage != "predict" or data.task != "score":
            return
        require_one_process(trainer)
        if not hasattr(pl_module, "reward"):
            raise InputError(
                f"Scores are made by a module with a reward, but {type(pl_module).__name__}, the model, has "
                "none. Choose RLTModule, as in the config score."
            )
        if self.per_token and not isinstance(pl_module.reward, RLTReward):
            raise InputError(
                f"scores.per_token needs RLTReward, but model.reward is {type(pl_module.reward).__name__}, "
                "which asks no model. Set it to false."
            )
        if self.rank_groups is not None and len(data.trace_columns) == 1:
            split_into_groups([0.0] * len(data.items), self.rank_groups)
        data.num_finished = resume_rows(
            self._path(trainer), data.problems[: len(data.items)], is_scored_row_of
        )
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
        if stratos_of(trainer).task != "score":
            return
        scores = batch.scores
        assert scores is not None
        rows = (
            {**r.problem.columns, **terms}
            for r, terms in zip(batch.rollouts.rollouts, score_rows(scores), strict=True)
        )
        if self.per_token:
            formats = stratos_of(trainer).readers.formats
            rollouts = batch.rollouts.rollouts
            tokens = (token_columns(r, scores, i, formats) for i, r in enumerate(rollouts))
            rows = ({**row, **extra} for row, extra in zip(rows, tokens, strict=True))
        append_rows(self._path(trainer), rows)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rank and compare. Lightning does not call this after a failure."""
        data = stratos_of(trainer)
        if stage != "predict" or data.task != "score":
            return
        rows, folder = list(rows_in(self._path(trainer))), self._path(trainer).parent
        terms = shown_columns(pl_module)
        if self.rank_groups is not None and len(data.trace_columns) == 1:
            write_groups(rows, self.rank_groups, terms, folder)
        if len(data.trace_columns) == 2:
            problems = data.problems[: len(rows)]
            rollouts = [data.rollout(p, p.given_completion) for p in problems if p.given_completion]
            write_comparison(rows, rollouts, data.trace_columns, terms, folder)

    def _path(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "scores.jsonl"


def shown_columns(module: Any) -> tuple[str, ...]:
    """Return the columns of scored rows that pages show; with several students the reward by each of them."""
    labels = module.students.labels
    return (*module.reward.columns(), *(f"reward/{label}" for label in labels if len(labels) > 1))


def is_scored_row_of(row: Row, problem: Problem) -> bool:
    """Return whether a scored row has the texts of a problem's row."""
    texts = {n: v for n, v in problem.columns.items() if isinstance(v, str) or n == "conversations"}
    return texts == {name: row.get(name) for name in texts}


def is_sampled_by(teacher: str, problem: Problem) -> bool:
    """Return whether a row names this teacher as the one that wrote its trace, by any path of its folder."""
    columns = problem.columns
    named = columns.get("teacher") if columns.get("trace_column", TRACE_COLUMN) == TRACE_COLUMN else None
    return isinstance(named, str) and Path(named).resolve() == Path(teacher).resolve()


def warn_of_foreign_traces(items: Sequence[Any], module: Any) -> None:
    """Warn if a sampled estimator of the KL is used for traces that the teacher has not sampled."""
    reward: Any = module.reward
    if not isinstance(reward, RLTReward):
        return
    foreign = sum(not is_sampled_by(str(module.pretrained), problem) for problem in items)
    if foreign and reward.kl_estimator != "exact":
        rank_zero_warn(
            f"{foreign} of {len(items)} traces were not sampled by the teacher {module.pretrained} (their "
            f"column teacher does not name it). The mean of their log-ratios ({reward.kl_estimator}) is no "
            "KL and may be negative, so that nonsense can win. Rank such traces by the exact KL, with "
            "--config rank; see docs/scoring.md."
        )


def require_one_process(trainer: Trainer) -> None:
    """Check that there is only one process, so that rows keep their order."""
    if trainer.world_size > 1:
        raise InputError(
            "`rlt predict` must run in one process, so that rows keep their order, but got "
            f"{trainer.world_size}. Set --trainer.devices 1."
        )
