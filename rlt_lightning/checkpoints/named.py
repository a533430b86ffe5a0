"""State dicts in which optimizer states have their parameters' names, whatever the strategy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlt_lightning.checkpoints.folder import WEIGHTS, read_state, write_checkpoint
from rlt_lightning.checkpoints.io import full_name, moment_folders, split_moments
from rlt_lightning.models.weights import WeightFiles, fill_in_place, set_whole, trained


class NamedCheckpoints:
    """Writes and reads our `checkpoints`, which every strategy can go on from, not the library's own."""

    lightning_module: Any
    optimizers: list[Any]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: weights are written tensor by tensor."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: moments are written tensor by tensor."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Meet, and write."""
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
        """Fill weights and, to go on training, moments."""
        folder = Path(checkpoint_path)
        state = read_state(folder)
        self.lightning_module.on_load_checkpoint(state)  # Lightning calls it too late
        policy = self.lightning_module.policy
        fill_in_place(trained(policy), WeightFiles(str(folder / WEIGHTS)))
        if self.optimizers and "optimizer_groups" in state:
            [optimizer] = self.optimizers
            for group, saved in zip(optimizer.param_groups, state["optimizer_groups"], strict=True):
                group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
            files = {path.name: WeightFiles(str(path)) for path in moment_folders(folder)}
            self.restore_moments(policy, state["optimizer_numbers"], files)
        return state

    def weights(self, policy: Any) -> dict[str, Any]:
        """What is written of the policy's weights, by name."""
        return trained(policy)

    def moments(self, policy: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """The optimizer's state of every parameter, by name; tensors may be sharded."""
        [optimizer] = self.optimizers
        for name, parameter in policy.named_parameters():
            if parameter in optimizer.state:
                yield name, optimizer.state[parameter]

    def restore_moments(
        self, policy: Any, numbers: dict[str, dict[str, Any]], files: dict[str, WeightFiles]
    ) -> None:
        """Give the optimizer the state of every parameter."""
        [optimizer] = self.optimizers
        for name, parameter in policy.named_parameters():
            if name not in numbers:
                continue
            optimizer.state[parameter] = dict(numbers[name])
            for key, file in files.items():
                optimizer.state[parameter][key] = moment = torch.zeros_like(parameter)
                set_whole(moment, file(name))


def aliases(named_parameters: Iterator[tuple[str, Any]]) -> dict[str, str]:
    """Names of tied weights, and the names that they are stored under."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in named_parameters]
    return {full_name(name): full_name(other) for name, other in pairs if name != other}


def numbered_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's settings with its parameters numbered, as its own state_dict has them."""
    numbered, number = [], 0
    for group in groups:
        count = len(group["param_names"])
        numbered.append({**group, "params": list(range(number, number + count))})
        number += count
    return numbered
