"""Save and load our checkpoint folders through Lightning, with and without sharded weights.

`FolderCheckpointIO` is for processes that hold whole tensors: one process, or DDP. In Lightning's state dict
weights have the LightningModule's names, and moments have the parameter's number in the optimizer. In the
files both have the names that from_pretrained expects.

`NamedCheckpoints` is for strategies that shard weights. Lightning would gather one whole state dict; this
passes sharded tensors by name instead, and `write_checkpoint` gathers them one by one:

    save   trainer.dump_checkpoint() → state without tensors ┐
           weights(policy)           → weights/              ├→ write_checkpoint (checkpoints/folder.py)
           moments(policy)           → exp_avg/, …           ┘
    load   read_whole_state() → module.on_load_checkpoint() → fill_in_place(weights) → restore_moments()

A strategy overrides `weights`, `moments` and `restore_moments` where its library keeps them elsewhere.

A resume, in order: the run chooses the newest finished checkpoint and locks its folder (run_folder.py), reads
the rows, and loads the models. Lightning restores weights, callbacks' states, counters, moments, schedule and
the position in the data. Then the callbacks load the reference, cut `metrics.csv` and `rollouts.jsonl` to the
checkpoint's step, and start the engine, which gets the weights; each worker's copy is verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from rlt_lightning.checkpoints.folder import WEIGHTS, discard, read_whole_state, write_checkpoint
from rlt_lightning.models.weights import NamedTensor, WeightFiles, fill_in_place, set_whole, trained_tensors
from rlt_lightning.types import InputError

# The LightningModule's prefix of the names of the policy's weights.
MODULE_PREFIX = "entry.model."
# Settings of how an optimizer computes. They depend on the machine, not on the run.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


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
        tensors = {
            WEIGHTS: [(n.removeprefix(MODULE_PREFIX), weights[n]) for n, o in aliases.items() if n == o]
        }
        state["aliases"] = {name: stored for name, stored in aliases.items() if name != stored}
        [optimizer] = state.pop("optimizer_states", None) or [None]
        if optimizer is not None:
            state["optimizer_groups"] = optimizer["param_groups"]
            names = map_numbers_to_names(optimizer["param_groups"])
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
        state = read_checkpoint(folder)
        if "optimizer_groups" in state:
            groups, numbers = state.pop("optimizer_groups"), state.pop("optimizer_numbers")
            names = map_numbers_to_names(groups)
            moments: dict[str, dict[str, Any]] = {name: dict(values) for name, values in numbers.items()}
            for moment in list_moment_folders(folder):
                for name, tensor in read_all(moment):
                    moments[name][moment.name] = tensor
            optimizer = {number: moments[name] for number, name in names.items() if name in moments}
            state["optimizer_states"] = [{"state": optimizer, "param_groups": groups}]
        return state

    @override
    def remove_checkpoint(self, path: Any) -> None:
        discard(Path(path))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return a checkpoint of any strategy without the optimizer's moments, as Lightning has it."""
    state = read_whole_state(folder)
    weights = {module_name(n): t for n, t in read_all(folder / WEIGHTS)}
    state["state_dict"] = weights | {n: weights[stored] for n, stored in state.pop("aliases").items()}
    return state


def split_moments(
    states: Iterator[tuple[str, dict[str, Any]]],
) -> tuple[dict[str, dict[str, Any]], dict[str, list[NamedTensor]]]:
    """Divide the optimizer's state into numbers (step) by parameter, and moments by kind."""
    numbers: dict[str, dict[str, Any]] = {}
    moments: dict[str, list[NamedTensor]] = {}
    for name, kept in states:
        # bitsandbytes hands out its codes and scales in a dictionary.
        nested = [value for value in kept.values() if isinstance(value, dict)]
        values = {k: v for k, v in kept.items() if not isinstance(v, dict)}
        for inner in nested:
            values |= inner
        numbers[name] = {k: v for k, v in values.items() if not len(getattr(v, "shape", ()))}
        for key in values.keys() - numbers[name].keys():
            moments.setdefault(key, []).append((name, values[key]))
    return numbers, dict(sorted(moments.items()))


def list_moment_folders(folder: Path) -> list[Path]:
    """Return the folders of a checkpoint that hold the optimizer's moments."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != WEIGHTS)


def read_all(folder: Path) -> Iterator[NamedTensor]:
    """Yield all tensors of a folder, one at a time."""
    files = WeightFiles(str(folder))
    return ((name, files(name)) for name in files.file_of)


def map_numbers_to_names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their numbers in its state."""
    pairs = (zip(group["params"], group["param_names"], strict=True) for group in groups)
    return dict(pair for group in pairs for pair in group)


