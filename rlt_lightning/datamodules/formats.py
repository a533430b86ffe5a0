"""Build the texts that teacher and student see, as token ids whose spans are known by construction."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from rlt_lightning.datamodules.control_tokens import MARK, encode_marked, mark_text
from rlt_lightning.models.template import NO_SYSTEM_ROLE, find_turn_end, find_turn_opening, render_chat
from rlt_lightning.tags import STRATOS, TagStyle, decode, require_fast, start_of_tag, tag_style
from rlt_lightning.types import Completion, FinishReason, InputError, ModelView, Problem, Rollout, SFTExample

BLOCK_BREAK = "\n\n"  # between the blocks of an assistant turn
# Stands for the text after a prompt, which decides how the prompt's last newlines are tokenised.
SENTINEL = "A"

TEACHER_SYSTEM_PROMPT = (
    "You are a teacher. You are given a question together with its solution. Explain step by step how to get "
    "from the question to this solution, so that a student who has not seen the solution can follow every "
    "step and reach it alone. Write the explanation between {explanation_open} and {explanation_close}."
)
STUDENT_SYSTEM_PROMPT = (
    "Answer the question in two parts. First think step by step, checking your steps, between {thought_open} "
    "and {thought_close}. Then write the final solution, short and complete, between {solution_open} and "
    "{solution_close}."
)


def encode_pieces(tokenizer: Any, pieces: list[str]) -> list[list[int]]:
    """Tokenise the concatenated pieces once, and assign each token to the piece in which it starts.

    A token that spans the end of one piece and the start of the next, such as `>\\n\\n` in Qwen's vocabulary,
    thus belongs to the first.

    Raises:
        InputError: If the tokenizer is a slow one, which has no offsets.
    """
    require_fast(tokenizer)
    text, lengths = "".join(pieces), list(map(len, pieces))
    if MARK in text:
        token_ids, offsets, lengths = encode_marked(tokenizer, pieces)
    else:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        token_ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    bounds = list(accumulate(lengths))
    ids_per_piece: list[list[int]] = [[] for _ in pieces]
    piece = covered = 0
    for token_id, (start, end) in zip(token_ids, offsets, strict=True):
        # Some tokenizers leave leading spaces out of the offsets: a token starts where the text before it
        # ends. Tokens of one multi-byte character have the same offsets, and so stay together.
        piece = max(piece, bisect_right(bounds, min(start, covered)))
        ids_per_piece[min(piece, len(pieces) - 1)].append(token_id)
        covered = max(covered, end)
    return ids_per_piece


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a text whose special tokens, bos included, are already written out; marked ones are text."""
    if MARK in text:
        return encode_marked(tokenizer, [text])[0]
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class ChatFormat:
    """Build and take apart the contexts of teacher and student for one tokenizer.

    Teacher: chat(system, question) + <solution> + <explanation> … </explanation>
    Student: chat(system, question) + <thought> … </thought> + <solution>

    With `thinks` there is no teacher: the student's thought stands where an explanation does.

    Control tokens that question, solution or trace spell are read as text; see `control_tokens.py`.

    The chat template renders only system, user and generation prompt, without a thought that it opens. The
    assistant's text is appended unchanged, since some templates cut reasoning out of an assistant turn, after
    what the template writes before every such text (`turn_opening`).

    Args:
        tokenizer: Fast tokenizer with a chat template.
        tags: "stratos", "r1" or a TagStyle.
        teacher_system_prompt: None for ours. The empty string means no system message at all; some
            templates, such as Qwen2.5's, then insert theirs.
        student_system_prompt: The same, for rows without a system prompt.
        student_tags: The tags of a student that was trained with others than the teacher; None: the same.
        fills: Whether tags replace their names, such as {thought_open}, in the given prompts.
        thinks: Whether completions are thoughts of the student, which has not seen the solution.

    Raises:
        InputError: If the tokenizer is slow, merges the separator with the text after it, or has no chat
            template that can hold these prompts.
    """

    # The format of a student with another tokenizer.
    student: ChatFormat | None = None

    def __init__(
        self,
        tokenizer: Any,
        tags: str | TagStyle = "stratos",
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        student_tags: str | TagStyle | None = None,
        fills: bool = True,
        thinks: bool = False,
    ) -> None:
        self.tokenizer = self.student_tokenizer = tokenizer
        self.thinks = thinks
        self.tags = tag_style(tags)
        self.student_tags = self.tags if student_tags is None else tag_style(student_tags)
        self.teacher_system_prompt = fill_prompt(
            teacher_system_prompt, TEACHER_SYSTEM_PROMPT, self.tags, fills
        )
        self.student_system_prompt = fill_prompt(
            student_system_prompt, STUDENT_SYSTEM_PROMPT, self.student_tags, fills
        )
        require_fast(tokenizer)
        if tokenizer.eos_token_id is None:
            raise InputError(
                "The tokenizer must have an end-of-sequence token, but has none. Set its eos_token."
            )
        self._opened_thought = ""  # what the checks render has all that the template writes
        for system_prompt in (self.teacher_system_prompt, self.student_system_prompt):
            self._check_template(system_prompt)
        self._opened_thought, self.turn_opening = find_turn_opening(tokenizer)
        self.turn_end = find_turn_end(tokenizer)
        opening = self._encode_opening(self.opening_tag, self.tags)
        self._completion_opening = opening[0] + opening[1]

    @property
    def end_tag(self) -> str:
        """Return the stop string of the engines: the tag that closes an explanation, or a thought."""
        return self.tags.thought_close if self.thinks else self.tags.explanation_close

    @property
    def opening_tag(self) -> str:
        """Return the tag that opens an explanation, or a thought; a prompt ends with it."""
        return self.tags.thought_open if self.thinks else self.tags.explanation_open

    # Problems

    def build_problem(
        self,
        row_number: int,
        question: str,
        solution: str,
        student_system_prompt: str | None = None,
        columns: dict[str, Any] | None = None,
    ) -> Problem:
        """Tokenise one question with its solution.

        The prompts get the tokens that they have before a letter, as in training text.

        Args:
            row_number: Number of the row in its source, from 1.
            question: The user's message.
            solution: Text between the solution tags, surrounding newlines included; see `TagStyle.wrap`.
            student_system_prompt: The row's system prompt; None for the format's.
            columns: The row as it was read.
        """
        tags, student_tags = self.tags, self.student_tags
        given = self._mark(solution)
        chat = self.render_student_chat(question, student_system_prompt) + self.turn_opening
        student_prefix, student_separator = self._encode_opening(
            chat + student_tags.thought_open, student_tags
        )
        teacher_prefix, think_prefix = student_prefix, student_separator
        if not self.thinks:
            opening = tags.solution_open + given + tags.solution_close + BLOCK_BREAK + self.opening_tag
            prompt = self.render_teacher_chat(question) + self.turn_opening + opening
            teacher_prefix, think_prefix = self._encode_opening(prompt, tags)
        if student_separator != think_prefix:
            # The two tags end differently, so that their prompts share no tokens.
            teacher_prefix, student_prefix = teacher_prefix + think_prefix, student_prefix + student_separator
            think_prefix = []
        between = student_tags.thought_close + BLOCK_BREAK + student_tags.solution_open
        # The explanation's tokens bring the separator before that closing tag, unless it is the teacher's.
        before = SENTINEL if self._replaces_separator else SENTINEL + tags.separator
        between = student_tags.separator + between if self._replaces_separator else between
        known = given if student_tags == tags else student_tags.wrap(given)
        content = known.removesuffix(student_tags.separator)
        closing = known[len(content) :] + student_tags.solution_close
        _, student_suffix, solution_ids, _ = encode_pieces(
            self.tokenizer, [before, between, content, closing]
        )
        return Problem(
            row=row_number,
            question=question,
            solution=solution,
            teacher_prefix=teacher_prefix,
            think_prefix=think_prefix,
            student_prefix=student_prefix,
            student_suffix=student_suffix,
            solution_ids=solution_ids,
            student_system_prompt=student_system_prompt,
            columns=columns or {},
        )

    def build_student_problem(
        self,
        row_number: int,
        question: str,
        solution: str,
        student_system_prompt: str | None = None,
        columns: dict[str, Any] | None = None,
    ) -> Problem:
        """Tokenise one question that the trained model answers without a teacher; see `build_problem`."""
        prompt = encode(self.tokenizer, self.render_student_chat(question, student_system_prompt))
        return Problem(
            row=row_number,
            question=question,
            solution=solution,
            teacher_prefix=prompt,
            think_prefix=[],
            student_prefix=[],
            student_suffix=[],
            solution_ids=[],
            student_system_prompt=student_system_prompt,
            columns=columns or {},
        )

    def count_read_tokens(self, problem: Problem, completion: Completion) -> int:
        """Return how many tokens the student reads of a completion."""
        return len(completion.token_ids)

    def render_teacher_chat(self, question: str) -> str:
        """Render the teacher's conversation up to the assistant's text."""
        return self.render(self.teacher_system_prompt, question)

    def render_student_chat(self, question: str, student_system_prompt: str | None = None) -> str:
        """Render the student's conversation up to the assistant's text; see `render`."""
        if student_system_prompt is None:
            return self.render(self.student_system_prompt, question)
        return self.render(self._mark(student_system_prompt, keeps_tags=True), question)

    def render(self, system_prompt: str, question: str) -> str:
        """Render system message, user message and generation prompt with the tokenizer's chat template.

        Control tokens that the question spells are marked in the result, for `encode`.

        Args:
            system_prompt: The system message; the empty string for none.
            question: The user's message.

        Raises:
            InputError: If there is no template, or it refuses a system message.
        """
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": self._mark(question)})
        # Our thought replaces it.
        return render_chat(self.tokenizer, messages).removesuffix(self._opened_thought)

    # Completions

    def completion_from_text(self, problem: Problem, text: str) -> Completion:
        """Tokenise a completion that is given as text; text after its first end tag is dropped."""
        text, end_tag, _ = text.partition(self.end_tag)
        finish_reason: FinishReason = "stop" if end_tag else "length"
        opening, text = self.opening_tag + self.tags.separator, self._mark(text)
        prompt_ids, token_ids = encode_pieces(self.tokenizer, [opening, text + end_tag])
        if prompt_ids != self._completion_opening:
            # Tokenised together, the text would change the prompt's tokens.
            token_ids = encode(self.tokenizer, text + end_tag)
        return Completion(token_ids, None, finish_reason)

    def completion_from_trace(self, problem: Problem, trace: str) -> Completion:
        """Tokenise a reasoning trace as the completion that a perfect teacher would sample."""
        return self.completion_from_text(problem, trace.strip() + self.tags.separator + self.end_tag)

    def build_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Find the spans of a completion by looking at its last tokens only.

        A token that holds the start of the end tag is not part of the body, even if it also holds the
        explanation's last character. So no part of the tag reaches the student.
        """
        body = completion.token_ids
        if completion.finish_reason == "stop":
            body = body[: start_of_tag(self.tokenizer, body, self.end_tag)]
        elif completion.finish_reason == "eos":
            body = body[:-1]
        num_explained = len(body) - self._num_separator_tokens(body)
        closed = completion.finish_reason == "stop"
        text = decode(self.tokenizer, body).strip()
        read = body[:num_explained] if self._replaces_separator else body
        view = ModelView(problem, completion, read, num_tokens=num_explained, num_own=num_explained)
        return Rollout(problem, completion, text, closed, view)

    def build_student_rollout(self, problem: Problem, completion: Completion) -> Rollout:
        """Attach a student's answer, tags included, to its problem."""
        closed = completion.finish_reason == "eos"
        body = completion.token_ids[:-1] if closed else completion.token_ids
        text = decode(self.tokenizer, body).strip()
        return Rollout(problem, completion, text, closed)

    # Supervised fine-tuning

    def build_teacher_sft_example(self, problem: Problem, trace: str) -> SFTExample:
        """Make an example of the teacher's prompt with a human's or a model's trace as its explanation.

        The prompt has the same tokens as in RL. The loss counts explanation, end tag and the end of the turn.
        """
        completion = [*self.completion_from_trace(problem, trace).token_ids, self.turn_end]
        return build_masked_example(problem.row, problem.teacher_prompt, completion)

    def build_student_sft_example(
        self,
        row_number: int,
        question: str,
        thought: str,
        solution: str,
        student_system_prompt: str | None = None,
    ) -> SFTExample:
        """Make an example of the turn that the student should write; the loss counts that turn.

        Args:
            row_number: Number of the row in its source.
            question: The user's message.
            thought: Text between the thought tags, surrounding newlines included.
            solution: Text between the solution tags, surrounding newlines included.
            student_system_prompt: The row's system prompt; None for the format's.
        """
        tags = self.student_tags
        turn = self.turn_opening + tags.thought_open + self._mark(thought) + tags.thought_close + BLOCK_BREAK
        turn += tags.solution_open + self._mark(solution) + tags.solution_close
        # Prompt and turn are tokenised separately, as when the student is used.
        prompt = encode(self.tokenizer, self.render_student_chat(question, student_system_prompt))
        return build_masked_example(row_number, prompt, [*encode(self.tokenizer, turn), self.turn_end])

    def build_conversation(self, problem: Problem, thought: str) -> dict[str, Any]:
        """Return a thought and its problem as `system` and `conversations`, as in Bespoke-Stratos-17k."""
        system = problem.student_system_prompt
        system = self.student_system_prompt if system is None else system
        system = self.student_tags.translate(system, STRATOS)
        answer = STRATOS.thought_open + STRATOS.wrap(thought) + STRATOS.thought_close + BLOCK_BREAK
        answer += STRATOS.solution_open + STRATOS.wrap(problem.solution) + STRATOS.solution_close
        turns = (("user", problem.question), ("assistant", answer))
        return {"system": system, "conversations": [{"from": role, "value": text} for role, text in turns]}

    # Helpers

    def _mark(self, text: str, keeps_tags: bool = False) -> str:
        """Mark the control tokens that a given text spells; with `keeps_tags` those but tags."""
        keep = {*self.tags.tags().values(), *self.student_tags.tags().values()} if keeps_tags else ()
        return mark_text(self.tokenizer, text, keep)

    @property
    def _replaces_separator(self) -> bool:
        """Return whether the student's separator replaces the teacher's before the closing tag."""
        return self.tags.separator != self.student_tags.separator

    def _check_template(self, system_prompt: str) -> None:
        """Check that the template renders both messages."""
        text = self.render(system_prompt, "What is 1 + 1?")
        for name, content in {"system message": system_prompt, "user message": "What is 1 + 1?"}.items():
            if content.strip() not in text:
                raise InputError(
                    f"The chat template must render the {name}, but it leaves it out. {NO_SYSTEM_ROLE}"
                )

    def _encode_opening(self, text: str, tags: TagStyle) -> tuple[list[int], list[int]]:
        """Tokenise a prompt that ends in an opening tag, and the separator after that tag."""
        prefix, separator, sentinel = encode_pieces(self.tokenizer, [text, tags.separator, SENTINEL])
        if not sentinel:
            raise InputError(
                "The separator must be tokenised separately from the text after it, but "
                f"{tags.separator!r} shares a token with it. Let data.tags.separator end in a newline."
            )
        return prefix, separator

    def _ends_in_separator(self, token_ids: list[int]) -> bool:
        separator = self.tags.separator
        return not separator or decode(self.tokenizer, token_ids[-len(separator.encode()) :]).endswith(
            separator
        )

    def _num_separator_tokens(self, token_ids: list[int]) -> int:
        """Count the last tokens that start inside the separator."""
        separator = self.tags.separator
        if not separator or not self._ends_in_separator(token_ids):
            return 0
        count = 0
        while count < len(token_ids) and separator.endswith(
            decode(self.tokenizer, token_ids[len(token_ids) - count - 1 :])
        ):
            count += 1
        return count


def fill_prompt(prompt: str | None, ours: str, tags: TagStyle, fills: bool = True) -> str:
    """Return a system prompt, ours for None; tags replace their names in one that `fills`."""
    if prompt is None:
        return tags.fill(ours)
    return tags.fill(prompt) if fills else prompt


def build_masked_example(row: int, prompt: list[int], completion: list[int]) -> SFTExample:
    """Join prompt and completion into an example whose loss counts the completion."""
    return SFTExample(row, prompt + completion, [False] * len(prompt) + [True] * len(completion))
