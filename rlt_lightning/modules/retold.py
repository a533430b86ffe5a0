"""Scoring by a student with another tokenizer: what it refuses, and r_KL on spans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.retelling import RetellingFormat
from rlt_lightning.models.announce import announce
from rlt_lightning.models.packed import ask
from rlt_lightning.numerics.packing import ScoredSequence
from rlt_lightning.numerics.rewards import Reward, RLTReward
from rlt_lightning.numerics.spans import span_kl
from rlt_lightning.types import InputError, Retold, Rollout

announce_once = cache(announce)


def require_scorable(reward: Reward, formats: Sequence[ChatFormat], students: Sequence[str]) -> None:
    """Check that a reward can be computed with students, and name each that reads explanations as text.

    Args:
        reward: The reward.
        formats: The format of each student; one also without a student.
        students: Their names.

    Raises:
        InputError: If it sums over a vocabulary that the models do not share.
    """
    of_others = [s for s, own in zip(students, formats, strict=False) if isinstance(own, RetellingFormat)]
    for student in of_others:
        if isinstance(reward, RLTReward) and reward.kl_estimator == "exact":
            raise InputError(
                "reward.kl_estimator exact sums over a vocabulary that teacher and student share, but the "
                f"tokenizer of the student {student} is not the teacher's. Set it to k1 or k3, which compare "
                "the models on spans of text; or choose models of one family."
            )
        announce_once(
            f"the student {student} reads every explanation as text, in tokens of its own: its tokenizer is "
            "not the teacher's"
        )


def require_room(student: Callable[..., Any], rows: list[Rollout], sequences: list[ScoredSequence]) -> None:
    """Check that retold explanations fit into the student's context.

    Explanations that teacher and student read in the same tokens were checked before the run.

    Args:
        student: Calls the student.
        rows: N rollouts.
        sequences: What the student reads of each.

    Raises:
        InputError: If one does not; it names the row.
    """
    if not any(row.retold for row in rows):
        return
    context: int = ask(student, longest_sequence)
    for row, sequence in zip(rows, sequences, strict=True):
        if len(sequence.scored) > context:
            raise InputError(
                f"What the student reads must fit into its context of {context} tokens, but row "
                f"{row.problem.row}, with a completion of {len(row.completion.token_ids)} tokens of the "
                f"teacher, has {len(sequence.scored)} tokens of the student. Lower "
                "rollouts.sampling.max_completion_length or, for given traces, data.max_length."
            )


def longest_sequence(model: Any) -> int:
    """Return the most tokens that a model takes; some have no limit."""
    limit: int = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    return limit


def sampled_kl(
    estimate: Callable[[Tensor, Tensor], Tensor],
    teacher_log_probs: Tensor,
    student_log_probs: Tensor,
    retold: Sequence[Retold | None],
) -> Tensor:
    """Estimate the KL of the teacher's think tokens, on spans where the student's tokens are others.

    Args:
        estimate: Estimates it from log-probs, such as `RLTReward.token_kl`.
        teacher_log_probs: Of n explanations, one after the other, (sum of K,), nats.
        student_log_probs: The same of the student, in its own tokens.
        retold: What the student read of each, n; None for each: the teacher's tokens.

    Returns:
        (sum of K,), nats.
    """
    spans = [span for one in retold if one is not None for span in one.spans]
    if None in retold:
        return estimate(teacher_log_probs, student_log_probs)
    return span_kl(estimate, teacher_log_probs, student_log_probs, spans)
