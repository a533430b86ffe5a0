"""Warn of a run that goes wrong while nobody watches it."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tqdm import tqdm
from typing_extensions import override

from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError

WATCHED = (
    *("reward/group_std", "policy/entropy", "rollout/truncated_frac", "rollout/staleness"),
    *("student/kl_mean", "rollout/length_mean", "reward/mean"),
    *("distill/unjudged_frac", "rollout/closed_frac"),
)
# Attributes in a checkpoint, besides the latest values.
SAVED = ("lowest_truncated", "longest", "reward_of_longest", "lowest_unjudged", "highest_closed", "sent_at")
GROUP_STD_BELOW = 1e-3  # nats
FORM_ADVICE = "No teacher judges an answer's tags and solution: lower the learning rate."


class Alarms(Callback):
    """Warn when a run goes wrong: by one line on the terminal, an alert in W&B and a text in TensorBoard.

    A figure must be bad for `patience` iterations in a row, and the same alarm comes again only after
    `quiet_steps`. A figure that is not finite, and an error that ends the run, raise an alarm at once.

    Args:
        enabled: Whether to raise alarms.
        patience: Iterations in a row with a bad figure.
        quiet_steps: Iterations until the same alarm may come again.
        group_std_below: `reward/group_std`, nats: the completions of a prompt all earn the same.
        entropy_below: `policy/entropy`, nats: sampling has collapsed.
        truncated_rise: How far `rollout/truncated_frac` may rise above its lowest mean over `patience`
            iterations: completions run into the length limit, though they did not before.
        staleness_above: `rollout/staleness`, steps; asynchronous sampling makes it 1.
        kl_below: `student/kl_mean`, nats. A KL is never negative, and the mean of its estimates over sampled
            tokens only by chance; a low one means that tokens are scored that the teacher did not sample.
        length_below: `rollout/length_mean`, as a fraction of its highest mean over `patience` iterations. The
            alarm comes only if `reward/mean` has risen since then: the reward pays for saying little.
        form_drift: Of on-policy distillation: how far `distill/unjudged_frac` may rise above its lowest mean
            over `patience` iterations, or `rollout/closed_frac` fall below its highest. No teacher judges an
            answer's tags and solution, so at too high a learning rate they drift.
    """

    def __init__(
        self,
        enabled: bool = True,
        patience: int = 5,
        quiet_steps: int = 100,
        group_std_below: float = GROUP_STD_BELOW,
        entropy_below: float = 0.02,
        truncated_rise: float = 0.5,
        staleness_above: float = 1.0,
        kl_below: float = -0.5,
        length_below: float = 0.33,
        form_drift: float = 0.2,
    ) -> None:
        if patience < 1 or quiet_steps < 1:
            raise InputError(
                f"alarms.patience and quiet_steps must be at least 1, but are {patience} and {quiet_steps}. "
                "Switch alarms off by alarms.enabled false."
            )
        self.enabled = enabled
        self.patience = patience
        self.quiet_steps = quiet_steps
        self.group_std_below = group_std_below
        self.entropy_below = entropy_below
        self.truncated_rise = truncated_rise
        self.staleness_above = staleness_above
        self.kl_below = kl_below
        self.length_below = length_below
        self.form_drift = form_drift
        self.latest = {name: deque[float](maxlen=patience) for name in WATCHED}
        self.lowest_truncated = math.inf  # mean over `patience` iterations
        self.longest = 0.0  # largest mean over `patience` iterations, tokens
        self.reward_of_longest = 0.0  # over the same iterations
        self.lowest_unjudged = math.inf  # mean over `patience` iterations
        self.highest_closed = -math.inf  # likewise
        self.sent_at: dict[str, int] = {}  # title -> step
        self.begun = False

    @override
    def state_dict(self) -> dict[str, Any]:
        latest = {name: [*values] for name, values in self.latest.items()}
        return {name: getattr(self, name) for name in SAVED} | {"latest": latest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in set(SAVED) & state_dict.keys():  # an older checkpoint has fewer
            setattr(self, name, state_dict[name])
        for name, values in state_dict.get("latest", {}).items():
            if name in self.latest:
                self.latest[name].extend(values)

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
        for title, text in self.find_alarms(metrics):
            if step - self.sent_at.get(title, -self.quiet_steps) >= self.quiet_steps:
                self.sent_at[title] = step
                send_alarm(trainer, title, f"Iteration {step}: {text}")

    def find_alarms(self, metrics: dict[str, float]) -> Iterator[tuple[str, str]]:
        """Record an iteration's metrics; yield title and text of every alarm."""
        if broken := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            yield "Not finite", f"{', '.join(broken)} must be finite. Lower the learning rate, or use fp32."
        for name, values in self.latest.items():
            if name in metrics:
                values.append(metrics[name])
        full = {name: v for name, v in self.latest.items() if len(v) == self.patience}
        long = f"for {self.patience} iterations"
        spread, entropy, truncated, staleness, kl, lengths, rewards, unjudged, closed = (
            full.get(name) for name in WATCHED
        )
        if spread and max(spread) < self.group_std_below:
            left = "there is nothing to learn from"
            if "policy/answer_loss" in metrics:
                left = "thoughts are not told apart, only the answer term trains"
            text = f"reward/group_std is below {self.group_std_below:g} {long}: {left}."
            yield "Rewards are all alike", text
        if entropy and max(entropy) < self.entropy_below:
            text = f"policy/entropy is below {self.entropy_below:g} nats {long}: sampling has collapsed."
            yield "Entropy has collapsed", text
        if truncated:
            if min(truncated) - self.lowest_truncated >= self.truncated_rise:
                text = f"rollout/truncated_frac has been at least {min(truncated):.2f} {long}, but was "
                yield "Completions are cut off", f"{text}{self.lowest_truncated:.2f} before."
            self.lowest_truncated = min(self.lowest_truncated, sum(truncated) / self.patience)
        if staleness and min(staleness) > self.staleness_above:
            text = f"rollout/staleness is above {self.staleness_above:g} {long}: workers are slow, or lost."
            yield "Rollouts are stale", text
        if kl and max(kl) < self.kl_below:
            text = (
                f"student/kl_mean is below {self.kl_below:g} nats {long}, but a KL is never negative: tokens "
                "are scored that the teacher did not sample. Look at score_given and the sampling settings."
            )
            yield "The KL is negative", text
        if lengths and rewards:
            length, reward = (sum(values) / self.patience for values in (lengths, rewards))
            if max(lengths) < self.length_below * self.longest and reward > self.reward_of_longest:
                text = f"rollout/length_mean is below {self.length_below:g} of the {self.longest:.0f} tokens "
                text += f"that it was {long}, but reward/mean has risen: the reward pays for saying little."
                yield "Completions shrink as the reward rises", text
            if length > self.longest:
                self.longest, self.reward_of_longest = length, reward
        if unjudged and closed:
            if min(unjudged) - self.lowest_unjudged >= self.form_drift:
                text = f"distill/unjudged_frac has been at least {min(unjudged):.2f} {long}, but was "
                yield "The form drifts", f"{text}{self.lowest_unjudged:.2f} before. {FORM_ADVICE}"
            elif self.highest_closed - max(closed) >= self.form_drift:
                text = f"rollout/closed_frac has been at most {max(closed):.2f} {long}, but was "
                yield "The form drifts", f"{text}{self.highest_closed:.2f} before. {FORM_ADVICE}"
            self.lowest_unjudged = min(self.lowest_unjudged, sum(unjudged) / self.patience)
            self.highest_closed = max(self.highest_closed, sum(closed) / self.patience)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Send an alarm for an error that ends the run. The terminal shows the error anyway."""
        if self.enabled and self.begun and trainer.is_global_zero and isinstance(exception, Exception):
            reason = " ".join(f"{type(exception).__name__}: {exception}".split())
            send_alarm(
                trainer, "The run has failed", f"Iteration {trainer.global_step}: {reason}", is_error=True
            )


def send_alarm(trainer: Trainer, title: str, text: str, is_error: bool = False) -> None:
    """Send an alarm to the run's dashboards and, unless it is an error, to the terminal."""
    if not is_error:
        tqdm.write(f"rlt: alarm: {title}. {text}", file=sys.stderr)
    text = redact(text)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.alert(title, text, level="ERROR" if is_error else "WARN")
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("alarms", f"**{title}.** {text}", trainer.global_step)
