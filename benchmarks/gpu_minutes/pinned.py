"""Push weights from the GPU through two pinned buffers, as GlooPush does: are they right, and how fast?

The worker is the stand-in of the tests: it takes the weights over gloo, in a thread of this process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import DEVICE, ON_CPU, TINY, Finding, attempt, median_seconds, note
from torch import Tensor
from transformers import LlamaConfig

from rlt_lightning.engines import GlooPush, VLLMEngine
from rlt_lightning.engines.push import Staging, split_pieces

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fake_worker import FakeWorker, join_gloo, receive_gloo  # type: ignore[import-not-found]

PIECE_MIB = 1 if TINY else 64
NUMBERS = 700_001 if TINY else 200_000_003  # several pieces, the last one short


def through(staging: Staging, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's bytes as they arrive: each piece is read while the next is on its way."""
    arrived, previous = [], None
    for piece in split_pieces(tensor, dtype, staging.num_bytes):
        staged = staging.fill(piece, dtype)
        if previous is not None:
            arrived.append(previous.wait().clone())
        previous = staged
    assert previous is not None
    return torch.cat([*arrived, previous.wait()]).view(dtype)


def drained(staging: Staging, tensor: Tensor) -> None:
    """Let a tensor pass, and keep nothing of it."""
    previous = None
    for piece in split_pieces(tensor, tensor.dtype, staging.num_bytes):
        staged = staging.fill(piece, tensor.dtype)
        if previous is not None:
            previous.wait()
        previous = staged


def buffers(source: torch.dtype, dtype: torch.dtype) -> Finding:
    """Compare what arrives with a plain copy, bit by bit."""
    torch.manual_seed(0)
    staging = Staging(PIECE_MIB * 2**20)
    # Made just before, so that the copies begin while it is still computed.
    tensor = torch.randn(NUMBERS, device=DEVICE).mul_(3).to(source)
    found = through(staging, tensor, dtype)
    right, pinned = torch.equal(found, tensor.to(dtype).cpu()), is_pinned(staging)
    return right and (ON_CPU or pinned), {"equal": right, "pinned": pinned}


def is_pinned(staging: Staging) -> bool:
    """Return whether both buffers are there and pinned."""
    return [buffer.is_pinned() for buffer in staging.buffers] == [True, True]


def rates() -> None:
    """Measure copies out of the GPU: through the buffers, and to fresh pages."""
    tensor = torch.randn(NUMBERS, device=DEVICE)
    staging = Staging(PIECE_MIB * 2**20)
    for label, copy in (("pinned buffers", partial(drained, staging, tensor)), ("fresh pages", tensor.cpu)):
        note(f"weights through {label}", gb_per_s=tensor.nbytes / median_seconds(copy) / 1e9)


def push() -> Finding:
    """Push twice to a worker by GlooPush, in bfloat16, and compare what it received."""
    torch.manual_seed(0)
    sizes = [NUMBERS // 4 + i for i in range(4)] + [NUMBERS]
    weights = [(str(i), torch.randn(size, device=DEVICE)) for i, size in enumerate(sizes)]
    received: dict[str, Tensor] = {}

    def receive(info: dict[str, Any]) -> None:
        received.update(receive_gloo("worker", info))

    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=[2]), name_or_path="model", config=LlamaConfig()
    )
    gloo = GlooPush(PIECE_MIB, timeout_s=60.0, dtype="bfloat16")
    with (
        FakeWorker(on_init=partial(join_gloo, "worker"), on_update=receive) as worker,
        tempfile.TemporaryDirectory() as folder,
    ):
        engine = VLLMEngine([worker.url], push=gloo)
        try:
            engine.start(model, SimpleNamespace(eos_token_id=2), Path(folder))
            for step in range(2):
                start = time.perf_counter()
                engine.update_weights(weights, step)
                seconds = time.perf_counter() - start
            pinned, version = is_pinned(gloo.staging), engine.policy_version
        finally:
            engine.close()
    wrong = [name for name, tensor in weights if not torch.equal(received[name], tensor.cpu().bfloat16())]
    passed = not wrong and version == 1 and (ON_CPU or pinned)
    rate = sum(tensor.nbytes for tensor in received.values()) / seconds / 1e9
    return passed, {"wrong": wrong, "gb_per_s": rate, "pinned": pinned}


def main() -> None:
    if ON_CPU:
        note("pinned memory", why="skipped: needs a GPU; the checks below use buffers that are not pinned")
    results = []
    for source, dtype in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16,) * 2,
    ):
        label = f"buffers, {str(source)[6:]} as {str(dtype)[6:]}"
        results.append(attempt(label, partial(buffers, source, dtype)))
    results.append(attempt("a push by gloo through buffers", push))
    if not ON_CPU:
        rates()
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
