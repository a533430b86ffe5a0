"""A Trainer on the CPU that trains some steps, and writes nothing but checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from rlt_lightning.checkpoints.io import FolderCheckpointIO


def bare_trainer(folder: Path, *callbacks: Callback, steps: int = 1, **options: Any) -> Trainer:
    """Return a Trainer without progress bar, summary and sanity check; the options win."""
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    defaults: dict[str, Any] = dict(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=saves,
        plugins=[FolderCheckpointIO()] if saves else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    return Trainer(default_root_dir=folder, max_steps=steps, callbacks=list(callbacks), **defaults | options)
