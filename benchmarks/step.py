"""Whole training steps on recorded completions: everything but sampling is timed.

    .venv/bin/python benchmarks/step.py [--kinds rlt_k1 opd_reverse] [--steps 10]

The runs are those of tests/trajectories, with miniatures: their numbers are the same in every version, and
most of the time is not arithmetic. All steps but the first are timed. The first one counts what is carried
through a step: the bytes of tensors that Python holds when a backward begins, besides weights, gradients and
AdamW's moments. The last line has milliseconds of CPU time per step.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from side_by_side import alternate, benchmark_parser, cpu_seconds, finish, read_options

import rlt_lightning
from rlt_lightning.callbacks import RolloutCallback

# Of the package that was imported, which need not be the one beside this file.
TESTS = Path(rlt_lightning.__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "support")]
from replay import ReplayEngine  # noqa: E402
from trainers import bare_trainer  # noqa: E402
from trajectories.runs import FOLDER, KINDS  # noqa: E402


def count_held_bytes() -> dict[int, int]:
    """Return the bytes of the memory behind all tensors that Python holds, by address."""
    tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class Clock(Callback):
    """Measures what the first step holds, and the time from the second step to the end of the last."""

    def __init__(self) -> None:
        self.held = 0
        self.result: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            gc.collect()
            self.before = count_held_bytes()
        if trainer.global_step == 1:
            self.start = time.perf_counter(), cpu_seconds()

    def on_before_backward(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            gradients = {p.grad.data_ptr() for p in pl_module.parameters() if p.grad is not None}
            held = {at: size for at, size in count_held_bytes().items() if at not in self.before}
            self.held = max(self.held, sum(size for at, size in held.items() if at not in gradients))

    def on_train_end(self, *_: Any) -> None:
        seconds, cpu_s = self.start
        self.result = {
            "seconds": time.perf_counter() - seconds,
            "cpu_s": cpu_seconds() - cpu_s,
            "peak_bytes": self.held,
        }


def run(kind: str, steps: int) -> dict[str, float]:
    """Train, and return what the steps took."""
    setup, clock = KINDS[kind](), Clock()
    engine = ReplayEngine(str(FOLDER / "recorded" / setup.recording / "rollouts.jsonl"), setup.placement)
    callbacks = [RolloutCallback(engine=engine, **(setup.rollouts or {})), *setup.callbacks, clock]
    with tempfile.TemporaryDirectory() as folder:
        setup.data.output_dir = folder
        trainer = bare_trainer(Path(folder), *callbacks, steps=steps, devices=1)
        trainer.fit(setup.module, datamodule=setup.data)
    return clock.result


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", default=["rlt_k1", "rlt_two_students", "opd_reverse"])
    parser.add_argument("--steps", type=int, default=10)
    options = read_options(parser, kinds=["rlt_k1"], steps=2)
    sides: dict[str, Callable[[], dict[str, float]]] = {
        kind: lambda kind=kind: run(kind, options.steps)  # type: ignore[misc]
        for kind in options.kinds
    }
    results = alternate(sides, options.rounds)
    figures = {kind: 1000 * result["cpu_s"] / (options.steps - 1) for kind, result in results.items()}
    finish(options.output, {"steps": options.steps, "kinds": results}, **figures)


if __name__ == "__main__":
    main()
