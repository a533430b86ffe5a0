"""Compare adding up gradients over ranks in every micro-batch and in the last one: bytes sent, memory, time.

    .venv/bin/python benchmarks/reductions.py [--model smollm2-135m] [--sides fsdp2_every fsdp2_last zero3]

Two processes on this machine train by SFT, over gloo. In the second step it counts the collectives that add
up gradients, and the bytes that each process puts into them; peak memory is what the step adds to the memory
before it. `fsdp2_every` and `fsdp2_last` are FSDP2 with reduce_every_micro_batch true and false.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from side_by_side import CPU, alternate, benchmark_parser, cpu_seconds, finish, memory_now, read_options
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.datamodules import StudentSFTData
from rlt_lightning.engines.launch import find_free_port
from rlt_lightning.modules import SFTModule
from rlt_lightning.strategies import FSDP2, DeepSpeed

RESULT = "RESULT "
STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp2_every": lambda: FSDP2(reduce_every_micro_batch=True),
    "fsdp2_last": lambda: FSDP2(reduce_every_micro_batch=False),
    "fsdp2_auto": FSDP2,
    "ddp": lambda: "ddp",
    "zero1": lambda: DeepSpeed(stage=1),
    "zero2": lambda: DeepSpeed(stage=2),
    "zero3": lambda: DeepSpeed(stage=3),
}


class Collectives(TorchDispatchMode):
    """Counts collectives of more than a thousand numbers by name, and the bytes that go into them."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            # Of those with separate outputs and inputs, the inputs come second.
            inputs = args[1] if name.endswith("_base_") else args[0]
            tensors = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
            if sum(x.numel() for x in tensors) > 1000:
                self.number[name.removeprefix("c10d::")] += 1
                self.bytes[name.removeprefix("c10d::")] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Measures the second step, in which gradients and moments have their memory."""

    def __init__(self) -> None:
        self.collectives = Collectives()
        self.micro_batches = 0
        self.result: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            enter, self.micro_batches = pl_module.sharding.micro_batch, 0

            def count(last: bool) -> Any:
                self.micro_batches += 1
                return enter(last=last)

            pl_module.sharding.micro_batch = count
            self.collectives.__enter__()
            self.start = time.perf_counter(), cpu_seconds(), memory_now(CPU)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.collectives.__exit__(None, None, None)
            seconds, cpu_s, memory = self.start
            number, num_bytes = self.collectives.number, self.collectives.bytes
            self.result = {
                "seconds": time.perf_counter() - seconds,
                "cpu_s": cpu_seconds() - cpu_s,
                "peak_bytes": float(trainer.callback_metrics["perf/train_peak_gib"]) * 2**30 - memory,
                "micro_batches": self.micro_batches,
                "reductions": sum(n for name, n in number.items() if "reduce" in name),
                "reduced_bytes": sum(n for name, n in num_bytes.items() if "reduce" in name),
                "collectives": dict(number),
            }


def train(side: str, model: str, rows: int, tokens: int) -> tuple[dict[str, Any], Any]:
    """Train two steps as one rank of two, and return what the second one took, and the module."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=2,
            strategy=STRATEGIES[side](),
            max_steps=2,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[watch],
        )
        module = SFTModule(model, micro_batch_tokens=tokens)
        data = StudentSFTData(
            source="chains",
            tags="r1",
            student_system_prompt="",
            num_embedded_rows=2 * rows,
            tokenizer=model,
            prompts_per_step=rows,
            output_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return watch.result, module


def serve(options: Any) -> None:
    """Train as one rank whatever the standard input names."""
    for line in sys.stdin:
        result, _ = train(line.strip(), options.model, options.rows, options.tokens)
        print(RESULT + json.dumps(result), flush=True)


class Ranks:
    """Two processes that train when told to."""

    def __init__(self) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "NODE_RANK": "0"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv, "--serve"],
                env=os.environ | meeting | {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def run(self, side: str) -> dict[str, float]:
        """Train; return what rank 0 measured."""
        for process in self.processes:
            assert process.stdin is not None
            print(side, file=process.stdin, flush=True)
        results = [self.read(process) for process in self.processes]
        return results[0]

    def read(self, process: Any) -> dict[str, float]:
        for line in process.stdout:
            if line.startswith(RESULT):
                result: dict[str, float] = json.loads(line.removeprefix(RESULT))
                return result
        self.close()
        raise SystemExit("A rank has ended: see its error above.")

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait()


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=32, help="of a step, of both ranks")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
    parser.add_argument("--sides", nargs="+", choices=list(STRATEGIES), default=["fsdp2_every", "fsdp2_last"])
    parser.add_argument("--serve", action="store_true", help="as one of the ranks")
    options = read_options(parser, model="miniature", rows=8, tokens=200)
    if options.serve:
        serve(options)
        return
    ranks = Ranks()
    shown = ("micro_batches", "reductions", "reduced_bytes")

    def side(name: str) -> Callable[[], dict[str, float]]:
        return lambda: {key: value for key, value in ranks.run(name).items() if key != "collectives"}

    results = alternate({name: side(name) for name in options.sides}, options.rounds)
    ranks.close()
    figures = {
        f"{name}_{key}": float(result[key])
        for name, result in results.items()
        for key in (*shown, "peak_bytes")
    }
    finish(options.output, {"model": options.model, "sides": results}, **figures)


if __name__ == "__main__":
    main()
