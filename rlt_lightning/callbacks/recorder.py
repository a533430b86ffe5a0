"""What a run writes down: every completion with its reward, and the scores of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.jsonl import Row, append_rows, rewrite, whole_rows
from rlt_lightning.types import InputError, PromptBatch, Scores


class RolloutRecorder(Callback):
    """Append every training completion with every reward term to `rollouts.jsonl`.

    Args:
        every_n_steps: Record the completions of every n-th iteration; 0 is off.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        self.every_n_steps = every_n_steps

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop what a killed run wrote past the checkpoint: those iterations are made again."""
        path = self._path(trainer)
        if trainer.is_global_zero:
            kept = (line for line, row in whole_rows(path) if row["step"] <= trainer.global_step)
            if path.exists():
                rewrite(path, kept)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step  # one batch is one RL iteration is one optimizer step
        if not isinstance(batch, PromptBatch) or not self.every_n_steps or step % self.every_n_steps:
            return
        rows = gather_rows([{"step": step, **row} for row in rollout_rows(batch)], trainer)
        if trainer.is_global_zero:
            append_rows(self._path(trainer), rows)

    def _path(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "rollouts.jsonl"


class ScoreWriter(Callback):
    """Write the scored rows of `rlt predict` to `scores.jsonl`, input columns kept, batch by batch.

    Args:
        per_token: Also write `solution_log_probs` and `thought_kl` (nats) of every token.
    """

    def __init__(self, per_token: bool = False) -> None:
        self.per_token = per_token

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            raise InputError(
                "`rlt predict` must run in one process, so that rows keep their order, but got "
                f"{trainer.world_size}. Set --trainer.devices 1."
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
        scores = batch.scores
        assert scores is not None
        rows = (
            {**r.problem.columns, **terms}
            for r, terms in zip(batch.rollouts.rollouts, score_rows(scores), strict=True)
        )
        if self.per_token:
            tokens = (
                {"solution_log_probs": s.tolist(), "thought_kl": k.tolist()}
                for s, k in zip(scores.solution_log_probs, scores.kl, strict=True)
            )
            rows = ({**row, **extra} for row, extra in zip(rows, tokens, strict=True))
        append_rows(Path(trainer.default_root_dir) / "scores.jsonl", rows)


def rollout_rows(batch: PromptBatch) -> Iterator[Row]:
    """One JSON-ready row per completion."""
    assert batch.rollouts is not None
    assert batch.scores is not None
    for i, (rollout, terms) in enumerate(zip(batch.rollouts.rollouts, score_rows(batch.scores), strict=True)):
        yield {
            "row": rollout.problem.row,
            "completion": i % batch.rollouts.group_size,
            "policy_version": batch.rollouts.policy_version,
            "question": rollout.problem.question,
            "solution": rollout.problem.solution,
            "explanation": rollout.text,
            "finish_reason": rollout.completion.finish_reason,
            "num_tokens": len(rollout.completion.token_ids),
            "seed": rollout.completion.seed,
            "worker": rollout.completion.worker,
            **terms,
        }


def score_rows(scores: Scores) -> list[dict[str, float]]:
    """The reward and its terms, one dictionary per rollout."""
    columns = {name: values.tolist() for name, values in scores.terms.recorded().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def gather_rows(rows: list[Row], trainer: Trainer) -> list[Row]:
    """Bring the rows of all ranks together on rank 0."""
    if trainer.world_size == 1:
        return rows
    gathered: list[list[Row]] | None = (
        [[] for _ in range(trainer.world_size)] if trainer.is_global_zero else None
    )
    torch.distributed.gather_object(rows, gathered, dst=0)
    return [row for part in gathered or [] for row in part]
