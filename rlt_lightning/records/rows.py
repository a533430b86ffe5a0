"""Rows of completions and scores, as they are written to JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

from rlt_lightning.records.jsonl import Row
from rlt_lightning.tags import decode_each
from rlt_lightning.types import PromptBatch, Rollout, Scores

T = TypeVar("T")


def evenly_spread(items: list[T], number: int) -> list[T]:
    """So many of them at equal distances, the same whatever they hold; all if they are fewer."""
    number = max(0, min(number, len(items)))
    return [items[i * len(items) // number] for i in range(number)]


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


def token_columns(rollout: Rollout, scores: Scores, position: int, tokenizer: Any) -> Row:
    """The tokens that the reward is made of, each with its value before clipping and normalisation, nats.

    Args:
        rollout: A scored completion.
        scores: Of its batch.
        position: Its place there.
        tokenizer: Of its token ids.

    Returns:
        `thought_tokens` with `thought_kl`, and `solution_tokens` with `solution_log_probs`. Values are
        rounded to 1e-6.
    """
    columns: Row = {"thought_tokens": decode_each(tokenizer, scores.think_tokens[position])}
    columns["thought_kl"] = [round(value, 6) for value in scores.kl[position].tolist()]
    columns["solution_tokens"] = decode_each(tokenizer, rollout.problem.solution_ids)
    values = scores.solution_log_probs[position].tolist()
    columns["solution_log_probs"] = [round(value, 6) for value in values]
    return columns


def gather_rows(rows: list[Row], trainer: Trainer) -> list[Row]:
    """Bring the rows of all ranks together on rank 0."""
    if trainer.world_size == 1:
        return rows
    gathered: list[list[Row]] | None = (
        [[] for _ in range(trainer.world_size)] if trainer.is_global_zero else None
    )
    torch.distributed.gather_object(rows, gathered, dst=0)
    return [row for part in gathered or [] for row in part]
