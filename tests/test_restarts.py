"""torchrun starts killed processes again, and the run ends as one that nobody has killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from commands import ROOT, rlt
from safetensors.torch import load_file
from test_cli import explanation, metrics
from test_rank_failures import STRATEGIES
from test_strategies import full

from rlt_lightning.cli.restarts import require_restartable
from rlt_lightning.types import InputError

STEPS = 6
MARK = "RLT_TEST_RUN"  # in the environment of all processes of a run, whichever session they are in


def options(model: str, folder: Path, strategy: str) -> list[str]:
    words = ["fit", "--config=tests/rlt.yaml", f"--model.teacher={model}", f"--model.student={model}"]
    words += ["--model.group_size=2", "--model.optimizer.lr=1e-3", "--data.num_embedded_rows=8"]
    words += ["--rollouts.sampling.max_completion_length=6", f"--trainer.max_steps={STEPS}"]
    words += ["--trainer.callbacks.init_args.every_n_steps=2", "--checkpoint.every_n_train_steps=2"]
    words += ["--rollouts.engine=faults.Launching", "--trainer.devices=2", *STRATEGIES[strategy]]
    return [*words, f"--output_dir={folder}", "--resume=true"]


def kill(life: int, rank: int, hook: str, step: int) -> str:
    """Kill a rank in the step after `step`, after so many restarts."""
    arguments = {"rank": rank, "hook": hook, "kind": "kill", "step": step, "life": life}
    return "--trainer.callbacks+=" + json.dumps({"class_path": "faults.Fault", "init_args": arguments})


def living(mark: str) -> list[psutil.Process]:
    """Return all processes of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def path_of_tests() -> str:
    return os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])


def torchrun(restarts: int, words: list[str], mark: Path, seconds: float = 400) -> tuple[int, list[str]]:
    """Run `rlt` by torchrun in two processes; return the exit status and the lines of the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "-m", "rlt_lightning", *words]
    environment = {"PYTHONPATH": path_of_tests(), MARK: str(mark), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = mark.with_suffix(".log")
    with log.open("w") as file:
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=file)
    try:
        status = run.wait(seconds)
        deadline = time.monotonic() + 15
        while left := living(str(mark)):
            assert time.monotonic() < deadline, f"{left} outlived the run"
            time.sleep(0.1)
    finally:
        for process in living(str(mark)):
            process.send_signal(signal.SIGKILL)
    return status, log.read_text().splitlines()


@pytest.mark.parametrize("strategy", [full("ddp"), full("zero3")])
def test_killed_and_restarted_by_torchrun_equals_not_stopping(
    strategy: str, tiny_model: str, tmp_path: Path
) -> None:
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = rlt(*options(tiny_model, whole, strategy), PYTHONPATH=path_of_tests())
    assert result.returncode == 0, result.stderr
    kills = [
        kill(0, rank=1, hook="on_after_backward", step=1),  # in step 2, before the first checkpoint
        kill(1, rank=0, hook="on_after_backward", step=3),  # in step 4, which is made again
        kill(2, rank=1, hook="on_train_end", step=STEPS),  # between the last checkpoint and the model
    ]
    status, lines = torchrun(3, [*options(tiny_model, killed, strategy), *kills], killed)
    log = "\n".join(lines)
    assert status == 0, log[-4000:]
    # Each kill came, its rank was named, and the next life said which one it is.
    assert log.count("--- made at") == 3
    told = [line for line in lines if line.startswith("rlt: error")]
    assert [re.match(r"rlt: error: rank (\d): .*without a message", line)[1] for line in told] == [  # type: ignore[index]
        *("1", "0", "1")
    ], told
    restarts = [line for line in lines if line.startswith("torchrun has restarted")]
    assert [line.rpartition(": ")[2] for line in restarts] == [f"restart {n} of at most 3" for n in (1, 2, 3)]
    assert_equal(whole, killed)


def assert_equal(whole: Path, killed: Path) -> None:
    """The same files, and in them the same bits, metrics and completions; nothing lost, nothing twice."""
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (killed, whole))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert metrics(killed) == metrics(whole)
    assert metrics(killed).keys() == set(range(1, STEPS + 1))
    rows = [[explanation(line) for line in (run / "rollouts.jsonl").open()] for run in (whole, killed)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == len(set(rows[0]))
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (whole, killed)]
    assert names[0] == names[1]


@pytest.mark.full
@pytest.mark.parametrize(("hook", "step"), [("setup", 0), ("on_after_backward", 1)])
def test_the_rank_that_was_killed_is_named_under_torchrun(
    hook: str, step: int, tiny_model: str, tmp_path: Path
) -> None:
    words = [*options(tiny_model, tmp_path / "run", "ddp"), kill(0, rank=1, hook=hook, step=step)]
    status, lines = torchrun(0, words, tmp_path / "run")
    assert status == 1
    told = [line for line in lines if line.startswith("rlt: error")]
    assert [line.partition(": It was")[0] for line in told] == [told[0]], lines
    assert re.match("rlt: error: rank 1: .* ended without a message", told[0])


@pytest.mark.parametrize(
    ("resume", "agents_store", "expected"),
    [
        (False, "False", "needs --resume true"),
        (True, "True", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        (True, "False", None),
    ],
)
def test_a_run_that_could_not_be_restarted_is_refused_at_once(
    resume: bool, agents_store: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents_store)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    require_restartable(resume)  # what is never restarted needs nothing
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    if expected is None:
        require_restartable(resume)
        return
    with pytest.raises(InputError, match=expected):
        require_restartable(resume)
