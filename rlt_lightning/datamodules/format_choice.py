"""Choose the format of a run: what the user sets, what the models were trained in, or what rows show.

| | tags | system prompt |
|---|---|---|
| 1 | `tags` | `teacher_system_prompt`, `student_system_prompt` |
| 2 | what the model's folder records | what the folder records |
| 3 | the tags of `format_from` | the student's: the one of `format_from` |
| 4 | the tags of the other model of the run | the row's own, else ours |

A setting that contradicts what a model was trained in is refused, unless `force_format` is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import (
    STUDENT_SYSTEM_PROMPT,
    TEACHER_SYSTEM_PROMPT,
    ChatFormat,
    fill_prompt,
)
from rlt_lightning.datamodules.rows import parse_row
from rlt_lightning.datamodules.sources import SourceReader, read_rows
from rlt_lightning.models.format import ModelFormat, Role
from rlt_lightning.models.load import load_format
from rlt_lightning.tags import STRATOS, TAG_STYLES, TagStyle, style_name, tag_style
from rlt_lightning.types import BadRowError, InputError

ROWS_READ = 1000  # of format_from
SHOWN = 60  # characters of a prompt in a message


@dataclass(frozen=True)
class FormatOptions:
    """The user's settings of the format; None leaves a choice to the models.

    Args:
        tags: "stratos", "r1", or a TagStyle.
        teacher_system_prompt: The teacher's; '' for none, @FILE for the text of a file.
        student_system_prompt: The student's, likewise.
        format_from: Rows off which the student's tags and system prompt are read: a file, folder or hub id.
        force_format: Use these settings although a model was trained in others.
        group: What stands before the names of these settings on the command line.
        written: The teacher's tags, if another student has decided them; no setting.
    """

    tags: str | TagStyle | None = None
    teacher_system_prompt: str | None = None
    student_system_prompt: str | None = None
    format_from: str | None = None
    force_format: bool = False
    group: str = "--data."
    written: TagStyle | None = None

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> FormatOptions:
        """Return the options among the parsed settings of a datamodule."""
        found = {
            field.name: settings[field.name] for field in fields(FormatOptions) if field.name in settings
        }
        if isinstance(found["tags"], Mapping):
            found["tags"] = TagStyle(**found["tags"])
        return FormatOptions(**found)

    def name(self, setting: str) -> str:
        """Return what a setting is called on the command line."""
        return self.group + setting

    def require_files(self) -> None:
        """Raise InputError if a prompt's @FILE cannot be read, or `format_from` is a path without rows."""
        self.read_files()
        if self.format_from is not None:
            SourceReader().open(self.format_from)

    def read_files(self) -> FormatOptions:
        """Return the options with each @FILE replaced by the text of the file.

        Raises:
            InputError: If a file cannot be read.
        """
        names = ("teacher_system_prompt", "student_system_prompt")
        teacher, student = (read_prompt(self.name(name), getattr(self, name)) for name in names)
        return replace(self, teacher_system_prompt=teacher, student_system_prompt=student)


