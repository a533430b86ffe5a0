"""The mistakes of a first hour: each gets one line that names what came and the remedy.

A command line is read by the verb's real parser in this process. The last tests run whole commands.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import rlt
from test_docs import parser_of

from rlt_lightning import (
    OptimizerConfig,
    RLTModule,
    RolloutCallback,
    Sampling,
    SFTModule,
    StratosDataModule,
    Teacher,
    Trainer,
)
from rlt_lightning import __main__ as program
from rlt_lightning.cli import main as cli
from rlt_lightning.cli.mistakes import describe_kind, find_place
from rlt_lightning.hub.push import push
from rlt_lightning.pretrained import require_model_name
from rlt_lightning.python.environment import name_arguments
from rlt_lightning.run.folder import choose_run_folder
from rlt_lightning.types import InputError

CONFIGS = {
    "key.yaml": "model:\n  class_path: rlt_lightning.modules.RLTModule\n  init_args: {group_sise: 4}\n",
    "section.yaml": "modle:\n  class_path: rlt_lightning.modules.RLTModule\n",
    "nested.yaml": "model:\n  optimizer: {lrr: 2}\n",
    "type.yaml": "model:\n  group_size: four\n",
    "class.yaml": "model:\n  class_path: rlt_lightning.modules.RTLModule\n",
    "filter.yaml": "data:\n  filters: {longest: 2}\n",
    "text.yaml": "what I want to do\n",
}
FIT = "fit --config quickstart"
# What is typed -> the line, without "rlt: error: " and what names the help.
MISTAKES = {
    "fitt --config quickstart": "but got 'fitt'. Did you mean rlt fit?",
    "train": "but got 'train'. Did you mean rlt fit?",
    "fit": "rlt fit needs an experiment, but got none: rlt fit --config NAME",
    "fit quickstart": "begins with --, but got quickstart. Did you mean --config quickstart?",
    "fit --config quikstart": "'quikstart' is neither. Did you mean quickstart?",
    f"{FIT} --config text.yaml": "Every --config must be a YAML file of settings, but text.yaml is not.",
    f"{FIT} --model.group_sise 4": "has no option --model.group_sise. Did you mean --model.group_size?",
    f"{FIT} --modle.group_size 4": "has no option --modle.group_size. Did you mean --model.group_size?",
    f"{FIT} --modle x": "has no option --modle. Did you mean --model?",
    f"{FIT} --group_size 4": "has no option --group_size. Did you mean --model.group_size?",
    f"{FIT} --lr 1": "has no option --lr. Did you mean --model.optimizer.lr?",
    f"{FIT} --model.optimizer.lrr 1": "--model.optimizer.lrr. Did you mean --model.optimizer.lr?",
    f"{FIT} --model.reward.kl_wieght 1": "--model.reward.kl_wieght. Did you mean --model.reward.kl_weight?",
    f"{FIT} --config key.yaml": "has no option model.group_sise in key.yaml. Did you mean model.group_size?",
    f"{FIT} --config section.yaml": "has no option modle.class_path in section.yaml. Did you mean model?",
    f"{FIT} --config nested.yaml": "model.optimizer.lrr in nested.yaml. Did you mean model.optimizer.lr?",
    f"{FIT} --config filter.yaml": "data.filters.longest in filter.yaml. data.filters has min_pass_rate, ",
    f"{FIT} --config type.yaml": "model.group_size in type.yaml must be a whole number, but got 'four'.",
    f"{FIT} --config class.yaml": "no attribute 'RTLModule'. Did you mean rlt_lightning.modules.RLTModule",
    f"{FIT} --model.reward RLTRewrd": "--model.reward must name a class, such as package.module.Class, but "
    "RLTRewrd is none. Did you mean rlt_lightning.numerics.RLTReward",
    f"{FIT} --model.dtype fp16": "float32, bfloat16, float16, auto, but got 'fp16'. Did you mean float16?",
    f"{FIT} --model.optimizer.lr high": "--model.optimizer.lr must be a number, but got 'high'.",
    f"{FIT} --trainer.max_steps many": "must be a whole number, but got 'many'. The default is -1.",
    f"{FIT} --resume perhaps": "--resume must be true or false, but got 'perhaps'. The default is false.",
    f"{FIT} --overwrite": "--overwrite needs a value, but none follows. Give true or false: --overwrite true",
    f"{FIT} --model.group_size": "--model.group_size needs a value, but none follows. Give a whole number:",
    f"{FIT} --rollouts.engine.urls [a]": "needs the class that has it. Name it before: "
    "--rollouts.engine rlt_lightning.engines.VLLMEngine",
    "test --config quickstart": "which is for rlt fit. Did you mean rlt fit --config quickstart?",
    "fit --config evaluate": "which is for rlt test. Did you mean rlt test --config evaluate?",
    f"{FIT} --seed abc": "--seed must be a whole number of at least 0, but got 'abc'.",
    f"{FIT} --seed -1": "--seed must be a whole number of at least 0, but got '-1'.",
    "fit --config overlays/fsdp2_8gpu": "an experiment below its overlays, but got overlays/fsdp2_8gpu:",
    "dashboard": "rlt dashboard needs --project: rlt dashboard --project PROJECT",
    "chat runs/x/model": "but got runs/x/model. Did you mean --model.path runs/x/model?",
    "push": "rlt push takes one run, but got none: rlt push RUN [--data] --repo_id USER/NAME",
    "report": "rlt report needs a run, the folder that --output_dir was: rlt report RUN_DIR [RUN_DIR ...]",
    "export --ckpt_path x": "needs --output_dir: rlt export --ckpt_path CHECKPOINT --output_dir FOLDER",
    "plan --config quickstart --plan.graphics x": "has no option --plan.graphics. plan has verb, device, ",
    "configs --cpy x": "rlt configs has no option --cpy. Did you mean --copy?",
}


def read(words: list[str]) -> None:
    """Read a command line as `rlt` does, and run nothing."""
    verb, *options = words
    if verb not in cli.COMMAND_LINES and verb not in [*cli.COMMANDS, "fit", "test"]:
        program.main()
        return
    options = cli.read_run(options) if verb == "push" else options
    command_line = cli.COMMAND_LINES.get(verb)
    own = (
        options if verb in cli.COMMANDS else [command_line.settings_verb if command_line else verb, *options]
    )
    parser_of(verb).parse_args(own)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_with_its_remedy(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    words = command.split()
    monkeypatch.setattr(sys, "argv", ["rlt", *words])
    with pytest.raises((SystemExit, InputError)) as ending:
        read(words)
    if isinstance(ending.value, InputError):
        line = f"rlt: error: {ending.value}"  # as `run` prints it
    else:
        assert ending.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rlt: error: ")
    assert "\n" not in line
    assert MISTAKES[command] in line


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "a push without a token": (lambda: push("nowhere"), "environment variable HF_TOKEN, which is not set"),
    "a model's typo": (lambda: require_model_name("minature"), "Did you mean miniature?"),
    "no such model folder": (lambda: require_model_name("./model"), "The model folder './model' must exist"),
    "nothing to resume": (lambda: choose_run_folder("fit", "new", "", "last"), "--ckpt_path last needs"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_before_any_work_names_the_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    function, expected = REFUSALS[case]
    with pytest.raises(InputError) as raised:
        function()
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fitt"], "Did you mean rlt fit?"),
        (["push", "runs/none", "--repo_id=a/b"], "environment variable HF_TOKEN, which is not set"),
        (
            ["fit", "--config=quickstart", "--data.source=rows.jsonl"],
            "lacks solution and has answer, question.",
        ),
        (["fit", "--config=quickstart", "--model.teacher=minature"], "Did you mean miniature?"),
        (["teach", "nofolder", "--question=1?", "--solution=1"], "There is no folder 'nofolder' here"),
        (["report", "runs/none"], "Name the folder that --output_dir was."),
    ],
)
def test_a_mistaken_command_ends_with_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    done = rlt(*words, cwd=tmp_path, HF_TOKEN="")
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("rlt: error: ")
    assert expected in line
    assert not (tmp_path / "runs").exists()


def test_the_place_of_a_setting_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: {init_args: {optimizer: {lr: 1}}}\n")
    assert str(find_place("optimizer.lr", ["--config", "a.yaml"])) == "model.optimizer.lr in a.yaml"
    words = ["--config=a.yaml", "--model.init_args.optimizer.lr=2"]
    assert str(find_place("optimizer.lr", words)) == "--model.optimizer.lr"
    assert str(find_place("optimizer.lr", words[:1], "3")) == "--optimizer.lr"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("INT", "a whole number"),
        ("true|false", "true or false"),
        ("a|b", "one of a, b"),
        ("auto|STR", "auto or a text"),
        ("true|false|STR", "true or false or a text"),
    ],
)
def test_a_kind_is_said_in_words(kind: str, expected: str) -> None:
    assert describe_kind(kind) == expected


IN_A_SCRIPT = {
    "at least data.prompts_per_step=2 rows": "at least prompts_per_step=2 rows",
    "rlt validate needs rows. Set data.val_rows.": "Trainer.validate needs rows. Set val_rows.",
    "To resume: --resume true, or --ckpt_path last": "To resume: resume=True, or ckpt_path='last'",
    "Raise model.head.logits_mib.": "Raise head.logits_mib.",
    "in run/data.jsonl, of my.model.Class": "in run/data.jsonl, of my.model.Class",
}


@pytest.mark.parametrize("text", IN_A_SCRIPT)
def test_a_script_reads_of_its_arguments(text: str) -> None:
    assert name_arguments(text) == IN_A_SCRIPT[text]


ROWS = [{"question": "1 + 1?", "solution": "2", "reasoning_trace": "1 + 1 is 2."}] * 4
LR = OptimizerConfig(1e-4)


def train(module: Any = None, data: Any = None, **options: Any) -> None:
    options = {"max_steps": 1, "accelerator": "cpu", "overwrite": True} | options
    Trainer("run", **options).fit(module or make_module(), data or make_data())


def make_module(**options: Any) -> RLTModule:
    return RLTModule(**{"teacher": "miniature", "student": "miniature", "group_size": 2} | options)


def make_data(source: Any = ROWS, **options: Any) -> StratosDataModule:
    return StratosDataModule(source, prompts_per_step=2, tags="r1", **options)


# A mistake in a script -> what its line says.
SCRIPTS: dict[str, tuple[Callable[[], object], str]] = {
    "strategy": (lambda: train(strategy="fsdp"), "strategy must be auto, ddp or an overlay's, but is fsdp."),
    "accumulation": (lambda: train(accumulate_grad_batches=2), "so accumulate_grad_batches must be 1, but"),
    "a callback's class": (
        lambda: train(callbacks=[RolloutCallback]),
        "one is the class RolloutCallback. Write RolloutCallback().",
    ),
    "two samplers": (
        lambda: train(callbacks=[RolloutCallback(), RolloutCallback()]),
        "one RolloutCallback, but callbacks has 2.",
    ),
    "data first": (lambda: train(make_data(), make_module()), "Write fit(module, data)."),
    "no data": (lambda: Trainer("run").fit(make_module()), "after the module, but got None. Give it Strat"),
    "rows for data": (lambda: train(data=ROWS), "but got of type list. Give it StratosDataModule(rows)."),
    "a rate": (
        lambda: train(make_module(optimizer=1e-4)),
        "OptimizerConfig(lr=1e-6), but is of type f",
    ),
    "a reward": (lambda: train(make_module(reward="RLTReward")), "such as RLTReward(), but is of type str."),
    "a teacher": (lambda: train(make_module(teacher="minature")), "Did you mean miniature?"),
    "a folder": (lambda: train(make_module(student="./none")), "model folder './none' must exist, but does"),
    "a task of SFT": (lambda: train(data=make_data(task="student_sft")), "but task is student_sft, which is"),
    "no task of SFT": (
        lambda: train(SFTModule("miniature", LR), make_data()),
        "task must be teacher_sft or student_sft for SFTModule, but is rlt.",
    ),
    "a file": (lambda: train(data=make_data("rows.jsonl")), "file or folder 'rows.jsonl' must exist"),
    "a column": (
        lambda: train(data=make_data([{"question": "1?", "answer": "2"}])),
        "lacks solution and has answer, question.",
    ),
    "few rows": (lambda: train(data=make_data(ROWS[:1])), "at least prompts_per_step=2 usable rows, but has"),
    "a number": (lambda: train(data=make_data([ROWS[0] | {"solution": 2}])), "1 of 1 rows of '1 rows in mem"),
    "tags": (lambda: train(data=StratosDataModule(ROWS, tags="qwen")), "stratos or r1 or a mapping with the"),
    "a checkpoint": (
        lambda: Trainer("run").fit(make_module(), make_data(), ckpt_path="no.ckpt"),
        "ckpt_path must be last, best or a checkpoint that exists, but is no.ckpt.",
    ),
    "nothing held out": (
        lambda: Trainer("run", accelerator="cpu").validate(make_module(), make_data()),
        "Trainer.validate needs held-out rows, but has none. Set val_rows or val_source.",
    ),
    "a full folder": (
        lambda: Trainer("full").fit(make_module(), make_data()),
        "output_dir must be empty or new, but full is not. Choose another folder, replace what is there "
        "(overwrite=True)",
    ),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_mistake_in_a_script_is_one_line_about_its_arguments(
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
    assert not re.search(r"--(?!config)|\b(model|data|rollouts|trainer)\.[a-z]+_", line), line


def test_a_script_with_a_mistake_gets_one_line_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "1 + 1?", "solution": "2"}]
    options: dict[str, Any] = {"tags": "r1", "teacher_system_prompt": "", "student_system_prompt": ""}

    def fit(teacher: str, given: list[dict[str, str]]) -> None:
        data = StratosDataModule(given, prompts_per_step=2, **options)
        rollouts = RolloutCallback(sampling=Sampling(max_completion_length=8))
        trainer = Trainer("run", max_steps=1, accelerator="cpu", callbacks=rollouts, overwrite=True)
        trainer.fit(RLTModule(teacher, "miniature", group_size=2), data)

    for function, expected in (
        (partial(fit, "minature", rows), "There is no model 'minature'. Did you mean miniature?"),
        (partial(fit, "./nowhere", rows), "The model folder './nowhere' must exist, but does not."),
        (partial(fit, "miniature", rows), "at least prompts_per_step=2 usable rows, but has 1."),
        (
            partial(fit, "miniature", [{"question": "1?", "answer": "2"}]),
            "lacks solution and has answer, question.",
        ),
        (partial(Teacher("minature").explain, "1?", "2"), "Did you mean miniature?"),
    ):
        with pytest.raises(InputError) as raised:
            function()
        assert expected in str(raised.value)
        assert "\n" not in str(raised.value)
        assert not list(Path("run").glob("model*"))
