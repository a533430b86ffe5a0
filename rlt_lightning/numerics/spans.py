"""Spans: the shortest pieces of a text that are whole tokens in two tokenisations of it.

    teacher      The│ cat│ costs│ 123│45│ €
    student      The│ cat│ costs│ 1│23│45│ │€
    spans        The│ cat│ costs│ 123  │45│ €

A span ends where a token ends in both. By the chain rule its log-probability under a model is the sum over
the model's tokens, so that two models with different tokens can be compared span by span.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlt_lightning.numerics.packing import to_padded

# Tokens of the teacher and of the student in one span.
Span = tuple[int, int]


def split_spans(teacher_ends: Sequence[int], student_ends: Sequence[int]) -> list[Span]:
    """Divide a text into spans that end where a token of both tokenisations ends.

    Args:
        teacher_ends: Where each of the teacher's tokens ends in the text, in bytes, never decreasing.
        student_ends: The same of the student's tokens.

    Returns:
        The number of tokens on both sides of each span, in order. Tokens after the last common end are in no
        span. A token without bytes belongs to the span that ends where it stands.
    """
    common = sorted(set(teacher_ends) & set(student_ends) - {0})
    spans, begun = [], (0, 0)
    for end in common:
        ended = bisect_right(teacher_ends, end, begun[0]), bisect_right(student_ends, end, begun[1])
        spans.append((ended[0] - begun[0], ended[1] - begun[1]))
        begun = ended
    return spans


def span_sums(log_probs: Tensor, num_tokens: Sequence[int]) -> Tensor:
    """Return the log-probability of each span, by the chain rule.

    Args:
        log_probs: Log-probabilities of the tokens of one side, span after span, (K,), nats.
        num_tokens: Tokens of each span on that side, J numbers that sum to K.

    Returns:
        (J,), nats.
    """
    # Summed in rows, since adding by index has no fixed order on a GPU.
    return to_padded(log_probs, list(num_tokens))[0].sum(dim=1)


def span_kl(
    estimate: Callable[[Tensor, Tensor], Tensor],
    teacher_log_probs: Tensor,
    student_log_probs: Tensor,
    spans: Sequence[Span],
) -> Tensor:
    """Estimate the KL of teacher from student on spans, and divide it among the teacher's tokens.

    v_j = estimate(log p_T(span j), log p_S(span j)),   KL_t = v_j / n_j   for each of the n_j teacher tokens

    So the mean over the teacher's tokens is the sum of the v_j by their number, and the maximum that of a
    span's value per token. Where every span is one token on both sides, it is `estimate` of the tokens.

    Args:
        estimate: Estimates the KL from log-probabilities of what the teacher sampled, such as `log_ratio_kl`.
        teacher_log_probs: Of the teacher's tokens, span after span, (K,), nats.
        student_log_probs: Of the student's tokens, (L,), nats.
        spans: Tokens of both sides in each span, J pairs.

    Returns:
        One value per token of the teacher, (K,), nats.
    """
    num_teacher, num_student = ([span[side] for span in spans] for side in (0, 1))
    values = estimate(span_sums(teacher_log_probs, num_teacher), span_sums(student_log_probs, num_student))
    lengths = torch.tensor(num_teacher, dtype=torch.long, device=values.device)  # (J,)
    return (values / lengths).repeat_interleave(lengths)