@dataclass(frozen=True)
class ChosenFormat:
    """The arguments of a ChatFormat, and how they were found.

    Attributes:
        options: What the user has said.
        tags: The teacher's tags; without a teacher, the student's.
        student_tags: The student's tags.
        teacher_system_prompt: None for ours.
        student_system_prompt: None for ours.
        keeps_row_prompts: Whether a row's own system prompt replaces the student's.
        recorded: The format in which the student was trained; None if that is unknown.
        learner: Name of the student if it is fine-tuned.
        guessed: The models of unknown format, by role, that are asked under our prompt for want of another.
        thinks: See `ChatFormat`.
        readers: The models that read in the format of another one, and the formats of their training.
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
    readers: tuple[tuple[str, ModelFormat], ...] = ()

    def build_format(self, tokenizer: Any, student_tokenizer: Any = None) -> ChatFormat:
        """Return the format for a tokenizer, and for the student's if that is another one."""
        prompts = (self.teacher_system_prompt, self.student_system_prompt)
        if student_tokenizer is not None:
            both = tokenizer, student_tokenizer
            return CrossTokenizerFormat(*both, self.tags, *prompts, self.student_tags, self.thinks)
        # What the user wrote is filled already. What a model records stays as rows have shown it.
        own = tokenizer, self.tags, *prompts, self.student_tags
        return ChatFormat(*own, fills=False, thinks=self.thinks)

    def check_rows(self, prompts: Counter[str]) -> None:
        """Compare the rows' system prompts, with their counts, with the one that a student was trained with.

        Raises:
            InputError: If the student learns from rows with another prompt than the one of its training, or a
                reader would read them so.
        """
        for name, trained in self.readers:
            others = [prompt for prompt in prompts if prompt != trained.system_prompt]
            if trained.tags != self.student_tags or (trained.share == 1 and others):
                shown = others[0] if others else trained.system_prompt
                raise InputError(
                    "The scorer reads in the format of the student that thinks: tags "
                    f"{describe_tags(self.student_tags)}, {describe_prompt(shown)}. But {name} was trained "
                    f"with tags {describe_tags(trained.tags)}, {describe_prompt(trained.system_prompt)}. "
                    f"Name another model.student, or add {self.options.name('force_format')} true."
                )
        if self.recorded is not None and self.learner is not None and not self.options.force_format:
            require_rows_agree(self.recorded, self.learner, prompts)

    def warn_of_guesses(self, prompts: Counter[str] | None = None) -> None:
        """Warn about each model whose format is unknown, and name the system prompt that is used for it.

        Args:
            prompts: The system prompts under which the student sees the rows, counted; None: the default.
        """
        name_of = self.options.name
        default = fill_prompt(None, STUDENT_SYSTEM_PROMPT, self.student_tags)
        prompt = quote_prompt(fill_prompt(None, TEACHER_SYSTEM_PROMPT, self.tags))
        tags, student_tags = describe_tags(self.tags), describe_tags(self.student_tags)
        formats = {
            "teacher": f"the tags {tags} and our system prompt, {prompt}",
            "student": f"the tags {student_tags} and our system prompt, {quote_prompt(default)}",
        }
        guessed = dict(self.guessed)
        if prompts is not None and default not in prompts:
            guessed.pop("student", None)
        for name in dict.fromkeys(guessed.values()):
            roles = [role for role in guessed if guessed[role] == name]
            found = " and ".join(f"as the {role} {formats[role]}" for role in roles)
            settings = [name_of("tags"), *(name_of(f"{role}_system_prompt") for role in roles)]
            rows = f", or {name_of('format_from')} to rows that it was trained on"
            rank_zero_warn(
                f"{name} does not record the format that it was trained in. It gets {found}. If it was "
                f"trained with others, set {' and '.join(settings)} ('' for none, @FILE for the text of a "
                f"file){rows if 'student' in roles else ''}."
            )


def choose_formats(
    options: FormatOptions, teacher: str, students: Sequence[str], learns: bool = False
) -> list[ChosenFormat]:
    """Choose the format for each student of a run, at least one; the teacher writes for the first.

    Raises:
        InputError: See `choose_format`.
    """
    first = choose_format(options, teacher, students[0] if students else None, learns)
    options = replace(options, written=first.tags)
    further = [choose_format(options, teacher, name, learns) for name in students[1:]]
    return [first, *(replace(one, guessed=drop_teacher(one.guessed)) for one in further)]


def choose_thinking_format(options: FormatOptions, student: str, scorers: Sequence[str]) -> ChosenFormat:
    """Choose the format in which a student thinks, and in which a model reads the solution after its thought.

    `ChosenFormat.check_rows` refuses a scorer that was trained in another one, once the rows are known.

    Raises:
        InputError: See `choose_format`; or if a scorer was trained as a teacher.
    """
    chosen = choose_format(options, None, student)
    others = [name for name in scorers if name != student and not options.force_format]
    recorded = [(name, load_recorded_format(name, "student", options, False)) for name in others]
    readers = tuple((name, trained) for name, trained in recorded if trained is not None)
    return replace(chosen, thinks=True, readers=readers)


