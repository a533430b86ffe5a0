"""The moving reference of the KL penalty."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.pretrained import load_model, quiet_transformers
from rlt_lightning.types import InputError


class ReferenceSync(Callback):
    """Move the reference towards the policy: reference <- alpha * policy + (1 - alpha) * reference.

    The reference stays out of checkpoints. What it has become is written to `reference/` in the run folder at
    each sync, and the callback's state names that folder, so a resumed run goes on with the same reference.

    Args:
        every_n_steps: Optimizer steps between syncs.
        alpha: Weight of the policy, in (0, 1].
    """

    def __init__(self, every_n_steps: int = 32, alpha: float = 0.9) -> None:
        if not 0 < alpha <= 1 or every_n_steps < 1:
            raise InputError(
                f"ReferenceSync needs 0 < alpha <= 1 and every_n_steps >= 1, but got {alpha} and "
                f"{every_n_steps}."
            )
        self.every_n_steps = every_n_steps
        self.alpha = alpha
        self.synced_at = 0  # optimizer step of the last sync; 0: the reference is still the initial teacher

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"synced_at": self.synced_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.synced_at = state_dict["synced_at"]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.synced_at or pl_module.reference is None:
            return
        folder = self._folder(trainer)
        if not folder.is_dir():
            raise InputError(
                f"Resuming needs the reference of step {self.synced_at} in {folder}, but it is gone. Restore "
                "it."
            )
        restored = load_model(
            str(folder), str(pl_module.dtype_name), trust_remote_code=bool(pl_module.trust_remote_code)
        )
        pl_module.reference.model.load_state_dict(restored.state_dict())  # type: ignore[union-attr]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if pl_module.reference is None or step % self.every_n_steps or step == self.synced_at:
            return
        move_towards(pl_module.reference.model, pl_module.policy, self.alpha)  # type: ignore[union-attr, arg-type]
        self.synced_at = step
        if trainer.is_global_zero:
            save_folder(pl_module.reference.model, self._folder(trainer))  # type: ignore[union-attr]

    def _folder(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "reference" / f"step={self.synced_at:06d}"


@torch.no_grad()
def move_towards(reference: torch.nn.Module, policy: torch.nn.Module, alpha: float) -> None:
    """In place: reference <- alpha * policy + (1 - alpha) * reference, parameter by parameter."""
    for ours, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        ours.lerp_(theirs.to(ours), alpha)  # to its type and, where it is offloaded, its device


def save_folder(model: Any, folder: Path) -> None:
    """Write a model as a safetensors folder that is complete or absent, never half there."""
    scratch = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    with quiet_transformers():
        model.save_pretrained(scratch)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
