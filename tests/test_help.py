"""What `--help` shows: one screen of what most people set, read off the parsers, at once."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import full
from commands import ROOT, rlt
from test_docs import parser_of

from rlt_lightning.cli import help as screens
from rlt_lightning.cli.help import TABLE, VERBS, list_options, suggest_option, suggest_verb

MOST_LINES = 60


def test_every_common_option_exists() -> None:
    missing = {
        verb: sorted({*VERBS[verb].common} - {option.name for option, _ in list_options(verb)})
        for verb in VERBS
    }
    assert not any(missing.values()), missing
    assert [verb for verb in VERBS if not VERBS[verb].common] == ["completion"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_is_one_screen(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    screens.print_screen(verb)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0] == f"usage: rlt {verb} {VERBS[verb].usage}"
    assert lines[2] == VERBS[verb].line
    has_more = {option.name for option, _ in list_options(verb)} > {*VERBS[verb].common}
    assert (lines[-1] == f"all options: rlt {verb} --help-all") is has_more
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert {line.removeprefix("--").partition("=")[0] for line in options} == {*VERBS[verb].common}
    assert max(map(len, lines)) <= screens.COLUMNS


def test_help_of_a_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['rlt', 'fit', '--help']; import rlt_lightning.__main__ as m; m.main()\n"
        "heavy = {'torch', 'lightning', 'jsonargparse', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--model.group_size=8 " in done.stdout


def test_help_shows_values_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    screens.print_screen("fit")
    shown = capsys.readouterr().out
    assert "--model.reward.kl_weight=3.0 " in shown
    assert "bf16-true" not in shown


def test_output_that_no_encoding_shows_ends_no_command() -> None:
    code = "import sys; sys.argv = ['rlt', 'fit', '--help']; import rlt_lightning.__main__ as m; m.main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.isspace()


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    screens.print_main_help()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= MOST_LINES
    for name, verb in VERBS.items():
        assert f"  rlt {name:10} {verb.line}" in lines


@pytest.mark.docs
def test_the_table_of_options_is_that_of_the_parsers() -> None:
    write_table = runpy.run_path(str(ROOT / "scripts/options.py"))["write_table"]
    assert TABLE.read_text() == write_table(), "run `python scripts/options.py`"
    assert json.loads(TABLE.read_text())["verbs"].keys() == VERBS.keys()


def test_help_with_a_config_shows_its_classes_and_values() -> None:
    done = rlt("fit", "--config", "quickstart", "--help")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= MOST_LINES
    for setting in ("model.optimizer.lr=0.0002", "data.source=chains", "trainer.max_steps=40"):
        assert any(line.startswith(f"* --{setting} ") for line in lines), setting
    assert any(line.startswith("  --model.reward.kl_weight=3.0 ") for line in lines)
    assert "model: RLTModule" in lines
    assert "SFTModule" not in done.stdout
    assert any("max_staleness" in line for line in lines)


@pytest.mark.parametrize(
    ("verb", "config"), [("test", "evaluate"), full("plan", "teacher_rlt"), full("teach", "rank")]
)
def test_help_with_any_config_is_one_screen(verb: str, config: str) -> None:
    overlays = ["--config", "overlays/zero3_8gpu"] if verb == "plan" else []
    done = rlt(verb, "--config", config, *overlays, "--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("option", "first"),
    [
        ("rollouts.engine.launch", "  --rollouts.engine.launch.executable=vllm "),
        ("model.lora", "  --model.lora.rank=32 "),
    ],
)
def test_a_dataclass_within_a_class_has_a_help(
    option: str, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", f"--{option}.help"]
    monkeypatch.setattr(sys, "argv", ["rlt", *words])
    with pytest.raises(SystemExit) as ending:
        parser_of("fit").parse_args(words)
    assert ending.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index(next(line for line in lines if line.startswith(option))) + 1].startswith(first)


@pytest.mark.full
def test_a_help_whose_reader_stops_ends_without_a_traceback() -> None:
    words = [sys.executable, "-m", "rlt_lightning", "fit", "--config", "quickstart", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=570)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        full(["report"], "report RUN_DIR [RUN_DIR ...] [--output FILE]"),
        (["teach"], "teach RUN_OR_FOLDER --question '…' --solution '…'"),
    ],
)
def test_help_all_is_the_parsers_own(words: list[str], usage: str) -> None:
    done = rlt(*words, "--help-all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: rlt {usage}")
    assert "Run inference on your data" not in done.stdout
    assert "--print_config" in done.stdout


def test_a_users_own_class_is_shown_with_its_settings(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rlt_lightning.numerics import RLTReward\n\n\n"
        "class OwnReward(RLTReward):\n"
        '    """Mine.\n\n    Args:\n        joy: How glad it is.\n    """\n\n'
        "    def __init__(self, joy: float = 2.5) -> None:\n        super().__init__()\n"
    )
    done = rlt("fit", "--config", "quickstart", "--model.reward=own.OwnReward", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "* --model.reward=OwnReward" in done.stdout
    assert "reward.joy" in done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.group_sise", "model.group_size"),
        ("modle.group_size", "model.group_size"),
        ("group_size", "model.group_size"),
        ("max_steps", "trainer.max_steps"),
        ("lr", "model.optimizer.lr"),
        ("model.optimizer.lrr", "model.optimizer.lr"),
        ("modle", "model"),
        ("rollouts.sampling.temprature", "rollouts.sampling.temperature"),
        ("data.sources", "data.source"),
        ("model.reward.kl_wieght", "model.reward.kl_weight"),
    ],
)
def test_a_misspelled_option_is_found(name: str, expected: str) -> None:
    assert suggest_option(name, [option.name for option, _ in list_options("fit")])[0] == expected


def test_nothing_near_is_suggested_for_another_word() -> None:
    assert suggest_option("zzzz", ["model.group_size", "trainer.max_steps"]) == []


@pytest.mark.parametrize(("typed", "meant"), [("fitt", "fit"), ("reprot", "report"), ("train", "fit")])
def test_a_misspelled_verb_is_found(typed: str, meant: str) -> None:
    line = suggest_verb(typed)
    assert f"Did you mean rlt {meant}?" in line
    assert all(verb in line for verb in VERBS)


def test_help_as_a_verb_names_the_option() -> None:
    assert "type rlt --help" in suggest_verb("help")