def drop_teacher(guessed: dict[Role, str]) -> dict[Role, str]:
    """Return the guessed models without the teacher, since the first student's format warns about it."""
    return {role: name for role, name in guessed.items() if role != "teacher"}


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
        InputError: If a setting contradicts what a model was trained in, or `format_from` shows no format.
    """
    options = options.read_files()
    named = None if options.tags is None else tag_style(options.tags)
    # data.tags are the teacher's if there is one: the frozen student keeps those of its training.
    own_named = named if teacher is None or options.force_format else None
    row_format = None if options.format_from is None else read_format(options.format_from, options)
    teacher_format = None if teacher is None else load_recorded_format(teacher, "teacher", options, learns)
    student_format = None if student is None else load_recorded_format(student, "student", options, learns)
    tags = named or options.written or find_tags(teacher_format, row_format, student_format) or STRATOS
    student_tags = own_named or find_tags(student_format, row_format) or tags
    teacher_prompt, student_prompt = options.teacher_system_prompt, options.student_system_prompt
    if teacher_prompt is not None:
        teacher_prompt = fill_prompt(teacher_prompt, TEACHER_SYSTEM_PROMPT, tags)
    if student_prompt is not None:
        student_prompt = fill_prompt(student_prompt, STUDENT_SYSTEM_PROMPT, student_tags)
    if row_format is not None:
        require_one_prompt(student_prompt, row_format, options)
    if teacher_format is not None and not options.force_format:
        require_same(str(teacher), teacher_format, named, options, "tags")
        require_same(str(teacher), teacher_format, teacher_prompt, options, "teacher_system_prompt")
    if student_format is not None and not options.force_format:
        require_known(str(student), student_format, options, (own_named, student_prompt), row_format)
    if teacher_prompt is None and teacher_format is not None:
        teacher_prompt = teacher_format.system_prompt
    recorded = student_format or row_format
    recorded_prompt = None if recorded is None else recorded.system_prompt
    asked: dict[Role, tuple[str | None, bool]] = {
        "teacher": (teacher, teacher_prompt is None),
        "student": (student, student_prompt is None and recorded is None),
    }
    # A student learns what its rows say. One that is asked is asked as it was trained.
    asks_by_row = learns or recorded is None or (recorded is student_format and recorded.share < 1)
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


def require_known(
    student: str,
    student_format: ModelFormat,
    options: FormatOptions,
    named: tuple[TagStyle | None, str | None],
    row_format: ModelFormat | None,
) -> None:
    """Check that settings and the rows of `format_from` agree with the format a student was trained in."""
    tags, prompt = named
    require_same(student, student_format, tags, options, "tags")
    require_same(student, student_format, prompt, options, "student_system_prompt")
    if row_format is not None:
        require_same(student, student_format, row_format.tags, options, "format_from")
        require_same(student, student_format, row_format.system_prompt, options, "format_from")


def require_one_prompt(student_prompt: str | None, row_format: ModelFormat, options: FormatOptions) -> None:
    """Check that a student's system prompt, if it is set, is the one that the rows of `format_from` have."""
    if student_prompt not in (None, row_format.system_prompt):
        raise InputError(
            f"Either {options.name('student_system_prompt')} or {options.name('format_from')} says how the "
            f"student is asked, but the first is {quote_prompt(str(student_prompt))} and the rows of the "
            f"second have {quote_prompt(row_format.system_prompt)}. Drop one."
        )


def find_tags(*formats: ModelFormat | None) -> TagStyle | None:
    """Return the tags of the first format that is known."""
    return next((found.tags for found in formats if found is not None), None)


def require_same(
    name: str, recorded: ModelFormat, value: TagStyle | str | None, options: FormatOptions, setting: str
) -> None:
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
        option = options.name(setting)
        raise InputError(
            f"{name} was trained with {theirs}, but {option} gives {ours}. Leave {option} out (null) to use "
            f"it as it was trained, or add {options.name('force_format')} true to use {option} all the same."
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
        f"{does[recorded.role]}. Name another model, or add {options.name('force_format')} true."
    )


def require_rows_agree(recorded: ModelFormat, name: str, prompts: Counter[str]) -> None:
    """Check that the rows which a student learns from have the system prompt that it was trained with.

    Raises:
        InputError: If any has another.
    """
    others = Counter({prompt: n for prompt, n in prompts.items() if prompt != recorded.system_prompt})
    if recorded.share == 1 and others:
        [(other, _)] = others.most_common(1)
        raise InputError(
            f"{name} was trained with {describe_prompt(recorded.system_prompt)}, but {others.total()} of "
            f"{prompts.total()} rows have another, such as {quote_prompt(other)}. Add --data.force_format "
            "true to train it with those of the rows, or --data.student_system_prompt to use its own for all "
            "rows."
        )


def read_format(source: str, options: FormatOptions) -> ModelFormat:
    """Read the tags and the commonest system prompt off rows in Bespoke-Stratos' form.

    Raises:
        InputError: If no row shows them.
    """
    rows = [row for _, row in read_rows(source, max_rows=ROWS_READ) if isinstance(row, dict)]
    for tags in TAG_STYLES.values():
        prompts = Counter(system for row in rows if (system := read_system_prompt(row, tags)) is not None)
        if prompts:
            return ModelFormat.from_rows("student", tags, prompts)
    raise InputError(
        f"{options.name('format_from')} must have rows with `system` and `conversations`, and one of the tag "
        f"styles {', '.join(TAG_STYLES)} in their answers, but none of the first {len(rows)} rows of "
        f"'{source}' has. Name other rows, or set {options.name('student_system_prompt')} and "
        f"{options.name('tags')}."
    )


def read_system_prompt(row: dict[str, Any], tags: TagStyle) -> str | None:
    """Return a row's own system prompt if its answer has these tags."""
    try:
        parsed = parse_row(row, tags)
    except BadRowError:
        return None
    # A row in other tags is parsed too, and its system prompt translated.
    has_tags = any(tags.thought_open in str(turn) for turn in row.get("conversations") or [])
    return parsed.system if has_tags else None


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


def read_prompt(option: str, value: str | None) -> str | None:
    """Return a prompt, or the text of the file that it names as @FILE, without the file's last line end.

    Raises:
        InputError: If the file cannot be read.
    """
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{option} must name a readable text file after @, but '{value[1:]}' is not one ({error}). "
            "Correct the path."
        ) from error


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
