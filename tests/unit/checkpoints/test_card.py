"""The card of a trained model: what it inherits, and what it leaves out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

from rlt_lightning.checkpoints.card import inherited_header, write_model_card

FACTS = {"pretrained": "Qwen/Qwen2.5-7B-Instruct", "lora": None, "training": {"method": "SFTModule"}}
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


def test_a_model_inherits_base_and_licence_of_a_local_one(tmp_path: Path) -> None:
    assert inherited_header("Qwen/Qwen2.5-7B-Instruct") == {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    assert inherited_header("smollm2-135m")["license"] == "apache-2.0"
    assert inherited_header(str(tmp_path)) == {}
    (tmp_path / "README.md").write_text(write_model_card(FACTS))
    assert inherited_header(str(tmp_path)) == {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    second = write_model_card(FACTS | {"pretrained": str(tmp_path)})
    assert header_of(second)["base_model"] == "Qwen/Qwen2.5-7B-Instruct"
    assert faults(second) == []
    (tmp_path / "README.md").write_text("---\n- no mapping\n---\n")
    assert inherited_header(str(tmp_path)) == {}


def test_a_card_names_no_place_on_this_machine() -> None:
    training = {"teacher": "/home/alice/runs/warmup/model", "rows": "~/data/rows/a.jsonl, Qwen/Qwen2.5-7B"}
    card = write_model_card(FACTS | {"training": training | {"paper": "https://example.com/a/b/c"}})
    assert "| teacher | …/warmup/model |" in card
    assert "| rows | …/rows/a.jsonl, Qwen/Qwen2.5-7B |" in card
    assert "https://example.com/a/b/c" in card
