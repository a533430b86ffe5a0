"""Several students: what each of them reads of a problem and of an explanation.

Problems and rollouts are made for the first student. A further one whose tokenizer, tags or system prompt
differ from the first one's gets a `View` of every rollout, in its own format:

    completion ─▶ format of student 1 ─▶ Rollout ─┐
        └───────▶ format of student 2 ─▶ View ────┴▶ Rollout.views      None: it reads what student 1 reads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlt_lightning.datamodules.format_choice import ChosenFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.retelling import tokenizers_of
from rlt_lightning.datamodules.rows import parse_row
from rlt_lightning.datamodules.tokenised import describe_format, hash_value
from rlt_lightning.types import Problem, Rollout, View


@dataclass(frozen=True)
class Reader:
    """How one student reads.

    Attributes:
        format: The contexts of the teacher and of this student.
        keeps_row_prompts: Whether a row's own system prompt replaces the student's.
    """

    format: ChatFormat
    keeps_row_prompts: bool

    def key(self) -> str:
        """Return a hash of all that decides what the student reads."""
        return hash_value([describe_format(self.format), self.keeps_row_prompts])

    def problem(self, problem: Problem) -> Problem:
        """Return a problem with the pieces of this student; the teacher's prompt stays, token by token."""
        system = None
        if self.keeps_row_prompts:
            system = parse_row(
                problem.columns, self.format.tags, student_tags=self.format.student_tags
            ).system
        own = self.format.problem(problem.row, problem.question, problem.solution, system)
        prompt, given = problem.teacher_prompt, own.think_prefix
        student_prefix = own.student_prefix
        if prompt[len(prompt) - len(given) :] != given:
            student_prefix, given = student_prefix + given, []
        return replace(
            problem,
            teacher_prefix=prompt[: len(prompt) - len(given)],
            think_prefix=given,
            student_prefix=student_prefix,
            student_suffix=own.student_suffix,
            solution_ids=own.solution_ids,
            student_system_prompt=system,
        )

    def view(self, problem: Problem, rollout: Rollout) -> View:
        """Return what this student reads of a rollout; `problem` has this student's pieces."""
        own = self.format.rollout(problem, rollout.completion)
        return View(problem, own.num_body, own.num_think, own.retold)


class Readers:
    """The readers of a run's students, at least one.

    Args:
        chosen: The format of each student; without a student, that of the model.
        teacher: Name of the teacher, or of the only model.
        students: Names of the students.
        trust_remote_code: Run code that comes with a tokenizer.

    Raises:
        InputError: If a tokenizer cannot be loaded, or has not what a student needs.
    """

    def __init__(
        self,
        chosen: Sequence[ChosenFormat],
        teacher: str,
        students: Sequence[str] = (),
        trust_remote_code: bool = False,
    ) -> None:
        self.chosen = list(chosen)
        names: Sequence[str | None] = students or [None]
        self.all = [
            Reader(one.build_format(*tokenizers_of(teacher, name, trust_remote_code)), one.keeps_row_prompts)
            for one, name in zip(chosen, names, strict=True)
        ]
        keys = [reader.key() for reader in self.all] if len(self.all) > 1 else []
        # None: this student reads what the first one reads.
        self.others = [
            None if key == keys[0] else reader for reader, key in zip(self.all[1:], keys[1:], strict=True)
        ]
        # The problem of the last rollout, as the others read it: completions of a problem come together.
        self._last: tuple[Problem, list[Problem]] | None = None

    @property
    def formats(self) -> list[ChatFormat]:
        """Return the format of each student."""
        return [reader.format for reader in self.all]

    def with_views(self, rollout: Rollout) -> Rollout:
        """Return a rollout of the first student with the views of the others."""
        if not self.others:
            return rollout
        problem = rollout.problem
        if self._last is None or self._last[0] is not problem:
            self._last = problem, [reader.problem(problem) if reader else problem for reader in self.others]
        pairs = zip(self.others, self._last[1], strict=True)
        return replace(
            rollout, views=tuple(reader.view(own, rollout) if reader else None for reader, own in pairs)
        )

    def warn_of_guesses(self, prompts: Counter[str] | None = None) -> None:
        """Warn of each model of unknown format; `prompts` are those of the first student's rows, counted."""
        first = self.chosen[0]
        for one in self.chosen:
            alike = one.keeps_row_prompts == first.keeps_row_prompts and one.recorded == first.recorded
            one.warn_of_guesses(prompts if alike else None)
