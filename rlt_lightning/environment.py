"""What a process that trains sets up before it starts, from the command line or from a script."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from rlt_lightning.checkpoints.io import NamedCheckpoints
from rlt_lightning.models.load import require_model_name
from rlt_lightning.strategies import NAMED
from rlt_lightning.types import InputError

# Arguments of Lightning's Trainer that a run has unless others are set.
TRAINER_DEFAULTS: dict[str, Any] = {
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # our loader distributes the rows itself
}
# Warnings of other packages that say nothing about the user's run.
STRAY = (
    # Our loaders make batches of lists and want no workers.
    ".*does not have many workers.*",
    # Our checkpoint callback saves at the end of a step.
    ".*Using `?ModelCheckpoint`? with manual optimization.*",
    # The folder of a resumed run is not empty.
    ".*exists and is not empty.*",
    ".*have overridden `transfer_batch_to_device`.*",
    # No validation set was asked for.
    ".*Total length of `list` across ranks is zero.*",
    ".*defined a `validation_step` but have no `val_dataloader`.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*gradient_checkpointing_enable` is deprecated.*",
    # DeepSpeed calls these two.
    ".*all_gather_into_tensor.*deprecated.*",
    ".*reduce_scatter_tensor.*deprecated.*",
)


# Of wandb: command line, terminal output, code, host and git remote stay here: each may hold a secret.
WANDB = {
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_HOST": "-",
    "WANDB_X_DISABLE_META": "true",
}


def quiet_third_parties() -> None:
    """Silence tips, hardware lists and warnings that say nothing about the user's run."""
    for name, value in {"TOKENIZERS_PARALLELISM": "false", **WANDB}.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed warns
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # It tells of a kernel that it has not found, even where nothing is quantised.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for pattern in STRAY:
        warnings.filterwarnings("ignore", pattern)


def require_known_strategy(strategy: Any) -> None:
    """Check that steps of several micro-batches, and our checkpoints, work under a strategy."""
    known = isinstance(strategy, (NamedCheckpoints, DDPStrategy, SingleDeviceStrategy))
    if not known and strategy not in ("auto", "ddp", *NAMED):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise InputError(
            f"trainer.strategy must be one of auto, ddp, {', '.join(NAMED)}, but is {name}. For weights in "
            "shards use fsdp2 or deepspeed_stage_3 (docs/scaling.md)."
        )


def require_one_batch_size(accumulate_grad_batches: int) -> None:
    """Check that a step is one batch of the data."""
    if accumulate_grad_batches != 1:
        raise InputError(
            "A step is one batch, so trainer.accumulate_grad_batches must be 1, but is "
            f"{accumulate_grad_batches}. Set data.prompts_per_step to the problems of a step, and bound "
            "memory by model.micro_batch_tokens, which does not change the step."
        )


def require_own_clipping(gradient_clip_val: float | None) -> None:
    """Check that gradients are not clipped by the trainer, which cannot where a module steps by itself."""
    if gradient_clip_val:
        raise InputError(
            f"trainer.gradient_clip_val must stay unset, but is {gradient_clip_val}. Set "
            "model.optimizer.max_grad_norm instead."
        )


def require_accelerator(accelerator: Any) -> None:
    """Check that a GPU is there if one is asked for."""
    if accelerator in ("gpu", "cuda") and not (
        torch.cuda.is_available() or torch.backends.mps.is_available()
    ):
        raise InputError(
            f"trainer.accelerator may be {accelerator} only where PyTorch sees a GPU, but PyTorch "
            f"{torch.__version__} sees none. Set it to cpu, or install a PyTorch for the GPU's driver "
            "(docs/gpu.md)."
        )


def require_models(module: Any) -> None:
    """Check the names of a module's models, as far as that needs no hub, before anything is made.

    Raises:
        InputError: If one is a folder that does not exist, or an embedded model misspelled.
    """
    students = getattr(getattr(module, "students", None), "names", ())
    for name in (getattr(module, "pretrained", None), getattr(module, "teacher_name", None), *students):
        if isinstance(name, str):
            require_model_name(name)
