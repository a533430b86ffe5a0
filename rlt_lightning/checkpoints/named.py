"""Save and load our checkpoint folders from strategies that shard weights.

Lightning would gather one whole state dict. `NamedCheckpoints` passes sharded tensors by name instead, and
`write_checkpoint` gathers them one by one:

    save   trainer.dump_checkpoint() → state without tensors ┐
           weights(policy)           → weights/              ├→ write_checkpoint (checkpoints/folder.py)
           moments(policy)           → exp_avg/, …           ┘
    load   read_state() → module.on_load_checkpoint() → fill_in_place(weights) → restore_moments()

A strategy overrides `weights`, `moments` and `restore_moments` where its library keeps them elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.checkpoints.folder import WEIGHTS, read_state, write_checkpoint
from rlt_lightning.checkpoints.io import module_name, moment_folders, split_moments
from rlt_lightning.models.announce import announce_reading
from rlt_lightning.models.weights import WeightFiles, fill_in_place, set_whole, trained


class NamedCheckpoints:
    """A mixin of strategies that writes and reads our checkpoints, not the sharding library's own."""

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
        state["aliases"] = aliases((name, parameter) for name, parameter in named if parameter.requires_grad)
        tensors = {WEIGHTS: list(self.weights(policy).items())}
        if "optimizer_states" in checkpoint:
            [optimizer] = self.optimizers
            state["optimizer_groups"] = numbered_groups(optimizer.param_groups)
            state["optimizer_numbers"], moments = split_moments(self.moments(policy))
            tensors |= moments
        write_checkpoint(Path(filepath), state, tensors, self)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the weights and, when training resumes, the optimizer's moments."""
        folder = Path(checkpoint_path)
        announce_reading(folder)
        state = read_state(folder)
        # Lightning calls it only after the weights have been filled.
        self.lightning_module.on_load_checkpoint(state)
        policy = self.lightning_module.policy
        fill_in_place(trained(policy), WeightFiles(str(folder / WEIGHTS)))
        if self.optimizers and "optimizer_groups" in state:
            [optimizer] = self.optimizers
            groups = keep_implementation(optimizer, {"param_groups": state["optimizer_groups"]})[
                "param_groups"
            ]
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
            files = {path.name: WeightFiles(str(path)) for path in moment_folders(folder)}
            self.restore_moments(policy, state["optimizer_numbers"], files)
        return state

    def weights(self, policy: Any) -> dict[str, Any]:
        """Return the policy's weights that are written, by name."""
        return trained(policy)

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
            optimizer.state[parameter]["step"] = step_for(optimizer, parameter, numbers[name]["step"])
            for key, file in files.items():
                optimizer.state[parameter][key] = moment = torch.zeros_like(parameter)
                set_whole(moment, file(name))


# Settings of how an optimizer computes. They depend on the machine, not on the run.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def keep_implementation(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's saved state, but with this machine's settings of how AdamW computes."""
    groups = [
        saved | {key: group[key] for key in IMPLEMENTATION if key in group}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return state | {"param_groups": groups}


def step_for(optimizer: Any, parameter: Any, step: Any) -> Any:
    """Return a parameter's own count of steps: on its device where AdamW is fused, else in main memory."""
    if not isinstance(step, Tensor):  # bitsandbytes counts with a plain number
        return step
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return step.to(parameter.device if is_fused else "cpu", torch.float32, copy=True)


def aliases(named_parameters: Iterator[tuple[str, Any]]) -> dict[str, str]:
    """Return the names of tied weights that are stored under another name, and that name."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in named_parameters]
    return {module_name(name): module_name(other) for name, other in pairs if name != other}


def numbered_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an optimizer's settings with its parameters numbered, as in its own state_dict."""
    numbered, number = [], 0
    for group in groups:
        count = len(group["param_names"])
        numbered.append({**group, "params": list(range(number, number + count))})
        number += count
    return numbered
