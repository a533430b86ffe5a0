"""Weights that lie in shards are pushed whole, a bucket at a time, and never gathered within a send."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import ranks
import torch
from cases import full
from fake_worker import FakeWorker, join_gloo, receive
from sharded import VERSION, sharded_model
from torch.utils._python_dispatch import TorchDispatchMode

from rlt_lightning.engines import EngineError, GlooPush, IPCPush
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.engines.push import BucketPush
from rlt_lightning.models.load import load_model
from rlt_lightning.models.weights import full_shape, gather_in_groups

DIES_AT = "model.layers.1.self_attn.q_proj.weight"


def count_held(named_tensors: list[tuple[str, Any]]) -> int:
    """Return how many numbers of the weights this rank has in memory, without its shard of ZeRO-3."""
    return sum((p.to_local() if hasattr(p, "to_local") else p.data).numel() for _, p in named_tensors)


# Collectives of the trainer and parts of a send, in the order in which this process begins them


class Record(TorchDispatchMode):
    """Notes every collective of the thread, of any process group that PyTorch made."""

    lock = Lock()

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def note(self, event: str) -> None:
        with self.lock:
            self.events.append(event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.note(f"gather:{func.__name__}")
        return func(*args, **(kwargs or {}))


PUSHES: dict[str, Callable[..., BucketPush]] = {"ipc": IPCPush, "gloo": GlooPush}


@contextmanager
def recorded(record: Record, push: BucketPush) -> Iterator[None]:
    """Note collectives, and the parts that are sent to workers."""
    send, post = push.send, push.post

    def noted_send(*arguments: Any) -> None:
        record.note("send")
        send(*arguments)
        record.note("sent")

    def noted_post(worker: Any, path: str, *arguments: Any) -> Any:
        if path == "/update_weights":
            record.note("part")
        return post(worker, path, *arguments)

    with pytest.MonkeyPatch.context() as patch, record:
        patch.setattr(push, "send", noted_send)
        patch.setattr(push, "post", noted_post)
        yield


def push_main(
    rank: int, strategy: str, name: str, kind: str, folder: str, urls: list[str], num_pushes: int
) -> None:
    """Push and write down, on each rank, what was begun in which order, and which workers failed."""
    named_tensors = list(sharded_model(rank, strategy, name).named_parameters())
    held = count_held(named_tensors)
    assert held < 0.6 * sum(math.prod(full_shape(p)) for _, p in named_tensors)
    push = PUSHES[kind](bucket_mib=1, timeout_s=60.0)
    push.bucket_bytes = 2**17  # less than the embedding
    workers = [WorkerClient(url) for url in urls]
    results = []
    for _ in range(num_pushes):
        record = Record([])
        failure = None
        with recorded(record, push):
            torch.distributed.barrier()
            if rank == 0:
                try:
                    push.push(named_tensors, workers, VERSION)
                except EngineError as error:
                    failure = str(error)
                    push.disconnect()  # as the engine does
            else:
                for _ in gather_in_groups(named_tensors, push.bucket_bytes):
                    pass
            torch.distributed.barrier()  # every rank comes here, whatever failed
        assert failure or count_held(named_tensors) == held  # what was gathered is let go
        results.append({"events": record.events, "failure": failure})
        workers = workers[1:] or workers  # the first is the one that tests kill
    push.close()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))


def run_push(
    strategy: str, kind: str, model: str, folder: Path, *workers: FakeWorker, num_pushes: int = 1
) -> list[list[dict[str, Any]]]:
    """Push from two ranks to workers; what each rank wrote down of each push."""
    urls = [worker.url for worker in workers]
    ranks.call(push_main, folder, strategy, model, kind, str(folder), urls, num_pushes)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def receiver(
    name: str, received: dict[str, Any], call: Callable[..., Any] = lambda f, *a: f(*a), dies_at: str = ""
) -> FakeWorker:
    """A worker that takes weights, in one update or in several, where `call` lets the functions run."""
    received[name] = {}

    def take(info: dict[str, Any]) -> None:
        received[name].update(call(receive, name, info, dies_at))

    return FakeWorker(on_init=lambda info: call(join_gloo, name, info), on_update=take)


def split_sends(events: list[str]) -> list[list[str]]:
    """What was begun from the first to the last part of each send."""
    sends: list[list[str]] = []
    for event in events:
        if event == "send":
            sends.append([])
        elif sends and sends[-1][-1:] != ["sent"]:
            sends[-1].append(event)
    return sends


@pytest.mark.parametrize(
    ("strategy", "kind"), [("fsdp2", "ipc"), ("zero3", "ipc"), ("fsdp2", "gloo"), full("zero3", "gloo")]
)
def test_shards_arrive_whole_by_gathers_between_sends(
    strategy: str, kind: str, tiny_model: str, tmp_path: Path
) -> None:
    received: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = [stack.enter_context(receiver(name, received)) for name in ("one", "two")]
        found = run_push(strategy, kind, tiny_model, tmp_path, *workers)
        assert [worker.version for worker in workers] == [VERSION] * 2
        assert all(worker.calls.count("POST /start_weight_update") == 1 for worker in workers)
    events = found[0][0]["events"]
    sends = split_sends(events)
    assert len(sends) > 3
    assert all({*send} == {"part", "sent"} for send in sends), sends
    whole = dict(load_model(tiny_model).named_parameters())
    gathers = [[event for event in rank[0]["events"] if "gather" in event] for rank in found]
    assert len(gathers[0]) > len(sends)
    assert all(other == gathers[0] for other in gathers)  # the ranks take part in the same ones
    for name in ("one", "two"):
        assert received[name].keys() == whole.keys()
        assert all(torch.equal(received[name][key], tensor) for key, tensor in whole.items())


@pytest.mark.parametrize(
    ("strategy", "kind"), [("fsdp2", "ipc"), ("fsdp2", "gloo"), full("zero3", "ipc"), full("zero3", "gloo")]
)
def test_ranks_stay_in_step_when_a_worker_dies(
    strategy: str, kind: str, tiny_model: str, tmp_path: Path
) -> None:
    received: dict[str, Any] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        there = receiver("there", received, lambda f, *a: pool.submit(f, *a).result(), DIES_AT)
        here = receiver("here", received)
        for worker in (there, here):
            stack.enter_context(worker)
        found = run_push(strategy, kind, tiny_model, tmp_path, there, here, num_pushes=2)
    first, second = found[0]
    assert first["failure"] is not None
    # The other rank gathered everything in step with rank 0, which went on when sending had failed.
    assert found[1][0]["events"] == [event for event in first["events"] if "gather" in event]
    assert second["failure"] is None  # without the dead worker
    assert here.version == VERSION
    for name, tensor in load_model(tiny_model).named_parameters():
        assert torch.equal(received["here"][name], tensor), name
