"""Choose the format of a run: what the user sets, or what the models were trained in.

| | tags | system prompt |
|---|---|---|
| 1 | `tags` | `teacher_system_prompt`, `student_system_prompt` |
| 2 | what the model's folder records | what the folder records |
| 3 | the tags of the other model of the run | the row's own, else ours |

A setting that contradicts what a model was trained in is refused, unless `force_format` is true.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import (
    STUDENT_SYSTEM_PROMPT,
    TEACHER_SYSTEM_PROMPT,
    ChatFormat,
    fill_prompt,
)
from rlt_lightning.models.format import ModelFormat, Role
from rlt_lightning.models.load import load_format
from rlt_lightning.tags import STRATOS, TagStyle, style_name, tag_style
from rlt_lightning.types import InputError

SHOWN = 60  # characters of a prompt in a message


@dataclass(frozen=True)
class FormatOptions:
    """The user's settings of the format; None leaves a choice to the models.

    Args:
        tags: "stratos", "r1", or a TagStyle.
        teacher_system_prompt: The teacher's; '' for none.
        student_system_prompt: The student's, likewise.
        force_format: Use these settings although a model was trained in others.
    """

    tags: str | TagStyle | None = None
    teacher_system_prompt: str | None = None
    student_system_prompt: str | None = None
    force_format: bool = False


@dataclass(frozen=True)
class ChosenFormat:
    """The arguments of a ChatFormat, and how they were found.

    Attributes:
        options: What the user has said.
        tags: The teacher's tags; without a teacher, the student's.
        student_tags: The student's tags.
        teacher_system_prompt: None for ours.
        student_system_prompt: None for ours.
        keeps_row_prompts: Whether a row's system prompt replaces the student's.
        recorded: The format in which the student was trained; None if that is unknown.
        learner: Name of the student if it is fine-tuned.
        guessed: The models of unknown format, by role, that are asked under our prompt for want of another.
        thinks: See `ChatFormat`.
    """

    options: FormatOptions
    tags: TagStyle
    student_tags: TagStyle
    teacher_system_prompt: str | None
    student_system_prompt: str | None
    keeps_row_prompts: bool
    recorded: ModelFormat | None
    learner: str | None
    guessed: dict[Role, str]
    thinks: bool = False

    def build_format(self, tokenizer: Any, student_tokenizer: Any = None) -> ChatFormat:
        """Return the format for a tokenizer, and for the student's if that is another one."""
        prompts = (self.teacher_system_prompt, self.student_system_prompt)
        if student_tokenizer is not None:
            both = tokenizer, student_tokenizer
            return CrossTokenizerFormat(*both, self.tags, *prompts, self.student_tags, self.thinks)
        # What the user wrote is filled already. What a model records stays as rows have shown it.
        settings = tokenizer, self.tags, *prompts, self.student_tags
        return ChatFormat(*settings, fills=False, thinks=self.thinks)

    def check_rows(self, prompts: Counter[str]) -> None:
        """Compare the rows' system prompts, with their counts, with the one that a student was trained with.

        Raises:
            InputError: If the student learns from rows with another prompt than the one of its training.
        """
        if self.recorded is not None and self.learner is not None and not self.options.force_format:
            require_rows_agree(self.recorded, self.learner, prompts)

    def warn_of_guesses(self, prompts: Counter[str] | None = None) -> None:
        """Warn about each model whose format is unknown, and name the system prompt that is used for it.

        Args:
            prompts: The system prompts under which the student sees the rows, counted; None: the default.
        """
        ours: dict[Role, tuple[TagStyle, str]] = {
            "teacher": (self.tags, TEACHER_SYSTEM_PROMPT),
            "student": (self.student_tags, STUDENT_SYSTEM_PROMPT),
        }
        for role, name in self.guessed.items():
            tags, prompt = ours[role][0], fill_prompt(None, ours[role][1], ours[role][0])
            if role == "student" and prompts is not None and prompt not in prompts:
                continue
            rank_zero_warn(
                f"{name} does not record the format that it was trained in. As the {role} it gets the tags "
                f"{describe_tags(tags)} and our system prompt, {quote_prompt(prompt)}. If it was trained in "
                f"another, set --data.tags and --data.{role}_system_prompt ('' for none)."
            )


