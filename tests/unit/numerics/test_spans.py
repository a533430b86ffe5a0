"""Spans of two tokenisations: worked by hand, and against a slow version that compares prefixes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlt_lightning.numerics.divergence import log_ratio_kl, schulman_kl
from rlt_lightning.numerics.rewards import student_kl_penalty
from rlt_lightning.numerics.spans import Span, span_kl, split_spans


def slow_spans(teacher: list[bytes], student: list[bytes]) -> list[Span]:
    """Compare every prefix of one side with every prefix of the other."""
    spans, begun = [], (0, 0)
    for i in range(1, len(teacher) + 1):
        for j in range(1, len(student) + 1):
            met = b"".join(teacher[:i]) == b"".join(student[:j])
            if met and i > begun[0] and j > begun[1]:
                spans.append((i - begun[0], j - begun[1]))
                begun = i, j
    return spans


def ends(pieces: list[bytes]) -> list[int]:
    return [len(b"".join(pieces[: i + 1])) for i in range(len(pieces))]


def test_spans_end_where_both_tokenisations_end() -> None:
    teacher = [b"The", b" cat", b" costs", b" 123", b"45", b" \xe2\x82\xac"]
    student = [b"The", b" cat", b" costs", b" 1", b"23", b"45", b" \xe2", b"\x82\xac"]
    spans = [(1, 1), (1, 1), (1, 1), (1, 2), (1, 1), (1, 2)]
    assert split_spans(ends(teacher), ends(student)) == spans == slow_spans(teacher, student)


def test_tokens_after_the_last_common_end_are_in_no_span() -> None:
    # The student's text ends with "a"; the teacher's " \xe2" holds the beginning of a character.
    assert split_spans([1, 3], [1, 2]) == [(1, 1)]
    assert split_spans([2], [1]) == split_spans([], []) == split_spans([], [1]) == []


def test_a_token_without_bytes_belongs_to_the_span_that_ends_there() -> None:
    # Bytes: 0 | 2 | 2 | 3 against 2 | 3.
    assert split_spans([0, 2, 2, 3], [2, 3]) == [(3, 1), (1, 1)]


@pytest.mark.parametrize("seed", range(50))
def test_shared_spans_equal_the_slow_version(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("aé数🧮 ") for _ in range(draw.randrange(1, 15))).encode()

    def cut() -> list[bytes]:
        places = sorted(draw.sample(range(1, len(text)), draw.randrange(len(text))) if len(text) > 1 else [])
        return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]

    teacher, student = cut(), cut()
    spans = split_spans(ends(teacher), ends(student))
    assert spans == slow_spans(teacher, student)
    assert [sum(side) for side in zip(*spans, strict=True)] == [len(teacher), len(student)]


def test_span_kl_by_hand() -> None:
    # Two spans: 1 teacher token against 2 of the student, d = -1 - (-0.5 - 1.5) = 1; 2 against 1,
    # d = (-2 - 1) + 2.4 = -0.6. KL_t: 1, -0.3, -0.3. mean = (1 - 0.6) / 3 teacher tokens, max = 1 / 1.
    log_probs = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-0.5, -1.5, -2.4])
    spans = [(1, 2), (2, 1)]
    k1 = span_kl(log_ratio_kl, *log_probs, spans)
    torch.testing.assert_close(k1, torch.tensor([1.0, -0.3, -0.3]))
    penalty = student_kl_penalty(k1[None], torch.ones(1, 3, dtype=torch.bool), max_coef=0.01)
    torch.testing.assert_close(penalty, torch.tensor([0.4 / 3 + 0.01]))
    # k3 of a span: d - 1 + exp(-d), divided by its teacher tokens.
    k3 = span_kl(schulman_kl, *log_probs, spans)
    second = (-0.6 - 1 + math.exp(0.6)) / 2
    torch.testing.assert_close(k3, torch.tensor([math.exp(-1), second, second]))
