"""Jobs of `ranks` under a GPU's rules: runs in which every reduced tensor must lie on the root device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device_rules import Places, Refusing, rules_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from strategy_run import STRATEGIES, Given
from torch.distributed.fsdp._fully_shard import _fully_shard

from rlt_lightning.callbacks import EvaluateEvery, ReferenceSync, RolloutCallback
from rlt_lightning.datamodules import StratosDataModule
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import RLTModule, SFTModule

STEPS = 2


class Watched(Callback):
    """Looks, once the run has begun, where the module and its models are; and refuses what NCCL refuses."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.refusing: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.refusing = trainer.strategy.reduce = Refusing(trainer.strategy.reduce, self.places)  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        root = trainer.strategy.root_device
        assert root.index is not None
        assert pl_module.device == root
        assert pl_module.phase.device == root
        frozen = []
        if isinstance(pl_module, RLTModule):
            frozen = [
                one.model for one in (*pl_module.student_models, pl_module.reference) if one is not None
            ]
            assert frozen
        for model in (pl_module.policy, *frozen):
            for name, buffer in model.named_buffers():
                assert self.places.has(buffer), f"buffer {name} is in main memory"

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert self.refusing.number > (3 * STEPS if trainer.world_size > 1 else 0)


@contextmanager
def devices_with_numbers(strategy: str) -> Iterator[None]:
    """Let the root device of rank n be cpu:n, also where Lightning, FSDP2 and DeepSpeed choose it."""

    def parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", i) for i in range(int(devices))]

    name = f"cpu:{os.environ.get('LOCAL_RANK', '0')}"
    with (
        patch.object(CPUAccelerator, "get_parallel_devices", staticmethod(parallel_devices)),
        patch.object(_fully_shard, "_get_device_from_mesh", lambda mesh: torch.device(name)),
    ):
        if strategy not in ("zero1", "zero2"):
            yield
            return
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed.accelerator import get_accelerator

        with patch.object(type(get_accelerator()), "device_name", lambda self, index=None: name):
            yield


def run_ruled(rank: int, model: str, folder: str, strategy: str, method: str) -> None:
    """Train for two steps, with validation.

    Args:
        rank: Of this process.
        model: The small model.
        folder: The run folder.
        strategy: One of STRATEGIES.
        method: rlt or sft.
    """
    with devices_with_numbers(strategy), rules_of(torch.device("cpu", rank)) as places:
        fit(model, folder, strategy, method, Watched(places))


def fit(model: str, folder: str, strategy: str, method: str, watched: Watched) -> None:
    """Fit a module of the method."""
    options: dict[str, Any] = dict(
        source="arithmetic", num_embedded_rows=8, val_rows=2, val_batch_size=2, prompts_per_step=2
    )
    module: Any = RLTModule(teacher=model, student=model, group_size=4)
    sampling = Sampling(max_completion_length=16)
    callbacks: list[Callback] = [
        RolloutCallback(engine=Given(False), sampling=sampling),
        ReferenceSync(every_n_steps=1),
    ]
    if method == "rlt":
        options |= dict(student_tokenizer=model)
    else:
        module = SFTModule(pretrained=model)
        options |= dict(task="student_sft")
        callbacks = [EvaluateEvery(1, {"arithmetic": None}, sampling, max_rows=2)]
    chosen = STRATEGIES[strategy]()
    if strategy == "single":
        chosen["strategy"] = SingleDeviceStrategy(torch.device("cpu", 0))
    trainer = Trainer(
        default_root_dir=Path(folder),
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=1,
        use_distributed_sampler=False,
        callbacks=[*callbacks, watched],
        **chosen,
    )
    trainer.fit(module, datamodule=StratosDataModule(tokenizer=model, output_dir=folder, **options))
