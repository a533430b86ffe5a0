"""Write the trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.checkpoints.export import Adapter, export_model, pretrained_tensors
from rlt_lightning.checkpoints.folder import whole_or_absent
from rlt_lightning.checkpoints.named import NamedCheckpoints
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.models.announce import announce_writing, weights_size
from rlt_lightning.models.weights import trained


class ModelExporter(Callback):
    """At the end of training write `model/`: safetensors, tokenizer, generation config and a model card.

    Args:
        enabled: Whether to write it; `rlt export` makes the folder from any checkpoint later.
        adapter: How to write a LoRA: merged into the weights, or only the adapter, as peft and vLLM read it.
    """

    def __init__(self, enabled: bool = True, adapter: Adapter = "merged") -> None:
        self.enabled = enabled
        self.adapter: Adapter = adapter

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.enabled:
            return
        module: Any = pl_module
        with whole_or_absent(Path(trainer.default_root_dir) / "model", trainer.strategy) as folder:
            tokenizer = stratos_of(trainer).format.tokenizer
            facts, policy = module.facts(), module.policy
            # DeepSpeed computes with rounded copies of the weights that it trains, and of the frozen weights.
            strategy: Any = trainer.strategy
            named = isinstance(strategy, NamedCheckpoints)
            tensors: dict[str, Any] = strategy.weights(policy) if named else trained(policy)
            if module.lora is not None:
                tensors = pretrained_tensors(facts)[1] | tensors
            announce_writing(folder, weights_size(tensors.values()))
            adapter: Adapter = "merged" if module.lora is None else self.adapter
            export_model(policy, tensors, tokenizer, facts, folder, adapter, strategy)
