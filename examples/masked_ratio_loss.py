"""prime-rl's default loss: masked ratios of the policy to the engine, without a clip or a reference.

    loss = -sum of coef * log pi / tokens,   coef = ratio * (A - kl_tau * log ratio), without gradient

The ratio is pi / pi_engine. Tokens whose ratio is out of bounds do not count, nor do completions whose
ratio's geometric mean is.
Run: PYTHONPATH=examples rlt fit --config laptop/rlt --model masked_ratio_loss.MaskedRatioModule
"""

from __future__ import annotations

from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.losses import LossInputs, LossOutput, LossTerm, build_sampled_pass
from rlt_lightning.rollouts.step import ScoringPass
from rlt_lightning.types import Rollout

TOKEN, SEQUENCE, KL_TAU = (0.125, 8.0), (0.1, 10.0), 0.0


class MaskedRatioLoss(LossTerm):
    """The loss on the sampled tokens."""

    def scoring_pass(self, rollout: Rollout) -> ScoringPass:
        """Return the sampled tokens."""
        return build_sampled_pass(rollout)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of a micro-batch."""
        engine_log_probs, mask = inputs.engine_log_probs, inputs.token_mask  # (n, T)
        assert engine_log_probs is not None, "this loss needs an engine that reports log-probs"
        log_ratio = (inputs.log_probs.detach() - engine_log_probs).masked_fill(~mask, 0.0)
        ratio, mean = log_ratio.exp(), (log_ratio.sum(1, True) / mask.sum(1, True).clamp(min=1)).exp()
        kept = mask & (ratio >= TOKEN[0]) & (ratio <= TOKEN[1])
        kept = kept & (mean >= SEQUENCE[0]) & (mean <= SEQUENCE[1])
        coef = ratio * (inputs.advantages.unsqueeze(1) - KL_TAU * log_ratio)
        num_tokens = inputs.micro.num_tokens
        loss = -(coef * inputs.log_probs * kept).sum() / num_tokens
        return LossOutput(loss, {"policy/loss": loss.detach(), "policy/kept_frac": kept.sum() / num_tokens})


class MaskedRatioModule(RLTModule):
    """RLT with this loss."""

    @property
    def losses(self) -> list[LossTerm]:
        """Return the loss."""
        return [MaskedRatioLoss()]
