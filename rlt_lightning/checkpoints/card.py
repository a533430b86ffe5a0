"""Write the card of a trained model, with the licence that it inherits from the model it started as."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rlt_lightning.console import announce
from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES
from rlt_lightning.types import first_line
from rlt_lightning.version import __version__

CARD = "README.md"
LICENCE = ("license", "license_name", "license_link")
# A path from the root or the home folder; its last two parts say enough, and a card may be published.
PLACE = re.compile(r"(?<![\w:/.~])~?(?:/[^\s/|,()'\"`]+)+/([^\s/|,()'\"`]+/[^\s/|,()'\"`]+)")
# Header of the models that come with the package.
EMBEDDED_HEADERS: dict[str, dict[str, Any]] = {
    DEFAULT_MODEL: {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"},
    **{name: {"license": "apache-2.0"} for name in MINIATURES},
    **{str(folder): {"license": "apache-2.0"} for folder in MINIATURES.values()},
}


def write_model_card(metadata: dict[str, Any], is_adapter: bool = False) -> str:
    """Return a model card that says what the model is and how it was trained.

    Args:
        metadata: What `PolicyModule.build_metadata` returned.
        is_adapter: Whether the folder holds a LoRA without its base.
    """
    from huggingface_hub import ModelCardData

    pretrained, training = metadata["pretrained"], dict(metadata["training"])
    method = "Supervised fine-tuning"
    if "student" in training and metadata["format"]["role"] == "teacher":
        method = "Reinforcement-Learned Teacher (arXiv:2506.08388)"
    elif "reward" in training:
        method = f"{training['reward']} and GRPO (arXiv:2402.03300)"
    if metadata["lora"] is not None:
        training["LoRA"] = ", ".join(f"{key} {value}" for key, value in metadata["lora"].items())
    header = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        tags=["rlt_lightning", "reasoning"],
        **inherited_header(pretrained),
    )
    lines = [
        f"---\n{header.to_yaml()}\n---",
        f"# {method} from {pretrained}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in training.items()),
        f"| made with | rlt_lightning {__version__} |",
        "",
        "In the run folder, `metrics.csv` has the figures of every step, and `config.yaml` the resolved "
        "configuration of a run of `rlt`.",
    ]
    return PLACE.sub(r"…/\1", "\n".join(lines) + "\n")


def inherited_header(pretrained: str) -> dict[str, Any]:
    """Return the base model and the licence that a model's card takes over from the model it began as.

    The hub takes only its own ids as `base_model`. So a model that was trained from a local folder has the
    base of that folder's card: the nearest ancestor with an id. The licence of a hub id is not read,
    since a training needs no network.
    """
    from huggingface_hub import ModelCard

    folder = Path(pretrained).expanduser()
    if pretrained in EMBEDDED_HEADERS:
        return EMBEDDED_HEADERS[pretrained]
    if not folder.is_dir():
        return {"base_model": pretrained}
    if not (folder / CARD).is_file():
        return {}
    try:
        header = ModelCard((folder / CARD).read_text(encoding="utf-8-sig")).data.to_dict()
    except (ValueError, yaml.YAMLError) as error:
        # A training of days must not end without its model because of another model's card.
        announce(
            f"The header of {folder / CARD} must be YAML as the hub reads it, but is not "
            f"({first_line(error)}). The new model's card names neither base nor licence."
        )
        return {}
    return {name: header[name] for name in ("base_model", *LICENCE) if header.get(name)}
