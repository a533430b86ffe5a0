"""The learning rate of every step, against its formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.datamodules import TeacherSFTData
from rlt_lightning.modules import SFTModule
from rlt_lightning.modules.optimizer import OptimizerConfig


class LearningRates(Callback):
    """Keeps the rate of each step, and writes a checkpoint after step 5."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: SFTModule, optimizer: object) -> None:
        self.values.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "five.ckpt")


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_learning_rates_follow_their_schedule(scheduler: str, tiny_model: str, tmp_path: Path) -> None:
    # 8 steps, a quarter of them warm-up: 0, 1/2 of the peak, then six steps from the peak on.
    after = {
        "constant": [1.0] * 6,
        "linear": [1 - i / 6 for i in range(6)],
        "cosine": [0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)],
    }
    optimizer = OptimizerConfig(lr=2e-3, scheduler=scheduler, warmup_frac=0.25)  # type: ignore[arg-type]

    def fit(resume: Path | None, max_epochs: int = 2) -> list[float]:
        rates = LearningRates()
        data = TeacherSFTData(tokenizer=tiny_model, num_embedded_rows=8, prompts_per_step=2)
        off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        options = {"accelerator": "cpu", "max_epochs": max_epochs, "callbacks": [rates]}
        trainer = Trainer(default_root_dir=tmp_path, plugins=[FolderCheckpointIO()], **options, **off)
        trainer.fit(SFTModule(pretrained=tiny_model, optimizer=optimizer), datamodule=data, ckpt_path=resume)
        return rates.values

    expected = [2e-3 * value for value in (0.0, 0.5, *after[scheduler])]
    assert fit(None) == pytest.approx(expected, rel=1e-6)
    assert fit(tmp_path / "five.ckpt") == pytest.approx(expected[5:], rel=1e-6)
    if scheduler == "linear":  # the schedule of a longer run is another one
        assert fit(tmp_path / "five.ckpt", max_epochs=4) == fit(None, max_epochs=4)[5:]
