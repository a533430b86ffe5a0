"""A stage is a pair of classes: data classes have their own settings, and a module accepts some of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import rlt
from jsonargparse import ArgumentParser
from trainers import bare_trainer

from rlt_lightning.cli.stages import find_class, propose_data
from rlt_lightning.datamodules import (
    ScoringData,
    StratosDataModule,
    StudentLikelihoodData,
    StudentOPDData,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.modules import SFTModule

READS = {"student_tokenizer", "max_solution_length", "max_length"}
# The settings of each stage beside those of all stages.
OWN: dict[type[StratosDataModule], set[str]] = {
    TeacherRLData: READS | {"student_context"},
    ScoringData: READS | {"trace_columns"},
    StudentLikelihoodData: READS,
    TeacherSFTData: {"trace_columns", "max_solution_length", "max_length", "long_traces"},
    StudentSFTData: {"trace_columns", "max_length", "long_traces"},
    StudentRLData: {"student_context"},
    StudentOPDData: {"teacher_tokenizer", "view"},
}
OF_TRAINING = {"order", "val_source", "val_split", "val_rows"}


def list_settings(kind: type) -> set[str]:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, fail_untyped=False)
    return set(vars(parser.get_defaults()))


@pytest.mark.parametrize("kind", OWN)
def test_a_stage_has_the_settings_of_all_and_its_own(kind: type[StratosDataModule]) -> None:
    common = list_settings(StratosDataModule)
    assert list_settings(kind) - common == OWN[kind]
    assert common - list_settings(kind) == (OF_TRAINING if kind is ScoringData else set())


# The command line


def test_a_module_proposes_its_data(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": "rlt_lightning.modules.OPDModule"}}))
    for words, kind in (
        (["--model", "RLTModule"], TeacherRLData),
        (["--model=rlt_lightning.modules.SFTModule"], StudentSFTData),
        (["--config", str(path)], StudentOPDData),
        (["--config", str(path), "--model={class_path: RLTModule}"], TeacherRLData),
        (["--config=laptop/rlt", "--data.max_rows=4"], TeacherRLData),
    ):
        proposed, *rest = propose_data(words)
        assert (proposed.rpartition(".")[2], rest) == (kind.__name__, words)
    for words in (["--data=ScoringData"], ["--model=NoModule"], ["--model=no.Module"], ["--config={a: 1}"]):
        assert propose_data(words) == words
    assert find_class(["--config=laptop/rlt", "--data=ScoringData"], "data") == "ScoringData"


def test_a_run_needs_no_name_of_its_data(tmp_path: Path) -> None:
    rows = [{"question": f"start {i}, add 1?", "solution": str(i + 1)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    models = ["--model=RLTModule", "--model.teacher=miniature", "--model.student=miniature"]
    data = [f"--data.source={tmp_path / 'rows.jsonl'}", "--data.prompts_per_step=2", "--data.tags=r1"]
    data += ["--data.teacher_system_prompt=", "--data.student_system_prompt="]
    run = ["--trainer.max_steps=1", "--trainer.accelerator=cpu", f"--output_dir={tmp_path / 'run'}"]
    result = rlt("fit", *models, *data, *run, "--rollouts.sampling.max_completion_length=8")
    assert result.returncode == 0, result.stderr
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]
    assert settings["class_path"].endswith(".TeacherRLData")


# Scripts


def test_a_subclass_of_a_stage_is_taken(tmp_path: Path) -> None:
    class Shouted(StudentSFTData):
        def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
            return {**columns, "question": columns["question"].upper()}

    data = Shouted("chains", num_embedded_rows=8, prompts_per_step=4, tags="r1", student_system_prompt="")
    bare_trainer(tmp_path, steps=1).fit(SFTModule("miniature"), data)
    assert "START" in data.format.tokenizer.decode(data.examples[0].token_ids)
