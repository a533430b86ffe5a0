"""Policy losses. Each is a weighted sum over tokens, so the losses of micro-batches add up to the step's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from rlt_lightning.numerics.divergence import schulman_kl


@dataclass(eq=False)
class PolicyLoss(ABC):
    """The clipped policy loss with a KL penalty; its subclasses choose ratio, surrogate and weights.

    loss = sum over tokens of weight * (kl_coef * ratio * k3(policy || reference) - surrogate)
    surrogate = min(ratio * A, clip(ratio, 1 - clip_eps_low, 1 + clip_eps_high) * A)

    (DeepSeekMath, arXiv:2402.03300, Eqs. 3 and 4; k3 is `schulman_kl`.) The ratio before k3 comes later, from
    DeepSeek-V3.2 (arXiv:2512.02556), and is TRL's default. With it the mean gradient is that of
    KL(policy || reference); without it, it is not, even where the ratio is 1.

    Args:
        clip_eps_low: How far the ratio may fall below 1 before a bad token is clipped, epsilon in the paper.
        clip_eps_high: How far the ratio may rise above 1 before a good token is clipped.
        kl_coef: Weight of the KL from the reference, beta in the paper.
        unbiased_kl: Weigh k3 by the ratio. False: plain k3, as in the paper.

    Raises:
        ValueError: If a number is negative.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    kl_coef: float = 0.04
    unbiased_kl: bool = True

    def __post_init__(self) -> None:
        for name in ("clip_eps_low", "clip_eps_high", "kl_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, but it is {getattr(self, name)}.")

    def __call__(
        self,
        *,
        log_probs: Tensor,
        advantages: Tensor,
        token_mask: Tensor,
        old_log_probs: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        importance_weights: Tensor | None = None,
        num_tokens: float | None = None,
        num_sequences: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to minimise, and metrics.

        Given `num_tokens` and `num_sequences`, losses, gradients and metrics of micro-batches add up to the
        step's.

        Args:
            log_probs: The policy's, the only term with gradient, (N, T), nats. Padding may hold anything, as
                in all others of (N, T).
            advantages: (N,), or (N, T) if each token has one.
            token_mask: True on completion tokens, (N, T). A row without any adds 0.
            old_log_probs: The sampling policy's, (N, T), nats. None: it is the policy itself, ratio 1.
            ref_log_probs: The reference's, (N, T), nats. None only if `kl_coef` is 0.
            importance_weights: Without gradient, (N, T). They multiply the surrogate and, with `unbiased_kl`,
                the ratio before k3: both are means over samples of the engine. None: 1.
            num_tokens: Tokens of the whole step; None: the tokens of this mask.
            num_sequences: Completions of the whole step; None: the rows of this mask.

        Returns:
            The loss, scalar; and scalars without gradient, means over a sequence's tokens and then over
            sequences, or over all tokens where the loss is a mean over tokens: `policy/kl_ref` in nats, if
            there is a reference, as it enters the loss, `policy/clip_frac` between 0 and 1, the tokens that
            clipping holds back, the part of them whose ratio is low, below 1, and high, and
            `policy/ratio_mean`.

        Raises:
            ValueError: If `kl_coef` is not 0 and there is no reference.
        """
        assert log_probs.shape == token_mask.shape
        assert advantages.shape in (log_probs.shape[:1], log_probs.shape)
        self.require_reference(ref_log_probs)
        # Mask before exp(): inf or NaN on padding would reach the weights through the backward pass.
        padding = ~token_mask  # (N, T)
        log_probs = log_probs.masked_fill(padding, 0.0)
        old = log_probs.detach() if old_log_probs is None else old_log_probs.masked_fill(padding, 0.0)
        mask = token_mask.to(log_probs.dtype)  # (N, T), 1 on tokens and 0 on padding
        ratio = self.ratio(log_probs - old, mask)  # (N, T)
        advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)  # (N, T) or (N, 1)
        advantages = advantages.masked_fill(padding, 0.0)  # (N, T)
        mean_weights = self.mean_weights(mask, num_tokens, num_sequences)  # (N, T)
        weights = mask if importance_weights is None else importance_weights.masked_fill(padding, 0.0)
        token_loss = -weights * self.surrogate(ratio, advantages, log_probs)  # (N, T)
        clipped = self.is_clipped(ratio, advantages)  # (N, T)
        metrics = {
            # Tokens that clipping limits, in all and by the lower and the upper bound.
            "policy/clip_frac": (mean_weights * clipped).sum(),
            "policy/clip_frac_low": (mean_weights * (clipped & (ratio < 1))).sum(),
            "policy/clip_frac_high": (mean_weights * (clipped & (ratio > 1))).sum(),
            "policy/ratio_mean": (mean_weights * ratio).sum().detach(),
        }
        if ref_log_probs is not None:
            kl = schulman_kl(log_probs, ref_log_probs.masked_fill(padding, 0.0))  # (N, T), nats
            kl = weights * ratio * kl if self.unbiased_kl else kl
            token_loss = token_loss + self.kl_coef * kl
            metrics["policy/kl_ref"] = (mean_weights * kl).sum().detach()
        return (self.loss_weights(mask, mean_weights) * token_loss).sum(), metrics

    def require_reference(self, ref_log_probs: Tensor | None) -> None:
        """Raise a ValueError if the loss has a KL penalty, but there is no reference."""
        if ref_log_probs is None and self.kl_coef:
            raise ValueError(
                f"The KL penalty needs ref_log_probs, but kl_coef is {self.kl_coef} and none came. "
                "Pass the reference's log-probs or set kl_coef to 0."
            )

    @abstractmethod
    def mean_weights(self, mask: Tensor, num_tokens: float | None, num_sequences: float | None) -> Tensor:
        """Return the weight of each token, (N, T), 0 on padding; over a whole step they sum to 1."""

    def loss_weights(self, mask: Tensor, mean_weights: Tensor) -> Tensor:
        """Return the weight of each token in the loss, (N, T), which may differ from the weight in a mean."""
        return mean_weights

    def ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Return the importance ratio of each token, (N, T)."""
        return log_ratio.exp()

    def surrogate(self, ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> Tensor:
        """Return the quantity to maximise at each token, (N, T)."""
        clipped_ratio = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high)
        return torch.minimum(ratio * advantages, clipped_ratio * advantages)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return True at each token that clipping keeps from moving further, (N, T)."""
        too_low = (ratio < 1 - self.clip_eps_low) & (advantages < 0)
        too_high = (ratio > 1 + self.clip_eps_high) & (advantages > 0)
        return too_low | too_high


class GRPOLoss(PolicyLoss):
    """GRPO: the mean over a sequence's tokens, then over sequences (DeepSeekMath, arXiv:2402.03300).

    A token of a long completion weighs less than one of a short completion.
    """

    def mean_weights(self, mask: Tensor, num_tokens: float | None, num_sequences: float | None) -> Tensor:
        """Return 1 / (sequences * tokens of the sequence)."""
        num_sequences = max(len(mask), 1) if num_sequences is None else num_sequences
        return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_sequences)


@dataclass(eq=False)
class DrGRPOLoss(GRPOLoss):
    """Dr. GRPO: the sum over tokens, divided by a constant length and the sequences (arXiv:2503.20783).

    Every token weighs the same, however long its completion. Meant for `GroupCenteredAdvantages`. Metrics are
    still means over a sequence's tokens, then over sequences.

    Args:
        max_completion_length: The constant length, in tokens: the limit that sampling sets.

    Raises:
        ValueError: If `max_completion_length` is below 1 or another number is negative.
    """

    _: KW_ONLY
    max_completion_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if (length := self.max_completion_length) < 1:
            raise ValueError(f"max_completion_length must be at least 1 token, not {length}.")

    def loss_weights(self, mask: Tensor, mean_weights: Tensor) -> Tensor:
        """Return 1 / (sequences * max_completion_length)."""
        return mean_weights * mask.sum(dim=1, keepdim=True) / self.max_completion_length


class GSPOLoss(GRPOLoss):
    """GSPO: one ratio per sequence, (pi(y) / pi_old(y))^(1 / tokens of y), clipped whole (arXiv:2507.18071).

    These ratios stay far closer to 1 than those of tokens: the paper clips at 3e-4 below and 4e-4 above. They
    also weigh the tokens' k3, whose gradient they only make unbiased where sequences are one token long.
    """

    def ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Return the geometric mean of the sequence's ratios, at each of its tokens."""
        num_tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (N, 1)
        return (log_ratio.sum(dim=1, keepdim=True) / num_tokens).exp().expand_as(log_ratio)


class DAPOLoss(PolicyLoss):
    """DAPO: the mean over all tokens of the step, over all micro-batches and ranks (arXiv:2503.14476).

    TRL's "bnpo" is the same loss, but divides by the tokens of a micro-batch, and so depends on how a batch
    was cut. The paper's recipe also clips higher, `clip_eps_high=0.28`, and drops the KL, `kl_coef=0`.
    """

    def mean_weights(self, mask: Tensor, num_tokens: float | None, num_sequences: float | None) -> Tensor:
        """Return 1 / tokens."""
        return mask / (mask.sum().clamp(min=1) if num_tokens is None else num_tokens)


class CISPOLoss(DAPOLoss):
    """CISPO: REINFORCE weighted by a clipped ratio without gradient (MiniMax-M1, arXiv:2506.13585).

    surrogate = detach(min(ratio, 1 + clip_eps_high)) * A * log pi

    So no token is ever left without gradient. There is no lower clip, as in the paper's experiments:
    `clip_eps_low` is taken, so that a config can swap `class_path`, and has no effect. TRL's `epsilon_high`
    bounds the ratio itself: its 5.0 is `clip_eps_high=4.0` here.
    """

    def surrogate(self, ratio: Tensor, advantages: Tensor, log_probs: Tensor) -> Tensor:
        """Return the weighted log-probs."""
        return ratio.detach().clamp(max=1 + self.clip_eps_high) * advantages * log_probs

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return True where the weight is clipped."""
        return ratio > 1 + self.clip_eps_high
