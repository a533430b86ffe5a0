"""The models that score completions for a reward: one frozen student, several, or the policy itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from pathlib import PurePath
from typing import Self

from torch import Tensor

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.numerics.students import Reduction
from rlt_lightning.rollouts.step import POLICY, REFERENCE
from rlt_lightning.types import InputError, ModelView, Problem

# Names of students, with their weights or without.
StudentNames = list[str] | dict[str, float]


@dataclass(frozen=True)
class Student:
    """One model that reads completions.

    Attributes:
        model: Its name in scoring passes.
        number: Its view of a rollout, from 0.
        format: The contexts in which it reads.
        label: A short name of it for metrics and columns; empty if it is the only one.
        latest_empty: The last problem whose empty explanation it read, with the view, by `number`.
    """

    model: str
    number: int
    format: ChatFormat
    label: str = ""
    latest_empty: dict[int, tuple[Problem, ModelView]] = field(default_factory=dict, repr=False)

    def name(self, column: str) -> str:
        """Return the name of a token column that each student has."""
        return f"{column}/{self.label}" if self.label else column

    @property
    def prefix(self) -> str:
        """Return the prefix of its columns in the table: `of/LABEL/`, or '' if it is the only one."""
        return f"of/{self.label}/" if self.label else ""

    def name_columns(self, table: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return its columns by the names that they have in the table of all."""
        return {self.prefix + name: values for name, values in table.items()}


@dataclass(frozen=True)
class Students:
    """Which students score, and how their rewards become one.

    Example:
        `Students.of(None, {"a": 1.0, "b": 0.5})` has names ("a", "b") and weights (1.0, 0.5);
        `Students.of("policy", None, policy="a")` has the name "a" and the model "policy".

    Attributes:
        names: Their models; none if the reward asks no model.
        weights: One for each, above 0.
        reduction: The weighted mean of their rewards, or the smallest.
        formats: The format of each, once the data are known; one also without a student.
        model: "policy" or "reference", where that is the only student: it has no weights of its own.
        latest_empty: See `Student`.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    reduction: Reduction = "mean"
    formats: tuple[ChatFormat, ...] = ()
    model: str | None = None
    latest_empty: dict[int, tuple[Problem, ModelView]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __iter__(self) -> Iterator[Student]:
        """Iterate over the students, once `formats` are set."""
        labels = self.labels if len(self.names) > 1 else [""] * len(self.names)
        for number, (name, label) in enumerate(zip(self.names, labels, strict=True)):
            yield Student(self.model or name, number, self.formats[number], label, self.latest_empty)

    @classmethod
    def of(
        cls,
        student: str | None,
        students: StudentNames | None,
        reduction: Reduction = "mean",
        policy: str = DEFAULT_MODEL,
    ) -> Students:
        """Return the students that settings name.

        Args:
            student: The only one, or "policy" or "reference"; None if no model scores. Not read where
                `students` are named.
            students: Several, with weights or without.
            reduction: See `Students`.
            policy: Name of the model that is trained.

        Raises:
            InputError: If the settings contradict each other, or a weight cannot be one.
        """
        if reduction not in ("mean", "min"):
            raise InputError(f"model.student_reduction must be mean or min, but is {reduction!r}. Set it.")
        if students is None and student in (POLICY, REFERENCE):
            return cls((policy,), (1.0,), reduction, model=student)
        if students is None:
            return cls((student,), (1.0,), reduction) if student is not None else cls((), (), reduction)
        if student not in (None, DEFAULT_MODEL):
            raise InputError(
                f"model.student or model.students names who scores, but both are set: {student} and "
                f"{', '.join(students)}. Set one of them to null."
            )
        if not students or not {POLICY, REFERENCE}.isdisjoint(students):
            raise InputError(
                f"model.students must name frozen models, but is {list(students)}. Name a model, or set "
                "model.student to policy or reference alone."
            )
        weights = dict(students) if isinstance(students, dict) else dict.fromkeys(students, 1.0)
        for name, weight in weights.items():
            if not (isinstance(weight, (int, float)) and isfinite(weight) and weight > 0):
                raise InputError(
                    f"A weight of model.students must be a number above 0, but that of {name} is {weight}."
                )
        if reduction == "min" and len(set(weights.values())) > 1:
            raise InputError(
                "model.student_reduction min has no use for weights, but model.students gives "
                f"{weights}. List the names without weights, or set mean."
            )
        return cls(tuple(students), tuple(float(weights[name]) for name in students), reduction)

    def with_formats(self, formats: list[ChatFormat]) -> Self:
        """Return the students with the format of each."""
        return replace(self, formats=tuple(formats))

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the names of the students that have weights of their own, each once."""
        return () if self.model else tuple(dict.fromkeys(self.names))

    @property
    def first(self) -> str | None:
        """Return the first student, for whom problems and rollouts are made; None if there is none."""
        return self.names[0] if self.names else None

    @property
    def labels(self) -> list[str]:
        """Return a short name of each for metrics and columns, in letters, digits and underscores.

        It is the last part of the model's name, or as many parts as tell students apart; a student that is
        named twice gets a number.
        """
        parts = [PurePath(name).parts for name in self.names]
        longest = max(map(len, parts), default=0)
        shortened: list[str] = []
        for length in range(1, longest + 1):
            shortened = [re.sub(r"\W", "_", "_".join(part[-length:]), flags=re.ASCII) for part in parts]
            if len(set(shortened)) == len(set(self.names)):
                break
        labels: list[str] = []
        for label in shortened:
            numbered = (f"{label}_{number}" for number in count(2))
            labels.append(label if label not in labels else next(n for n in numbered if n not in labels))
        return labels


def split_student_setting(student: str | StudentNames | None) -> tuple[str | None, StudentNames | None]:
    """Return `model.student` and `model.students` of an argument that may be either."""
    return (student, None) if student is None or isinstance(student, str) else (None, student)
