"""A student with another tokenizer: it reads the teacher's explanation as text, in tokens of its own.

    teacher's tokens ─▶ bytes ─▶ text ─▶ student's tokens          PlainTokenizer (token_bytes.py)
           └──────────── ends ───────────── ends ────▶ spans       shared_spans (numerics/spans.py)

Its question and solution are tokenised by its own tokenizer too, in its own chat format.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlt_lightning.datamodules.formats import SENTINEL, ChatFormat, encode_pieces
from rlt_lightning.datamodules.token_bytes import PlainTokenizer
from rlt_lightning.numerics.spans import Span, shared_spans
from rlt_lightning.pretrained import load_tokenizer
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import Completion, InputError, ModelView, Problem, Rollout, SFTExample


class RetellingFormat(ChatFormat):
    """The contexts of a teacher and of a student with different tokenizers.

    Args:
        tokenizer: The teacher's, see `ChatFormat`.
        student_tokenizer: The student's.
        tags: See `ChatFormat`; likewise the others.
        teacher_system_prompt: None for our own.
        student_system_prompt: None for our own.
        student_tags: None: the same as the teacher's.

    Raises:
        InputError: If the bytes of either tokenizer's tokens cannot be known, a ChatFormat of either cannot
            be made, or the student's tokenizer glues the separator to the closing tag.
    """

    def __init__(
        self,
        tokenizer: Any,
        student_tokenizer: Any,
        tags: str | TagStyle = "stratos",
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        student_tags: str | TagStyle | None = None,
    ) -> None:
        prompts = teacher_system_prompt, student_system_prompt
        super().__init__(tokenizer, tags, *prompts, student_tags, fills=False)
        # Never asked for a teacher's chat, which its template may not know.
        self.student = ChatFormat(
            student_tokenizer, tags, "", self.student_system_prompt, student_tags, fills=False
        )
        self.student_tokenizer = student_tokenizer
        self.teachers_text = PlainTokenizer(tokenizer, "teacher")
        self.students_text = PlainTokenizer(student_tokenizer, "student")
        own = self.student_tags
        before = SENTINEL + own.separator
        _, closing = encode_pieces(student_tokenizer, [before, own.thought_close])
        if b"".join(map(self.students_text.bytes_of, closing)) != own.thought_close.encode():
            raise InputError(
                "The student's tokenizer must divide the separator from the tag after it, but "
                f"{own.separator!r} shares a token with {own.thought_close!r}. Set other data.student_tags."
            )
        separator = own.separator if own.separator != self.tags.separator else ""
        self.after_explanation = separator + own.thought_close

    def problem(
        self,
        row_number: int,
        question: str,
        solution: str,
        student_system_prompt: str | None = None,
        columns: dict[str, Any] | None = None,
    ) -> Problem:
        """See `ChatFormat.problem`; the student's pieces are in its own tokens. No separator is given."""
        texts = row_number, question, solution, student_system_prompt
        teachers, students = super().problem(*texts, columns), self.student.problem(*texts)
        return replace(
            teachers,
            teacher_prefix=teachers.teacher_prompt,
            think_prefix=[],
            student_prefix=students.student_prefix + students.think_prefix,
            student_suffix=students.student_suffix,
            solution_ids=students.solution_ids,
        )

    def rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """See `ChatFormat.rollout`; the student reads the explanation in its own tokens.

        r_KL counts the spans that hold the explanation. If the student's tokens glue the separator after it
        to its last character, the last span holds that too. Tokens of a character that is incomplete at the
        end are in no span.
        """
        rollout = super().rollout(problem, completion)
        [own] = rollout.views  # in the teacher's tokens
        text, ends = self.students_text.spellable(*self.teachers_text.text_of(own.token_ids))
        token_ids, student_ends = self.students_text.encode(text, self.after_explanation)
        spans: list[Span] = []
        num_tokens = 0
        for span in shared_spans(ends, student_ends):
            if num_tokens >= own.num_tokens:
                break
            spans.append(span)
            num_tokens += span[0]
        view = ModelView(
            problem,
            completion,
            token_ids,
            num_tokens,
            num_own=sum(num_student for _, num_student in spans),
            spans=spans,
            num_left_out=max(0, own.num_tokens - num_tokens),
        )
        return replace(rollout, views=(view,))

    def num_read(self, problem: Problem, completion: Completion) -> int:
        """Return how many tokens of its own the student reads of a completion."""
        [view] = self.rollout(problem, completion).views
        return len(view.token_ids)

    def student_sft_example(
        self,
        row_number: int,
        question: str,
        thought: str,
        solution: str,
        student_system_prompt: str | None = None,
    ) -> SFTExample:
        """See `ChatFormat.student_sft_example`; in the student's own tokens."""
        texts = question, thought, solution, student_system_prompt
        return self.student.student_sft_example(row_number, *texts)


def tokenizers_of(name: str, student: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a model's tokenizer and, if it cannot read the model's tokens, that of its student.

    Returns:
        The model's tokenizer, and the student's; None if every token of the model has the same number in the
        student's vocabulary, so that explanations pass between them as token ids.
    """
    tokenizer = load_tokenizer(name, trust_remote_code)
    if student is None or student == name:
        return tokenizer, None
    students = load_tokenizer(student, trust_remote_code)
    shares = tokenizer.get_vocab().items() <= students.get_vocab().items()
    return tokenizer, None if shares else students
