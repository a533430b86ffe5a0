"""Say when training goes wrong in a way that a setting mends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from rlt_lightning.run.console import announce

PATIENCE = 5  # iterations in a row with a negative KL: the mean of a few samples may be negative by chance


class Alarms(Callback):
    """Say on the terminal, and to W&B, when training goes wrong in a way that a setting mends.

    Args:
        enabled: Whether to raise alarms.
        quiet_steps: Iterations until the same alarm may come again.
        kl_below: `student/kl_mean`, nats. A KL is never negative, and the mean of its estimates over sampled
            tokens only by chance; one that stays low means that tokens are scored that the teacher did not
            sample.
        truncated_above: `rollout/truncated_frac`: more completions are cut at the limit of length, and earn
            the format penalty whatever they say.
    """

    def __init__(
        self,
        enabled: bool = True,
        quiet_steps: int = 100,
        kl_below: float = -0.5,
        truncated_above: float = 0.1,
    ) -> None:
        self.enabled = enabled
        self.quiet_steps = quiet_steps
        self.kl_below = kl_below
        self.truncated_above = truncated_above
        self.num_negative = 0  # iterations in a row with a KL below the limit
        self.sent_at: dict[str, int] = {}  # title -> step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.enabled or not trainer.is_global_zero:
            return
        step, metrics = trainer.global_step, {n: float(v) for n, v in trainer.callback_metrics.items()}
        for title, text in self.find_alarms(metrics):
            if step - self.sent_at.get(title, -self.quiet_steps) >= self.quiet_steps:
                self.sent_at[title] = step
                announce(f"rlt: alarm: {title}. Iteration {step}: {text}")
                for logger in trainer.loggers:
                    if isinstance(logger, WandbLogger):
                        logger.experiment.alert(title, f"Iteration {step}: {text}")

    def find_alarms(self, metrics: dict[str, float]) -> Iterator[tuple[str, str]]:
        """Record an iteration's metrics; yield title and text of every alarm."""
        if broken := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            yield "Not finite", f"{', '.join(broken)} must be finite. Lower the learning rate, or use fp32."
        if (part := metrics.get("rollout/truncated_frac", 0.0)) > self.truncated_above:
            yield (
                "Completions are cut",
                f"{100 * part:.0f} % of the completions reach rollouts.sampling.max_completion_length. Raise "
                "it to what `rlt check` proposes; a model that does not end its text needs a warm-up.",
            )
        is_negative = metrics.get("student/kl_mean", 0.0) < self.kl_below
        self.num_negative = self.num_negative + 1 if is_negative else 0
        if self.num_negative >= PATIENCE:
            yield (
                "The KL is negative",
                f"student/kl_mean is below {self.kl_below:g} for {PATIENCE} iterations: tokens are scored "
                "that the teacher did not sample. Look at score_given and the sampling settings.",
            )
