"""Settings of AdamW, its schedule and gradient clipping, and the two objects made from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlt_lightning.checkpoints.io import keep_implementation
from rlt_lightning.models.weights import full_shape
from rlt_lightning.types import require_limits


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule and the clipping of gradients.

    Args:
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of the matrices; vectors (norms, biases) are not decayed.
        betas: Decay rates of the two moments.
        scheduler: Shape of the learning rate after the warm-up: constant, linear or cosine to zero.
        warmup_frac: Fraction of the run, in [0, 1), over which the learning rate rises linearly from 0.
        max_grad_norm: Gradients are scaled down to this global L2 norm; 0 is off.
        states: The type of AdamW's moments: full, that of the weights; 8bit: codes of 8 bits with a scale per
            256 (arXiv:2110.02861), for one process or DDP.
    """

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_frac: float = 0.0
    max_grad_norm: float = 1.0
    states: Literal["full", "8bit"] = "full"

    def __post_init__(self) -> None:
        limits = {
            "lr > 0": self.lr > 0,
            "max_grad_norm >= 0": self.max_grad_norm >= 0,
            "0 <= warmup_frac < 1, a fraction of the run": 0 <= self.warmup_frac < 1,
        }
        require_limits(self, limits, "The optimizer must have", "Correct model.optimizer")


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, Any]], fused: bool | None
) -> torch.optim.Optimizer:
    """Return AdamW.

    Args:
        config: The settings.
        named_parameters: The trained parameters, by name; matrices get weight decay, vectors do not.
        fused: Whether AdamW runs in one pass over memory; None: PyTorch's choice. A checkpoint does
            not change it.
    """
    named = list(named_parameters)
    matrices = [(name, p) for name, p in named if len(full_shape(p)) > 1]
    vectors = [(name, p) for name, p in named if len(full_shape(p)) <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A LoRA has no vectors, and AdamW takes no empty group.
    groups = [group for group in groups if group["params"]]
    if config.states == "8bit":
        from bitsandbytes.optim import AdamW8bit

        optimizer_8bit: torch.optim.Optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas)
        return optimizer_8bit
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)
    optimizer.register_load_state_dict_pre_hook(keep_implementation)
    return optimizer


def build_schedule(
    config: OptimizerConfig, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a linear warm-up into a constant, linear or cosine learning rate over a run of so many steps."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if config.scheduler == "constant" else config.scheduler
    return get_scheduler(name, optimizer, round(config.warmup_frac * total_steps), total_steps)


def resume_schedule(schedule: Any) -> None:
    """Set the learning rates of the next step to those of a schedule, whose length may have changed.

    A checkpoint holds the rates of the schedule that it was trained with. Only a LambdaLR, such as
    `build_schedule` makes, computes a rate from the step alone: other schedules stay as they are.
    """
    if isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        factors = [function(schedule.last_epoch) for function in schedule.lr_lambdas]
        rates = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def states_8bit_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of both moments in 8 bits for tensors of these sizes; small ones are in fp32."""
    return sum(8 * n if n < 4096 else 2 * (n + 4 * math.ceil(n / 256)) for n in sizes)
