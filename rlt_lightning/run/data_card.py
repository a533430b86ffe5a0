"""The card of a distillation set: where its rows are, and how they were made."""

from __future__ import annotations

from typing import Any

from rlt_lightning.version import __version__


def write_data_card(title: str, metadata: dict[str, Any], file_name: str) -> str:
    """Return the card as Markdown, with the header by which `datasets.load_dataset(FOLDER)` finds the rows.

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
    recipe = metadata | {"made with": f"rlt_lightning {__version__}"}
    lines = [f"---\n{header.to_yaml()}\n---", f"# {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in recipe.items()]
    return "\n".join(lines) + "\n"
