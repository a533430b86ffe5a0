"""What a run writes down: every completion with its reward, and the scores of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from rlt_lightning.types import InputError, PromptBatch, Scores

Row = dict[str, Any]
TERMS = (
    "reward",
    "solution_log_prob_mean",
    "solution_log_prob_min",
    "kl_mean",
    "kl_max",
    "format_reward",
    "solution_log_prob_reward",
    "kl_reward",
)


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
        if trainer.is_global_zero:
            drop_rows_after(self._path(trainer), trainer.global_step)

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
    columns: dict[str, Tensor] = {f.name: getattr(scores.terms, f.name) for f in fields(scores.terms)}
    values = [columns[name].tolist() for name in TERMS]
    return [dict(zip(TERMS, row, strict=True)) for row in zip(*values, strict=True)]


def gather_rows(rows: list[Row], trainer: Trainer) -> list[Row]:
    """Bring the rows of all ranks together on rank 0."""
    if trainer.world_size == 1:
        return rows
    gathered: list[list[Row]] | None = (
        [[] for _ in range(trainer.world_size)] if trainer.is_global_zero else None
    )
    torch.distributed.gather_object(rows, gathered, dst=0)
    return [row for part in gathered or [] for row in part]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a JSONL file in one write, so that a kill leaves at most one torn last line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def drop_rows_after(path: Path, step: int) -> None:
    """Keep the rows of a JSONL file up to a step, without a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.open(encoding="utf-8"):  # splitlines() would also split inside JSON texts
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(kept), encoding="utf-8")
    scratch.replace(path)
