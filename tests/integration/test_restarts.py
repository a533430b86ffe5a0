"""torchrun restarts killed processes, and the run ends like one that was never killed."""

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
from types import SimpleNamespace
from typing import Any

import commands
import psutil
import pytest
from cases import full, slow
from commands import ROOT, path_of_tests, rlt
from fits import explanation, metrics
from jsonargparse import Namespace
from launchers import STRATEGIES
from nodes import two_nodes
from safetensors.torch import load_file

from rlt_lightning.cli.stages import SaveConfig
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


def torchrun(mark: Path, words: list[str], *launches: list[str]) -> tuple[list[int], list[str]]:
    """Run `rlt` by an agent for each launch; return their exit statuses and the lines of the output."""
    environment = {"PYTHONPATH": path_of_tests(), MARK: str(mark), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = mark.with_suffix(".log")
    with log.open("a") as file:
        agents = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "rlt_lightning", *words],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=file,
                stderr=file,
            )
            for launch in launches
        ]
    try:
        deadline = time.monotonic() + commands.longest_s
        statuses = [agent.wait(deadline - time.monotonic()) for agent in agents]
        deadline = time.monotonic() + 15
        while left := living(str(mark)):
            assert time.monotonic() < deadline, f"{left} outlived the run"
            time.sleep(0.1)
    finally:
        for process in living(str(mark)):
            process.send_signal(signal.SIGKILL)
    return statuses, log.read_text().splitlines()


def one_node(restarts: int) -> list[str]:
    return ["--nproc-per-node=2", f"--max-restarts={restarts}"]


def whole_run(model: str, folder: Path, strategy: str) -> Path:
    """Make the run that nobody kills, without torchrun."""
    result = rlt(*options(model, folder, strategy), PYTHONPATH=path_of_tests())
    assert result.returncode == 0, result.stderr
    return folder


def killed_ranks(lines: list[str]) -> list[str]:
    """Return the local ranks that torchrun has named as killed."""
    return re.findall(r"failed \(exitcode: -9\) local_rank: (\d)", "\n".join(lines))


FIRST = kill(0, rank=1, hook="on_after_backward", step=1)  # in step 2, before the first checkpoint
MIDDLE = kill(1, rank=0, hook="on_after_backward", step=3)  # in step 4, which is made again
LAST = {"rank": 1, "hook": "on_train_end", "step": STEPS}  # between the last checkpoint and the model


@pytest.mark.parametrize(
    ("strategy", "kills", "ranks"),
    [
        full("ddp", [FIRST, kill(1, **LAST)], ["1", "1"]),
        slow("ddp", [FIRST, MIDDLE, kill(2, **LAST)], ["1", "0", "1"]),
        slow("zero3", [FIRST, MIDDLE, kill(2, **LAST)], ["1", "0", "1"]),
    ],
    ids=["ddp-2", "ddp-3", "zero3-3"],
)
def test_killed_and_restarted_by_torchrun_equals_not_stopping(
    strategy: str, kills: list[str], ranks: list[str], tiny_model: str, tmp_path: Path
) -> None:
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    whole, killed = whole_run(tiny_model, tmp_path / "whole", strategy), tmp_path / "killed"
    [status], lines = torchrun(killed, [*options(tiny_model, killed, strategy), *kills], one_node(3))
    log = "\n".join(lines)
    assert status == 0, log[-4000:]
    # Each kill came, its rank was named, and the next life said which one it is.
    assert log.count("--- made at") == len(kills)
    assert killed_ranks(lines) == ranks, log
    restarts = re.findall(r"restarted all processes: restart (\d) of at most 3", log)
    assert restarts == ["1", "2", "3"][: len(kills)]
    assert_equal(whole, killed)


@pytest.mark.slow
def test_two_nodes_restart_together(tiny_model: str, tmp_path: Path) -> None:
    whole, killed = whole_run(tiny_model, tmp_path / "whole", "ddp"), tmp_path / "killed"
    words = [*options(tiny_model, killed, "ddp"), "--trainer.devices=1", "--trainer.num_nodes=2"]
    node = [*two_nodes(), "--max-restarts=2"]
    kills = [kill(0, rank=1, hook="on_after_backward", step=3)]
    statuses, lines = torchrun(killed, [*words, *kills], node, node)
    log = "\n".join(lines)
    assert statuses == [0, 0], log[-4000:]
    assert log.count("--- made at") == 1
    assert killed_ranks(lines) == ["0"], log  # of the second node
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


@pytest.mark.parametrize(("hook", "step"), [full("setup", 0), slow("on_after_backward", 1)])
def test_the_rank_that_was_killed_is_named_under_torchrun(
    hook: str, step: int, tiny_model: str, tmp_path: Path
) -> None:
    words = [*options(tiny_model, tmp_path / "run", "ddp"), kill(0, rank=1, hook=hook, step=step)]
    [status], lines = torchrun(tmp_path / "run", words, one_node(0))
    assert status == 1
    assert killed_ranks(lines) == ["1"], lines
    assert not any(line.startswith("rlt: error") for line in lines), lines


def test_ranks_that_find_other_checkpoints_do_not_train() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda own: "step=6"), global_rank=1)
    saving = SaveConfig(None, Namespace(ckpt_path="step=4"))
    with pytest.raises(InputError, match="rank 0 found step=6 and rank 1 found step=4"):
        saving.setup(trainer, None, "fit")
