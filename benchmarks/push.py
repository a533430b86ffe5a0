"""What a weight push costs, against a plain copy of the same bytes through the same channel.

    .venv/bin/python benchmarks/push.py [--backend ipc|gloo] [--rounds 10]

Needs scripts/setup_vllm_cpu.sh. Pushes SmolLM2-135M (538 MB in fp32) into a launched vLLM worker, and in turn
copies the same tensors to a process that only stores them in memory: through a shared buffer, or by a gloo
broadcast. A push is timed as the trainer waits for it, from pausing the worker to
resuming it, so it includes the reload, the repacking for the CPU's kernels and all HTTP calls. Also measures,
in buckets, how far the trainer's memory rises during a push.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from side_by_side import benchmark_parser, finish, read_options
from torch.distributed import TCPStore

from rlt_lightning.engines import GlooPush, IPCPush, Launch, VLLMEngine
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.worker.gloo import LOOPBACK, build_broadcast_options, join_group
from rlt_lightning.worker.ipc import HostBuffer, open_buffer

ROOT = Path(__file__).parents[1]
GOAL = 1.5
BUCKET_MIB = 256  # the default; the largest tensor has 113 MB


def receive_gloo(port: int, shapes: list[torch.Size], rounds: int) -> None:
    """Take every tensor and put it in its place."""
    torch.set_num_threads(1)
    group = join_group(TCPStore(LOOPBACK, port, None, False), 1, 2, 60, LOOPBACK)
    places = [torch.zeros(shape) for shape in shapes]
    for _ in range(rounds):
        for place in places:
            arrival = torch.empty_like(place)
            group.broadcast([arrival.view(-1).view(torch.uint8)], build_broadcast_options()).wait()
            place.copy_(arrival)
        group.barrier().wait()


def receive_ipc(info: Any, arrived: Any, shapes: list[torch.Size], rounds: int) -> None:
    """Take every tensor out of the buffer and put it in its place."""
    torch.set_num_threads(1)
    content = open_buffer(info, torch.device("cpu")).view(torch.float32)
    places = [torch.zeros(shape) for shape in shapes]
    for _ in range(rounds):
        for place in places:
            arrived.wait()
            place.view(-1).copy_(content[: place.numel()])
            arrived.wait()


class GlooCopy:
    """Broadcast all tensors to one process."""

    def __init__(self, tensors: dict[str, torch.Tensor], rounds: int) -> None:
        self.tensors = tensors
        store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=60), False)
        arguments = (store.port, [tensor.shape for tensor in tensors.values()], rounds)
        start_process(receive_gloo, arguments)
        self.group: Any = join_group(store, 0, 2, 60, LOOPBACK)

    def __call__(self) -> None:
        for tensor in self.tensors.values():
            self.group.broadcast([tensor.view(-1).view(torch.uint8)], build_broadcast_options()).wait()
        self.group.barrier().wait()


class IPCCopy:
    """Put tensor after tensor into a shared buffer, let one process take it out."""

    def __init__(self, tensors: dict[str, torch.Tensor], rounds: int) -> None:
        self.tensors = tensors
        self.buffer = HostBuffer(max(tensor.nbytes for tensor in tensors.values()))
        self.arrived = multiprocessing.get_context("spawn").Barrier(2)
        shapes = [tensor.shape for tensor in tensors.values()]
        start_process(receive_ipc, (self.buffer.share(""), self.arrived, shapes, rounds))

    def __call__(self) -> None:
        for tensor in self.tensors.values():
            self.buffer.tensor[: tensor.nbytes].view(tensor.dtype).copy_(tensor.view(-1))
            self.arrived.wait()
            self.arrived.wait()


def start_process(target: Any, arguments: tuple[Any, ...]) -> None:
    multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True).start()


class PeakMemory:
    """The most that this process's own memory rises by in the block, bytes; mapped files do not count."""

    def __enter__(self) -> PeakMemory:
        self.before, self.peak, self.running = own_memory(), 0, True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, own_memory() - self.before)
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()


def own_memory() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096  # resident minus shared pages


def timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=10)
    parser.add_argument("--backend", choices=["ipc", "gloo"], default="ipc")
    parser.add_argument("--model", default="smollm2-135m")
    options = read_options(parser, model="miniature")
    model = load_model(options.model, "float32", None, False)
    named_tensors = list(model.named_parameters())
    tensors = {name: tensor.detach() for name, tensor in named_tensors}
    push = (GlooPush if options.backend == "gloo" else IPCPush)(BUCKET_MIB)
    overlay = yaml.safe_load((ROOT / "configs/add/vllm_launch.yaml").read_text())
    launch = Launch(**overlay["rollouts"]["engine"]["init_args"]["launch"])
    engine = VLLMEngine(launch=launch, push=push)
    warm_up = 2  # the first rounds touch memory for the first time
    copies, pushes, memory = [], [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        try:
            engine.start(model, load_tokenizer(options.model), Path(folder))
            rounds = warm_up + options.rounds
            copy = (GlooCopy if options.backend == "gloo" else IPCCopy)(tensors, rounds)
            for number in range(rounds):
                copies.append(timed(copy))
                with PeakMemory() as peak:
                    pushes.append(timed(lambda number=number: engine.update_weights(named_tensors, number)))
                memory.append(peak.peak / (BUCKET_MIB * 2**20))
                figures = f"copy {copies[-1]:.2f} s, push {pushes[-1]:.2f} s, {memory[-1]:.2f} buckets"
                print(f"round {number}: {figures}")
            assert engine.policy_version == rounds - 1
        finally:
            engine.close()
    ratios = [b / a for a, b in zip(copies[warm_up:], pushes[warm_up:], strict=True)]
    result = {
        "backend": options.backend,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "bucket_mib": BUCKET_MIB,
        "copy_s": statistics.median(copies[warm_up:]),
        "push_s": statistics.median(pushes[warm_up:]),
        "ratios": sorted(ratios),
        "extra_memory_buckets": max(memory[warm_up:]),
    }
    print(f"trainer's extra memory: {result['extra_memory_buckets']:.2f} buckets, goal below 2")
    finish(options.output, result, ratio=statistics.median(ratios), goal=GOAL)


if __name__ == "__main__":
    main()
