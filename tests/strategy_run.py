"""A seeded RLT run under a strategy, on given completions; run as a script, in as many processes as it names.

    python tests/strategy_run.py MODEL OUTPUT STRATEGY [STEPS] [TOKENS] [CHECKPOINT]

Writes OUTPUT.safetensors, the final weights, and OUTPUT.json, the metrics of every step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import save_file

from rlt_lightning.callbacks import Checkpoint, ReferenceSync, RolloutCallback
from rlt_lightning.checkpoints import FolderCheckpointIO
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.base import OptimizerConfig
from rlt_lightning.sharding import gathered, stored_once
from rlt_lightning.strategies import FSDP2, DeepSpeed
from rlt_lightning.types import Completion

STRATEGIES: dict[str, Any] = {
    "single": lambda: dict(strategy="auto", devices=1),
    "ddp": lambda: dict(strategy="ddp", devices=2),
    "fsdp2": lambda: dict(strategy=FSDP2(), devices=2),
    "zero3": lambda: dict(strategy=DeepSpeed(stage=3), devices=2),
    "zero2": lambda: dict(strategy=DeepSpeed(stage=2), devices=2),
    "zero1": lambda: dict(strategy=DeepSpeed(stage=1), devices=2),
    "zero3_offload": lambda: dict(
        strategy=DeepSpeed(stage=3, offload_optimizer=True, offload_parameters=True), devices=2
    ),
    "zero2_offload": lambda: dict(strategy=DeepSpeed(stage=2, offload_optimizer=True), devices=2),
}


class Given(HFEngine):
    """Completions of very different lengths, made of the prompt's seed: the same on any number of ranks."""

    reports_log_probs = False

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        self.tokenizer = tokenizer

    def health(self) -> None: ...

    def update_weights(self, named_tensors: Any, policy_version: int) -> None:
        self.policy_version = policy_version

    def generate(
        self, prompts: Any, sampling: Sampling, num_completions: int, stop: str, seeds: list[int]
    ) -> list[list[Completion]]:
        groups = []
        for seed in seeds:
            random = Random(seed)
            longest = random.choice([6, 60])
            rows = [
                [random.randrange(100, 2000) for _ in range(random.randint(3, longest))]
                for _ in range(num_completions)
            ]
            groups.append([Completion(row, None, "length", seed) for row in rows])
        return groups


class Keep(Callback):
    """The metrics of every step, and the final weights."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.metrics: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.output / "initial.ckpt")
        if "SPOIL_GRADIENTS" in os.environ:
            next(pl_module.policy.parameters()).register_hook(lambda gradient: gradient * torch.nan)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        weights = {}
        for name, tensor in stored_once(pl_module.policy).items():
            with gathered([tensor]) as [whole]:
                weights[name] = whole.detach().clone().cpu()
        if trainer.is_global_zero:
            save_file(weights, self.output.with_suffix(".safetensors"))
            self.output.with_suffix(".json").write_text(json.dumps(self.metrics))


def main() -> None:
    model, output, strategy = sys.argv[1:4]
    steps, tokens = int((sys.argv[4:5] or [6])[0]), int((sys.argv[5:6] or [4096])[0])
    torch.set_num_threads(1)
    folder = Path(output).with_suffix("")
    resume = (sys.argv[6:7] or [None])[0]
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        plugins=[FolderCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[
            RolloutCallback(engine=Given(), sampling=Sampling(max_completion_length=64)),
            ReferenceSync(every_n_steps=2),
            Checkpoint(dirpath=str(folder / "checkpoints"), save_top_k=-1),
            Keep(Path(output)),
        ],
        **STRATEGIES[strategy.removesuffix("_bf16")](),
        precision="bf16-mixed" if strategy.endswith("_bf16") else "32-true",
    )
    module = RLTModule(
        teacher=model,
        student=model,
        group_size=4,
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.01, max_grad_norm=0.5),
        micro_batch_tokens=tokens,
    )
    data = StratosDataModule(
        source="arithmetic",
        num_arithmetic_rows=8,
        tokenizer=model,
        student_tokenizer=model,
        prompts_per_step=2,
        output_dir=str(folder),
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)


if __name__ == "__main__":
    main()
