"""GRPO of a tiny model: module, data and sampler, a callback that records steps, and slow log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StratosDataModule, TeacherRLData
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.types import PromptBatch, Rollout

TEMPERATURE = 0.7


def data(model: str, folder: Path, **options: Any) -> StratosDataModule:
    return TeacherRLData(
        source="chains",
        num_embedded_rows=8,
        tokenizer=model,
        student_tokenizer=model,
        prompts_per_step=2,
        output_dir=str(folder),
        **options,
    )


def rollout_callback(length: int = 12, **options: Any) -> RolloutCallback:
    sampling = Sampling(temperature=TEMPERATURE, max_completion_length=length)
    return RolloutCallback(sampling=sampling, **options)


def module(model: str, **options: Any) -> RLTModule:
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0)
    return RLTModule(model, **{"student": model, "group_size": 4, "optimizer": optimizer} | options)


def fit(folder: Path, rlt: RLTModule, *callbacks: Callback, **options: Any) -> Trainer:
    """Train a module with the options of a Trainer; `rollout_callback()` samples if no callback does."""
    samples = any(isinstance(callback, RolloutCallback) for callback in callbacks)
    trainer = bare_trainer(folder, *([] if samples else [rollout_callback()]), *callbacks, **options)
    trainer.fit(rlt, datamodule=data(rlt.pretrained, folder))
    return trainer


class MovedReference(Callback):
    """Moves the reference away from the policy before the first step, by a standard deviation of `size`."""

    def __init__(self, size: float) -> None:
        self.size = size

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        torch.manual_seed(1)
        for parameter in pl_module.reference.model.parameters():
            parameter.add_(self.size * torch.randn_like(parameter))


class Witness(Callback):
    """Keeps what a step saw: the batch, the gradients before clipping, the weights before and after."""

    def __init__(self) -> None:
        self.batches: list[PromptBatch] = []
        self.gradients: dict[str, Tensor] = {}
        self.weights_before: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.weights_before = {n: p.detach().clone() for n, p in pl_module.policy.named_parameters()}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.policy.named_parameters()
        self.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch)

    def one_step(self) -> tuple[StepBatch, list[Rollout]]:
        """The only step, and its rollouts."""
        [batch] = self.batches
        assert batch.rollouts is not None
        return batch.step, batch.rollouts.rollouts

    def load_policy(self, model: str) -> Any:
        """The policy as it was before the last step, without anything of ours around it."""
        policy = module(model).load(model, "float32").model
        policy.load_state_dict(self.weights_before, strict=False)
        return policy

    def require_gradients(self, policy: Any, relative: float = 1e-3) -> None:
        """The last step's gradients must be those of this model, to a part of the largest of each tensor."""
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None
            bound = relative * float(parameter.grad.abs().max()) + 1e-7
            torch.testing.assert_close(self.gradients[name], parameter.grad, atol=bound, rtol=0, msg=name)


def slow_log_probs(model: Any, prompt: list[int], scored: list[int], temperature: float) -> Tensor:
    """One sequence, full logits, nothing packed: log-probs of `scored` after `prompt`."""
    logits = model(input_ids=torch.tensor([prompt + scored])).logits[0] / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(scored)[:, None]).squeeze(1)
