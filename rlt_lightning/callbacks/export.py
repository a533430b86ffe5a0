"""Write the trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.checkpoints.card import CARD
from rlt_lightning.checkpoints.export import (
    Adapter,
    export_model,
    load_pretrained_tensors,
    write_model_folder,
)
from rlt_lightning.checkpoints.folder import replace_folder
from rlt_lightning.checkpoints.io import NamedCheckpoints
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.models.weights import trained_tensors
from rlt_lightning.run.redaction import redact


class ModelExporter(Callback):
    """At the end of training write `model/`: safetensors, tokenizer, generation config and a model card.

    Args:
        enabled: Whether to write it; `rlt export` makes the folder from any checkpoint later.
        adapter: How to write a LoRA: merged into the weights, or only the adapter, as peft and vLLM read it.
    """

    def __init__(self, enabled: bool = True, adapter: Adapter = "merged") -> None:
        self.enabled = enabled
        self.adapter: Adapter = adapter
        self.has_written = False  # in this fit

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.enabled or trainer.fast_dev_run:  # type: ignore[attr-defined]
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
            adapter: Adapter = "merged" if module.lora is None else self.adapter
            export_model(policy, tensors, tokenizer, metadata, folder, adapter, strategy)
            if trainer.is_global_zero:
                hide_secrets(folder / CARD)
        self.has_written = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the model of a run that was killed after its last checkpoint: no step is left."""
        # Without a checkpoint nothing was trained at all.
        if not self.enabled or self.has_written or trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / "model"
        write_model_folder(Path(trainer.ckpt_path), folder, adapter=self.adapter)
        hide_secrets(folder / CARD)
        self.has_written = True


def hide_secrets(card: Path) -> None:
    """Hide secrets in a card, which people publish."""
    card.write_text(redact(card.read_text(encoding="utf-8")), encoding="utf-8")
