"""The columns of a step's table: the class of a column, its kind, says what becomes of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor


@dataclass(frozen=True)
class Column:
    """A column of one number per row.

    Attributes:
        name: Its name.
        training: What its mean is called among the metrics of training; '': it is not logged.
        validation: The same in validation.
        files: What it is called in files; '': it is not written.
    """

    name: str = ""
    training: ClassVar[str] = ""
    validation: ClassVar[str] = ""
    files: ClassVar[str] = ""


class Total(Column):
    """What a completion is worth."""

    training, validation, files = "reward/mean", "reward/val_mean", "reward"


class Term(Column):
    """A term of the reward."""

    training, validation, files = "reward/{}", "reward/val_{}", "{}_reward"


class Level(Column):
    """A figure beside the reward."""

    training, validation, files = "reward/{}", "reward/val_{}", "{}"


class Log(Column):
    """A figure that is logged, in training only, under its own name."""

    training = "{}"


class Record(Column):
    """A figure that is written to files."""

    files = "{}"


class Group(Column):
    """A number for `Reward.score`, which compares the completions of a group by it."""


class Text(Column):
    """What a `TextReward` has found in each text; a list, which stays on its rank."""


REWARD = Total()
Table = dict[Column, Tensor]


def columns_of(table: Mapping[Column, Tensor], kind: type[Column]) -> dict[str, Tensor]:
    """Return the columns of a kind, by their own names."""
    return {column.name: values for column, values in table.items() if isinstance(column, kind)}


def name_columns(table: Table, use: Literal["training", "validation", "files"]) -> dict[str, Tensor]:
    """Return the columns that have a name for this use, by it; a name that is taken raises an error."""
    named: dict[str, Tensor] = {}
    for column, values in table.items():
        if pattern := getattr(column, use):
            named = dict(**named, **{pattern.format(column.name): values})
    return named
