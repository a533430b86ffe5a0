"""Lines instead of Lightning's progress bar, where there is no terminal that could redraw one."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from typing_extensions import override

from rlt_lightning.console import redraws_lines


def choose_progress_bar() -> ProgressBar:
    """Return Lightning's bar for a terminal, and lines for a log."""
    return TQDMProgressBar() if sys.stdout.isatty() and redraws_lines() else IterationLines()


class IterationLines(ProgressBar):
    """Print a line per iteration, with what is logged by `prog_bar=True`, and per batch of anything else.

    iteration 3/125: reward/mean -0.41, policy/loss 0.0012, perf/tokens_per_s 5.12e+03
    validation batch 2/3
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True

    @override
    def disable(self) -> None:
        self.enabled = False

    @override
    def enable(self) -> None:
        self.enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.enabled:
            print(*args, file=sys.stderr, flush=True)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in trainer.progress_bar_metrics.items())
        self.print(f"iteration {trainer.global_step}/{pl_module.total_steps()}: {figures}")  # type: ignore[operator]

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
        self.print(f"validation batch {batch_idx + 1}/{trainer.num_val_batches[dataloader_idx]}")

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
        self.print(f"predict batch {batch_idx + 1}/{trainer.num_predict_batches[dataloader_idx]}")

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
        self.print(f"test batch {batch_idx + 1}/{trainer.num_test_batches[dataloader_idx]}")
