"""A model trained in Bespoke-Stratos' format, and the text that it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, run_rlt
from tiny import tiny_options

from rlt_lightning.datamodules import StudentSFTData
from rlt_lightning.types import SFTExample

ROWS = 6


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def bespoke(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows with the system prompt, the questions' wording and the tags of Bespoke-Stratos-17k."""
    with (shared / "data/stratos_format/gsm8k_train.jsonl").open() as file:
        return write(
            tmp_path_factory.mktemp("rows") / "rows.jsonl", [json.loads(next(file)) for _ in range(ROWS)]
        )


def stage_4(config: str, model: str, folder: Path, *options: str) -> Any:
    """Run stage 4 for one step."""
    settings = yaml.safe_load((ROOT / config).read_text())
    tiny = [*tiny_options("fit", settings, model), "--checkpoint.every_n_train_steps=1"]
    result = run_rlt(
        "fit", f"--config={config}", *tiny, "--trainer.strategy=auto", f"--output_dir={folder}", *options
    )
    return result


@pytest.fixture(scope="module")
def student(bespoke: str, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of configs/recipe_7b/sft.yaml on these rows, and what it printed."""
    folder = tmp_path_factory.mktemp("student") / "run"
    options = [f"--data.source={bespoke}", "--model.optimizer.lr=1e-2", "--model.optimizer.warmup_frac=0"]
    return folder, stage_4("configs/recipe_7b/sft.yaml", tiny_model, folder, *options).stdout


def trained_prompts(source: str, model: str, **options: Any) -> dict[str, list[int]]:
    """The prompts of stage 4 by question, token ids."""
    data = StudentSFTData(source, tokenizer=model, prompts_per_step=1, **options)
    data.setup("fit")
    questions = [turns[0]["value"] for row in rows_of(source) if (turns := row["conversations"])]
    examples = [item for item in data.items if isinstance(item, SFTExample)]
    prompts = [item.token_ids[: item.loss_mask.index(True)] for item in examples]
    return dict(zip(questions, prompts, strict=True))


def rows_of(source: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(source).read_text().splitlines()]
