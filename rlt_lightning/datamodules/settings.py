"""Checks of a datamodule's settings, made when it is built."""

from __future__ import annotations

from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.types import InputError


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
