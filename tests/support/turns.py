"""Runs whose workers take turns with training on the same GPUs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, Trainer
from vllm_runs import processes

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.engines import VLLMEngine

TARGETS = ("server", "engine", "worker")  # vLLM's processes, in the order that they start in


def turns(calls: list[str]) -> str:
    """What a worker was asked to do, in short: s(leep), w(ake up), p(ush), c(omplete or score)."""
    letters = {"/sleep": "s", "/wake_up": "w", "/update_weights": "p", "/v1/completions": "c"}
    return "".join(letters.get(call.split()[1].partition("?")[0], "") for call in calls)


class ChosenOnCPU(Callback):
    """Let the engine that a run has chosen start the CPU build of vLLM.

    Args:
        executable: In place of vllm.
    """

    def __init__(self, executable: str) -> None:
        self.executable = executable

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Change the command line, before RolloutCallback starts the worker."""
        engine = RolloutCallback.of(trainer).engine
        assert isinstance(engine, VLLMEngine)
        launch = engine.fleet.launch
        assert launch is not None
        assert launch.gpus == [[0]]
        arguments = [*launch.arguments[:2], "--enforce-eager", "--kv-cache-memory-bytes", str(2**26)]
        engine.fleet.launch = replace(launch, executable=self.executable, arguments=arguments)


class WorkerWatch(Callback):
    """Write down what becomes of a run's only worker, a line of JSON for each event; kill it, if it is to be.

    The events: "verify" (weights were compared, and agree), "awake" (all is sampled), "sleep" (the worker
    sleeps), "backward" (the update has begun) and "kill". Each has the step, whether the worker sleeps, and
    the resident memory of its processes in MiB.

    Args:
        path: The file.
        kills: By the step, from 0, when and what: {2: "asleep worker", 4: "awake engine"}. What is killed
            awake has sampled the first of the step's completions.
    """

    def __init__(self, path: str, kills: dict[int, str] | None = None) -> None:
        self.path = Path(path)
        self.kills = dict(kills or {})
        self.asleep = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        engine = RolloutCallback.of(trainer).engine
        assert isinstance(engine, VLLMEngine)
        self.engine, self.trainer = engine, trainer
        verify, put_to_sleep, sample = engine.verify, engine.put_to_sleep, engine.sample

        def note_verify(*arguments: Any) -> None:
            verify(*arguments)
            self.asleep = False
            self.note("verify")

        def note_sleep() -> None:
            self.note("awake")
            put_to_sleep()
            self.asleep = True
            self.note("sleep")

        def kill_awake(*arguments: Any) -> Iterator[Any]:
            for number, sampled in enumerate(sample(*arguments)):
                yield sampled
                if number == 0:
                    self.kill("awake")

        for name, method in (("verify", note_verify), ("put_to_sleep", note_sleep), ("sample", kill_awake)):
            setattr(engine, name, method)

    def on_before_backward(self, *_: Any) -> None:
        self.note("backward")
        self.kill("asleep")

    def kill(self, moment: str) -> None:
        """Kill what is to be killed at this moment of this step."""
        when, _, target = self.kills.get(self.trainer.global_step, "").partition(" ")
        if when == moment:
            del self.kills[self.trainer.global_step]
            self.note("kill")
            os.kill(processes(Path(self.trainer.default_root_dir))[TARGETS.index(target)], signal.SIGKILL)

    def note(self, event: str) -> None:
        [worker] = self.engine.fleet.workers
        assert worker.process is not None
        guard = psutil.Process(worker.process.pid)
        rss = 0
        for process in [guard, *guard.children(recursive=True)]:
            try:
                rss += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        row = {"event": event, "step": self.trainer.global_step, "asleep": self.asleep, "mib": rss / 2**20}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
