"""What `--help` prints, at once, and what it names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from parsed import check_rlt, parser_of

from rlt_lightning.cli.help import VERBS
from rlt_lightning.run.shipped import list_shipped_configs, read_next_command


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("demo", "report")])
def test_examples_of_a_help_are_right(verb: str, tmp_path: Path) -> None:
    for line in re.findall(rf"^  rlt ({verb}\b.*)", VERBS[verb], re.MULTILINE):
        if "[" not in line and "CHECKPOINT" not in line:
            check_rlt(shlex.split(line.partition(" > ")[0]), tmp_path)


def test_help_of_a_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['rlt', 'fit', '--help']; import rlt_lightning.__main__ as m\n"
        "try: m.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'jsonargparse', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--model.micro_batch_tokens N " in done.stdout


# The next command, which a config names


WITH_NEXT = [name for name, path in list_shipped_configs().items() if "\n# Next: " in path.read_text()]


@pytest.mark.parametrize("name", WITH_NEXT)
def test_the_next_command_of_a_config_is_read(name: str, tmp_path: Path) -> None:
    text = list_shipped_configs()[name].read_text()
    (tmp_path / "model").mkdir()
    (tmp_path / "distillation.jsonl").touch()
    [line] = re.findall(r"^# Next: (.*)$", text, re.MULTILINE)
    program, verb, *words = shlex.split(line.replace("RUN", str(tmp_path)))
    assert program == "rlt"
    parser_of(verb).parse_args([verb, *words])


def test_the_next_command_keeps_what_was_chosen(tmp_path: Path) -> None:
    warmup = [list_shipped_configs()["recipe_7b/warmup"]]
    assert read_next_command(warmup, tmp_path) is None  # as after trainer.fast_dev_run
    (tmp_path / "model").mkdir()
    after = f"--model.teacher {tmp_path}/model"
    fit = "rlt fit --config recipe_7b/rlt --config hardware"
    assert read_next_command(warmup, tmp_path, "fsdp2") == f"{fit}/fsdp2_8gpu {after}"
    found = read_next_command(warmup, tmp_path, "deepspeed_stage_3", "my rows.jsonl")
    assert found == f"{fit}/zero3_8gpu {after} --data.source 'my rows.jsonl'"
