"""Count how often the host waits for the device in each training step, by the function that causes it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

# isort: off
from pretended_gpu.device import set_on_wait  # before torch
from pretended_gpu.where import find_place
from lightning.pytorch import Callback, Trainer
# isort: on


class WaitsOfSteps(Callback):
    """Writes the waits of each training step, from the start of its batch to that of the next.

    waits.jsonl of the run folder has a line for each step: function -> number; the last step has none.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if self.waits is not None and trainer.is_global_zero:
            with (Path(trainer.default_root_dir) / "waits.jsonl").open("a") as file:
                print(json.dumps(self.waits), file=file)
        self.waits = waits = Counter()
        set_on_wait(lambda kind: waits.update([find_place().name]))

    def on_train_end(self, *_: object) -> None:
        set_on_wait(None)
