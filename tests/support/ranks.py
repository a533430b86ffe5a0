"""Processes that run job after job, alone or as one of two ranks, since starting them takes long."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from commands import ROOT, Running

from rlt_lightning.engines.launch import find_free_port

WAIT_FOR_JOBS = "from strategy_run import main; main()"
STEPS = 5  # of a job that does not say
DEADLINE_S = 600.0  # of a job: what hangs is killed
FAILED_TOGETHER_S = 30.0  # after one rank has failed, for the others to fail as well


def run(model: str, output: Path, strategy: str, gpus: bool = False, **options: Any) -> None:
    """Run `strategy_run.run_job` in as many processes as the strategy takes, on pretended GPUs or without.

    Raises:
        AssertionError: With what the processes printed, if one of them fails or hangs.
    """
    if strategy.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    ranks = RANKS[1 if strategy.startswith("single") else options.get("world_size", 2)]
    if gpus:
        ranks = PRETENDED_RANKS
    ranks.run({"model": model, "output": str(output), "strategy": strategy, **options})


class Runs(dict[str, Path]):
    """The folder of a run under each strategy, `run` when it is first asked for."""

    def __init__(self, model: str, folder: Path, **options: Any) -> None:
        super().__init__()
        self.model, self.folder, self.options = model, folder, options

    def __missing__(self, strategy: str) -> Path:
        self[strategy] = self.folder / strategy
        run(self.model, self[strategy], strategy, **self.options)
        return self[strategy]


def call(function: Callable[..., None], folder: Path, *arguments: Any, world_size: int = 2) -> None:
    """Call a function of any file in every process, with rank and arguments.

    Raises:
        AssertionError: With what the processes printed, if one of them fails or hangs.
    """
    RANKS[world_size].run(job(function, folder, *arguments))


def job(function: Callable[..., None], folder: Path, *arguments: Any) -> dict[str, Any]:
    """Return the job to call a function with rank and arguments."""
    module = function.__module__
    place = Path(inspect.getfile(function)).parents[module.count(".")]  # what its module is looked for in
    named = {"function": f"{module}:{function.__name__}", "place": str(place)}
    return named | {"arguments": arguments, "output": str(folder / "call")}


def done_file(output: str | Path, rank: int) -> Path:
    """Return the file that says that a rank is done with a job, and why if it failed."""
    return Path(f"{output}.done{rank}")


class Ranks:
    """As many processes as a run has ranks, started with the first job and again after one hung or ended."""

    def __init__(self, world_size: int, gpus: bool = False) -> None:
        self.world_size = world_size
        self.gpus = world_size if gpus else 0  # pretended ones
        self.processes: list[Running] = []

    def start(self) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "NODE_RANK": "0"}
        self.folder = TemporaryDirectory()
        self.log = Path(self.folder.name) / "log"
        for rank in range(self.world_size):
            environment = meeting | {"LOCAL_RANK": str(rank)} if self.world_size > 1 else {}
            process = Running((), self.log, ROOT, None, environment, WAIT_FOR_JOBS, self.gpus)
            self.processes.append(process)

    def run(self, job: dict[str, Any]) -> None:
        if any(process.poll() is not None for process in self.processes):
            self.stop()
        if not self.processes:
            self.start()
        Path(job["output"]).parent.mkdir(parents=True, exist_ok=True)
        done = [done_file(job["output"], rank) for rank in range(self.world_size)]
        for process in self.processes:
            process.send(json.dumps(job, default=str))
        deadline = time.monotonic() + DEADLINE_S
        while not all(path.exists() for path in done):
            if any(path.exists() and path.stat().st_size for path in done):  # the others may wait for ever
                deadline = min(deadline, time.monotonic() + FAILED_TOGETHER_S)
            ended = any(process.poll() is not None for process in self.processes)
            if ended or time.monotonic() > deadline:
                time.sleep(1)  # for the others' last words
                self.stop()
                told = "\n".join(path.read_text() for path in done if path.exists())
                raise AssertionError(
                    f"{job}: {'ended' if ended else 'hangs'}\n{self.log.read_text()[-4000:]}\n{told}"
                )
            time.sleep(0.05)
        failures = "\n".join(path.read_text() for path in done)
        for path in done:
            path.unlink()
        assert not failures.strip(), f"{job}: failed\n{failures}"  # on all ranks, which can take another job

    def stop(self) -> None:
        for process in self.processes:
            process.killpg()
            process.wait()
        self.processes = []


RANKS = {world_size: Ranks(world_size) for world_size in (1, 2, 4)}
PRETENDED_RANKS = Ranks(2, gpus=True)
