"""The mistakes of a first hour: each gets one line that names what came and the remedy.

A command line is read by the verb's real parser in this process. The last tests run whole commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_lightning import (
    OptimizerConfig,
    RLTModule,
    RolloutCallback,
    StratosDataModule,
    Trainer,
)
from rlt_lightning import __main__ as program
from rlt_lightning.datamodules import StudentSFTData, TeacherRLData
from rlt_lightning.models.load import require_model_name
from rlt_lightning.run.folder import choose_run_folder
from rlt_lightning.types import InputError

CONFIGS = {
    "key.yaml": "model:\n  class_path: rlt_lightning.modules.RLTModule\n  init_args: {group_sise: 4}\n",
    "nested.yaml": "model:\n  optimizer: {lrr: 2}\n",
    "type.yaml": "model:\n  group_size: four\n",
    "class.yaml": "model:\n  class_path: rlt_lightning.modules.RTLModule\n",
}
FIT = "fit --config quickstart"
# What is typed -> the setting that the line names, and the word of its remedy.
MISTAKES = {
    "fitt --config quickstart": ("fitt", "Did you mean rlt fit?"),
    "train": ("train", "Did you mean rlt fit?"),
    "help": ("help", "rlt --help"),
    "fit": ("required", "data"),
    "fit --config quikstart": ("quikstart", "Did you mean quickstart?"),
    f"{FIT} --model.group_sise 4": ("group_sise", "Did you mean group_size?"),
    f"{FIT} --modle.group_size 4": ("modle.group_size", "Did you mean model.group_size?"),
    f"{FIT} --group_size 4": ("group_size", "Did you mean model.group_size?"),
    f"{FIT} --lr 1": ("lr", "Did you mean model.optimizer.lr?"),
    f"{FIT} --model.optimizer.lrr 1": ("optimizer.lrr", "Did you mean optimizer.lr?"),
    f"{FIT} --model.reward.kl_wieght 1": ("kl_wieght", "Did you mean kl_weight?"),
    f"{FIT} --config key.yaml": ("group_sise", "Did you mean group_size?"),
    f"{FIT} --config nested.yaml": ("lrr", "optimizer"),
    f"{FIT} --config type.yaml": ("group_size", "int"),
    f"{FIT} --config class.yaml": ("RTLModule", "no attribute"),
    f"{FIT} --model.reward RLTRewrd": ("reward", "import path"),
    f"{FIT} --model.dtype fp16": ("dtype", "float16"),
    f"{FIT} --seed -1": ("seed", "v>=0"),
    "test --config quickstart": ("RLTModule", "EvaluationModule"),
    "report": ("run_dir", "required"),
    "export --ckpt_path x": ("output_dir", "required"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_with_its_remedy(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlt", *command.split()])
    with pytest.raises(SystemExit) as ending:
        program.main()
    assert ending.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    setting, remedy = MISTAKES[command]
    assert line.startswith("rlt: error: ")
    assert setting in line
    assert remedy in line


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "a model's typo": (lambda: require_model_name("minature"), "Did you mean miniature?"),
    "no such model folder": (lambda: require_model_name("./model"), "The model folder './model' must exist"),
    "nothing to resume": (lambda: choose_run_folder("fit", "new", "", "last"), "--ckpt_path last needs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_before_any_work_names_the_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, expected = REFUSALS[case]
    with pytest.raises(InputError) as raised:
        function()
    assert expected in str(raised.value)


ROWS = [{"question": "1 + 1?", "solution": "2", "reasoning_trace": "1 + 1 is 2."}] * 4
LR = OptimizerConfig(1e-4)


def train(module: Any = None, data: Any = None, **options: Any) -> None:
    options = {"max_steps": 1, "accelerator": "cpu", "overwrite": True} | options
    Trainer("run", **options).fit(module or make_module(), data or make_data())


def make_module(**options: Any) -> RLTModule:
    return RLTModule(**{"teacher": "miniature", "student": "miniature", "group_size": 2} | options)


def make_data(source: Any = ROWS, **options: Any) -> StratosDataModule:
    return TeacherRLData(source, prompts_per_step=2, tags="r1", **options)


# A mistake in a script -> the setting and the remedy.
SCRIPTS: dict[str, tuple[Callable[[], object], str]] = {
    "strategy": (lambda: train(strategy="fsdp"), "strategy"),
    "accumulation": (lambda: train(accumulate_grad_batches=2), "accumulate_grad_batches must be 1"),
    "two samplers": (lambda: train(callbacks=[RolloutCallback(), RolloutCallback()]), "RolloutCallback"),
    "a teacher": (lambda: train(make_module(teacher="minature")), "Did you mean miniature?"),
    "a folder": (lambda: train(make_module(student="./none")), "model folder './none' must exist"),
    "data of SFT": (lambda: train(data=StudentSFTData(ROWS)), "must be TeacherRLData"),
    "a file": (lambda: train(data=make_data("rows.jsonl")), "file or folder 'rows.jsonl' must exist"),
    "a column": (lambda: train(data=make_data([{"question": "1?", "answer": "2"}])), "lacks solution"),
    "few rows": (lambda: train(data=make_data(ROWS[:1])), "prompts_per_step=2"),
    "tags": (lambda: train(data=TeacherRLData(ROWS, tags="qwen")), "stratos or r1"),
    "a checkpoint": (
        lambda: Trainer("run").fit(make_module(), make_data(), ckpt_path="no.ckpt"),
        "ckpt_path",
    ),
    "nothing held out": (
        lambda: Trainer("run", accelerator="cpu").validate(make_module(), make_data()),
        "val_rows",
    ),
    "a full folder": (lambda: Trainer("full").fit(make_module(), make_data()), "output_dir must be empty"),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_mistake_in_a_script_is_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    function, expected = SCRIPTS[case]
    with pytest.raises(InputError) as raised:
        function()
    line = str(raised.value)
    assert expected in line
    assert "\n" not in line
    assert not list(Path("run").glob("model*"))
