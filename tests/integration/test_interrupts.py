"""Ctrl-C and SIGTERM stop a fit with a checkpoint from which a resume is exact."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from cases import full, slow
from commands import ROOT, path_of_tests, run_rlt, start, start_fresh, wait_until
from fake_worker import worker_of
from fits import explanation, metrics, sampled_by, small_fit, weights
from kills import fault, processes, send_sigterm, wait_for
from launchers import STRATEGIES, TORCHRUN

SHORT = ["--rollouts.sampling.max_completion_length=6", "--checkpoint.every_n_train_steps=4"]
TWO = ["--trainer.devices=2"]
RANKS = {"one process": [], "two ranks": [*TWO, "--trainer.strategy=ddp"]}
RANKS["FSDP2"] = [*TWO, "--config=configs/hardware/fsdp2.yaml"]
VALIDATED = ["--data.val_rows=2", "--trainer.val_check_interval=2", "--trainer.check_val_every_n_epoch=null"]


def command(model: str, folder: Path, *options: str, steps: int = 6) -> list[str]:
    return small_fit(model, folder, *SHORT, f"--trainer.max_steps={steps}", *options)


def assert_equal(whole: Path, resumed: Path) -> None:
    """The same bits, metrics and completions; only a validation that was due may be missing."""
    ours, theirs = weights(resumed), weights(whole)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    found, expected = metrics(resumed), metrics(whole)
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        missing = row.keys() - found[step].keys()
        assert all("/val_" in name for name in missing), step
        assert found[step] == {name: row[name] for name in row.keys() - missing}, step
    rows = [sorted(map(explanation, (folder / "rollouts.jsonl").open())) for folder in (whole, resumed)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("ranks", ["one process", full("two ranks"), full("FSDP2")])
def test_the_first_ctrl_c_writes_a_checkpoint_and_says_how_to_continue(
    ranks: str, tiny_model: str, tmp_path: Path
) -> None:
    whole, stopped, log = tmp_path / "whole", tmp_path / "stopped", tmp_path / "log"
    options = [*VALIDATED, *RANKS[ranks]]
    run_rlt(*command(tiny_model, whole, *options))
    # In iteration 2, after which a validation is due and no checkpoint.
    process = start(*command(tiny_model, stopped, *options, fault("on_after_backward", "pause", 1)), log=log)
    wait_for(lambda: "--- made at" in log.read_text(), process)
    # To rank 0, or to all processes as a terminal does.
    (os.killpg if ranks == "FSDP2" else os.kill)(process.pid, signal.SIGINT)
    assert process.wait(120) == 130, log.read_text()[-3000:]
    lines = log.read_text().splitlines()
    assert "rlt: interrupted: the run stops after this iteration. Again: it ends at once." in lines
    [told] = [line for line in lines if line.startswith("rlt: interrupted. ")]
    assert told.startswith("rlt: interrupted. The run stopped after iteration 2. Set resume to true ")
    assert (stopped / "checkpoints" / "step=000002.ckpt").is_dir()
    assert not (stopped / "model").exists()
    assert metrics(stopped).keys() == {1, 2}
    assert not any("/val_" in name for name in metrics(stopped)[2])
    run_rlt(*command(tiny_model, stopped, *options, "--resume=true"))
    assert_equal(whole, stopped)


@pytest.mark.full
def test_a_signal_to_torchrun_writes_a_checkpoint_that_resumes(tiny_model: str, tmp_path: Path) -> None:
    whole, stopped, log = tmp_path / "whole", tmp_path / "stopped", tmp_path / "log"
    run_rlt(*command(tiny_model, whole, *RANKS["two ranks"]))
    pause = fault("on_after_backward", "pause", 1)
    words = command(tiny_model, stopped, *RANKS["two ranks"], pause)
    # Its ranks are in sessions of their own: a terminal reaches torchrun alone.
    agent = start_fresh(
        [sys.executable, *TORCHRUN, "-m", "rlt_lightning", *words], log, PYTHONPATH=path_of_tests()
    )
    try:
        wait_until(lambda: "--- made at" in log.read_text(), 120)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) != 0
    finally:
        agent.kill()
    assert "The run stopped after iteration 2. " in log.read_text()
    assert (stopped / "checkpoints" / "step=000002.ckpt").is_dir()
    run_rlt(*command(tiny_model, stopped, *RANKS["two ranks"], "--resume=true"))
    assert_equal(whole, stopped)


def test_the_second_ctrl_c_ends_at_once(tiny_model: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(*command(tiny_model, tmp_path / "run", fault("on_after_backward", "hang", 1)), log=log)
    wait_for(lambda: "--- made at" in log.read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: "rlt: interrupted: the run stops after this iteration" in log.read_text(), process)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == -signal.SIGINT


def terminate_and_resume(model: str, folder: Path, strategy: str, signals: list[tuple[str, str]]) -> None:
    """Run to the end by one command, terminated once at each (moment, receiver); compare with a whole run."""
    random, whole, stopped = Random(f"{strategy} {signals}"), folder / "whole", folder / "stopped"
    options = [*VALIDATED, *TWO, *STRATEGIES[strategy], "--checkpoint.every_n_train_steps=3"]
    if strategy == "ddp":  # while rank 0 samples, rank 1 waits in a collective
        options += ["--rollouts.engine=faults.SlowEngine", "--rollouts.engine.init_args.delay_s=0.5"]
    steps, log = 4 * len(signals) + 2, folder / "log"
    run_rlt(*command(model, whole, *options, steps=steps))
    words = command(model, stopped, *options, "--resume=true", steps=steps)
    for moment, to in signals:
        log.write_text("")
        begun = max(metrics(stopped), default=0)
        pause = [fault("on_validation_start", "pause", 1)] if moment == "validating" else []
        process = start(*words, *pause, log=log)
        if moment == "writing":
            wait_for(lambda: any((stopped / "checkpoints").glob("step=*.tmp")), process)
        else:
            shown = "--- made at" if moment == "validating" else "policy/loss="
            wait_for(lambda shown=shown: shown in log.read_text(), process)
            # "any": somewhere in an iteration, a validation or a checkpoint.
            time.sleep(random.uniform(0, 2.5 if moment == "any" else 0.4))
        sent_at = time.monotonic()
        send_sigterm(process, to, random)
        assert process.wait(120) == 143, log.read_text()[-3000:]
        print(f"{strategy}: {moment}, {to}: ended {time.monotonic() - sent_at:.1f} s later")
        wait_until(lambda process=process: not processes(process))
        told = re.findall(
            r"^rlt: terminated\. The run stopped after iteration (\d+)\.", log.read_text(), re.M
        )
        assert len(told) == 1, log.read_text()[-3000:]
        assert (stopped / "checkpoints" / f"step={int(told[0]):06d}.ckpt").is_dir()
        assert int(told[0]) > begun
    run_rlt(*words)
    assert_equal(whole, stopped)


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp2"), slow("zero3")])
def test_sigterm_stops_all_ranks_with_a_checkpoint_that_resumes(
    strategy: str, tiny_model: str, tmp_path: Path
) -> None:
    terminate_and_resume(tiny_model, tmp_path, strategy, [("sampling", "the group")])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_moment_and_no_receiver_of_sigterm_hangs(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    receivers = ["the group", "rank 0", "rank 1", "both", "the group twice"]
    signals = list(zip(["sampling", "writing", "validating", "sampling", "writing"], receivers, strict=True))
    signals += [("any", to) for to in (*receivers, "both", "the group")]
    terminate_and_resume(tiny_model, tmp_path, strategy, signals)


def test_the_signal_of_slurm_queues_the_job_again(tiny_model: str, tmp_path: Path) -> None:
    whole, stopped, log = tmp_path / "whole", tmp_path / "stopped", tmp_path / "log"
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\nls {stopped}/checkpoints > {tmp_path}/requeued\necho "$@" >> {tmp_path}/requeued\n'
    )
    program.chmod(0o755)
    job = {"JOB_ID": "7", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    run_rlt(*command(tiny_model, whole, steps=3))
    pause = fault("on_after_backward", "pause", 1)
    process = start(*command(tiny_model, stopped, pause, steps=3), log=log, **environment)
    wait_for(lambda: "--- made at" in log.read_text(), process)
    os.kill(process.pid, signal.SIGUSR1)
    os.kill(process.pid, signal.SIGTERM)  # the time is over before the iteration
    assert process.wait(60) == 143, log.read_text()
    assert (tmp_path / "requeued").read_text() == "step=000002.ckpt\nrequeue 7\n"
    run_rlt(*command(tiny_model, stopped, "--resume=true", steps=3))
    assert_equal(whole, stopped)


@pytest.mark.parametrize(
    ("ranks", "first"), [("one process", "signal"), full("one process", "loss"), full("two ranks", "signal")]
)
def test_sigterm_does_not_wait_for_workers_that_ended(
    ranks: str, first: str, tiny_model: str, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with worker_of(tiny_model) as worker:
        options = [*RANKS[ranks], *sampled_by(worker.url)]
        pause = fault("on_train_batch_start", "pause", 2)
        process = start(*command(tiny_model, folder, *options, pause), log=log)
        wait_for(lambda: "--- made at" in log.read_text(), process)
        if first == "signal":
            os.killpg(process.pid, signal.SIGTERM)
    if first == "loss":
        wait_for(lambda: "Lost vLLM worker" in log.read_text(), process)
        os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()  # it would wait 10 minutes for the worker to come back
    assert "this run was terminated" in log.read_text()
    assert max(metrics(folder)) == 2
    assert (folder / "checkpoints" / "step=000002.ckpt").is_dir()


STAGES = f"""
run={{run}}
source {ROOT}/examples/stage.sh
stage first model/config.json {sys.executable} {{child}}
stage second model/config.json touch {{run}}/too_late
"""
CHILD = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
def save(*_):
    time.sleep(0.5)
    (folder / "checkpoint").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
folder.mkdir(parents=True)
while True:
    time.sleep(0.1)
"""


def test_a_pipeline_waits_for_the_checkpoint_of_its_stage(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    script = STAGES.format(run=tmp_path / "run", child=tmp_path / "child.py")
    job = subprocess.Popen(["bash", "-euo", "pipefail", "-c", script], start_new_session=True)
    wait_until((tmp_path / "run" / "first").exists)
    os.killpg(job.pid, signal.SIGTERM)  # as SLURM sends it to a job step, and timeout to its group
    assert job.wait(60) == 143
    assert (tmp_path / "run" / "first" / "checkpoint").exists()
    assert not (tmp_path / "run" / "too_late").exists()
