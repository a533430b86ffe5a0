"""How the teacher of StudentOPDData reads a student's answer: its contexts, and the tokens that it judges.

It sees the question with the solution, then the student's tokens:

    student   <user>question                     <think> first, second </think> <solution>...
    teacher   <user>question solution<explanation> first, second </explanation>       view explanation
    teacher   <user>question, hint with solution <think> first, second </think> <solution>...    view hint

It judges the tokens that stand one below the other. In the view `explanation` these are the thought and the
decision to end it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from rlt_lightning.datamodules.cross_tokenizer import ByteExactTokenizer
from rlt_lightning.datamodules.formats import BLOCK_BREAK, SENTINEL, ChatFormat, encode, encode_pieces
from rlt_lightning.datamodules.rows import ParsedRow
from rlt_lightning.numerics.spans import split_spans
from rlt_lightning.tags import decode, decode_each, fill_template
from rlt_lightning.types import Completion, ModelView, Problem, Rollout

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
            thought as its own explanation. "hint": the student's chat with the solution in the question,
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
        """Return two tokens to exchange in the teacher's distribution, so that both closing tags match.

        Styles need it whose closing tags begin with different tokens, such as r1 where `</think>` is one
        token; no context can do it instead, since the teacher may end its thought at every token.
        """
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
            given = {"question": texts.question, "solution": texts.solution.strip()}
            asked = fill_template(HINT, given)
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
        elif (thought := find_thought(self.student, ids[:num_body])) is not None:
            view = self._build_view(problem, completion, *thought)
        else:
            return rollout
        return replace(rollout, view=view)

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

    Both tags mean the same, and each model reads one. If the student samples the teacher's, it is judged by
    the teacher's log-prob of the student's. A tag that is spelled in other tokens is read as it is.
    """
    student, teacher = closing
    if student == teacher:
        return ids
    exchanged = {student: teacher, teacher: student}
    end = next((i for i, word in enumerate(ids) if word in exchanged), len(ids))
    return ids[:end] + [exchanged[word] for word in ids[end : end + 1]]


def find_closing_tokens(chat_format: ChatFormat) -> tuple[int, int] | None:
    """Return the first tokens of the student's and of the teacher's closing tag, after the separator.

    Returns:
        None if a separator's token holds the start of a tag, or the separators differ.
    """
    tags, student_tags, tokens = chat_format.tags, chat_format.student_tags, []
    if tags.separator != student_tags.separator:
        return None
    after = student_tags.thought_close + BLOCK_BREAK + student_tags.solution_open + student_tags.separator
    for closing, text in (
        (student_tags.thought_close, after),
        (tags.explanation_close, tags.explanation_close),
    ):
        first = encode_pieces(chat_format.tokenizer, [SENTINEL + student_tags.separator, text])[1][0]
        if not decode(chat_format.tokenizer, [first]).startswith(closing[0]):
            return None
        tokens.append(first)
    return tokens[0], tokens[1]