def module_name(name: str) -> str:
    """Return the name under which the LightningModule knows a weight of the policy."""
    return MODULE_PREFIX + name


class NamedCheckpoints:
    """A mixin of strategies that writes and reads our checkpoints, not the sharding library's."""

    lightning_module: Any
    optimizers: list[Any]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing, since weights are written tensor by tensor."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing, since moments are written tensor by tensor."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; all ranks call this together."""
        state = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        policy = self.lightning_module.policy
        named = policy.named_parameters(remove_duplicate=False)
        state["aliases"] = find_aliases(
            (name, parameter) for name, parameter in named if parameter.requires_grad
        )
        tensors = {WEIGHTS: list(self.weights(policy).items())}
        if "optimizer_states" in checkpoint:
            [optimizer] = self.optimizers
            state["optimizer_groups"] = number_groups(optimizer.param_groups)
            state["optimizer_numbers"], moments = split_moments(self.moments(policy))
            tensors |= moments
        write_checkpoint(Path(filepath), state, tensors, self)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the weights and, when training resumes, the optimizer's moments."""
        folder = Path(checkpoint_path)
        state = read_whole_state(folder)
        # Lightning calls it only after the weights have been filled.
        self.lightning_module.on_load_checkpoint(state)
        policy = self.lightning_module.policy
        fill_in_place(trained_tensors(policy), WeightFiles(str(folder / WEIGHTS)))
        if self.optimizers and "optimizer_groups" in state:
            [optimizer] = self.optimizers
            groups = keep_implementation(optimizer, {"param_groups": state["optimizer_groups"]})[
                "param_groups"
            ]
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
            files = {path.name: WeightFiles(str(path)) for path in list_moment_folders(folder)}
            self.restore_moments(policy, state["optimizer_numbers"], files)
        return state

    def weights(self, policy: Any) -> dict[str, Any]:
        """Return the policy's weights that are written, by name."""
        return trained_tensors(policy)

    def moments(self, policy: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the optimizer's state of every parameter; tensors may be sharded."""
        [optimizer] = self.optimizers
        for name, parameter in policy.named_parameters():
            if parameter in optimizer.state:
                yield name, optimizer.state[parameter]

    def restore_moments(
        self, policy: Any, numbers: dict[str, dict[str, Any]], files: dict[str, WeightFiles]
    ) -> None:
        """Set the optimizer's state of every parameter."""
        [optimizer] = self.optimizers
        for name, parameter in policy.named_parameters():
            if name not in numbers:
                continue
            optimizer.state[parameter] = dict(numbers[name])
            if "step" in numbers[name]:
                optimizer.state[parameter]["step"] = place_step(optimizer, parameter, numbers[name]["step"])
            for key, file in files.items():
                optimizer.state[parameter][key] = moment = torch.zeros_like(parameter)
                set_whole(moment, file(name))


def name_parameters(optimizer: Any, policy: Any) -> None:
    """Give an optimizer's groups the names of their parameters in the policy, by which checkpoints keep them.

    Raises:
        InputError: If it steps others too.
    """
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    for group in optimizer.param_groups:
        if not all(id(parameter) in names for parameter in group["params"]):
            raise InputError(
                "configure_optimizers must give the optimizer only weights of module.policy, which "
                "checkpoints hold, but some are others. Leave them out."
            )
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]


def keep_implementation(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's saved state, but with this machine's settings of how AdamW computes."""
    groups = [
        saved | {key: group[key] for key in IMPLEMENTATION if key in group}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return state | {"param_groups": groups}


def place_step(optimizer: Any, parameter: Any, step: Any) -> Any:
    """Return a parameter's count of steps: on its device where AdamW is fused, else in main memory."""
    if not isinstance(step, Tensor):  # bitsandbytes counts with a plain number
        return step
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return step.to(parameter.device if is_fused else "cpu", torch.float32, copy=True)


def find_aliases(named_parameters: Iterator[tuple[str, Any]]) -> dict[str, str]:
    """Return the names of tied weights that are stored under another name, and that name."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in named_parameters]
    return {module_name(name): module_name(stored) for name, stored in pairs if name != stored}


def number_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an optimizer's settings with its parameters numbered, as in its state_dict."""
    numbered, number = [], 0
    for group in groups:
        count = len(group["param_names"])
        numbered.append({**group, "params": list(range(number, number + count))})
        number += count
    return numbered
