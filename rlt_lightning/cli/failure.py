"""What ended a process, in words that another process can show."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from typing import Literal, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from rlt_lightning.engines import EngineError
from rlt_lightning.numerics.rewards import NonFiniteError
from rlt_lightning.types import InputError

MISTAKES = (InputError, NonFiniteError, EngineError, MisconfigurationException)  # told in one line


@dataclass(frozen=True)
class Failure:
    """Why a rank failed."""

    rank: int
    message: str  # one line
    status: int  # of the processes
    details: str = ""  # a traceback, or nothing
    kind: Literal["own", "silent", "connection"] = "own"  # silent: gone; connection: another is gone, or late

    def tell(self) -> None:
        """Print it."""
        print(f"{self.details}{self.line}", file=sys.stderr, flush=True)

    @property
    def line(self) -> str:
        """What the user is told last."""
        return f"rlt: error: rank {self.rank}: {self.message}"


def failure_of(error: BaseException, rank: int) -> Failure:
    """What an exception means for the run."""
    text = " ".join(str(error).split())
    if isinstance(error, MISTAKES):
        return Failure(rank, text, 2)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return Failure(rank, "It was told to end.", 1)
    broken = isinstance(error, RuntimeError) and "gloo" in text
    broken = broken or isinstance(error, torch.distributed.DistError)
    name = type(error).__name__
    details = "".join(format_exception(error))
    return Failure(rank, f"{name}: {text}" if text else name, 1, details, "connection" if broken else "own")


def gone(rank: int, how: str = "It was killed, or ran out of memory.") -> Failure:
    """A rank has ended and has not said why."""
    message = (
        f"Every rank must stay to the end, but this one is gone without a word. {how} What it printed, if "
    )
    message += "anything, stands above or in its log. Go on with --resume true."
    return Failure(rank, message, 1, kind="silent")


def end_process(failure: Failure) -> NoReturn:
    """End at once: cleaning up may take ranks that are gone. torchrun shows what its error file holds."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "py_callstack": failure.line}
        Path(path).write_text(json.dumps({"message": {"message": failure.line, "extraInfo": extra}}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.status)
