"""What a process that trains sets up before it starts, from the command line or from a script."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from rlt_lightning.checkpoints.io import NamedCheckpoints
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.rewards import Reward
from rlt_lightning.pretrained import require_model_name
from rlt_lightning.types import InputError

# Arguments of Lightning's Trainer that a run has unless others are set.
TRAINER_DEFAULTS: dict[str, Any] = {
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # our loader distributes the rows itself
}
EXAMPLES = {"optimizer": "OptimizerConfig(lr=1e-6)", "reward": "RLTReward()"}
# Warnings of other packages that say nothing about the user's run.
STRAY = (
    # Our loaders make batches of lists and want no workers.
    ".*does not have many workers.*",
    # Our checkpoint callback saves at the end of a step.
    ".*Using `?ModelCheckpoint`? with manual optimization.*",
    # Scores lie in the batch, where the writer takes them.
    ".*predict returned None.*",
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


def find_global_rank() -> int:
    """Return the rank of this process, which its launcher has set; 0 before anything is launched."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def require_known_strategy(strategy: Any) -> None:
    """Check that steps of several micro-batches, and our checkpoints, work under a strategy."""
    known = isinstance(strategy, (NamedCheckpoints, DDPStrategy, SingleDeviceStrategy))
    if not known and strategy not in ("auto", "ddp"):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise InputError(
            f"trainer.strategy must be auto, ddp or an overlay's, but is {name}. For weights in shards add "
            "--config overlays/fsdp2 or overlays/zero3; in a script take FSDP2() or "
            "DeepSpeed(stage=3) of rlt_lightning.strategies. docs/scaling.md lists all overlays."
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


def name_arguments(text: str) -> str:
    """Return a message of the command line as a script needs it: arguments in place of settings and options.

    `data.prompts_per_step=2` is `prompts_per_step=2`, `--ckpt_path last` is `ckpt_path='last'`, and `rlt
    validate` is `Trainer.validate`.
    """
    text = re.sub(r"\brlt (fit|validate|predict|test)\b(?! --)", r"Trainer.\1", text)
    text = re.sub(r"(?<![\w`])--(?:\w+\.)*(\w+) (true|false)\b", lambda m: f"{m[1]}={m[2].title()}", text)
    text = re.sub(r"(?<![\w`])--(?:\w+\.)*(\w+) (last|best)\b", r"\1='\2'", text)
    text = re.sub(r"(?<![\w`-])--(?!config\b)(?:\w+\.)*(\w+)(?![\w-])", r"\1", text)
    return re.sub(r"(?<![\w./])(?:--)?(?:model|data|rollouts|trainer)\.([a-z_]\w*(?:\.\w+)*)", r"\1", text)


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Let a user's mistake inside the block, and our warnings, name the arguments of a script."""
    show = warnings.showwarning

    def show_arguments(message: Warning | str, *where: Any, **more: Any) -> None:
        is_ours = type(message) is UserWarning
        show(UserWarning(name_arguments(str(message))) if is_ours else message, *where, **more)

    warnings.showwarning = show_arguments
    try:
        yield
    except InputError as error:
        raise type(error)(name_arguments(str(error))) from error.__cause__
    finally:
        warnings.showwarning = show


def require_parts(module: Any, data: Any) -> None:
    """Check what a script hands to `fit`: a module with objects of the right classes, and a datamodule.

    Raises:
        InputError: Naming the argument.
    """
    if not isinstance(module, LightningModule):
        raise InputError(
            f"Trainer.fit needs a module and then a datamodule, but the first is {describe(module)}. Write "
            "fit(module, data)."
        )
    if not isinstance(data, LightningDataModule):
        raise InputError(
            f"Trainer.fit needs a datamodule after the module, but got {describe(data)}. Give it "
            "StratosDataModule(rows)."
        )
    kinds = {"optimizer_config": ("optimizer", OptimizerConfig), "reward": ("reward", Reward)}
    for attribute, (name, kind) in kinds.items():
        value = getattr(module, attribute, None)
        if value is not None and not isinstance(value, kind):
            raise InputError(
                f"{name} must be an object such as {EXAMPLES[name]}, but is {describe(value)}. Make one."
            )


def require_callbacks(callbacks: Iterable[Any]) -> None:
    """Check that callbacks are objects.

    Raises:
        InputError: Naming the first that is none.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            made = f" Write {callback.__name__}()." if isinstance(callback, type) else " Correct it."
            raise InputError(f"callbacks must be callback objects, but one is {describe(callback)}.{made}")


def describe(value: Any) -> str:
    """Return what a value is, in words."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def require_models(module: Any) -> None:
    """Check the names of a module's models, as far as that needs no hub, before anything is made.

    Raises:
        InputError: If one is a folder that does not exist, or an embedded model misspelled.
    """
    students = getattr(getattr(module, "students", None), "names", ())
    for name in (getattr(module, "pretrained", None), getattr(module, "teacher_name", None), *students):
        if isinstance(name, str):
            require_model_name(name)
