"""Why a process failed, in words that another process can show, and how it then ends."""

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
from rlt_lightning.hub.client import PushError
from rlt_lightning.numerics.rewards import NonFiniteError
from rlt_lightning.run.run_folder import remove_empty_folders
from rlt_lightning.types import InputError

# The message of these says what to do in one line; a traceback would say nothing more.
MISTAKES = (InputError, NonFiniteError, EngineError, PushError, MisconfigurationException)

# Kinds of failures: one that stands further on mostly follows from one before it.
KINDS = ("own", "silent", "told", "connection")


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Args:
        rank: The rank that failed.
        message: What happened, in one line.
        status: The exit status of all processes.
        details: A traceback, or nothing.
        kind: "own": the rank said what went wrong; "silent": it ended without a word; "told": its launcher
            ended it; "connection": it waited for another rank that had ended or was late.
    """

    rank: int
    message: str
    status: int
    details: str = ""
    kind: Literal["own", "silent", "told", "connection"] = "own"

    def print(self) -> None:
        """Print the failure to the standard error stream."""
        print(f"{self.details}{self.line}", file=sys.stderr, flush=True)

    @property
    def line(self) -> str:
        """Return the last line that the user sees."""
        return f"rlt: error: rank {self.rank}: {self.message}"


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return an exception as the failure of a rank."""
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


def silent_failure(rank: int, how: str = "It was killed, or ran out of memory.") -> Failure:
    """Return the failure of a rank that ended without saying why."""
    message = (
        f"Every rank must run to the end, but this one ended without a message. {how} What it printed, if "
        "anything, stands above or in its log. Resume with --resume true."
    )
    return Failure(rank, message, 1, kind="silent")


def end_process(failure: Failure) -> NoReturn:
    """End at once, since cleaning up may wait for ranks that have ended; tell torchrun in its error file."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "py_callstack": failure.line}
        Path(path).write_text(json.dumps({"message": {"message": failure.line, "extraInfo": extra}}))
    remove_empty_folders()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.status)
