"""A Trainer on the CPU that trains some steps, without files or a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


def bare_trainer(folder: Path, *callbacks: Callback, steps: int = 1, **options: Any) -> Trainer:
    """Return a Trainer without logger, checkpoints, progress bar, summary and sanity check."""
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **options,
    )
