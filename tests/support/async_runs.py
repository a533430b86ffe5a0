"""Runs that sample while they train, on fake workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_worker import FakeWorker
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.callbacks import Checkpoint, DynamicSampling, RolloutCallback
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.engines import IPCPush, Sampling, VLLMEngine
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.rewards import RLTReward

SAMPLING = Sampling(max_completion_length=8)


STEPS = 5  # of four per epoch


class Witness(Callback):
    """Keeps what each step was trained on, and calls `at[step]` when that step is over."""

    def __init__(self, at: dict[int, Callable[[], Any]] | None = None) -> None:
        self.at = at or {}
        self.steps: list[tuple[int, Any]] = []  # staleness and completions, by step
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        completions = [(r.problem.row, r.completion.token_ids) for r in batch.rollouts.rollouts]
        self.steps.append((int(module.step_metrics["rollout/staleness"]), completions))
        self.weights = {name: value.clone() for name, value in module.policy.state_dict().items()}
        self.at.get(module.global_step, lambda: None)()


def fit(
    model: str,
    folder: Path,
    *workers: FakeWorker,
    witness: Witness | None = None,
    resume: Path | None = None,
    steps: int = STEPS,
    every: int = 1,
    asynchronous: bool = True,
    sampling: Sampling = SAMPLING,
    max_staleness: int = 1,
    log_probs: Any = "worker",
    importance_sampling: Any = "auto",
    dynamic_sampling: DynamicSampling | None = None,
    reward: RLTReward = RLTReward(),
    data: dict[str, Any] | None = None,
    recovery_timeout_s: float = 60.0,
    **options: Any,
) -> Witness:
    """Train, and return what the steps saw."""
    witness = witness or Witness()
    engine = VLLMEngine(
        [worker.url for worker in workers],
        push=IPCPush(timeout_s=20.0),
        log_probs=log_probs,
        max_sequences=1,  # one completion at a time
        call_timeout_s=20.0,
        recovery_timeout_s=recovery_timeout_s,
    )
    rollouts = RolloutCallback(engine, sampling, asynchronous=asynchronous, dynamic_sampling=dynamic_sampling)
    saved = Checkpoint(every_n_train_steps=every, save_top_k=-1)
    trainer = bare_trainer(folder, rollouts, witness, saved, steps=steps, **options)
    module = RLTModule(
        model,
        model,
        group_size=2,
        max_staleness=max_staleness,
        importance_sampling=importance_sampling,
        reward=reward,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    datamodule = TeacherRLData(
        source="chains",
        num_embedded_rows=8 + (data or {}).get("val_rows", 0),
        tokenizer=model,
        student_tokenizer=model,
        prompts_per_step=2,
        output_dir=str(folder),
        **(data or {}),
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=None if resume is None else str(resume))
    return witness


def assert_same(*parts: Witness, whole: Witness) -> None:
    assert [step for part in parts for step in part.steps] == whole.steps
    for name, tensor in parts[-1].weights.items():
        torch.testing.assert_close(tensor, whole.weights[name], rtol=0, atol=0)
