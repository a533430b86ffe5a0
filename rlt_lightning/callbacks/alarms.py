"""Warn when a run goes wrong, by a line on the terminal and an alert in W&B."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from rlt_lightning.console import announce
from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError, PromptBatch

GROUP_STD_BELOW = 1e-3  # nats
CUT = "Completions are cut"


class Alarms(Callback):
    """Warn when a run goes wrong, by one line on the terminal and an alert in W&B.

    A figure must be bad for `patience` iterations in a row, and the same alarm comes again only after
    `quiet_steps`. A figure that is not finite, and completions that reach the limit of length, raise an alarm
    at once. An error that ends the run is an alert in W&B only.

    Args:
        enabled: Whether to raise alarms.
        patience: Iterations in a row with a bad figure.
        quiet_steps: Iterations until the same alarm may come again.
        group_std_below: `reward/group_std`, nats: the completions of a prompt all earn the same.
        entropy_below: `policy/entropy`, nats: sampling has collapsed.
        staleness_above: `rollout/staleness`, steps; asynchronous sampling makes it 1.
        kl_below: `student/kl_mean`, nats. A KL is never negative, and the mean of its estimates over sampled
            tokens only by chance; a low one means that tokens are scored that the teacher did not sample.
        truncated_above: `rollout/truncated_frac`: more completions are cut at the limit of length, and earn
            the format penalty whatever they say. From the first iteration on.
    """

    def __init__(
        self,
        enabled: bool = True,
        patience: int = 5,
        quiet_steps: int = 100,
        group_std_below: float = GROUP_STD_BELOW,
        entropy_below: float = 0.02,
        staleness_above: float = 1.0,
        kl_below: float = -0.5,
        truncated_above: float = 0.1,
    ) -> None:
        if patience < 1 or quiet_steps < 1:
            raise InputError(
                f"alarms.patience and quiet_steps must be at least 1, but are {patience} and {quiet_steps}. "
                "Switch alarms off by alarms.enabled false."
            )
        self.enabled = enabled
        self.patience = patience
        self.quiet_steps = quiet_steps
        self.truncated_above = truncated_above
        # Metric -> title, sign and limit, advice: it is bad where sign * value exceeds sign * limit.
        self.limits: dict[str, tuple[str, int, float, str]] = {
            "reward/group_std": (
                "Rewards are all alike",
                -1,
                group_std_below,
                "there is nothing to learn from, but for an answer term",
            ),
            "policy/entropy": ("Entropy has collapsed", -1, entropy_below, "sampling has collapsed"),
            "rollout/staleness": ("Rollouts are stale", 1, staleness_above, "workers are slow, or lost"),
            "student/kl_mean": (
                "The KL is negative",
                -1,
                kl_below,
                "tokens are scored that the teacher did not sample; look at score_given and the sampling "
                "settings",
            ),
        }
        self.in_a_row = Counter[str]()  # metric -> bad iterations
        self.sent_at: dict[str, int] = {}  # title -> step
        self.begun = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self.in_a_row), "sent_at": self.sent_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row, self.sent_at = Counter(state_dict["in_a_row"]), dict(state_dict["sent_at"])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begun = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.enabled or not trainer.is_global_zero:
            return
        step, metrics = trainer.global_step, {n: float(v) for n, v in trainer.callback_metrics.items()}
        # The host waits for the rewards only where they are told.
        tells = step - self.sent_at.get(CUT, -self.quiet_steps) >= self.quiet_steps
        is_cut = metrics.get("rollout/truncated_frac", 0.0) > self.truncated_above
        cost = describe_cost_of_length(batch) if tells and is_cut and isinstance(batch, PromptBatch) else ""
        for title, text in self.find_alarms(metrics, cost):
            if step - self.sent_at.get(title, -self.quiet_steps) >= self.quiet_steps:
                self.sent_at[title] = step
                announce(f"rlt: alarm: {title}. Iteration {step}: {text}")
                send_alert(trainer, title, f"Iteration {step}: {text}", "WARN")

    def find_alarms(self, metrics: dict[str, float], cost: str = "") -> Iterator[tuple[str, str]]:
        """Record an iteration's metrics; yield title and text of every alarm.

        Args:
            metrics: The metrics.
            cost: What completions earn that reach the limit of length, as a clause.
        """
        if broken := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            yield "Not finite", f"{', '.join(broken)} must be finite. Lower the learning rate, or use fp32."
        if (part := metrics.get("rollout/truncated_frac", 0.0)) > self.truncated_above:
            yield (
                CUT,
                f"{100 * part:.0f} % of the completions reach rollouts.sampling.max_completion_length{cost}. "
                "Raise it to what `rlt check` proposes; a model that does not end its text needs a warm-up.",
            )
        for name, (title, sign, limit, advice) in self.limits.items():
            if name not in metrics:
                continue
            is_bad = sign * metrics[name] > sign * limit
            self.in_a_row[name] = self.in_a_row[name] + 1 if is_bad else 0
            if self.in_a_row[name] >= self.patience:
                side = "above" if sign > 0 else "below"
                yield title, f"{name} is {side} {limit:g} for {self.patience} iterations: {advice}."

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Send an alert of an error that ends the run. The terminal shows the error anyway."""
        if self.enabled and self.begun and trainer.is_global_zero and isinstance(exception, Exception):
            reason = " ".join(f"{type(exception).__name__}: {exception}".split())
            send_alert(trainer, "The run has failed", f"Iteration {trainer.global_step}: {reason}", "ERROR")


def describe_cost_of_length(batch: PromptBatch) -> str:
    """Return a clause with the mean rewards of cut and of finished completions; '' unless there are both."""
    if batch.rollouts is None or batch.step is None or not batch.step.scored:
        return ""
    rewards = batch.step.rewards[batch.step.logged].tolist()
    earned: dict[bool, list[float]] = {True: [], False: []}  # whether it was cut -> rewards
    for rollout, reward in zip(batch.rollouts.rollouts, rewards, strict=True):
        earned[rollout.completion.finish_reason == "length"].append(reward)
    if not all(earned.values()):
        return ""
    return f", and earn {fmean(earned[True]):.2f} where the others earn {fmean(earned[False]):.2f}"


def send_alert(trainer: Trainer, title: str, text: str, level: str) -> None:
    """Send an alert to the run's W&B, without secrets."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.alert(title, redact(text), level=level)
