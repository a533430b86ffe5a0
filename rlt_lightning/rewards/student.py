"""The student: the model that scores completions for a reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.rollouts.step import POLICY, REFERENCE
from rlt_lightning.types import ModelView, Problem


@dataclass(eq=False)
class Student:
    """The model that scores completions, with the contexts in which it reads them.

    Example:
        `Student.of("a")` is the frozen model a. `Student.of("policy", policy="a")` has the name "a" too, but
        the model "policy".

    Attributes:
        name: The model whose tokenizer and format it has; None if the reward asks no model.
        model: Its name in scoring passes: "policy", "reference" or its own.
        format: The contexts of teacher and student, once the data are known; one also without a student.
        latest_empty: The last problem whose empty explanation it read, with its view.
    """

    name: str | None
    model: str = ""
    format: ChatFormat = field(default=None, repr=False)  # type: ignore[assignment]
    latest_empty: tuple[Problem, ModelView] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, setting: str | None, policy: str = DEFAULT_MODEL, chat_format: ChatFormat | None = None
    ) -> Self:
        """Return the student that a setting names.

        Args:
            setting: A frozen model, "policy" or "reference"; None if no model scores.
            policy: Name of the model that is trained.
            chat_format: Its contexts, if they are known.
        """
        name = policy if setting in (POLICY, REFERENCE) else setting
        return cls(name, setting or "", chat_format)  # type: ignore[arg-type]

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return its name, unless it is the policy or its reference."""
        return () if self.name is None or self.model in (POLICY, REFERENCE) else (self.name,)
