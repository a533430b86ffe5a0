"""Checks of a datamodule's settings, made when it is built."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.views import ViewOptions
from rlt_lightning.types import InputError


def require_settings(data: Any) -> None:
    """Check the settings of a StratosDataModule.

    Raises:
        InputError: Naming the setting.
    """
    require_sizes(
        prompts_per_step=data.prompts_per_step,
        max_prompt_length=data.max_prompt_length,
        max_solution_length=data.max_solution_length,
        max_length=data.max_length,
        student_context=data.student_context,
        val_batch_size=data.val_batch_size,
        max_rows=data.reading.max_rows,
        num_embedded_rows=data.reading.num_embedded_rows,
    )
    require_trace_columns(data.trace_columns)
    require_held_out(data.val_rows, data.max_bad_frac)
    if not data.sources:
        raise InputError("data.source must name at least one source, but is an empty list. Name one.")
    if data.val_weights:
        raise InputError("Sources of data.val_source take no weights: all rows count. Name them only.")
    if data.task != "student_opd" and data.view != ViewOptions():
        raise InputError(
            f"data.view says what the teacher of student_opd sees, but data.task is {data.task}. Leave it "
            "out, or set data.task to student_opd."
        )
    if data.weights and data.order:
        raise InputError(
            "Sources may have weights, or data.order may be set, but not both: an order by difficulty "
            "mixes the sources in its own way. Drop one."
        )


def require_sizes(**sizes: int | None) -> None:
    """Check that sizes, where they are set, are at least 1.

    Raises:
        InputError: Naming the setting.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"data.{name} must be at least 1, but is {size}. Raise it.")


def require_trace_columns(columns: list[str]) -> None:
    """Check that columns of traces are different ones, and no column of completions.

    Raises:
        InputError: If they are not.
    """
    if len(set(columns)) != len(columns) or not columns:
        raise InputError(
            f"data.trace_columns must name one or several different columns, but is {columns}. Change it."
        )
    if "completion" in columns:
        raise InputError(
            "data.trace_columns must name columns of traces, but names completion. Name "
            f"{TRACE_COLUMN} instead: a row's completion is scored in its place."
        )


def require_held_out(val_rows: int, max_bad_frac: float) -> None:
    """Check the number of held-out rows, and the part of rows that may be unusable.

    Raises:
        InputError: Naming the setting.
    """
    if val_rows < 0:
        raise InputError(f"data.val_rows must be at least 0, but is {val_rows}. 0 holds none out.")
    if not 0 <= max_bad_frac <= 1:
        raise InputError(
            f"data.max_bad_frac must be in [0, 1], but is {max_bad_frac}. Set a part of the rows."
        )


def models_of(trainer: Trainer) -> tuple[str | None, tuple[str, ...]]:
    """Return the names of a run's trained or evaluated model, and of the frozen ones that read for it."""
    module: Any = trainer.lightning_module
    students, teacher = getattr(module, "students", None), getattr(module, "teacher_name", None)
    readers = students.names if students else (teacher,) if teacher else ()
    return getattr(module, "pretrained", None), readers
