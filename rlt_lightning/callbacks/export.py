"""The trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning import __version__
from rlt_lightning.checkpoints import ALONE, whole_or_absent
from rlt_lightning.datamodules.formats import ensure_pad_token
from rlt_lightning.sharding import stored_once, write_weights
from rlt_lightning.strategies import NamedCheckpoints


class ModelExporter(Callback):
    """At the end of training write `model/`: safetensors, tokenizer, generation config and a model card.

    Args:
        enabled: Off for throw-away runs.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.enabled:
            return
        with whole_or_absent(Path(trainer.default_root_dir) / "model", trainer.strategy) as folder:
            tokenizer = trainer.datamodule.format.tokenizer  # type: ignore[attr-defined]
            export_model(pl_module.policy, tokenizer, folder, trainer.strategy)
            if trainer.is_global_zero:
                (folder / "README.md").write_text(model_card(trainer, pl_module))


def export_model(model: Any, tokenizer: Any, folder: Path, strategy: Any = ALONE) -> None:
    """Write weights, tokenizer with chat template and configuration; pad differs from eos. All ranks meet."""
    if strategy.global_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ensure_pad_token(tokenizer))
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # DeepSpeed keeps the fp32 weights that it trains apart from those that it computes with.
    weights = strategy.weights(model) if isinstance(strategy, NamedCheckpoints) else stored_once(model)
    write_weights(list(weights.items()), folder, strategy.global_rank, strategy.world_size)


def model_card(trainer: Trainer, pl_module: Any) -> str:
    """Say what the model is, what it was trained on and how, from the run itself."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    student = getattr(pl_module, "student_name", None)
    method = "Reinforcement-Learned Teacher (arXiv:2506.08388)" if student else "Supervised fine-tuning"
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {pl_module.pretrained}",
        "tags: [rlt_lightning, reasoning]",
        "---",
        f"# {method} from {pl_module.pretrained}",
        "",
        "| | |",
        "|---|---|",
        f"| method | {type(pl_module).__name__} |",
        *([f"| frozen student | {student} |", f"| group size | {pl_module.group_size} |"] if student else []),
        f"| optimizer steps | {trainer.global_step} |",
        f"| peak learning rate | {pl_module.optimizer_config.lr} |",
        f"| data | {data.source} ({len(data.items)} rows) |",
        f"| made with | rlt_lightning {__version__} |",
        "",
        "The resolved configuration is `config.yaml` in the run folder; the figures of every step are in "
        "`metrics.csv`.",
    ]
    return "\n".join(lines) + "\n"
