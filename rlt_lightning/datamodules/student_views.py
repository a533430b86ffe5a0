"""Present problems and completions to several students, each in its own format.

Problems are tokenised for the first student. A further student whose tokenizer, tags or system prompt differ
reads every completion in its own format:

    completion ─┬▶ format of student 1 ─▶ ModelView ─┬▶ Rollout.views
                ├▶ format of student 2 ─▶ ModelView ─┤
                └▶ student 3, as student 1 ──────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlt_lightning.datamodules.cross_tokenizer import load_tokenizers
from rlt_lightning.datamodules.format_choice import ChosenFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.rows import parse_row
from rlt_lightning.datamodules.token_cache import describe_format, hash_value
from rlt_lightning.types import Completion, ModelView, Problem, Rollout


@dataclass(frozen=True)
class StudentView:
    """How one student reads problems and completions.

    Attributes:
        format: The contexts of the teacher and of this student.
        keeps_row_prompts: Whether a row's own system prompt replaces the student's.
    """

    format: ChatFormat
    keeps_row_prompts: bool

    def hash(self) -> str:
        """Return a hash of all that decides what the student reads."""
        return hash_value([describe_format(self.format), self.keeps_row_prompts])

    def build_problem(self, problem: Problem) -> Problem:
        """Return a problem with the pieces of this student; the teacher's prompt stays, token by token."""
        system = None
        if self.keeps_row_prompts:
            system = parse_row(
                problem.columns, self.format.tags, student_tags=self.format.student_tags
            ).system
        own = self.format.build_problem(problem.row, problem.question, problem.solution, system)
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

    def build_view(self, problem: Problem, completion: Completion) -> ModelView:
        """Return a completion as this student reads it; `problem` has this student's pieces."""
        [view] = self.format.build_rollout(problem, completion).views
        return view


class StudentViews:
    """How each student of a run reads, at least one.

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
            StudentView(
                one.build_format(*load_tokenizers(teacher, name, trust_remote_code)), one.keeps_row_prompts
            )
            for one, name in zip(chosen, names, strict=True)
        ]
        keys = [view.hash() for view in self.all] if len(self.all) > 1 else []
        # None: this student reads what the first one reads.
        self.others = [
            None if key == keys[0] else view for view, key in zip(self.all[1:], keys[1:], strict=True)
        ]
        # The problem of the last rollout, as the others read it: completions of a problem come together.
        self._last: tuple[Problem, list[Problem]] | None = None

    @property
    def formats(self) -> list[ChatFormat]:
        """Return the format of each student."""
        return [view.format for view in self.all]

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a completion to its problem, as every student reads it."""
        rollout = self.formats[0].build_rollout(problem, completion)
        if not self.others:
            return rollout
        if self._last is None or self._last[0] is not problem:
            own = [view.build_problem(problem) if view else problem for view in self.others]
            self._last = problem, own
        views = list(rollout.views)
        for view, own_problem in zip(self.others, self._last[1], strict=True):
            views.append(view.build_view(own_problem, completion) if view else rollout.views[0])
        return replace(rollout, views=tuple(views))

    def warn_of_guesses(self, prompts: Counter[str] | None = None) -> None:
        """Warn of each model of unknown format; `prompts` are those of the first student's rows, counted."""
        first = self.chosen[0]
        for one in self.chosen:
            alike = one.keeps_row_prompts == first.keeps_row_prompts and one.recorded == first.recorded
            one.warn_of_guesses(prompts if alike else None)
