"""A callback that writes the seconds of every optimizer step into the file that UPDATES names."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class UpdateTimer(Callback):
    """Time all optimizers of the process, waiting for the GPU before and after."""

    def __init__(self) -> None:
        self.start = 0.0
        register_optimizer_step_pre_hook(self.begin)
        register_optimizer_step_post_hook(self.end)

    def begin(self, *_: Any) -> None:
        self.start = now()

    def end(self, *_: Any) -> None:
        with Path(os.environ["UPDATES"]).open("a") as file:
            file.write(f"{now() - self.start}\n")


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
