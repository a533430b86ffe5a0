"""Compute all logits of a language-model head at once."""

import torch
from torch import Tensor, nn

from rlt_lightning.numerics.head import LogitScale


def slow_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: LogitScale) -> Tensor:
    """All logits before the temperature, as the model's own code computes them."""
    logits = nn.functional.linear(hidden, weight, bias) * scale.scale
    return logits if scale.cap is None else scale.cap * torch.tanh(logits / scale.cap)
