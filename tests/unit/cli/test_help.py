"""What `--help` prints, at once, and how a misspelled name is answered."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cases import full
from commands import ROOT, rlt
from parsed import parser_of

from rlt_lightning.cli.help import VERBS
from rlt_lightning.cli.parser import list_options
from rlt_lightning.run.shipped import list_shipped_configs


@cache
def known(verb: str) -> frozenset[str]:
    return frozenset(list_options(parser_of(verb)))


@pytest.mark.parametrize("verb", ["fit", full("validate"), full("predict"), "test", full("plan")])
def test_every_option_of_a_help_exists(verb: str) -> None:
    shown = {*re.findall(r"--([\w.]+)", VERBS[verb][2])} - {"config"}
    assert shown <= {name.removesuffix(".help") for name in known(verb)}


def test_help_of_a_verb_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['rlt', 'fit', '--help']; import rlt_lightning.__main__ as m; m.main()\n"
        "heavy = {'torch', 'lightning', 'jsonargparse', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--model.group_size 8 " in done.stdout
    assert "--model.reward.kl_weight 3.0 " in done.stdout


def test_output_that_no_encoding_shows_ends_no_command() -> None:
    code = "import sys; sys.argv = ['rlt', 'explain', '--help']; import rlt_lightning.__main__ as m; m.main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "--question" in done.stdout


def test_help_all_is_the_parsers_own() -> None:
    done = rlt("fit", "--help-all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: rlt fit --config CONFIG")
    assert "--print_config" in done.stdout


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
