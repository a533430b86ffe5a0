"""Show in one line how far a run is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm
from typing_extensions import override

from rlt_lightning.console import redraws_lines, waiting_for
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.modules.base import PolicyModule

# A narrow terminal cuts the end off.
LAYOUT = "{desc} {n_fmt}/{total_fmt} {bar:12} ETA {remaining}, {elapsed} passed{postfix}"
# What a phase is in the line of a long wait.
WAITED_FOR = {
    "push": "the push of weights",
    "generate": "the completions",
    "score": "the scores",
    "train": "the optimizer step",
}


class IterationBar(ProgressBar):
    """Show one bar per run: iteration, phase (generate / score / train), reward or loss, tokens/s and ETA.

    On a terminal the line is redrawn; in a log file each iteration is one line, and a long phase is named:

        iteration 3/125: reward -0.41, closed 0.98, loss 0.0012, tok/s 5,120, ETA 4123 s
        waiting for the completions of iteration 4/125: 10 s
        waiting for the scores of held-out batch 2/3: 5 s
    """

    def __init__(self) -> None:
        super().__init__()
        self.bar: tqdm[Any] | None = None
        self.enabled = True
        self.started = 0.0
        # What is computed now, such as a batch of a validation; empty in training.
        self.batch = ""

    @override
    def disable(self) -> None:
        self.enabled = False

    @override
    def enable(self) -> None:
        self.enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)), file=sys.stderr)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if isinstance(pl_module, PolicyModule):
            pl_module.phase.watch = self.watch

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.total: int = pl_module.total_steps()  # type: ignore[operator]
        self.started, self.first_step = time.monotonic(), trainer.global_step
        if self.enabled and redraws_lines():
            self.bar = tqdm(
                total=self.total,
                initial=trainer.global_step,
                desc="iteration",
                bar_format=LAYOUT,
                dynamic_ncols=True,
            )

    def watch(self, phase: str) -> AbstractContextManager[None]:
        """Show the phase that begins in the bar; without a bar, name it if it takes long."""
        if not self.enabled:
            return nullcontext()
        if self.bar is not None:
            where = f"{self.batch}: " if self.batch else ""
            self.bar.set_description_str(f"iteration [{where}{phase:<8}]")
            return nullcontext()
        batch = self.batch or f"iteration {self.trainer.global_step + 1}/{self.total}"
        return waiting_for(f"{WAITED_FOR.get(phase, phase)} of {batch}")

    @contextmanager
    def show_phases_of(self, what: str) -> Iterator[None]:
        """Show phases as those of `what`, not of the iteration, until the block ends."""
        self.batch = what
        try:
            yield
        finally:
            self.batch = ""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        shown = {
            "reward": "reward/mean",
            "closed": "rollout/closed_frac",
            "loss": "policy/loss",
            "tok/s": "perf/tokens_per_s",
        }
        parts = [
            f"{label} {format_figure(float(metrics[name]))}"
            for label, name in shown.items()
            if name in metrics
        ]
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(parts), refresh=False)
            self.bar.update(trainer.global_step - self.bar.n)
        elif self.enabled and trainer.is_global_zero:
            print(self.log_line(trainer, parts), file=sys.stderr, flush=True)

    def log_line(self, trainer: Trainer, parts: list[str]) -> str:
        """Return the iteration as one line of a log file, ETA in seconds."""
        total, step = self.total, trainer.global_step
        per_step = (time.monotonic() - self.started) / max(1, step - self.first_step)
        return f"iteration {step}/{total}: {', '.join(parts)}, ETA {per_step * (total - step):.0f} s"

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.bar is not None:
            self.bar.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()  # so that the error message starts on a new line

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batch = f"held-out batch 1/{trainer.num_val_batches[0]}"

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        total = trainer.num_val_batches[dataloader_idx]
        if self.enabled and self.bar is None:
            print(f"scored held-out batch {batch_idx + 1}/{total}", file=sys.stderr, flush=True)
        self.batch = f"held-out batch {batch_idx + 2}/{total}"

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batch = ""

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batch = f"batch 1/{trainer.num_predict_batches[0]}"

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        total = trainer.num_predict_batches[dataloader_idx]
        if self.enabled and trainer.is_global_zero:
            source = get_stratos_data(trainer).source
            done = "generated" if get_stratos_data(trainer).task == "rlt" else "scored"
            print(f"{done} batch {batch_idx + 1}/{total} of {source}", file=sys.stderr, flush=True)
        self.batch = f"batch {batch_idx + 2}/{total}"

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.enabled and batch.records:
            right = sum(record["correct"] for record in batch.records)
            line = f"evaluated batch {batch_idx + 1}/{trainer.num_test_batches[dataloader_idx]}: "
            line += f"{right} of {len(batch.records)} responses to {batch.records[0]['set']} are right"
            print(line, file=sys.stderr, flush=True)


def format_figure(value: float) -> str:
    """Return a figure in three digits, a large one as a whole number: 0.0012, 41.2, 4,110."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else f"{value:.3g}"
