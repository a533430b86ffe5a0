"""Checks of a run before it trains: its length, rows, strategy, precision and settings."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from rlt_lightning.checkpoints.io import NamedCheckpoints
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.strategies import NAMED
from rlt_lightning.types import InputError


def count_steps(
    steps_per_epoch: int, max_steps: int, max_epochs: int | None, limit_train_batches: int | float | None
) -> int:
    """Return the optimizer steps of a run with these settings of a trainer.

    Raises:
        InputError: If they do not say how long it is, or there is no step.
    """
    limit = limit_train_batches
    if limit is not None:
        steps_per_epoch = (
            min(steps_per_epoch, limit) if isinstance(limit, int) else int(steps_per_epoch * limit)
        )
    by_epochs = [max_epochs * steps_per_epoch] if max_epochs not in (None, -1) else []
    by_steps = [max_steps] if max_steps != -1 else []
    steps = min(by_epochs + by_steps, default=0)
    if steps < 1:
        raise InputError(
            f"A run must be at least one step long, but trainer.max_steps is {max_steps}, max_epochs "
            f"{max_epochs} and limit_train_batches {limit}. Set one of them; trainer.max_time ends it early."
        )
    return steps


def require_same_rows(data: StratosDataModule, before: list[str]) -> None:
    """Check that a resumed run trains on the rows of its checkpoint.

    Args:
        data: The data.
        before: The checkpoint's `fingerprint_rows`.

    Raises:
        InputError: If a source has other rows, or has them in another order.
    """
    sources = zip(data.sources, before, data.fingerprint_rows(), strict=False)
    if changed := [str(source) for source, old, new in sources if old != new]:
        raise InputError(
            "A resumed run must have the rows of its checkpoint, in their order, but the training rows of "
            f"{', '.join(changed)} are not those: some would come twice, others never. Restore data.source, "
            "or start a new run from the model that rlt export makes of the checkpoint."
        )


def require_even_rows(trainer: Any, cause: str) -> None:
    """Check that all ranks have equally many held-out rows in each batch, where they wait for each other.

    Args:
        trainer: The trainer, with its data.
        cause: Why they wait, for the message.

    Raises:
        InputError: If they have not.
    """
    data, world_size = get_stratos_data(trainer), trainer.world_size
    rows, batch_size = len(data.val_items), data.val_batch_size
    if rows and trainer.limit_val_batches and (rows % world_size or batch_size % world_size):
        raise InputError(
            f"With {cause} for {world_size} processes, the held-out rows and data.val_batch_size must be "
            f"multiples of that, but are {rows} and {batch_size}. Change data.val_rows or "
            "data.val_batch_size."
        )


def require_strategy(strategy: Any) -> None:
    """Check that steps of several micro-batches, checkpoints and our ranks work under a strategy.

    Raises:
        InputError: If they do not: the numbers would be wrong.
    """
    known = isinstance(strategy, (NamedCheckpoints, DDPStrategy, SingleDeviceStrategy))
    if not known or getattr(strategy, "_start_method", "popen") != "popen":
        raise InputError(
            f"strategy must be one of auto, ddp, {', '.join(NAMED)}, but is {type(strategy).__name__} of "
            "Lightning, in a form that does not work here. For weights in shards use fsdp2 or "
            "deepspeed_stage_3 (docs/hardware.md)."
        )


def require_whole_steps(trainer: Any) -> None:
    """Refuse Lightning's clipping and accumulation: the module steps its optimizer itself."""
    settings = {"gradient_clip_val": 0, "gradient_clip_algorithm": None, "accumulate_grad_batches": 1}
    named = [f"trainer.{name}" for name, off in settings.items() if getattr(trainer, name) not in (None, off)]
    if named:
        raise InputError(
            f"{' and '.join(named)} must not be set, since a module clips and divides its step itself. Set "
            "model.optimizer.max_grad_norm, the norm of the gradient, and model.micro_batch_tokens, the "
            "tokens of a forward; data.prompts_per_step is the size of a step."
        )


def require_precision(precision: str) -> None:
    """Refuse a precision in which training does not work."""
    if precision not in ("32-true", "bf16-mixed"):
        raise InputError(
            f"trainer.precision must be 32-true or bf16-mixed, but is {precision}. For weights in half "
            "precision set model.dtype to bfloat16."
        )


def require_dtype(dtype: str, precision: str, deepspeed: bool, trains: bool) -> None:
    """Refuse number types in which training does not work.

    Args:
        dtype: Type of the trained model's weights.
        precision: That of the trainer.
        deepspeed: Whether the strategy is DeepSpeed's.
        trains: Whether the run trains.
    """
    require_precision(precision)
    if trains and dtype == "float16":
        raise InputError(
            "model.dtype of a trained model must be float32 or bfloat16, but is float16, in which small "
            "numbers of AdamW are 0. Set it to bfloat16."
        )
    if deepspeed and precision == "32-true" and dtype != "float32":
        raise InputError(
            f"Under DeepSpeed model.dtype must be float32 with precision 32-true, but is {dtype}. Set "
            "trainer.precision to bf16-mixed: models then run in bfloat16."
        )


def require_same_settings(settings: dict[str, tuple[Any, Any]]) -> None:
    """Check that a run has the settings of its checkpoint.

    Args:
        settings: The checkpoint's value and the run's, by name.

    Raises:
        InputError: If one differs.
    """
    for setting, (theirs, ours) in settings.items():
        if theirs != ours:
            raise InputError(
                f"The checkpoint's run must have the same {setting} as this one, but had {theirs}, and "
                f"this one has {ours}. Set it as it was, or start from the model that rlt export makes."
            )


def require_whole_models(offload_frozen: bool, sharded: bool) -> None:
    """Check that no strategy shards the frozen models that are to be moved.

    Raises:
        InputError: If one does.
    """
    if offload_frozen and sharded:
        raise InputError(
            "model.offload_frozen is for whole models, but this strategy shards them. Set it to false; "
            "--config hardware/cpu_offload keeps shards in main memory."
        )
