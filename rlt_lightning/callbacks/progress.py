"""Lightning's progress bar on a terminal; a line per iteration where no terminal can redraw a bar."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from rlt_lightning.console import redraws_lines

BAR_WIDTH = 12


def has_terminal() -> bool:
    """Return whether Lightning's bar could be redrawn where this process prints."""
    return sys.stdout.isatty() and redraws_lines()


class IterationBar(RichProgressBar):
    """Lightning's bar, with a line for every figure: beside each other they break inside their names."""

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_text_delimiter="\n", metrics_format=".4g"))

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return Lightning's columns without the speed, with a short bar: 80 columns hold the figures too."""
        columns = super().configure_columns(trainer)
        columns[1].bar_width = BAR_WIDTH
        return columns[:-1]

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        """Return the text before the bar; Lightning's says "Epoch 0/-2" if only the steps are limited."""
        return super()._get_train_description(current_epoch).removesuffix("/-2")


class IterationLines(Callback):
    """Print a line per iteration, with what is logged by `prog_bar=True`, and per batch of anything else.

    iteration 3/125: reward/mean -0.41, policy/loss 0.0012, perf/tokens_per_s 5.12e+03
    validate batch 2/3
    """

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in trainer.progress_bar_metrics.items())
        print_line(f"iteration {trainer.global_step}/{pl_module.total_steps()}: {figures}")  # type: ignore[operator]

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        print_batch(trainer, trainer.num_val_batches, *args)

    @override
    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        print_batch(trainer, trainer.num_predict_batches, *args)

    @override
    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        print_batch(trainer, trainer.num_test_batches, *args)


def print_batch(
    trainer: Trainer,
    numbers: list[int | float],
    pl_module: LightningModule,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int = 0,
) -> None:
    """Print which batch of how many is finished."""
    assert trainer.state.stage is not None
    print_line(f"{trainer.state.stage.value} batch {batch_idx + 1}/{numbers[dataloader_idx]}")


@rank_zero_only
def print_line(line: str) -> None:
    """Print a line on rank 0."""
    print(line, file=sys.stderr, flush=True)
