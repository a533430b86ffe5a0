"""A stage is a pair of classes: data classes have their own settings, and a module accepts some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import rlt
from jsonargparse import ArgumentError, ArgumentParser
from trainers import bare_trainer

from rlt_lightning.callbacks import ResponseCallback, RolloutCallback
from rlt_lightning.datamodules import (
    EvaluationDataModule,
    ScoringData,
    StratosDataModule,
    StudentLikelihoodData,
    StudentOPDData,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.modules import EvaluationModule, OPDModule, RLTModule, SFTModule
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.types import InputError

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
VALUES = {
    "trace_columns": "[a]",
    "long_traces": "truncate",
    "view": "{kind: hint}",
    "student_tokenizer": "miniature",
    "teacher_tokenizer": "miniature",
}


def list_settings(kind: type) -> set[str]:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, fail_untyped=False)
    return set(vars(parser.get_defaults()))


@pytest.mark.parametrize("kind", OWN)
def test_a_stage_has_the_settings_of_all_and_its_own(kind: type[StratosDataModule]) -> None:
    common = list_settings(StratosDataModule)
    assert list_settings(kind) - common == OWN[kind]
    assert common - list_settings(kind) == (OF_TRAINING if kind is ScoringData else set())


@pytest.mark.parametrize("kind", OWN)
def test_a_stage_refuses_the_settings_of_others(kind: type[StratosDataModule]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(StratosDataModule, "data")
    for name in set().union(*OWN.values()):
        words = [f"--data={kind.__name__}", f"--data.{name}={VALUES.get(name, 5)}"]
        if name in OWN[kind]:
            assert name in parser.parse_args(words).data.init_args
            continue
        with pytest.raises(ArgumentError, match=name):
            parser.parse_args(words)
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            kind(**{name: 5})


# The command line


def test_a_wrong_pair_is_one_clear_line(tmp_path: Path) -> None:
    result = rlt("fit", "--config=laptop/opd", "--data=StudentRLData", f"--output_dir={tmp_path / 'run'}")
    [line] = [line for line in result.stderr.splitlines() if line.startswith("rlt: error")]
    assert "The data of OPDModule must be StudentOPDData, but are StudentRLData." in line
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


# Scripts


@pytest.mark.parametrize(
    ("module", "data", "named"),
    [
        (lambda: RLTModule("miniature", "miniature"), StudentSFTData, "TeacherRLData or ScoringData or Stud"),
        (lambda: RLTModule("miniature", "miniature"), StudentOPDData, "TeacherRLData or ScoringData or Stud"),
        (lambda: OPDModule("miniature"), TeacherSFTData, "StudentOPDData"),
        (lambda: SFTModule("miniature"), TeacherRLData, "StudentSFTData or TeacherSFTData"),
        (
            lambda: SFTModule("miniature"),
            lambda source: EvaluationDataModule({source: None}),
            "StudentSFTData",
        ),
    ],
)
def test_a_plain_trainer_refuses_a_wrong_pair(module: Any, data: Any, named: str, tmp_path: Path) -> None:
    module, data = module(), data("chains")
    with pytest.raises(InputError, match=f"The data of {type(module).__name__} must be {named}") as raised:
        bare_trainer(tmp_path, RolloutCallback()).fit(module, data)
    assert "\n" not in str(raised.value)
    assert module.entry is None  # nothing was loaded
    assert not hasattr(data, "items")  # or read


def test_an_evaluation_refuses_the_data_of_a_stage(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be EvaluationDataModule, but are StudentSFTData"):
        bare_trainer(tmp_path, ResponseCallback()).test(
            EvaluationModule("miniature"), StudentSFTData("chains")
        )


@pytest.mark.parametrize(
    ("reward", "kind", "message"),
    [
        (None, StudentRLData, "RLTReward judges explanations, but .* StudentRLData are answers"),
        (CorrectnessReward(), TeacherRLData, "judges answers, but .* TeacherRLData are explanations"),
    ],
)
def test_a_reward_refuses_what_it_does_not_judge(
    reward: Any, kind: type[StratosDataModule], message: str, tmp_path: Path
) -> None:
    options = {} if reward is None else {"reward": reward}
    module = RLTModule("miniature", "miniature" if reward is None else None, **options)
    prompts = {"teacher_system_prompt": "", "student_system_prompt": ""}
    data = kind("chains", num_embedded_rows=16, tags="r1", **prompts)
    with pytest.raises(InputError, match=message):
        bare_trainer(tmp_path, RolloutCallback()).fit(module, data)
    assert module.entry is None


def test_a_subclass_of_a_stage_is_taken(tmp_path: Path) -> None:
    class Shouted(StudentSFTData):
        def complete(self, columns: dict[str, Any]) -> dict[str, Any]:
            return {**columns, "question": columns["question"].upper()}

    data = Shouted("chains", num_embedded_rows=8, prompts_per_step=4, tags="r1", student_system_prompt="")
    bare_trainer(tmp_path, steps=1).fit(SFTModule("miniature"), data)
    assert "START" in data.format.tokenizer.decode(data.examples[0].token_ids)
