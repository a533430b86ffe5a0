"""Measure how far the engine's distribution is from the trainer's; compute weights that correct for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class TruncatedImportanceSampling:
    """Weigh a token by how much likelier it is to the trainer than to the engine that sampled it.

    r_t = pi_trainer / pi_engine of token t;   r = the ratio of `level`, at each token of a completion:

    token        r_t                                        |  mode truncate: weight = clip(r, floor, cap)
    sequence     the product of all r_t                     |  mode mask:     weight = r, but 0 outside
    arithmetic   the mean of all r_t                        |                 [floor, cap]
    geometric    (the product of all r_t)^(1 / tokens)      |

    The mean over the engine's samples is then the trainer's mean, with `token` and `sequence`, except for the
    bounds, which trade a little bias for a bounded variance (Ionides 2008). The weights correct for rounding
    in the engine and for stale rollouts. A mask drops what engine and trainer disagree about most. What it
    drops still counts as tokens in the loss's mean, as in TRL.

    Args:
        level: What a weight is computed of: each token, or the whole completion. sequence has no bias but the
            bounds', and a spread that grows with the length; arithmetic and geometric stay near 1.
        cap: Largest weight.
        floor: Smallest weight; 0: none.
        mode: Weights outside the bounds: truncate, to the bound; mask, to 0.

    Raises:
        ValueError: If the weight 1, of tokens sampled on policy, is not within the bounds.
    """

    def __init__(
        self,
        level: Literal["token", "sequence", "arithmetic", "geometric"] = "token",
        cap: float = 2.0,
        floor: float = 0.0,
        mode: Literal["truncate", "mask"] = "truncate",
    ) -> None:
        if cap < 1:
            raise ValueError(f"cap must be at least 1, but it is {cap}. Raise it; 2 is usual.")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must be between 0 and 1, but it is {floor}. 0 sets no lower bound.")
        self.level = level
        self.cap = cap
        self.floor = floor
        self.mode = mode

    def __str__(self) -> str:
        floor = f", floor {self.floor:g}" if self.floor else ""
        mask = ", mask" if self.mode == "mask" else ""
        return f"level {self.level}, cap {self.cap:g}{floor}{mask}"

    def __call__(self, log_probs: Tensor, engine_log_probs: Tensor, token_mask: Tensor) -> Tensor:
        """Return the weights, (N, T), without gradient; 1 on padding.

        Args:
            log_probs: The trainer's, (N, T), nats. Padding may hold anything.
            engine_log_probs: The engine's of the same tokens, as they were sampled, (N, T), nats.
            token_mask: True on completion tokens, (N, T).
        """
        log_ratio = (log_probs.detach() - engine_log_probs).masked_fill(~token_mask, 0.0)  # (N, T)
        ratio = self.ratio(log_ratio, token_mask).masked_fill(~token_mask, 1.0)  # (N, T)
        if self.mode == "mask":
            return ratio.masked_fill((ratio < self.floor) | (ratio > self.cap), 0.0)
        return ratio.clamp(self.floor, self.cap)

    def ratio(self, log_ratio: Tensor, token_mask: Tensor) -> Tensor:
        """Return the ratio of the level, (N, T), from the log-ratios, which are 0 on padding."""
        if self.level == "token":
            return log_ratio.exp()
        num_tokens = token_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (N, 1)
        if self.level == "arithmetic":
            ratio = (log_ratio.exp() * token_mask).sum(dim=1, keepdim=True) / num_tokens
        else:
            total = log_ratio.sum(dim=1, keepdim=True)  # (N, 1)
            ratio = (total if self.level == "sequence" else total / num_tokens).exp()
        return ratio.expand_as(log_ratio)


# Of fewer tokens, the missing ones count as equal: a few tell little of a variance or a mean.
FEW_TOKENS = 32
# One ratio, however large, raises their mean by about one standard error.
STANDARD_ERRORS = 6
# nats^2. Log-probs that vary by less hardly matter to a weight or a reward, whatever the engine reports.
SMALL_VARIANCE = 0.01


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
        num_masked: The tokens whose importance weight is 0.
        squared: sum d^2, nats^2.
        log_prob: sum of the trainer's log-probs, nats.
        squared_log_prob: sum of their squares, nats^2.
    """

    largest: float = 0.0
    num_tokens: float = 0.0
    distance: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    squared_ratio: float = 0.0
    num_masked: float = 0.0
    squared: float = 0.0
    log_prob: float = 0.0
    squared_log_prob: float = 0.0

    @classmethod
    def between(cls, log_probs: Tensor, engine_log_probs: Tensor, token_mask: Tensor) -> Mismatch:
        """Measure (N, T) log-probs, nats, where the mask is True."""
        return cls.read([measure_mismatch(log_probs, engine_log_probs, token_mask)])

    @classmethod
    def read(cls, measured: Sequence[Tensor]) -> Mismatch:
        """Add up the results of `measure_mismatch`; the host waits for the device once."""
        parts = torch.stack(list(measured)).tolist() if measured else []
        return sum((cls(*part) for part in parts), start=cls())

    def sums(self) -> tuple[float, ...]:
        """Return all figures that add up, in the order of the fields."""
        return tuple(vars(self).values())[1:]

    def __add__(self, other: Mismatch) -> Mismatch:
        sums = (a + b for a, b in zip(self.sums(), other.sums(), strict=True))
        return Mismatch(max(self.largest, other.largest), *sums)

    @property
    def mean(self) -> float:
        """Return the mean |trainer - engine|, nats per token."""
        return self.distance / self.num_tokens

    @property
    def unexplained_frac(self) -> float:
        """Return the part of the variance of the trainer's log-probs that the engine's do not explain.

        Mean d^2 / variance, which is 1 - R^2: 0 if they agree, 1 or more if the engine's tell no more about
        the trainer's than one constant would. It does not depend on how peaked the policy is, as nats do.
        """
        mean = self.log_prob / self.num_tokens
        variance = self.squared_log_prob / self.num_tokens - mean**2
        return self.squared / max(self.num_tokens, FEW_TOKENS) / max(variance, SMALL_VARIANCE)

    @property
    def excess_ratio(self) -> float:
        """Return by how much the mean ratio is above 1 beyond chance; 0 if it is not, or if tokens are few.

        Drawn from the distribution q that the engine reports, tokens have E[p / q] = 1, whatever the
        trainer's p is, so also with old weights or in 4 bits. Drawn from p, they have
        E[p / q] = 1 + chi^2(p || q): the engine then reports another temperature, say, than it draws at.
        """
        n, ratio = self.num_tokens, self.ratio / self.num_tokens
        error = math.sqrt(max(0.0, self.squared_ratio / n - ratio**2) / n)
        excess = ratio - 1
        return excess if n >= FEW_TOKENS and excess > STANDARD_ERRORS * error else 0.0

    @property
    def mean_kl(self) -> float:
        """Return the KL of engine from trainer, estimated from the engine's samples, nats per token."""
        return self.kl / self.num_tokens

    @property
    def effective_sample_frac(self) -> float:
        """Return the effective sample size (sum w)^2 / sum w^2 per token, in (0, 1]; 1 is on policy."""
        return self.ratio**2 / (self.squared_ratio * self.num_tokens)


def measure_mismatch(
    log_probs: Tensor, engine_log_probs: Tensor, token_mask: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the fields of `Mismatch`, (10,), float64, of (N, T) log-probs, nats, where the mask is True.

    Of importance `weights`, (N, T), those that are 0 are counted.
    """
    difference = (log_probs.detach() - engine_log_probs).masked_fill(~token_mask, 0.0).double().flatten()
    # The square of the ratio must stay finite. On padding it is 1 here.
    ratio = difference.clamp(max=100).exp()
    kl, distance = (ratio - 1 - difference).sum(), difference.abs()
    ratio = ratio * token_mask.flatten()
    largest = distance.amax() if len(distance) else distance.sum()
    masked = torch.zeros_like(largest) if weights is None else ((weights == 0) & token_mask).sum().double()
    values = log_probs.detach().masked_fill(~token_mask, 0.0).double()
    sums = [token_mask.sum().double(), distance.sum(), kl, ratio.sum(), ratio.square().sum(), masked]
    sums += [difference.square().sum(), values.sum(), values.square().sum()]
    return torch.stack([largest, *sums])
