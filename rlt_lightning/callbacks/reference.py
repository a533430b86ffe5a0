"""Update the reference model of the KL penalty, or the averaged teacher of `OPDModule`, during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.checkpoints.folder import replace_folder
from rlt_lightning.models.lora import merge_weights, unadapted_name
from rlt_lightning.models.quantised import dequantised_weights
from rlt_lightning.models.weights import WeightFiles, fill_in_place, move_towards, stored_once, write_weights
from rlt_lightning.run.digests import require_digests, write_digests
from rlt_lightning.types import InputError


class ReferenceSync(Callback):
    """Move the reference towards the policy: reference <- alpha * policy + (1 - alpha) * reference.

    Checkpoints do not hold the reference. Each sync writes it to `reference/` in the run folder, and the
    callback's state names that folder, so a resumed run has the same reference.

    Args:
        every_n_steps: Optimizer steps between syncs.
        alpha: Weight of the policy, in (0, 1].
    """

    moves_reference = True  # the module asks for it

    def __init__(self, every_n_steps: int = 32, alpha: float = 0.9) -> None:
        if not 0 < alpha <= 1 or every_n_steps < 1:
            raise InputError(
                f"ReferenceSync needs 0 < alpha <= 1 and every_n_steps >= 1, but got {alpha} and "
                f"{every_n_steps}."
            )
        self.every_n_steps = every_n_steps
        self.alpha = alpha
        # Optimizer step of the last sync; 0: the reference is still the initial teacher.
        self.synced_at = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"synced_at": self.synced_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.synced_at = state_dict["synced_at"]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.reference is None:
            return
        if not self.synced_at:
            start_at_base(pl_module.reference.model, pl_module.policy)  # type: ignore[union-attr]
            return
        here = self._folder(trainer)
        folder = here if here.is_dir() else self._find_folder(Path(str(trainer.ckpt_path)).parents[1])
        if not folder.is_dir():
            raise InputError(
                f"Resuming needs the reference of step {self.synced_at} in {here}, or in {folder}, but it is "
                "gone. Restore it."
            )
        require_digests(folder, "Restore it from a copy, or resume from another checkpoint.")
        fill_in_place(stored_once(pl_module.reference.model), WeightFiles(str(folder)))  # type: ignore[union-attr, arg-type]
        # After this, a run that starts from another run's checkpoint does not need that run's folder.
        if folder != here:
            save_folder(pl_module.reference.model, here, trainer.strategy)  # type: ignore[union-attr]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        step = trainer.global_step
        if module.reference is None or step % self.every_n_steps or step == self.synced_at:
            return
        merged = dict(merge_weights(module.policy, dict(module.policy.named_parameters())))
        move_towards(module.reference.model, merged, self.alpha)
        self.synced_at = step
        save_folder(module.reference.model, self._folder(trainer), trainer.strategy)

    def _folder(self, trainer: Trainer) -> Path:
        return self._find_folder(Path(trainer.default_root_dir))

    def _find_folder(self, run: Path) -> Path:
        return run / "reference" / f"step={self.synced_at:06d}"


def start_at_base(reference: Any, policy: Any) -> None:
    """Give a separate reference the values of a base in 4 bits, from which the policy starts."""
    start = {unadapted_name(name): weight for name, weight in dequantised_weights(policy).items()}
    weights = stored_once(reference)
    fill_in_place({name: weights[name] for name in start}, lambda name: start[name].full_tensor())


def save_folder(model: Any, folder: Path, strategy: Any) -> None:
    """Write a model's weights and configuration, completely or not at all. All ranks call this."""
    with replace_folder(folder, strategy) as scratch:
        if strategy.global_rank == 0:
            model.config.save_pretrained(scratch)
        tensors = list(stored_once(model).items())
        written = write_weights(tensors, scratch, strategy.global_rank, strategy.world_size)
        if strategy.global_rank == 0:
            written = [
                *{*written, *scratch.glob("*.json")}
            ]  # the configuration, and the index of several files
        if written:
            write_digests(scratch, written, strategy.global_rank)
