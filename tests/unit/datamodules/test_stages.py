"""A stage is a pair of classes: data classes have their own settings, and a module accepts some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from trainers import bare_trainer

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
from rlt_lightning.tasks.stepwise import chain_rows
from rlt_lightning.types import BadRowError, BadRowReason

READS = {"student_tokenizer", "max_length"}
# The settings of each stage beside those of all stages.
OWN: dict[type[StratosDataModule], set[str]] = {
    TeacherRLData: READS | {"student_context"},
    ScoringData: READS | {"trace_columns"},
    StudentLikelihoodData: READS,
    TeacherSFTData: {"trace_columns", "max_length", "long_traces"},
    StudentSFTData: {"trace_columns", "max_length", "long_traces"},
    StudentRLData: {"student_context"},
    StudentOPDData: {"teacher_tokenizer", "view"},
}
OF_TRAINING = {"val_source", "val_split", "val_rows"}


def list_settings(kind: type) -> set[str]:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, fail_untyped=False)
    return set(vars(parser.get_defaults()))


@pytest.mark.parametrize("kind", OWN)
def test_a_stage_has_the_settings_of_all_and_its_own(kind: type[StratosDataModule]) -> None:
    common = list_settings(StratosDataModule)
    assert list_settings(kind) - common == OWN[kind]
    assert common - list_settings(kind) == (OF_TRAINING if kind is ScoringData else set())


# Scripts


def test_a_subclass_of_a_stage_is_taken(tmp_path: Path) -> None:
    class Shouted(StudentSFTData):
        def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
            if columns["answer"] == "0":
                raise BadRowError(BadRowReason.BAD_ANSWER, "a zero")
            return {**columns, "question": columns["question"].upper()}

    options = {"prompts_per_step": 4, "tags": "r1", "student_system_prompt": "", "max_bad_frac": 0.5}
    data = Shouted("chains", num_embedded_rows=20, **options)
    bare_trainer(tmp_path, steps=1).fit(SFTModule("miniature"), data)
    assert "START" in data.format.tokenizer.decode(data.items[0].token_ids)
    zeros = sum(row["answer"] == "0" for row in chain_rows(20))
    assert len(data.items) == 20 - zeros < 20
