"""The card of a trained model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

from rlt_lightning.checkpoints.card import write_model_card

HUB = "Qwen/Qwen2.5-7B-Instruct"
LICENCES = {"apache-2.0", "mit", "other", "llama3.1", "cc-by-4.0", "gemma"}
REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def header_of(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    found = yaml.safe_load(match[1]) if match else {}
    return found if isinstance(found, dict) else {}


def faults(card: str) -> list[str]:
    """What the hub would not take in the header of a card."""
    header = header_of(card)
    listed = {name: header.get(name) or [] for name in ("base_model", "datasets", "tags", "license")}
    texts = {name: [value] if isinstance(value, str) else value for name, value in listed.items()}
    found = [f"{name} must be texts" for name, v in texts.items() if not all(isinstance(x, str) for x in v)]
    for name in ("base_model", "datasets"):
        found += [f'"{name}" with value "{x}" is not valid' for x in texts[name] if not REPO_ID.fullmatch(x)]
    found += [f'"license" must be one of the list, not "{x}"' for x in texts["license"] if x not in LICENCES]
    try:
        _, results = model_index_to_eval_results(header.get("model-index") or [{"name": "", "results": []}])
    except (KeyError, TypeError) as error:
        return [*found, f"model-index: {error!r}"]
    for result in results:
        if not (result.task_type and result.dataset_type and result.dataset_name and result.metric_type):
            found.append("model-index: task.type, dataset.type, dataset.name and metrics.type must be there")
    return found


@pytest.mark.parametrize(("pretrained", "base"), [(HUB, HUB), ("smollm2-135m", None), ("a folder", None)])
def test_the_hub_takes_the_header_of_a_card(pretrained: str, base: str | None, tmp_path: Path) -> None:
    pretrained = str(tmp_path) if pretrained == "a folder" else pretrained
    card = write_model_card({"pretrained": pretrained, "lora": None, "training": {"method": "SFTModule"}})
    assert header_of(card).get("base_model") == base
    assert faults(card) == []
    assert str(tmp_path) not in card  # it may be published
