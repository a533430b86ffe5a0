"""Tab completion in real shells, and how long a key press takes."""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from select import select

import pytest

from rlt_lightning.cli.completion import print_completion, write_script
from rlt_lightning.cli.help import VERBS
from rlt_lightning.types import InputError

CASES = [
    (["rlt", "te"], ["test", "teach"]),
    (["rlt", "fit", "--model.group_s"], ["--model.group_size"]),
    (["rlt", "fit", "--config", "student_o"], ["student_opd"]),
    (["rlt", "fit", "--config", "=", "student_o"], ["student_opd"]),
    (["rlt", "fit", "--resume", "t"], ["true"]),
    (["rlt", "fit", "--export.adapter", "="], ["merged", "separate"]),
    (["rlt", "report", "--max"], ["--max_completions", "--max_text_mib"]),
    (["rlt", "report", "mine"], ["mine.yaml"]),
]


@pytest.mark.parametrize(("words", "expected"), CASES, ids=lambda value: " ".join(value))
def test_bash_completes(words: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    line = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _rlt; "
    code = f'{write_script("bash")}\n{line}printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(expected)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(tmp_path: Path) -> None:
    # A real terminal: zsh completes only what is typed into one.
    (tmp_path / "script").write_text(write_script("zsh"))
    setup = (
        "PS1='$ '; autoload -U compinit; compinit -u -D; source ./script; rlt() { print -r -- TYPED $* }; "
        "print RE''ADY\n"
    )
    typed = "rlt fit --model.group_si\t 4 --config=student_o\t --resume tr\t \n"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve("/usr/bin/env", ["env", "zsh", "-fi"], os.environ | {"TERM": "dumb", "HOME": str(tmp_path)})
    os.write(terminal, setup.encode())
    read_until(r"(?s)READY\r\n.*\$ ", terminal)  # what is typed before the prompt would not be completed
    os.write(terminal, typed.encode())
    read_until("TYPED fit --model.group_size 4 --config=student_opd --resume true", terminal)
    os.close(terminal)
    os.waitpid(pid, 0)


def read_until(pattern: str, terminal: int) -> None:
    """Read what a terminal shows until a pattern comes; its end, or a minute of silence, is a failure."""
    shown = ""
    while not re.search(pattern, shown):
        assert select([terminal], [], [], 60)[0], shown
        shown += os.read(terminal, 10_000).decode(errors="replace")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_the_script_of_zsh_has_no_error() -> None:
    done = subprocess.run(["zsh", "-n"], input=write_script("zsh"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_verb_is_completed() -> None:
    for shell in ("bash", "zsh"):
        script = write_script(shell)
        assert all(f"        {verb}) " in script for verb in VERBS)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="takes bash or zsh, but got fish"):
        print_completion(["fish"])