def choose_format(
    options: FormatOptions, teacher: str | None, student: str | None, learns: bool = False
) -> ChosenFormat:
    """Choose the format of a run.

    Args:
        options: What the user says.
        teacher: Name of the model that explains; None if none does.
        student: Name of the model that answers, or that scores explanations; None if none does.
        learns: Whether the model is fine-tuned: it then may have been trained for the other role before.

    Raises:
        InputError: If a setting contradicts what a model was trained in.
    """
    named = None if options.tags is None else tag_style(options.tags)
    # data.tags are the teacher's if there is one: the frozen student keeps those of its training.
    own_named = named if teacher is None or options.force_format else None
    teacher_format = None if teacher is None else load_recorded_format(teacher, "teacher", options, learns)
    student_format = None if student is None else load_recorded_format(student, "student", options, learns)
    tags = named or find_tags(teacher_format, student_format) or STRATOS
    student_tags = own_named or find_tags(student_format) or tags
    teacher_prompt, student_prompt = options.teacher_system_prompt, options.student_system_prompt
    if teacher_prompt is not None:
        teacher_prompt = fill_prompt(teacher_prompt, TEACHER_SYSTEM_PROMPT, tags)
    if student_prompt is not None:
        student_prompt = fill_prompt(student_prompt, STUDENT_SYSTEM_PROMPT, student_tags)
    if teacher_format is not None and not options.force_format:
        require_same(str(teacher), teacher_format, named, "tags")
        require_same(str(teacher), teacher_format, teacher_prompt, "teacher_system_prompt")
    if student_format is not None and not options.force_format:
        require_same(str(student), student_format, own_named, "tags")
        require_same(str(student), student_format, student_prompt, "student_system_prompt")
    if teacher_prompt is None and teacher_format is not None:
        teacher_prompt = teacher_format.system_prompt
    recorded_prompt = None if student_format is None else student_format.system_prompt
    asked: dict[Role, tuple[str | None, bool]] = {
        "teacher": (teacher, teacher_prompt is None),
        "student": (student, student_prompt is None and student_format is None),
    }
    # A student learns what its rows say. One that is asked is asked as it was trained.
    asks_by_row = learns or student_format is None or student_format.share < 1
    return ChosenFormat(
        options=options,
        tags=student_tags if teacher is None else tags,
        student_tags=student_tags,
        teacher_system_prompt=teacher_prompt,
        student_system_prompt=recorded_prompt if student_prompt is None else student_prompt,
        keeps_row_prompts=student_prompt is None and asks_by_row,
        recorded=student_format,
        learner=student if learns else None,
        guessed={role: name for role, (name, unsaid) in asked.items() if name and unsaid and not learns},
    )


def find_tags(*formats: ModelFormat | None) -> TagStyle | None:
    """Return the tags of the first format that is known."""
    return next((recorded.tags for recorded in formats if recorded is not None), None)


def require_same(name: str, recorded: ModelFormat, value: TagStyle | str | None, setting: str) -> None:
    """Check that tags or a system prompt, where they are set, are the ones of a model's training.

    Raises:
        InputError: If they are others; it shows both.
    """
    if isinstance(value, TagStyle):
        same = value == recorded.tags
        theirs, ours = f"the tags {describe_tags(recorded.tags)}", describe_tags(value)
    else:
        same = value in (None, recorded.system_prompt)
        theirs, ours = describe_prompt(recorded.system_prompt), quote_prompt(value or "")
        theirs += "" if recorded.share == 1 else f" in {recorded.share:.0%} of its rows"
    if not same:
        option = f"--data.{setting}"
        raise InputError(
            f"{name} was trained with {theirs}, but {option} gives {ours}. Leave {option} out (null) to use "
            f"it as it was trained, or add --data.force_format true to use {option} all the same."
        )


def load_recorded_format(name: str, role: Role, options: FormatOptions, learns: bool) -> ModelFormat | None:
    """Return the format that a model was trained in; None if that is unknown or of no use here.

    Raises:
        InputError: If the model was trained for the other role.
    """
    recorded = load_format(name)
    if recorded is None or recorded.role == role:
        return recorded
    if learns or options.force_format:
        return None
    does = {"teacher": "explains given solutions", "student": "answers questions"}
    raise InputError(
        f"The {role} must be a model that {does[role]}, but {name} was trained as a {recorded.role}, which "
        f"{does[recorded.role]}. Name another model, or add --data.force_format true."
    )


def require_rows_agree(recorded: ModelFormat, name: str, prompts: Counter[str]) -> None:
    """Check that the rows which a student learns from have the system prompt that it was trained with.

    Raises:
        InputError: If any has another.
    """
    others = Counter({prompt: n for prompt, n in prompts.items() if prompt != recorded.system_prompt})
    if recorded.share == 1 and others:
        [(prompt, _)] = others.most_common(1)
        raise InputError(
            f"{name} was trained with {describe_prompt(recorded.system_prompt)}, but {others.total()} of "
            f"{prompts.total()} rows have another, such as {quote_prompt(prompt)}. Add --data.force_format "
            "true to train it with those of the rows, or --data.student_system_prompt to use its own for all "
            "rows."
        )


def require_model(name: str | None) -> str:
    """Return the name of the model whose tokenizer and format are used.

    Raises:
        InputError: If there is none.
    """
    if name is None:
        raise InputError(
            "data.tokenizer must name the model whose tokenizer is used, but neither it nor the run's module "
            "names one. Set it to a folder or hub id."
        )
    return name


def quote_prompt(prompt: str) -> str:
    """Return a prompt between quotes, shortened, with its length."""
    if not prompt:
        return "none"
    if len(prompt) <= SHOWN:
        return repr(prompt)
    return f"{prompt[: SHOWN - 20]!r} … {prompt[-20:]!r} ({len(prompt)} characters)"


def describe_prompt(prompt: str) -> str:
    """Return the system prompt of a training as a part of a sentence."""
    return f"the system prompt {quote_prompt(prompt)}" if prompt else "no system prompt"


def describe_tags(tags: TagStyle) -> str:
    """Return a tag style as a message shows it."""
    name = style_name(tags)
    return name if isinstance(name, str) else f"{tags.thought_open} … {tags.solution_close}"
