"""Read the weights of a run's ranks, and compare two sets of weights."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

STOP = 3


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder.with_suffix(".safetensors"))


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)
