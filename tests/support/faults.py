"""Callbacks and classes that fail, hang or are slow on one rank, to see what happens to the others."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from rlt_lightning.engines import HFEngine, Placement, SampleRequest, Sampling
from rlt_lightning.engines.launch import start_server, stop_server
from rlt_lightning.numerics import GRPOLoss
from rlt_lightning.rewards import RLTReward
from rlt_lightning.types import Completion, InputError

PAUSE_S = 3.0


class Fault(Callback):
    """Fail on one rank, at one hook, once so many steps were taken.

    The kinds: bug, mistake (of the user's), kill, hang, pause (once), stop (by Lightning's `should_stop`);
    and bug or kill "while the other sleeps", where the other rank sits in what never returns, like a
    collective of NCCL. `life`: only after so many restarts. `calls_before`: how often the hook is called
    before, from that step on.
    """

    def __init__(
        self, rank: int, hook: str, kind: str, step: int = 1, life: int | None = None, calls_before: int = 0
    ) -> None:
        self.rank, self.kind, self.step, self.calls_before = rank, kind, step, calls_before
        if life is not None and os.environ["TORCHELASTIC_RESTART_COUNT"] != str(life):
            return
        if hook != "init":
            setattr(self, hook, self.fail)
        elif os.environ.get("LOCAL_RANK") == str(rank):  # before ranks have met
            self.make()

    def fail(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step < self.step:
            return
        self.calls_before -= 1
        if self.calls_before >= 0:
            return
        if trainer.global_rank != self.rank:
            if "sleeps" in self.kind:
                time.sleep(3600)
            return
        if self.kind == "stop":
            say_made()
            trainer.should_stop = True
            return
        self.make()

    def make(self) -> None:
        say_made()
        if self.kind.startswith("bug"):
            raise ZeroDivisionError(f"made on rank {self.rank}")
        if self.kind == "mistake":
            raise InputError(f"The test must pass, but rank {self.rank} was told to fail. Ignore it.")
        if self.kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "pause":
            self.step = sys.maxsize
            return time.sleep(PAUSE_S)
        time.sleep(3600)


class Witness(Callback):
    """Says what each rank raises: its own exception, that of another rank, or that another has gone."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        os.write(2, f"--- raised on {trainer.global_rank}: {type(exception).__name__}\n".encode())


class NaNStudent(Callback):
    """Makes the frozen student's weights NaN on rank 1."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1:
            say_made()
            for parameter in next(iter(pl_module.models.values())).model.parameters():
                parameter.data.fill_(float("nan"))


class FailingReward(RLTReward):
    """Fails on rank 1, which measures its shard."""

    def measure(self, *arguments: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            say_made()
            raise KeyError("made in measure on rank 1")
        return super().measure(*arguments)


class FailingLoss(GRPOLoss):
    """Fails on rank 1, between forward and backward."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            say_made()
            raise KeyError("made in the loss on rank 1")
        return super().__call__(*arguments, **options)


class Launching(HFEngine):
    """Starts what would go on for an hour, as a run starts its vLLM workers."""

    process: Any = None

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        super().start(model, tokenizer, folder)
        self.process = start_server(["sleep", "3600"], {}, folder / "workers" / "sleeper.log")

    def close(self) -> None:
        stop_server(self.process)
        super().close()


def say_made() -> None:
    """Say when a fault happens; at once, since other processes write there too."""
    os.write(2, f"--- made at {time.monotonic()}\n".encode())


class SlowEngine(HFEngine):
    """Samples on rank 0 for all ranks, as workers do, and takes its time."""

    placement = Placement.SERVER
    unverified = False

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        time.sleep(self.delay_s)
        yield from super().sample(requests, sampling, stop)


class FailingEngine(SlowEngine):
    """Fails on rank 0, while the others wait for its completions, by a bug."""

    def __init__(self) -> None:
        super().__init__(delay_s=1)

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        yield next(super().sample(requests, sampling, stop))
        say_made()
        raise ZeroDivisionError("made in the engine on rank 0")
