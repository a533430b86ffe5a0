"""AdamW, its schedule and gradient clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlt_lightning.types import InputError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule and the clipping of gradients.

    Args:
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of the matrices; vectors (norms, biases) are not decayed.
        betas: Decay rates of the two moments.
        scheduler: Shape of the learning rate after the warm-up: constant, linear or cosine to zero.
        warmup_frac: Part of the run, in [0, 1), over which the learning rate rises linearly from 0.
        max_grad_norm: Gradients are scaled down to this global L2 norm; 0 is off.
    """

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_frac: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_frac < 1:
            raise InputError(
                f"optimizer.warmup_frac must be in [0, 1), but got {self.warmup_frac}. It is a part of the "
                "run."
            )
        if self.lr <= 0 or self.max_grad_norm < 0:
            raise InputError(
                f"optimizer.lr must be > 0 and max_grad_norm >= 0, but got {self}. Correct model.optimizer."
            )
