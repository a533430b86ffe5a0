"""Two nodes of one process each, started by torchrun or SLURM on the loopback, equal a single process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import commands
import lightning.pytorch
import psutil
import pytest
from commands import path_of_tests, rlt, run_rlt, start_fresh, wait_until
from compared import largest_difference
from fits import metrics
from kills import fault
from launchers import two_nodes
from safetensors.torch import load_file

from rlt_lightning import RLTModule, TeacherRLData
from rlt_lightning.engines.launch import find_free_port


def options(model: str, *overlays: str) -> list[str]:
    return [
        *("--config=tests/rlt.yaml", *(f"--config=hardware/{name}" for name in overlays)),
        *(f"--model.teacher={model}", f"--model.student={model}", "--data.num_embedded_rows=8"),
        *("--rollouts.sampling.max_completion_length=16", "--trainer.devices=1"),
    ]


def finish(folder: Path, *processes: subprocess.Popen[bytes], status: int = 0) -> str:
    """Wait for all nodes, and return what they print; if one hangs, no process survives."""
    try:
        statuses = [process.wait(timeout=commands.longest_s) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    output = (folder / "log").read_text()
    assert statuses == [status] * len(processes), output[-3000:]
    return output


def begin(folder: Path, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    return start_fresh(command, folder / "log", OMP_NUM_THREADS="1", **environment)


@pytest.fixture(scope="module")
def alone(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    run_rlt("fit", *options(tiny_model), "--trainer.max_steps=3", f"--output_dir={run}")
    return run


def assert_as_alone(run: Path, alone: Path) -> None:
    """The same texts, and weights that rounding alone tells apart: three steps moved them by about 1e-3."""
    texts, ours = (
        sorted(json.loads(line)["explanation"] for line in (r / "rollouts.jsonl").open())
        for r in (alone, run)
    )
    assert texts == ours
    weights, theirs = (load_file(r / "model" / "model.safetensors") for r in (run, alone))
    assert largest_difference(weights, theirs) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_torchrun_on_two_nodes_trains_as_one_process_does(
    strategy: str, alone: Path, tiny_model: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", *two_nodes()]
    train = ["-m", "rlt_lightning", "fit", *options(tiny_model, strategy, "multinode")]
    train += ["--trainer.max_steps=3", f"--output_dir={tmp_path / 'run'}"]
    finish(tmp_path, *(begin(tmp_path, [*command, *train]) for _ in range(2)))
    assert_as_alone(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_pods_train_as_one_process_does(alone: Path, tiny_model: str, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "rlt_lightning", "fit", *options(tiny_model, "fsdp2", "multinode")]
    train += ["--trainer.max_steps=3", f"--output_dir={tmp_path / 'run'}"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": "2"}
    finish(tmp_path, *(begin(tmp_path, train, RANK=rank, **meeting) for rank in ("0", "1")))
    assert_as_alone(tmp_path / "run", alone)


SRUN = """#!/bin/sh
# What SLURM's does: the same command on every node, which learns its place from its environment.
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NODEID=$rank SLURM_STEP_NUM_TASKS=2 "$@" &
  pids="$pids $!"
done
for pid in $pids; do wait $pid || status=$?; done
exit $status
"""


def submit(folder: Path, *words: str, restarts: int) -> subprocess.Popen[bytes]:
    """Run scripts/slurm.sh as sbatch would on two nodes."""
    rlt = folder / "rlt"
    rlt.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlt_lightning "$@"\n')
    srun = folder / "srun"
    srun.write_text(SRUN)
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.log\n')
    for program in (rlt, srun, scontrol):
        program.chmod(0o755)
    job = {"JOB_ID": "424242", "JOB_NAME": "rlt", "JOB_NUM_NODES": "2", "NTASKS": "2", "NTASKS_PER_NODE": "1"}
    job |= {"NODELIST": "127.0.0.1", "RESTART_COUNT": str(restarts)}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment |= {
        "PYTHONPATH": path_of_tests(),
        "RUN": str(folder / "run"),
        "RLT": str(rlt),
        "MASTER_PORT": str(find_free_port()),
    }
    path = f"{folder}:{os.environ['PATH']}"
    return begin(folder, ["bash", "scripts/slurm.sh", *words], PATH=path, **environment)


@pytest.mark.slow
def test_a_slurm_job_trains_as_one_process_does_also_after_a_requeue(
    alone: Path, tiny_model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()  # the job was requeued before its first checkpoint
    words = [*options(tiny_model, "fsdp2", "multinode"), "--trainer.max_steps=3"]
    job = submit(tmp_path, *words, fault("on_after_backward", "pause"), restarts=1)
    wait_until(lambda: job.poll() is not None or 1 in metrics(run), 300)
    # As SLURM does before the time limit: to all tasks, and to nothing else.
    for process in psutil.Process(job.pid).children(recursive=True):
        if "rlt_lightning" in process.cmdline():
            process.send_signal(signal.SIGUSR1)
    output = finish(tmp_path, job, status=143)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 424242\n"
    assert (run / "checkpoints" / "step=000002.ckpt").is_dir(), output[-3000:]
    output = finish(tmp_path, submit(tmp_path, *words, restarts=2))
    assert "Done" in output, output[-3000:]
    assert [*metrics(run)] == [1, 2, 3]
    assert_as_alone(run, alone)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_of_a_launcher_is_told_to_name_the_folder(rank: str, tiny_model: str) -> None:
    job = {"SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "rlt"}
    result = rlt("fit", *options(tiny_model), **job)
    assert result.returncode == 2
    assert "needs --output_dir" in result.stderr.splitlines()[-1]


BATCH = {"NTASKS": "1", "JOB_ID": "7", "JOB_NAME": "rlt", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}


def job_variables(**variables: str) -> dict[str, str]:
    """What SLURM sets in the script of a job; STEP_NUM_TASKS it sets only by srun."""
    return {f"SLURM_{name}": value for name, value in (BATCH | variables).items()}


TORCHRUN_ALONE = {"RUN_ID": "7", "MAX_RESTARTS": "0"}
TORCHRUN_ALONE = {f"TORCHELASTIC_{name}": value for name, value in TORCHRUN_ALONE.items()}
TORCHRUN_ALONE |= dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
TORCHRUN_ALONE |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("variables", [job_variables(), TORCHRUN_ALONE])
def test_a_launcher_must_start_a_process_per_device(
    variables: dict[str, str], tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = lightning.pytorch.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    data = TeacherRLData(tokenizer=tiny_model, student_tokenizer=tiny_model)
    # Lightning itself refuses what torchrun has started.
    words = r"need 2 processes, but the launcher has started 1|does not match the world size \(1\)"
    with pytest.raises(ValueError, match=words):
        trainer.fit(RLTModule(teacher=tiny_model, student=tiny_model), data)
