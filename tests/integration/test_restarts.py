"""torchrun restarts killed processes, and the run ends like one that was never killed."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import psutil
import pytest
from cases import full, slow
from commands import path_of_tests, run_rlt, start_fresh
from fits import explanation, metrics, small_fit
from jsonargparse import Namespace
from kills import fault
from launchers import STRATEGIES, two_nodes
from safetensors.torch import load_file

from rlt_lightning.cli.stages import SaveConfig
from rlt_lightning.types import InputError

STEPS = 6
MARK = "RLT_TEST_RUN"  # in the environment of all processes of a run, whichever session they are in


def options(model: str, folder: Path, strategy: str) -> list[str]:
    words = ["--data.num_embedded_rows=8", f"--trainer.max_steps={STEPS}", "--resume=true"]
    words += ["--rollouts.sampling.max_completion_length=6", "--checkpoint.every_n_train_steps=2"]
    words += ["--trainer.callbacks.init_args.every_n_steps=2", "--rollouts.engine=faults.Launching"]
    return small_fit(model, folder, *words, "--trainer.devices=2", *STRATEGIES[strategy])


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


def torchrun(mark: Path, words: list[str], *launches: list[str]) -> tuple[list[int], str]:
    """Run `rlt` by an agent for each launch; return their exit statuses and the output."""
    environment = {"PYTHONPATH": path_of_tests(), MARK: str(mark), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log, program = mark.with_suffix(".log"), [sys.executable, "-m", "torch.distributed.run"]
    agents = [
        start_fresh([*program, *launch, "-m", "rlt_lightning", *words], log, **environment)
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
    return statuses, log.read_text()


# In the step after the third argument, after so many restarts.
FIRST = fault("on_after_backward", "kill", 1, rank=1, life=0)  # before the first checkpoint
MIDDLE = fault("on_after_backward", "kill", 3, rank=0, life=1)  # in step 4, which is made again
LAST = [fault("on_train_end", "kill", STEPS, rank=1, life=n) for n in range(3)]  # before the model


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        full("ddp", [FIRST, LAST[1]]),
        slow("ddp", [FIRST, MIDDLE, LAST[2]]),
        slow("zero3", [FIRST, MIDDLE, LAST[2]]),
    ],
    ids=["ddp-2", "ddp-3", "zero3-3"],
)
def test_killed_and_restarted_by_torchrun_equals_not_stopping(
    strategy: str, kills: list[str], tiny_model: str, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_rlt(*options(tiny_model, whole, strategy), PYTHONPATH=path_of_tests())
    launch = ["--nproc-per-node=2", "--max-restarts=3"]
    [status], log = torchrun(killed, [*options(tiny_model, killed, strategy), *kills], launch)
    assert status == 0, log[-4000:]
    assert log.count("--- made at") == len(kills)  # each kill came
    assert_equal(whole, killed)


@pytest.mark.slow
def test_two_nodes_restart_together(tiny_model: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_rlt(*options(tiny_model, whole, "ddp"), PYTHONPATH=path_of_tests())
    words = [*options(tiny_model, killed, "ddp"), "--trainer.devices=1", "--trainer.num_nodes=2"]
    node = [*two_nodes(), "--max-restarts=2"]
    killing = fault("on_after_backward", "kill", 3, rank=1, life=0)
    statuses, log = torchrun(killed, [*words, killing], node, node)
    assert statuses == [0, 0], log[-4000:]
    assert log.count("--- made at") == 1
    # torchrun names the local rank that was killed, of the second node.
    assert re.findall(r"failed \(exitcode: -9\) local_rank: (\d)", log) == ["0"], log
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


def test_ranks_that_find_other_checkpoints_do_not_train() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda own: "step=6"), global_rank=1)
    saving = SaveConfig(None, Namespace(ckpt_path="step=4"))
    with pytest.raises(InputError, match="rank 0 found step=6 and rank 1 found step=4"):
        saving.setup(trainer, None, "fit")
