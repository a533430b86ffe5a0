"""A callback as users write them: in every hook it logs, without a batch size, and reads the batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.types import Batch


class EveryHook(Callback):
    """Log 1 under each hook's name and, where a batch has been worked on, its mean reward.

    `HOOK/first` is 1 in the first batch and 0 in the others: its mean over them is the part of the first.
    """

    def __init__(self) -> None:
        self.called: set[str] = set()

    def call(self, name: str, trainer: Any, module: Any, *others: Any) -> None:
        """Log in a hook."""
        self.called.add(name)
        [batch] = [value for value in others if isinstance(value, Batch)] or [None]
        ended = batch is not None and name.endswith("end")
        step = getattr(batch, "step", None)
        assert not ended or isinstance(step, StepBatch) or name == "on_test_batch_end"
        if _FxValidator.functions.get(name) is None:
            return
        module.log(f"hooks/{name}", 1.0, sync_dist=True)
        if batch is not None:
            number = next(value for value in others if type(value) is int)
            module.log(
                f"hooks/{name}/first", float(number == 0), on_step=False, on_epoch=True, sync_dist=True
            )
        if ended and step is not None:
            module.log(f"hooks/{name}/reward", step.rewards[step.logged].mean(), sync_dist=True)


def build_hook(name: str) -> Any:
    """Return the method of a hook."""
    return lambda self, trainer, module, *others: self.call(name, trainer, module, *others)


for hook in [name for name in dir(Callback) if name.startswith("on_")]:
    setattr(EveryHook, hook, build_hook(hook))
