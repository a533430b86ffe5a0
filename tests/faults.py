"""A callback that fails on one rank, to see what becomes of the others."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer

from rlt_lightning.types import InputError


class Fault(Callback):
    """Fail on one rank, at one hook of the second step."""

    def __init__(
        self, rank: int, hook: str, kind: Literal["bug", "mistake", "kill", "hang"] = "bug", step: int = 1
    ) -> None:
        self.rank, self.kind, self.step = rank, kind, step
        setattr(self, hook, self.fail)

    def fail(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank != self.rank or trainer.global_step < self.step:
            return
        if self.kind == "bug":
            raise ZeroDivisionError(f"made on rank {self.rank}")
        if self.kind == "mistake":
            raise InputError(f"The test must pass, but rank {self.rank} was told to fail. Ignore it.")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
