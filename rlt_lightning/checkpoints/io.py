"""Save and load our checkpoint folders through Lightning's CheckpointIO.

Lightning's state dict has weights, under the LightningModule's names, and moments, under the parameter's
number in the optimizer. Files name both as from_pretrained does. docs/resuming.md says in which order a run
is restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from rlt_lightning.checkpoints.folder import WEIGHTS, discard, read_state, write_checkpoint
from rlt_lightning.models.announce import announce_reading
from rlt_lightning.models.weights import NamedTensor, WeightFiles

# The LightningModule's prefix of the names of the policy's weights.
MODULE_PREFIX = "entry.model."


class FolderCheckpointIO(TorchCheckpointIO):
    """Reads and writes checkpoints of strategies whose processes hold whole tensors: one process, or DDP."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        state = dict(checkpoint)
        weights: dict[str, Tensor] = state.pop("state_dict")
        first: dict[int, str] = {}
        aliases = {name: first.setdefault(tensor.data_ptr(), name) for name, tensor in weights.items()}
        tensors = {WEIGHTS: [(pretrained_name(n), t) for n, t in weights.items() if aliases[n] == n]}
        state["aliases"] = {name: other for name, other in aliases.items() if name != other}
        [optimizer] = state.pop("optimizer_states", None) or [None]
        if optimizer is not None:
            state["optimizer_groups"] = optimizer["param_groups"]
            names = names_by_number(optimizer["param_groups"])
            state["optimizer_numbers"], moments = split_moments(
                (names[number], values) for number, values in optimizer["state"].items()
            )
            tensors |= moments
        write_checkpoint(Path(path), state, tensors)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        folder = Path(path)
        announce_reading(folder)
        state = read_state(folder)
        weights = {module_name(n): t for n, t in read_all(folder / WEIGHTS)}
        state["state_dict"] = weights | {n: weights[other] for n, other in state.pop("aliases").items()}
        if "optimizer_groups" in state:
            groups, numbers = state.pop("optimizer_groups"), state.pop("optimizer_numbers")
            names = names_by_number(groups)
            moments: dict[str, dict[str, Any]] = {name: dict(values) for name, values in numbers.items()}
            for moment in moment_folders(folder):
                for name, tensor in read_all(moment):
                    moments[name][moment.name] = tensor
            optimizer = {number: moments[name] for number, name in names.items() if name in moments}
            state["optimizer_states"] = [{"state": optimizer, "param_groups": groups}]
        return state

    @override
    def remove_checkpoint(self, path: Any) -> None:
        discard(Path(path))


def split_moments(
    states: Iterator[tuple[str, dict[str, Any]]],
) -> tuple[dict[str, dict[str, Any]], dict[str, list[NamedTensor]]]:
    """Divide the optimizer's state into numbers (step) by parameter, and moments by kind."""
    numbers: dict[str, dict[str, Any]] = {}
    moments: dict[str, list[NamedTensor]] = {}
    for name, kept in states:
        # bitsandbytes hands out its codes and scales in a dictionary of their own.
        nested = [value for value in kept.values() if isinstance(value, dict)]
        values = {k: v for k, v in kept.items() if not isinstance(v, dict)}
        for inner in nested:
            values |= inner
        numbers[name] = {k: v for k, v in values.items() if not len(getattr(v, "shape", ()))}
        for key in values.keys() - numbers[name].keys():
            moments.setdefault(key, []).append((name, values[key]))
    return numbers, dict(sorted(moments.items()))


def moment_folders(folder: Path) -> list[Path]:
    """Return the folders of a checkpoint that hold the optimizer's moments."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != WEIGHTS)


def read_all(folder: Path) -> Iterator[NamedTensor]:
    """Yield all tensors of a folder, one at a time."""
    files = WeightFiles(str(folder))
    return ((name, files(name)) for name in files.file_of)


def names_by_number(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their numbers in its state."""
    pairs = (zip(group["params"], group["param_names"], strict=True) for group in groups)
    return dict(pair for group in pairs for pair in group)


def pretrained_name(name: str) -> str:
    """Return the name under which from_pretrained knows a weight of the LightningModule."""
    return name.removeprefix(MODULE_PREFIX)


def module_name(name: str) -> str:
    """Return the name under which the LightningModule knows a weight of the policy."""
    return MODULE_PREFIX + name
