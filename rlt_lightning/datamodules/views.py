"""How models read what another one wrote: students an explanation, a teacher a student's answer.

    completion ─┬▶ format of student 1 ─▶ ModelView ─┬▶ Rollout.views
                ├▶ format of student 2 ─▶ ModelView ─┤
                └▶ student 3, as student 1 ──────────┘

Problems are tokenised for the first student. A further one whose tokenizer, tags or system prompt differ
reads every completion in its own format.

The teacher of StudentOPDData sees the question with the solution, then the student's tokens:

    student   <user>question                     <think> first, second </think> <solution>...
    teacher   <user>question solution<explanation> first, second </explanation>       view explanation
    teacher   <user>question, hint with solution <think> first, second </think> <solution>...    view hint

It judges the tokens that stand one below the other. In the view `explanation` these are the thought and the
decision to end it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from rlt_lightning.datamodules.cross_tokenizer import ByteExactTokenizer, load_tokenizers
from rlt_lightning.datamodules.format_choice import ChosenFormat
from rlt_lightning.datamodules.formats import BLOCK_BREAK, SENTINEL, ChatFormat, encode, encode_pieces
from rlt_lightning.datamodules.rows import ParsedRow, parse_row
from rlt_lightning.datamodules.token_cache import describe_format
from rlt_lightning.numerics.spans import split_spans
from rlt_lightning.tags import decode, decode_each
from rlt_lightning.types import Completion, ModelView, Problem, Rollout

# Students


@dataclass(frozen=True)
class StudentView:
    """How one student reads problems and completions.

    Attributes:
        format: The contexts of the teacher and of this student.
        keeps_row_prompts: Whether a row's own system prompt replaces the student's.
    """

    format: ChatFormat
    keeps_row_prompts: bool

    def build_problem(self, problem: Problem) -> Problem:
        """Return a problem with the pieces of this student; the teacher's prompt stays, token by token."""
        system = None
        if self.keeps_row_prompts:
            system = parse_row(
                problem.columns,
                self.format.tags,
                student_tags=self.format.student_tags,
                solution_in_tags=False,  # those of the first student count
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
        keys = [(describe_format(view.format), view.keeps_row_prompts) for view in self.all]
        # None: this student reads what the first one reads.
        self.others = [None if key == keys[0] else view for view, key in zip(self.all, keys, strict=True)][1:]
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


# A teacher that judges

HINT = (
    "{question}\n\nHere is the solution:\n\n{solution}\n\nAnswer the question in your own words, as if you "
    "had found the solution yourself."
)
View = Literal["explanation", "hint"]


class TeacherViews:
    """Builds the teacher's contexts, and finds the tokens of an answer that it judges.

    Args:
        student: The format of the trained student.
        teacher: The same format for the teacher's tokenizer; the same object if that is the student's.
        view: "explanation": what an RLT teacher sees, question and solution, and it judges the student's
            thought as its own explanation. "hint": the student's own chat with the solution in the question,
            and it judges the whole turn.
    """

    def __init__(self, student: ChatFormat, teacher: ChatFormat, view: View) -> None:
        self.student, self.teacher, self.view = student, teacher, view
        self.byte_tokenizers: tuple[ByteExactTokenizer, ByteExactTokenizer] | None = None
        if teacher is not student:
            self.byte_tokenizers = (
                ByteExactTokenizer(student.tokenizer, "student"),
                ByteExactTokenizer(teacher.tokenizer, "teacher"),
            )
        # The first tokens of the tags that end a thought, of the student and of the teacher.
        self.closing: tuple[int, int] | None = None
        if view == "explanation" and self.byte_tokenizers is None:
            self.closing = find_closing_tokens(student)

    @property
    def exchanged(self) -> tuple[int, int] | None:
        """Return two tokens to exchange in the teacher's distribution, so that both closing tags match."""
        return None if self.closing is None or self.closing[0] == self.closing[1] else self.closing

    def build_problem(
        self, row_number: int, texts: ParsedRow, system: str | None, columns: dict[str, Any]
    ) -> Problem:
        """Tokenise a question for the student, and with its solution for the teacher."""
        texts_of = row_number, texts.question, texts.solution
        problem = self.student.build_student_problem(*texts_of, system, columns)
        if self.view == "explanation":
            view = self.teacher.build_problem(*texts_of).teacher_prompt
        else:
            # In one pass: a question may hold "{solution}", as in \\frac{solution}{2}.
            given = {"{question}": texts.question, "{solution}": texts.solution.strip()}
            asked = re.sub("|".join(map(re.escape, given)), lambda name: given[name[0]], HINT)
            view = encode(self.teacher.tokenizer, self.teacher.render_student_chat(asked, system))
        return replace(problem, teacher_view=view)

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach an answer to its problem, as the teacher reads it; no view if it has no thought."""
        rollout = self.student.build_student_rollout(problem, completion)
        ids = completion.token_ids
        num_body = len(ids) - rollout.closed  # without the eos
        if self.view == "hint":
            # A tokenizer that is not the teacher's has no token for its end of a turn.
            end = len(ids) if self.byte_tokenizers is None else num_body
            view = self._build_view(problem, completion, 0, end, closes=False)
        elif (found := find_thought(self.student, ids[:num_body])) is not None:
            view = self._build_view(problem, completion, *found)
        else:
            return rollout
        return rollout if view is None else replace(rollout, views=(view,))

    def _build_view(
        self, problem: Problem, completion: Completion, start: int, end: int, closes: bool
    ) -> ModelView | None:
        """Return how the teacher reads tokens of an answer, from start to end; None if it can judge none.

        With `closes` the token at the end begins the student's closing tag.
        """
        ids = completion.token_ids
        read = ids[start:end]
        if self.byte_tokenizers is not None:
            students, teachers = self.byte_tokenizers
            text, ends = teachers.spellable(*students.decode_text(read))
            token_ids, teacher_ends = teachers.encode(text)
            spans = split_spans(teacher_ends, ends)
            num_teacher, num_student = (sum(span[side] for span in spans) for side in (0, 1))
            if not spans:
                return None
            return ModelView(
                problem, completion, token_ids[:num_teacher], num_student, num_teacher, start, spans
            )
        if self.closing is not None:
            read = exchange_end(ids[start : end + closes], self.closing)
            end = start + len(read)
        return ModelView(problem, completion, read, end - start, end - start, start) if read else None


def find_thought(chat_format: ChatFormat, ids: list[int]) -> tuple[int, int, bool] | None:
    """Find the thought in a student's answer.

    Returns:
        Its first token, the token after its last, and whether that one begins the closing tag; None if the
        answer does not begin with a thought, or tokens of tag and thought are one.
    """
    tags, texts = chat_format.student_tags, decode_each(chat_format.tokenizer, ids)
    text, starts = "".join(texts), [0, *accumulate(map(len, texts))]
    opening = tags.thought_open + tags.separator
    if text.startswith(chat_format.turn_opening):
        opening = chat_format.turn_opening + opening
    if not text.startswith(opening):
        return None
    close_at = text.find(tags.thought_close, len(opening))
    # A character of several tokens belongs to the last: the first of them begin where it does.
    begins = next((i for i in range(len(ids)) if starts[i] >= len(opening)), len(ids))
    if starts[begins] != len(opening):
        return None
    ends = [i for i in range(begins, len(ids)) if starts[i + 1] > close_at] if close_at >= 0 else []
    end = ends[0] if ends else len(ids)
    return begins, end, bool(ends) and starts[end] == close_at


def exchange_end(ids: list[int], closing: tuple[int, int]) -> list[int]:
    """Return a thought as the teacher reads it, up to the token that begins a closing tag, of either model.

    Both tags mean the same, and each model reads its own. If the student samples the teacher's, it is judged
    by the teacher's log-prob of the student's. A tag that is spelled in other tokens is read as it is.
    """
    own, teacher = closing
    if own == teacher:
        return ids
    other = {own: teacher, teacher: own}
    end = next((i for i, word in enumerate(ids) if word in other), len(ids))
    return ids[:end] + [other[word] for word in ids[end : end + 1]]


def find_closing_tokens(chat_format: ChatFormat) -> tuple[int, int] | None:
    """Return the first tokens of the student's and of the teacher's closing tag, after the separator.

    Returns:
        None if a separator's token holds the start of a tag, or the separators differ.
    """
    tags, own, found = chat_format.tags, chat_format.student_tags, []
    if tags.separator != own.separator:
        return None
    after = own.thought_close + BLOCK_BREAK + own.solution_open + own.separator
    for closing, text in ((own.thought_close, after), (tags.explanation_close, tags.explanation_close)):
        first = encode_pieces(chat_format.tokenizer, [SENTINEL + own.separator, text])[1][0]
        if not decode(chat_format.tokenizer, [first]).startswith(closing[0]):
            return None
        found.append(first)
    return found[0], found[1]
