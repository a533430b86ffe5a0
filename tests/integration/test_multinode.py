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
import pytest
from commands import ROOT, rlt
from compared import largest_difference
from nodes import options, two_nodes
from safetensors.torch import load_file

from rlt_lightning.engines.launch import find_free_port


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all nodes; if one hangs, no process survives."""
    outputs = []
    try:
        outputs = [process.communicate(timeout=commands.longest_s)[0] for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return outputs


def begin(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def alone(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    result = rlt("fit", *options(tiny_model), "--trainer.max_steps=3", f"--output_dir={run}")
    assert result.returncode == 0, result.stderr
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
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "torch.distributed.run", *two_nodes()]
    train = ["-m", "rlt_lightning", "fit", *options(tiny_model, strategy, "multinode")]
    train += ["--trainer.max_steps=3", f"--output_dir={tmp_path / 'run'}"]
    nodes = [begin([*command, *train]) for _ in range(2)]
    outputs = finish(nodes)
    assert [node.returncode for node in nodes] == [0, 0], "".join(outputs)[-3000:]
    assert_as_alone(tmp_path / "run", alone)


SRUN = """#!/bin/sh
# What SLURM's does: the same command on every node, which learns its place from its environment.
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NODEID=$rank SLURM_STEP_NUM_TASKS=2 "$@" &
done
wait
"""


def submit(folder: Path, *words: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Run scripts/slurm.sh as sbatch would on two nodes."""
    rlt = folder / "rlt"
    rlt.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlt_lightning "$@"\n')
    srun = folder / "srun"
    srun.write_text(SRUN)
    for program in (rlt, srun):
        program.chmod(0o755)
    job = {"JOB_ID": "424242", "JOB_NAME": "rlt", "JOB_NUM_NODES": "2", "NTASKS": "2", "NTASKS_PER_NODE": "1"}
    job |= {"NODELIST": "127.0.0.1", "RESTART_COUNT": str(restarts)}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment |= {"RUN": str(folder / "run"), "RLT": str(rlt), "MASTER_PORT": str(find_free_port())}
    path = f"{folder}:{os.environ['PATH']}"
    return begin(["bash", "scripts/slurm.sh", *words], PATH=path, **environment)


@pytest.mark.slow
def test_a_slurm_job_trains_as_one_process_does_also_after_a_requeue(
    alone: Path, tiny_model: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()  # the job was requeued before its first checkpoint
    words = options(tiny_model, "fsdp2", "multinode")
    for steps, restarts in ((2, 1), (3, 2)):
        job = submit(tmp_path, *words, f"--trainer.max_steps={steps}", restarts=restarts)
        [output] = finish([job])
        assert job.returncode == 0, output[-3000:]
        assert "Done" in output, output[-3000:]
    metrics = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(metrics) == 1 + 3
    assert_as_alone(tmp_path / "run", alone)


def test_a_job_before_its_time_limit_queues_again(tmp_path: Path) -> None:
    log = tmp_path / "scontrol.log"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {log}\n')
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "srun").write_text("#!/bin/sh\necho started\nsleep 300\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}
    job = begin(
        ["bash", "scripts/slurm.sh"],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        RUN=str(tmp_path / "run"),
        **environment,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGUSR1)
    job.wait(10)
    os.killpg(job.pid, signal.SIGKILL)  # what the stand-in still does
    finish([job])
    assert log.read_text() == "requeue 7\n"


def test_processes_get_the_cores_that_the_job_asked_for(tmp_path: Path) -> None:
    # srun takes --cpus-per-task from its own option or SRUN_CPUS_PER_TASK; it ignores SLURM_CPUS_PER_TASK.
    srun = '#!/bin/sh\necho "cores: ${SRUN_CPUS_PER_TASK:-1}"\n'
    (tmp_path / "srun").write_text(srun)
    (tmp_path / "srun").chmod(0o755)
    job = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "8"}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    job_process = begin(["bash", "scripts/slurm.sh"], PATH=path, RUN=str(tmp_path / "run"), **environment)
    [output] = finish([job_process])
    assert output == "cores: 8\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_of_a_launcher_is_told_to_name_the_folder(rank: str, tiny_model: str) -> None:
    job = {"SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "rlt"}
    result = rlt("fit", *options(tiny_model), **job)
    assert result.returncode == 2
    assert "needs --output_dir" in result.stderr.splitlines()[-1]
