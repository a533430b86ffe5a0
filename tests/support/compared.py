"""Gather the weights of a model, read those of a run's ranks, and compare two sets of weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rlt_lightning.models.weights import whole_tensors

STOP = 3


def gather_whole(named_tensors: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """Whole copies of weights by name, on every rank."""
    copies = {}
    for name, tensor in named_tensors:
        with whole_tensors([tensor]) as [whole]:
            copies[name] = whole.detach().clone()
    return copies


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder.with_suffix(".safetensors"))


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)
