"""How far the sampler's distribution is from the trainer's, and the weights that make up for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class TruncatedImportanceSampling:
    """Weigh a token by how much likelier it is to the trainer than to the engine that sampled it.

    weight = min(pi_trainer / pi_engine, cap), per token, or of the product over the sequence's tokens

    The mean over the engine's samples is then the trainer's mean, except for the cap, which trades a little
    bias for a bounded variance (Ionides 2008). The weights correct for rounding in the engine and for stale
    rollouts.

    Args:
        level: token, or sequence, which has no bias but the cap's, and a variance that grows with the length.
        cap: Largest weight.

    Raises:
        ValueError: If the cap is below 1, which would also shrink the weights of tokens sampled on policy.
    """

    def __init__(self, level: Literal["token", "sequence"] = "token", cap: float = 2.0) -> None:
        if cap < 1:
            raise ValueError(f"cap must be at least 1, but it is {cap}. Raise it; 2 is usual.")
        self.level = level
        self.cap = cap

    def __str__(self) -> str:
        return f"level {self.level}, cap {self.cap:g}"

    def __call__(self, log_probs: Tensor, engine_log_probs: Tensor, token_mask: Tensor) -> Tensor:
        """Return the weights, (N, T), without gradient; 1 on padding.

        Args:
            log_probs: The trainer's, (N, T), nats. Padding may hold anything.
            engine_log_probs: The engine's of the same tokens, as they were sampled, (N, T), nats.
            token_mask: True on completion tokens, (N, T).
        """
        log_ratio = (log_probs.detach() - engine_log_probs).masked_fill(~token_mask, 0.0)  # (N, T)
        if self.level == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio) * token_mask
        return log_ratio.exp().clamp(max=self.cap)


@dataclass
class Mismatch:
    """Sums over tokens of how the trainer's log-probs differ from the engine's, d = trainer - engine.

    The sums of micro-batches and of ranks add up (`+`).

    Attributes:
        largest: max |d|, nats.
        num_tokens: The number of tokens.
        distance: sum |d|, nats.
        kl: sum exp(d) - 1 - d, which estimates KL(engine || trainer), nats, at least 0 (k3).
        ratio: sum of w = exp(d).
        squared_ratio: sum of w^2.
    """

    largest: float = 0.0
    num_tokens: float = 0.0
    distance: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    squared_ratio: float = 0.0

    @classmethod
    def between(cls, log_probs: Tensor, engine_log_probs: Tensor, token_mask: Tensor) -> Mismatch:
        """Measure (N, T) log-probs, nats, where the mask is True."""
        return cls.read([measure_mismatch(log_probs, engine_log_probs, token_mask)])

    @classmethod
    def read(cls, measured: Sequence[Tensor]) -> Mismatch:
        """Add up what `measure_mismatch` returned; the host waits for the device once."""
        parts = torch.stack(list(measured)).tolist() if measured else []
        return sum((cls(*part) for part in parts), start=cls())

    def sums(self) -> tuple[float, ...]:
        """Return all figures that add up, in the order of the fields."""
        return (self.num_tokens, self.distance, self.kl, self.ratio, self.squared_ratio)

    def __add__(self, other: Mismatch) -> Mismatch:
        sums = (a + b for a, b in zip(self.sums(), other.sums(), strict=True))
        return Mismatch(max(self.largest, other.largest), *sums)

    @property
    def mean(self) -> float:
        """Return the mean |trainer - engine|, nats per token."""
        return self.distance / self.num_tokens

    @property
    def mean_kl(self) -> float:
        """Return the KL of trainer from engine, estimated from the engine's samples, nats per token."""
        return self.kl / self.num_tokens

    @property
    def effective_sample_frac(self) -> float:
        """Return the effective sample size (sum w)^2 / sum w^2 per token, in (0, 1]; 1 is on policy."""
        return self.ratio**2 / (self.squared_ratio * self.num_tokens)


def measure_mismatch(log_probs: Tensor, engine_log_probs: Tensor, token_mask: Tensor) -> Tensor:
    """Return the fields of `Mismatch`, (6,), float64, of (N, T) log-probs, nats, where the mask is True."""
    difference = (log_probs.detach() - engine_log_probs).masked_fill(~token_mask, 0.0).double().flatten()
    # The square of the ratio must stay finite. On padding it is 1 here.
    ratio = difference.clamp(max=100).exp()
    kl, distance = (ratio - 1 - difference).sum(), difference.abs()
    ratio = ratio * token_mask.flatten()
    largest = distance.amax() if len(distance) else distance.sum()
    sums = [token_mask.sum().double(), distance.sum(), kl, ratio.sum(), ratio.square().sum()]
    return torch.stack([largest, *sums])
