"""Write the card of a trained model."""

from __future__ import annotations

from typing import Any

from rlt_lightning.models.load import is_local
from rlt_lightning.version import __version__

CARD = "README.md"


def write_model_card(metadata: dict[str, Any], is_adapter: bool = False) -> str:
    """Return a model card that says what the model is and how it was trained.

    Args:
        metadata: What `PolicyModule.build_metadata` returned.
        is_adapter: Whether the folder holds a LoRA without its base.
    """
    from huggingface_hub import ModelCardData

    pretrained, training = metadata["pretrained"], dict(metadata["training"])
    if metadata["lora"] is not None:
        training["LoRA"] = ", ".join(f"{key} {value}" for key, value in metadata["lora"].items())
    header = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        tags=["rlt_lightning", "reasoning"],
        base_model=None if is_local(pretrained) else pretrained,  # the hub takes only its own ids
    )
    lines = [
        f"---\n{header.to_yaml()}\n---",
        f"# Trained from {pretrained}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in training.items()),
        f"| made with | rlt_lightning {__version__} |",
        "",
        "In the run folder, `metrics.csv` has the figures of every step, and `config.yaml` the resolved "
        "configuration of a run of `rlt`.",
    ]
    return "\n".join(lines) + "\n"
