"""Write the card of a trained model, and that of a distillation set."""

from __future__ import annotations

import re
from typing import Any

from rlt_lightning.models.load import is_local
from rlt_lightning.run import __version__

CARD = "README.md"
# A path from the root or the home folder; its last two parts say enough, and a card may be published.
PLACE = re.compile(r"(?<![\w:/.~])~?(?:/[^\s/|,()'\"`]+)+/([^\s/|,()'\"`]+/[^\s/|,()'\"`]+)")


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
        base_model=None if is_local(pretrained) else pretrained,  # the hub takes only ids of the hub
    )
    text = (
        f"{format_card(header, f'Trained from {pretrained}', training)}\n"
        "In the run folder, `metrics.csv` has the figures of every step, and `config.yaml` the resolved "
        "configuration of a run of `rlt`.\n"
    )
    return PLACE.sub(r"…/\1", text)


def write_data_card(title: str, metadata: dict[str, Any], file_name: str) -> str:
    """Return the card of a set, with the header by which `datasets.load_dataset(FOLDER)` finds the rows.

    Args:
        title: What the rows are.
        metadata: Settings that the rows were made with, by name.
        file_name: File of the set, beside the card.
    """
    from huggingface_hub import DatasetCardData

    header = DatasetCardData(
        configs=[{"config_name": "default", "data_files": file_name}],
        tags=["rlt_lightning", "reasoning", "distillation"],
    )
    return format_card(header, title, metadata)


def format_card(header: Any, title: str, metadata: dict[str, Any]) -> str:
    """Return a card as Markdown: the hub's header, the title, and a table."""
    table = metadata | {"made with": f"rlt_lightning {__version__}"}
    rows = [f"| {name} | {value} |" for name, value in table.items()]
    return "\n".join([f"---\n{header.to_yaml()}\n---", f"# {title}", "", "| | |", "|---|---|", *rows]) + "\n"
