"""What a weight push of a 7B model to several workers at once costs over gloo, against one worker.

    .venv/bin/python benchmarks/push_workers.py [--workers 8] [--rounds 1]

The trainer's side is the real one: `GlooPush` with `WorkerClient`. A worker is a process that answers the
routes of a push, receives every piece over its own group and drops it, where vLLM would load it. All are on
the loopback, so a machine's memory and cores stand for its network. Weights of one shape share their memory:
339 tensors of 15.2 GB are sent out of 1.6 GB. Needs 3 GB, and 64 MB a worker.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from side_by_side import alternate, benchmark_parser, finish, measure, read_options
from torch.distributed import PrefixStore, TCPStore
from transformers import AutoConfig, AutoModelForCausalLM

from rlt_lightning.commands.plan import read_known_configs
from rlt_lightning.engines import GlooPush
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.gloo import LOOPBACK, build_broadcast_options, join_group

TIMEOUT_S = 1800.0


class Worker(BaseHTTPRequestHandler):
    """Answers the routes of a push in a process of its own."""

    group: Any = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/init_weight_transfer_engine":
            self.join(body["init_info"])
        elif self.path == "/update_weights":
            self.receive(body["update_info"])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def join(self, info: dict[str, Any]) -> None:
        """Meet the trainer."""
        timeout_s = info["timeout_s"]
        server = TCPStore(info["host"], info["port"], None, False, timedelta(seconds=timeout_s))
        store = PrefixStore(info["prefix"], server)
        Worker.group = join_group(store, 1, info["world_size"], timeout_s, info["host"])

    def receive(self, info: dict[str, Any]) -> None:
        """Take all tensors, piece after piece, into the same place."""
        place = torch.empty(info["piece_bytes"], dtype=torch.uint8)
        for shape, dtype in zip(info["shapes"], info["dtype_names"], strict=True):
            left = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            while left:
                piece = place[: min(left, len(place))]
                self.group.broadcast([piece], build_broadcast_options()).wait()
                left -= len(piece)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def serve(pipe: Any) -> None:
    """Be a worker, and tell its port."""
    server = ThreadingHTTPServer((LOOPBACK, 0), Worker)
    pipe.send(server.server_port)
    server.serve_forever()


@contextmanager
def start_workers(number: int) -> Iterator[list[WorkerClient]]:
    """Run so many workers in the block."""
    context = multiprocessing.get_context("fork")  # they share what was imported
    pipes = [context.Pipe(duplex=False) for _ in range(number)]
    processes = [context.Process(target=serve, args=(end,), daemon=True) for _, end in pipes]
    for process in processes:
        process.start()
    try:
        yield [WorkerClient(f"http://{LOOPBACK}:{pipe.recv()}") for pipe, _ in pipes]
    finally:
        for process in processes:
            process.kill()


def build_weights(model: str) -> list[tuple[str, torch.Tensor]]:
    """Return a model's tensors in bfloat16, those of one shape in the same memory."""
    fields = dict(read_known_configs()[model])
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    memory: dict[torch.Size, torch.Tensor] = {}
    for _, weight in shapes.named_parameters():
        memory.setdefault(weight.shape, torch.ones(weight.shape, dtype=torch.bfloat16))
    return [(name, memory[weight.shape]) for name, weight in shapes.named_parameters()]


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--model", choices=read_known_configs(), default="Qwen/Qwen2.5-7B-Instruct")
    options = read_options(parser, workers=2, model="smollm2-135m")
    named_tensors = build_weights(options.model)
    num_bytes = sum(tensor.nbytes for _, tensor in named_tensors)
    push = GlooPush(timeout_s=TIMEOUT_S)
    with start_workers(options.workers) as workers:

        def push_to(number: int) -> dict[str, float]:
            failures: dict[str, Exception] = {}
            found = measure(lambda: failures.update(push.push(named_tensors, workers[:number], "1")))
            assert not failures, failures
            return found | {"gb_s": number * num_bytes / 1e9 / found["seconds"]}

        sides = {"one": lambda: push_to(1), "all": lambda: push_to(options.workers)}
        found = alternate(sides, options.rounds, warm_up=0)
        push.close()
    print(f"{len(named_tensors)} tensors of {num_bytes / 1e9:.3g} GB to 1 and to {options.workers} workers")
    result = found | {"bytes": num_bytes, "tensors": len(named_tensors), "workers": options.workers}
    ratio = found["all"]["seconds"] / found["one"]["seconds"]
    finish(options.output, result, seconds=found["all"]["seconds"], gb_s=found["all"]["gb_s"], ratio=ratio)


if __name__ == "__main__":
    main()
