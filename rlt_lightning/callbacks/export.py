"""Write the trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.checkpoints.export import (
    Adapter,
    export_model,
    load_pretrained_tensors,
    write_model_folder,
)
from rlt_lightning.checkpoints.folder import replace_folder
from rlt_lightning.checkpoints.io import NamedCheckpoints
from rlt_lightning.console import announce_writing
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.hub.client import PushError, open_repository
from rlt_lightning.hub.push import push
from rlt_lightning.models.weights import trained_tensors, weights_size
from rlt_lightning.types import InputError


class ModelExporter(Callback):
    """At the end of training write `model/`: safetensors, tokenizer, generation config and a model card.

    Args:
        enabled: Whether to write it; `rlt export` makes the folder from any checkpoint later.
        adapter: How to write a LoRA: merged into the weights, or only the adapter, as peft and vLLM read it.
        push_to_hub: Repository of the Hugging Face hub, USER/NAME, to push the model to. It is made before
            training begins, so that a missing right shows at once. `rlt push RUN` pushes later.
        private: Whether only you may see that repository.
    """

    def __init__(
        self,
        enabled: bool = True,
        adapter: Adapter = "merged",
        push_to_hub: str | None = None,
        private: bool = True,
    ) -> None:
        if push_to_hub is not None and not enabled:
            raise InputError(
                "export.push_to_hub pushes model/, but export.enabled is false. Drop one of them."
            )
        self.enabled = enabled
        self.adapter: Adapter = adapter
        self.push_to_hub = push_to_hub
        self.private = private
        # Whether this fit has written a model, and whether the hub did not take it.
        self.has_written = self.push_failed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the repository, or say why it cannot be, before any model is loaded."""
        if stage == "fit" and self.push_to_hub is not None and trainer.is_global_zero:
            open_repository(self.push_to_hub, "model", self.private)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.enabled or is_dry_run(trainer):
            return
        module: Any = pl_module
        with replace_folder(Path(trainer.default_root_dir) / "model", trainer.strategy) as folder:
            tokenizer = get_stratos_data(trainer).format.tokenizer
            metadata, policy = module.build_metadata(), module.policy
            # DeepSpeed computes with rounded copies of the weights that it trains, and of the frozen weights.
            strategy: Any = trainer.strategy
            named = isinstance(strategy, NamedCheckpoints)
            tensors: dict[str, Any] = strategy.weights(policy) if named else trained_tensors(policy)
            if module.lora is not None:
                tensors = load_pretrained_tensors(metadata)[1] | tensors
            announce_writing(folder, weights_size(tensors.values()))
            adapter: Adapter = "merged" if module.lora is None else self.adapter
            export_model(policy, tensors, tokenizer, metadata, folder, adapter, strategy)
        self.has_written = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the model of a run that was killed after its last checkpoint: it has no step to train."""
        # Without a checkpoint nothing was trained at all.
        if not self.enabled or self.has_written or is_dry_run(trainer):
            return
        if trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        write_model_folder(
            Path(trainer.ckpt_path), Path(trainer.default_root_dir) / "model", adapter=self.adapter
        )
        self.has_written = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Push the model, where no other rank waits for this one. A failure does not fail the run."""
        if self.push_to_hub is None or not self.has_written or not trainer.is_global_zero:
            return
        folder = str(trainer.default_root_dir)
        try:
            push(folder, self.push_to_hub, private=self.private)
        except (InputError, PushError) as error:
            self.push_failed = True
            again = f"rlt push {folder}{'' if self.private else ' --private false'}"
            rank_zero_warn(f"The model is in {folder}/model, but not on the hub. {error} To push it: {again}")


def is_dry_run(trainer: Any) -> bool:
    """Return whether a run only tries each step, by Lightning's fast_dev_run: its weights are no result."""
    return bool(trainer.fast_dev_run)
