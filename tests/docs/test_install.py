"""What works after `pip install`: the wheel, in an empty folder, with only the base dependencies."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import ROOT
from wheel import READS, build_wheel, fresh_environment

from rlt_lightning.run.shipped import list_shipped_configs

Rlt = Callable[..., subprocess.CompletedProcess[str]]
# What makes a proposed command tiny, by verb.
TINY = {
    "fit": ["--trainer.max_steps", "2"],
    "predict": ["--data.max_rows", "32"],
    "test": ["--data.max_rows", "4"],
    "report": [],
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return fresh_environment(build_wheel(folder), folder / "environment")


# Run by the environment's Python. Each line of standard input is a call of `rlt`, run in a fork of this
# process, which has the imports.
FORKS = """
import atexit, contextlib, gc, io, json, os, runpy, sys, threading
import peft, transformers.optimization, transformers.trainer_utils
from rlt_lightning.cli.main import run

# A config is read once, for what that caches.
sys.argv = ["rlt", "fit", "--config=laptop/rlt", "--print_config"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    run()
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    if (pid := os.fork()) == 0:
        for number, path in enumerate(job["streams"]):
            os.dup2(os.open(path, os.O_RDWR), number)
        os.chdir(job["cwd"])
        sys.argv = job["words"]
        status = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)  # clearing up 5000 modules would take a second
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def environment(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of `rlt`: there is nothing but the wheel, and a file names what it reads."""
    home = tmp_path_factory.mktemp("home")
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        READS: str(home / "reads"),
    }


@pytest.fixture(scope="module")
def forks(
    programs: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[str]]:
    """The process that forks `rlt`: a start of Python costs more than what most commands compute."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [str(programs / "python"), "-c", FORKS]
    cwd = tmp_path_factory.mktemp("forks")
    with subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, start_new_session=True, **pipes
    ) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)  # with a command that a failed test has left


@pytest.fixture
def rlt(programs: Path, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Rlt:
    """`rlt` in an empty folder, with an environment of its own. It may read nothing of the checkout.

    `fresh=True` starts the program itself.
    """
    (tmp_path / "empty").mkdir()

    def run(*words: str, text: str = "", fresh: bool = False) -> subprocess.CompletedProcess[str]:
        command = [str(programs / "rlt"), *words]
        streams = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
        for path, content in zip(streams, (text, "", ""), strict=True):
            path.write_text(content)
        cwd = tmp_path / "empty"
        if fresh:
            with streams[1].open("w") as out, streams[2].open("w") as errors:
                pipes = {"input": text, "stdout": out, "stderr": errors}
                status = subprocess.run(command, cwd=cwd, env=environment, text=True, **pipes).returncode
        else:
            process = request.getfixturevalue("forks")
            job = {"words": command, "cwd": str(cwd), "streams": [str(path) for path in streams]}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
        assert Path(environment[READS]).read_text() == "", words
        return subprocess.CompletedProcess(command, status, streams[1].read_text(), streams[2].read_text())

    return run


def proposed(output: str) -> list[list[str]]:
    """The commands that a run prints at its end, without the program."""
    found = re.findall(r"^(?:See it|Try it|Next): (?:.*:\n  )?(.+)$", output, re.MULTILINE)
    commands = [shlex.split(line) for line in found]
    assert all(Path(words[0]).name == "rlt" for words in commands), commands
    return [words[1:] for words in commands]


def follow(rlt: Rlt, words: list[str]) -> list[str]:
    """Run a command at tiny size and everything that it and the next ones propose; returns the verbs."""
    done = rlt(*words, *TINY[words[0]])
    assert done.returncode == 0, (words, done.stderr)
    assert str(ROOT) not in done.stdout + done.stderr
    verbs = [words[0]]
    for following in proposed(done.stdout):
        verbs += follow(rlt, following)
    return verbs


def test_the_first_run_and_all_that_follows_need_nothing_but_the_wheel(rlt: Rlt, tmp_path: Path) -> None:
    commands, _, _ = rlt().stdout.partition("rlt VERB --help")
    first = re.findall(r"^  rlt (.+)$", commands, re.MULTILINE)
    assert first[0].startswith("demo ")
    verbs = follow(rlt, [*shlex.split(first[1])[:3], "--output_dir", "runs/try"])
    assert sorted(verbs) == ["fit", "fit", "predict", "report", "report", "test"]
    for config in (tmp_path / "empty").glob("runs/*/config.yaml"):
        assert str(ROOT) not in config.read_text()


@pytest.mark.slow
def test_the_demo_shows_the_finding_in_an_empty_folder(rlt: Rlt) -> None:
    done = rlt("demo", "--output_dir", "runs/demo")
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("Held-out problems")[2]
    answers = [int(number) for number in re.findall(r"^ +(\d+)  \w", table, re.MULTILINE)]
    print(f"figure: untrained, GRPO, before RLT, best quarter, expert iteration, RLT: {answers} %")
    assert len(answers) == 6
    assert max(answers[:3]) < 5
    assert min(answers[3:5]) > 50
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_configs_are_listed_and_shown(rlt: Rlt) -> None:
    table = rlt("configs", fresh=True).stdout
    assert all(f" {name}\n" in table for name in list_shipped_configs())
    assert rlt("configs", "add/lora").stdout == list_shipped_configs()["add/lora"].read_text()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["fit", "--config=laptop/rlt", "--config=hardware/zero3"], "deepspeed"),
        (["fit", "--config=laptop/rlt", "--config=add/qlora"], "quant"),
        (["fit", "--config=laptop/rlt", "--model.kernels.liger=true"], "liger"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(words: list[str], extra: str, rlt: Rlt) -> None:
    done = rlt(*words)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("rlt: error: ")]
    assert f"pip install 'rlt-lightning[{extra}]'" in line
    assert "Traceback" not in done.stderr


def test_a_users_mypy_sees_the_types_of_the_wheel(programs: Path, tmp_path: Path) -> None:
    # What these packages define is Any: to read them takes a minute, and their types are not ours.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,lightning.*,transformers.*,datasets.*,numpy.*]\nfollow_imports = skip\n"
    )
    (tmp_path / "user.py").write_text(
        "from rlt_lightning import RLTModule, Teacher, TeacherRLData, Trainer\n\n"
        'module = RLTModule("miniature", "miniature", group_size=4)\n'
        'data = TeacherRLData([{"question": "q", "solution": "s"}], prompts_per_step=2)\n'
        'Trainer("runs/x", max_steps=1).fit(module, data)\n'
        'reveal_type(Teacher("miniature", "miniature").score([]))\n'
        'RLTModule("miniature", group_size="four")\n'
        "Trainer(5.0)\n"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", str(programs / "python"), "user.py"]
    environment = {name: value for name, value in os.environ.items() if "PATH" not in name}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *lines, end = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"user.py:{number}" for number in (6, 7, 8)], lines
    assert 'Revealed type is "list[rlt_lightning.teacher.Score]"' in lines[0]
    assert 'incompatible type "str"; expected "int"' in lines[1]
    assert 'incompatible type "float"; expected "str | Path | RunFolder"' in lines[2]
    assert end.startswith("Found 2 errors in 1 file")


def test_the_image_has_what_its_installation_reads(tmp_path: Path) -> None:
    """.dockerignore lets files through by name: with one too few, the image cannot be built."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    wheel = build_wheel(tmp_path, tmp_path)
    assert wheel.stat().st_size > 1e6
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (\w+)", dockerfile, re.MULTILINE) == ["rlt"]  # and no way back to root
    assert (tmp_path / "Makefile").is_file()
