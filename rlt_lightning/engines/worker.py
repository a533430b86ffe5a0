"""A vLLM worker as the fleet knows it: its routes, its state, and its process if the run started it."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.engines.launch import Launch, LocalServer
from rlt_lightning.engines.weights import WeightPush
from rlt_lightning.models.announce import model_size

NO_ANSWER = "It never answered."


class State(Enum):
    """Where a worker stands; the head of fleet.py draws it."""

    DOWN = "down"
    READY = "ready"
    CURRENT = "current"
    VERIFIED = "verified"


class Worker(WorkerClient):
    """A worker's routes, and all that the fleet knows of it."""

    state = State.DOWN
    reason = NO_ANSWER  # why it is down
    silence = ""  # the error of the last attempt to greet it
    asleep = False
    losses = 0  # times it was lost since any prompt got all its completions
    max_model_len = sys.maxsize  # tokens; known once it was greeted
    server: LocalServer | None = None  # its process, if it was launched

    @property
    def up(self) -> bool:
        """Tell whether the worker answers calls."""
        return self.state is not State.DOWN

    @property
    def current(self) -> bool:
        """Tell whether the worker has the weights of the last push."""
        return self.state in (State.CURRENT, State.VERIFIED)

    def go_down(self, reason: str) -> None:
        """Mark the worker as down, and forget its weights and connections."""
        self.state, self.reason, self.asleep = State.DOWN, reason, False
        self.adapter = None
        self.incarnation += 1


def server_of(
    worker: Worker, index: int, launch: Launch, model: str, push: WeightPush, logs: Path
) -> LocalServer:
    """Return the process of worker number `index`, not started yet."""
    port = int(worker.url.rpartition(":")[2])
    arguments, environment = push.launch_options()
    command = launch.command(index, port, model, push.backend, str(worker.model)) + arguments
    environment = environment | launch.environment | launch.visible_gpus(index)
    if key := worker.api_key:
        # Not on the command line, where every user of the machine could read it.
        environment["VLLM_API_KEY"] = key
    size = model_size(launch.model or model)
    return LocalServer(command, environment, logs / f"worker-{index}.log", not worker.plain, size)
