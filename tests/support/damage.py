"""Damage checkpoints and models in many ways, and count how much of the damage is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Barrier, Thread
from typing import Any

import torch

from rlt_lightning.checkpoints.export import export_model
from rlt_lightning.checkpoints.folder import write_checkpoint
from rlt_lightning.models import weights
from rlt_lightning.models.format import ModelFormat
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.weights import stored_once
from rlt_lightning.tags import R1
from rlt_lightning.types import InputError

NUM_FLIPS = 64


class Rank:
    """The part of a strategy that writing needs."""

    world_size = 2

    def __init__(self, global_rank: int, barrier: Barrier) -> None:
        self.global_rank = global_rank
        self.barrier = barrier.wait


def build_model(name: str, folder: Path, monkeypatch: Any = None) -> Path:
    """An exported model; by two ranks and in several files if there is a monkeypatch."""
    model = load_model(name)
    form = ModelFormat("teacher", R1, "Explain.").to_plain()
    metadata = {"pretrained": name, "format": form, "training": {}, "lora": None}
    folder.mkdir()
    options: Any = (model, stored_once(model), load_tokenizer(name), metadata, folder)
    if monkeypatch is None:
        export_model(*options)
        return folder
    monkeypatch.setattr(weights, "FILE_BYTES", 2**17)
    run_ranks(lambda rank: export_model(*options, strategy=rank))
    return folder


def build_checkpoint(folder: Path, scale: float = 1.0, monkeypatch: Any = None) -> Path:
    """A checkpoint with moments; by two ranks and in several files each if there is a monkeypatch."""
    names = [f"entry.model.{name}" for name in "abc"]
    tensors = {name: scale * torch.arange(40.0).reshape(8, 5) for name in names}
    pairs = [(name.removeprefix("entry.model."), tensor) for name, tensor in tensors.items()]
    groups = [{"params": [0, 1, 2], "param_names": ["a", "b", "c"], "lr": 0.1}]
    state = {"model": {"pretrained": "m"}, "aliases": {}, "optimizer_groups": groups, "global_step": 6}
    state["optimizer_numbers"] = {name: {"step": torch.tensor(6.0)} for name, _ in pairs}
    files = {"weights": pairs, "exp_avg": pairs, "exp_avg_sq": pairs}
    if monkeypatch is None:
        write_checkpoint(folder, state, files)
        return folder
    monkeypatch.setattr(weights, "FILE_BYTES", 200)
    run_ranks(lambda rank: write_checkpoint(folder, state, files, rank))
    return folder


def run_ranks(write: Callable[[Rank], None]) -> None:
    """Let two ranks write together."""
    barrier = Barrier(2)
    threads = [Thread(target=write, args=(Rank(number, barrier),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def count_unnoticed(folder: Path, load: Callable[[], Any]) -> list[str]:
    """Flip bits all over the files of a folder, one at a time; returns the flips that nothing noticed."""
    random, unnoticed = Random(0), []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(NUM_FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = random.randrange(len(content)), random.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        with suppress(InputError):
            load()
            unnoticed.append(f"{path.name}: bit {bit} of byte {place}")
        path.write_bytes(content)
    load()
    return unnoticed
