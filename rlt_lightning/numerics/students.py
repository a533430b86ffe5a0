"""Combine the rewards that several frozen students, or scorers, give into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rlt_lightning.types import RewardTerms

Reduction = Literal["mean", "min"]
Terms = TypeVar("Terms", bound=RewardTerms)
# Computed from the text, and so the same for every student.
OF_TEXT = ("format_reward",)


def combine_terms(found: Sequence[Terms], weights: Sequence[float], reduction: Reduction) -> Terms:
    """Return the reward of several students, and the terms that add up to it.

    mean    r = sum_i w_i * r_i / sum_i w_i,   and so is every term
    min     r = r_j, and every term is that of student j = argmin_i r_i; the first of equal ones

    Each r_i is a student's whole reward, for RLT w * r_SS - lambda * r_KL + format. The format term and a
    subclass's terms of the text are the same for all students, so they count once.

    Args:
        found: The terms of each student, each (N,).
        weights: One for each student, above 0; `min` does not read them.
        reduction: How the students' rewards become one.

    Returns:
        The terms of the completions, each (N,).
    """
    combine = build_choice(found) if reduction == "min" else build_mean(weights)
    # A baseline is None where the reward has none.
    names = [field.name for field in fields(found[0]) if field.name not in OF_TEXT]
    names = [name for name in names if getattr(found[0], name) is not None and name != "extra"]
    terms: dict[str, Any] = {name: combine([getattr(one, name) for one in found]) for name in names}
    extras = [getattr(one, "extra", {}) for one in found]
    if extras[0]:  # the terms of a subclass
        terms["extra"] = {name: combine([extra[name] for extra in extras]) for name in extras[0]}
    return replace(found[0], **terms)


def build_mean(weights: Sequence[float]) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that takes the weighted mean of tensors of one shape."""

    def combine(values: list[Tensor]) -> Tensor:
        total = torch.zeros_like(values[0])
        for weight, one in zip(weights, values, strict=True):
            total = total + weight * one
        return total / sum(weights)

    return combine


def build_choice(found: Sequence[RewardTerms]) -> Callable[[list[Tensor]], Tensor]:
    """Return a function that takes, of tensors (N,), the values of the student with the smallest reward."""
    lowest = torch.stack([one.reward for one in found]).argmin(dim=0, keepdim=True)  # (1, N)

    def combine(values: list[Tensor]) -> Tensor:
        return torch.stack(values).gather(0, lowest).squeeze(0)

    return combine
