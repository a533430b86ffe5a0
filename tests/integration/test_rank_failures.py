"""When one of two real processes fails, both end within seconds, and its message is the last line."""

from __future__ import annotations

import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ranks
from cases import full, slow
from commands import path_of_tests, start, start_fresh, wait_until
from fits import small_fit
from kills import fault, processes
from launchers import STRATEGIES, TORCHRUN
from sharded import join_ranks

from rlt_lightning.engines import EngineError
from rlt_lightning.run.ranks import Collectives, raise_from_ranks
from rlt_lightning.types import InputError

ENDS_WITHIN_S = 60.0  # Lightning looks every 5 s; PyTorch would wait 30 minutes
MADE = re.compile(r"--- made at ([\d.]+)")  # what a fault prints when it happens


def fit(model: str, folder: Path, *options: str) -> list[str]:
    words = ["--trainer.devices=2", "--trainer.max_steps=3", "--rollouts.sampling.max_completion_length=6"]
    return small_fit(model, folder, *words, *options)


class Ended:
    """A run that has ended: status, output, and how long after the fault every process was gone.

    Args:
        launcher: Python's words for what starts the ranks; without, `rlt` forks them from the warm process.
    """

    def __init__(self, model: str, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> None:
        self.log, paths = folder.with_suffix(".log"), {"PYTHONPATH": path_of_tests()}
        self.run: Any
        if launcher:
            self.log.with_suffix(".py").write_text(SCRIPT)
            words = [*launcher, str(self.log.with_suffix(".py")), model, *options]
            self.run = start_fresh([sys.executable, *words], self.log, **paths)
        else:
            self.run = start(*fit(model, folder, *options), log=self.log, **paths)
        deadline = time.monotonic() + 240
        while left := processes(self.run):
            self.run.poll()
            if time.monotonic() > deadline or (self.made_at and self.seconds() > ENDS_WITHIN_S + 45):
                os.killpg(self.run.pid, 9)
                pytest.fail(f"{left} hang: {self.lines[-30:]}")
            time.sleep(0.05)
        self.took_s = self.seconds()
        self.status = self.run.wait()

    @property
    def lines(self) -> list[str]:
        """The output, without what the fault has printed."""
        lines = (MADE.sub("", line).strip() for line in self.log.read_text().splitlines())
        return [line for line in lines if line]

    @property
    def made_at(self) -> float:
        """When the fault happened, by the clock that all processes share; 0 before."""
        made = MADE.search(self.log.read_text())
        return float(made[1]) if made else 0.0

    def seconds(self) -> float:
        return time.monotonic() - self.made_at


@pytest.mark.parametrize(
    ("strategy", "rank", "hook", "kind"),
    [
        ("ddp", 1, "on_train_batch_end", "bug"),
        full("ddp", 1, "setup", "mistake"),
        full("ddp", 1, "on_train_batch_start", "kill"),
        full("ddp", 1, "on_train_batch_end", "bug while the other sleeps"),
        full("fsdp2", 0, "on_train_batch_start", "mistake"),
        full("zero3", 1, "on_train_batch_end", "bug"),
    ],
)
def test_all_ranks_end_within_seconds_after_one_has_failed(
    strategy: str, rank: int, hook: str, kind: str, tiny_model: str, tmp_path: Path
) -> None:
    failing = fault(hook, kind, step=int(hook != "setup"), rank=rank)
    ended = Ended(tiny_model, tmp_path / "run", *STRATEGIES[strategy], failing)
    output = "\n".join(ended.lines)
    assert ended.status != 0, output
    assert ended.made_at
    causes = {"bug": f"ZeroDivisionError: made on rank {rank}", "mistake": "The test must pass", "kill": ""}
    assert causes[kind.partition(" ")[0]] in output
    print(f"figure: all ended after {ended.took_s:.1f} s")
    assert ended.took_s < ENDS_WITHIN_S, output


def test_no_rank_outlives_a_killed_rank_zero(tiny_model: str, tmp_path: Path) -> None:
    fault_of_zero = fault("on_train_batch_start", "kill while the other sleeps")
    ended = Ended(tiny_model, tmp_path / "run", *STRATEGIES["ddp"], fault_of_zero)
    assert ended.status == -9
    assert ended.took_s < ENDS_WITHIN_S


SCRIPT = """
import sys
from lightning.pytorch import Trainer
from faults import FailingEngine, FailingLoss, FailingReward, Fault, NaNStudent, Witness
from rlt_lightning import RLTModule, RolloutCallback, Sampling, TeacherRLData
from rlt_lightning.rewards import RLTReward

model, kind, strategy = sys.argv[1:]
data = TeacherRLData(tokenizer=model, student_tokenizer=model, num_embedded_rows=4, prompts_per_step=2)
engine = FailingEngine() if kind == "engine" else None
callbacks = [RolloutCallback(engine, Sampling(max_completion_length=6)), Witness()]
callbacks += [NaNStudent()] if kind == "nan" else []
callbacks += [Fault(int(kind[3:]), "on_train_batch_start", "bug", step=0)] if kind[:3] == "bug" else []
loss = FailingLoss() if kind == "loss" else None
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, logger=False,
                  enable_checkpointing=False, use_distributed_sampler=False, callbacks=callbacks)
reward = FailingReward() if kind == "reward" else RLTReward()
trainer.fit(RLTModule(teacher=model, student=model, group_size=2, policy_loss=loss, reward=reward), data)
"""  # of a user, with Lightning's own Trainer


@pytest.mark.parametrize(
    ("strategy", "hook"), [("ddp", "on_train_batch_end"), full("fsdp2", "on_validation_end")]
)
def test_a_stop_that_one_rank_asks_for_is_all_ranks(
    strategy: str, hook: str, tiny_model: str, tmp_path: Path
) -> None:
    validation = ["--data.val_rows=2", "--trainer.val_check_interval=1"] if "validation" in hook else []
    options = [*STRATEGIES[strategy], *validation, fault(hook, "stop", rank=1)]
    ended = Ended(tiny_model, tmp_path / "run", *options)
    assert (ended.status, bool(ended.made_at)) == (0, True), ended.lines
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 2, rows  # the names, and one iteration of three
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step=*")] == ["step=000001.ckpt"]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_an_unmodified_script_end_after_a_bug(rank: int, tiny_model: str, tmp_path: Path) -> None:
    ended = Ended(tiny_model, tmp_path / "run", f"bug{rank}", "auto", launcher=("-u",))
    assert ended.status != 0, ended.lines
    assert any(f"ZeroDivisionError: made on rank {rank}" in line for line in ended.lines)
    assert ended.took_s < ENDS_WITHIN_S


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_kill_between_the_updates_of_an_iteration_changes_nothing(
    strategy: str, tiny_model: str, tmp_path: Path
) -> None:
    options = [*STRATEGIES[strategy], "--model.updates_per_rollout=2", "--model.num_epochs=2"]
    options.append("--data.prompts_per_step=4")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert Ended(tiny_model, whole, *options).status == 0
    # An iteration has four updates of at least one backward: the kill comes within the second.
    killing = fault("on_after_backward", "kill", rank=1, calls_before=2)
    ended = Ended(tiny_model, killed, *options, killing)
    assert ended.status != 0, ended.lines
    assert ended.made_at
    assert Ended(tiny_model, killed, *options, "--resume=true").status == 0
    ours, theirs = ((run / "model/model.safetensors").read_bytes() for run in (killed, whole))
    assert ours == theirs


@pytest.mark.parametrize(
    ("kind", "strategy", "message"),
    [
        ("nan", "ddp", r"NonFiniteError: Every log-prob 'solution' of .* must be finite, but row\(s\) \d"),
        full("reward", "fsdp2", "KeyError: 'made in measure on rank 1'"),
        full("loss", "ddp", "KeyError: 'made in the loss on rank 1'"),
        full("engine", "ddp", "ZeroDivisionError: made in the engine on rank 0"),
    ],
)
def test_a_script_under_torchrun_ends_with_the_message_of_the_rank_that_failed(
    kind: str, strategy: str, message: str, tiny_model: str, tmp_path: Path
) -> None:
    ended = Ended(tiny_model, tmp_path / "run", kind, strategy, launcher=TORCHRUN)
    assert ended.status == 1, ended.lines
    told = [line for line in ended.lines if re.search(message, line)]
    assert told, ended.lines
    name = message.partition(":")[0]
    raised = sorted(line for line in ended.lines if line.startswith("--- raised on"))
    assert raised == [f"--- raised on {rank}: {name}" for rank in range(2)], ended.lines
    print(f"figure: all ended after {ended.took_s:.1f} s")
    assert ended.took_s < ENDS_WITHIN_S


class Unpicklable(RuntimeError):
    """Takes more than its message, so that no other rank can make it."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number} {text}")


def fail_on_a_rank(rank: int) -> None:
    """Require that both ranks raise what one of them raises."""
    join_ranks(rank)
    trainer: Any = SimpleNamespace(world_size=2, global_rank=rank, local_rank=rank, is_global_zero=rank == 0)
    patient = Collectives(600)

    def fail(error: Exception) -> None:
        raise error

    for error, kind in (
        (EngineError("no worker"), EngineError),
        (InputError("no setting"), InputError),
        (KeyError("no bug"), KeyError),
        (Unpicklable(1, "no pickle"), Unpicklable if rank == 0 else RuntimeError),
    ):
        with pytest.raises(kind, match="no ") as raised:
            patient.on_rank_zero(trainer, partial(fail, error))
        assert type(raised.value) is kind
        with pytest.raises(Exception, match="no "):
            raise_from_ranks(trainer, error if rank == 1 else None)
    assert patient.on_rank_zero(trainer, lambda: rank) == 0


def test_ranks_that_wait_raise_what_they_wait_for(tmp_path: Path) -> None:
    ranks.call(fail_on_a_rank, tmp_path)


@pytest.mark.parametrize(("deadline_s", "status"), [slow(600, 0), slow(4, 1)])
def test_ranks_wait_for_long_sampling_and_no_longer_than_its_deadline(
    deadline_s: int, status: int, tiny_model: str, tmp_path: Path
) -> None:
    # Sampling takes longer than the strategy lets a rank be late, and than ranks may take to meet first.
    options = ["--trainer.strategy=lightning.pytorch.strategies.DDPStrategy", "--trainer.max_steps=1"]
    options += ["--trainer.strategy.timeout=0:00:40"]
    options += ["--rollouts.engine=faults.SlowEngine", "--rollouts.engine.delay_s=50"]
    ended = Ended(tiny_model, tmp_path / "run", *options, f"--rollouts.deadline_s={deadline_s}")
    assert (ended.status != 0) is (status != 0), ended.lines
    if status:
        assert any("RuntimeError: " in line and "gloo" in line for line in ended.lines), ended.lines


@pytest.mark.parametrize("strategy", ["ddp", slow("zero3")])
def test_ranks_of_one_node_listen_on_the_loopback(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    words = [*STRATEGIES[strategy], fault("on_after_backward", "pause", rank=1), "--trainer.max_steps=2"]
    log = tmp_path / "log"
    run = start(*fit(tiny_model, tmp_path / "run", *words), log=log, PYTHONPATH=path_of_tests())
    wait_until(lambda: MADE.search(log.read_text()) is not None)
    opened = [c for process in processes(run) for c in process.net_connections("inet")]
    listening = {c.laddr.ip.removeprefix("::ffff:") for c in opened if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert run.wait(120) == 0, log.read_text()
