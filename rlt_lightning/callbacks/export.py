"""The trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning import __version__
from rlt_lightning.datamodules.formats import ensure_pad_token
from rlt_lightning.pretrained import quiet_transformers


class ModelExporter(Callback):
    """At the end of training write `model/`: safetensors, tokenizer, generation config and a model card.

    Args:
        enabled: Off for throw-away runs.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.enabled or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / "model"
        scratch = folder.with_name("model.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        export_model(pl_module.policy, trainer.datamodule.format.tokenizer, scratch)  # type: ignore[attr-defined]
        (scratch / "README.md").write_text(model_card(trainer, pl_module))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)


def export_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights, tokenizer with chat template and generation config; pad differs from eos in both."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ensure_pad_token(tokenizer))
    with quiet_transformers():
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


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
