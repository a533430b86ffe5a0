"""Count how often the host waits for the device, by the line that causes it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# isort: off
from pretended_gpu.device import set_on_wait  # before torch
from pretended_gpu.where import Place, find_place
from lightning.pytorch import Callback, Trainer
# isort: on

# Kind and line -> number. Kinds: item; `to host` and `to device`, copies other than those from or to pinned
# memory without blocking; index, by a mask or by numbers in main memory; operators whose result has a size
# that only the device knows; and torch.cuda's synchronize.
Waits = Counter[tuple[str, Place]]
WAITS = "waits.jsonl"


@contextmanager
def count_waits() -> Iterator[Waits]:
    """Yield the waits of all threads inside the block."""
    waits: Waits = Counter()

    def note(kind: str) -> None:
        waits[kind, find_place()] += 1

    set_on_wait(note)
    try:
        yield waits
    finally:
        set_on_wait(None)


class WaitsOfSteps(Callback):
    """Writes the waits of each training step, from the start of its batch to that of the next, by function.

    WAITS of the run folder has a line of JSON per step; the last step has none.
    """

    def __init__(self) -> None:
        self.waits: Waits | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.waits is not None and trainer.is_global_zero:
            with (Path(trainer.default_root_dir) / WAITS).open("a") as file:
                print(json.dumps(by_function(self.waits)), file=file)
        self.waits = waits = Counter()

        def note(kind: str) -> None:
            waits[kind, find_place()] += 1

        set_on_wait(note)

    def on_train_end(self, *_: Any) -> None:
        set_on_wait(None)


def by_function(waits: Waits) -> dict[str, int]:
    """Return the waits of each function of the package."""
    found: Counter[str] = Counter()
    for (_, place), number in waits.items():
        found[place.name] += number
    return dict(found.most_common())


def format_waits(waits: Waits) -> str:
    """Return a table of lines, the most frequent first."""
    return "\n".join(f"{number:7} {kind:24} {place}" for (kind, place), number in waits.most_common())
