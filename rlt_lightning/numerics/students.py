"""Combine the rewards that several frozen students, or scorers, give into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "min"]


def combine_tables(
    found: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reduction: Reduction
) -> dict[str, Tensor]:
    """Return the reward of several students, and the terms that add up to it.

    mean    r = sum_i w_i * r_i / sum_i w_i,   and so is every term
    min     r = r_j, and every term is that of student j = argmin_i r_i; the first of equal ones

    Each r_i is a student's whole reward, for RLT w * r_SS - lambda * r_KL + format. The format term is
    computed from the text, and so the same for all students.

    Args:
        found: The table of each student, with the same columns, each (N,).
        weights: One for each student, above 0; `min` does not read them.
        reduction: How the students' rewards become one.

    Returns:
        The table of all, each column (N,).
    """
    combine = build_choice(found) if reduction == "min" else build_mean(weights)
    return {
        name: values if name == "term/format" else combine([table[name] for table in found])
        for name, values in found[0].items()
    }


def build_mean(weights: Sequence[float]) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that takes the weighted mean of tensors of one shape."""

    def combine(values: list[Tensor]) -> Tensor:
        total = torch.zeros_like(values[0])
        for weight, one in zip(weights, values, strict=True):
            total = total + weight * one
        return total / sum(weights)

    return combine


def build_choice(found: Sequence[Mapping[str, Tensor]]) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that takes, of tensors (N,), the values of the student with the smallest reward."""
    lowest = torch.stack([table["reward"] for table in found]).argmin(dim=0, keepdim=True)  # (1, N)

    def combine(values: list[Tensor]) -> Tensor:
        return torch.stack(values).gather(0, lowest).squeeze(0)

    return combine
