"""On-policy distillation: its settings, and what its teacher judges of an answer, for both models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.packing import Extent, PackedSequences, ScoredSequence
from rlt_lightning.numerics.spans import Span
from rlt_lightning.types import InputError, RewardTerms, Rollout, Rollouts


@dataclass(frozen=True)
class JudgedTerms(RewardTerms):
    """What is recorded of each answer, both (N,).

    Attributes:
        reward: Minus the mean divergence of its judged tokens, nats; 0 if there is none.
        judged_tokens: How many tokens the teacher judged.
    """

    judged_tokens: Tensor


def num_judged(row: Rollout) -> int:
    """Return how many of an answer's tokens the teacher judges."""
    return sum(view.num_tokens for view in row.views)


def first_judged(row: Rollout) -> int:
    """Return the first of an answer's tokens that the teacher judges; 0 if it judges none."""
    return sum(view.start for view in row.views)


def judged_part(row: Rollout) -> Rollout:
    """Return an answer cut to its judged tokens, with the engine's log-probs of them."""
    completion, start = row.completion, first_judged(row)
    part = slice(start, start + num_judged(row))
    log_probs = None if completion.log_probs is None else completion.log_probs[part]
    return replace(
        row, completion=replace(completion, token_ids=completion.token_ids[part], log_probs=log_probs)
    )


def student_part(row: Rollout) -> ScoredSequence:
    """Return prompt and answer up to the last judged token, which are scored; of others the first token."""
    prompt, start = row.problem.teacher_prompt, first_judged(row)
    rest = row.completion.token_ids[: max(1, start + num_judged(row))]
    scored = [False] * (len(prompt) + start) + [True] * num_judged(row)
    return ScoredSequence(prompt, rest, scored if row.views else [False] * (len(prompt) + len(rest)))


def teacher_part(row: Rollout) -> ScoredSequence:
    """Return the teacher's context and what it judges; of an answer that it cannot judge its context."""
    context, read = row.problem.teacher_view, row.views[0].token_ids if row.views else []
    rest = read or context[-1:]
    return ScoredSequence(context, rest, [False] * len(context) + [bool(read)] * len(rest))


def with_exchange(
    teachers: PackedSequences, sampled: Tensor, exchanged: tuple[int, int] | None
) -> PackedSequences:
    """Return what the teacher reads, scored at the M sampled tokens as in `divergence` with `exchanged`.

    A student that samples the teacher's own closing tag gets no credit for an end: the exchange holds for
    each of both words, wherever it stands.
    """
    if exchanged is None:
        return teachers
    first, second = (sampled == word for word in exchanged)
    targets = torch.where(first, exchanged[1], torch.where(second, exchanged[0], sampled))
    return replace(teachers, targets=targets)


def per_token(values: Tensor, spans: Sequence[Span] | None) -> Tensor:
    """Divide what each of the student's tokens has of its whole span, (M,), by the span's tokens."""
    if spans is None:
        return values
    sizes = torch.tensor([span[1] for span in spans], dtype=torch.long)
    return values / sizes.repeat_interleave(sizes).to(values)


def judged_extents(rows: list[Rollout]) -> list[Extent]:
    """Return the lengths of what student and teacher read, whichever is longer."""
    pairs = [(student_part(row), teacher_part(row)) for row in rows]
    return [
        Extent(row.problem.row, max(len(s.prefix) for s in pair), max(len(s.rest) for s in pair))
        for row, pair in zip(rows, pairs, strict=True)
    ]


def judged_metrics(
    terms: JudgedTerms, rollouts: Rollouts, sum_over_ranks: Callable[..., list[float]]
) -> dict[str, Any]:
    """Return how much of the answers the teacher could judge."""
    own = sum(len(row.completion.token_ids) for row in rollouts.rollouts)
    judged, sampled = sum_over_ranks(float(terms.judged_tokens.sum()), own)
    return {
        "distill/judged_tokens": terms.judged_tokens.mean(),
        "distill/judged_frac": judged / sampled,
        "distill/unjudged_frac": (terms.judged_tokens == 0).float().mean(),
    }


def require_options(
    group_size: int,
    teacher: str | None,
    teacher_weights: str,
    estimator: str,
    divergence: Divergence,
    weighted: bool,
    temperature: float | None = None,
) -> None:
    """Check that settings of `OPDModule` do not contradict each other.

    `weighted` says whether importance weights were asked for.

    Raises:
        InputError: Naming them.
    """
    if group_size < 1:
        raise InputError(f"model.group_size must be at least 1, but is {group_size}. Raise it.")
    if temperature is not None and temperature <= 0:
        raise InputError(
            f"model.temperature must be positive, but is {temperature}. Raise it, or leave it out for "
            "that of sampling."
        )
    if teacher is not None and teacher_weights != "frozen":
        raise InputError(
            f"model.teacher_weights {teacher_weights} are the student's own, but model.teacher is "
            f"{teacher}. Set one of them back: teacher to null, or teacher_weights to frozen."
        )
    if estimator == "sampled" and (divergence.kind != "reverse" or divergence.top_k is not None):
        raise InputError(
            "model.estimator sampled estimates reverse KL over all words, but model.divergence is "
            f"{divergence}. Leave it out, or set the estimator to full."
        )
    if estimator == "full" and weighted:
        raise InputError(
            "model.importance_sampling weighs sampled tokens, but with model.estimator full the loss sums "
            "over words. Leave it out, or set the estimator to sampled."
        )
