"""Data classes and errors that several folders share. Losses are computed from token ids, never from text.

The data classes, from what they hold to what holds them:

    Problem, Completion → Rollout → Rollouts ─→ PromptBatch      fit, validate, predict: RLTModule, OPDModule
      ModelView ──┘
                                  SFTExample ─→ SFTBatch         fit and validate of SFTModule
                 EvaluationProblem, Response ─→ EvaluationBatch  rlt test

The errors of this package, by base class; `rlt` prints those marked * on one line, without a traceback:

    ValueError
    ├── InputError *          types.py                 something the user controls is wrong
    └── NonFiniteError *      numerics/finite.py       a reward, log-prob or gradient is not finite
    RuntimeError
    └── EngineError *         engines/base.py          an engine failed, or a worker of it
        ├── WorkersLost       engines/base.py          none is left: push weights, ask for the rest
        └── WorkerError       engines/client.py        one call to one worker failed
    SIGTERMException, Lightning's SystemExit
    └── Interrupted           run/interrupt.py      a signal: all ranks stop after the same iteration
    Exception
    └── BadRowError           types.py                 a row cannot be used: it is counted and left out
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

# The end tag was sampled, an end-of-sequence token, or as many tokens as are allowed.
FinishReason = Literal["stop", "eos", "length"]
# No room, the user's quota, the largest file that is allowed.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class InputError(ValueError):
    """Something the user controls is wrong. `rlt` prints its message on one line, without a traceback."""


def require_limits(settings: Any, limits: dict[str, bool], must: str, remedy: str) -> None:
    """Check the fields of a dataclass of settings.

    Args:
        settings: The dataclass.
        limits: Whether each limit holds, by its text, which names the fields.
        must: The beginning of the message, to which the limits that do not hold are added.
        remedy: The end of the message.

    Raises:
        InputError: Naming the limits that do not hold, and the values.
    """
    if broken := [limit for limit, holds in limits.items() if not holds]:
        words = re.findall(r"\w+", " ".join(broken))
        names = [part.name for part in fields(settings) if part.name in words]
        values = ", ".join(f"{name} is {getattr(settings, name)!r}" for name in names)
        raise InputError(f"{must} {' and '.join(broken)}, but {values}. {remedy}.")


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Turn any library's error about a full disk or quota into one that names the folder that is written.

    Raises:
        InputError: If there is one.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        # Libraries quote the system's words.
        while cause is not None and not any(os.strerror(number) in str(cause) for number in FULL_DISK):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise InputError(
            f"{folder} must be written, but its disk has no room ({first_line(cause)}). Make room, then give "
            "the same command again, for a stage with --resume true: what was finished before is kept."
        ) from error


def first_line(error: BaseException, length: int = 150) -> str:
    """Return the first line of an error's message that is not empty, or the error's kind if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:length] if lines else type(error).__name__


def missing_package(what: str, package: str, extra: str, instead: str) -> InputError:
    """Return the error for a package that is missing because its extra is not installed.

    Args:
        what: The thing that needs it, the beginning of the sentence.
        package: Name of the package.
        extra: The extra of pyproject.toml that has it.
        instead: The remedy without it, the end of the sentence.
    """
    return InputError(
        f"{what} needs the package {package}, but it is not installed. Run pip install "
        f"'rlt-lightning[{extra}]'; or {instead}."
    )


class BadRowReason(StrEnum):
    """Why a row cannot be used."""

    BROKEN_JSON = "broken_json"
    WRONG_ENCODING = "wrong_encoding"
    WRONG_TYPE = "wrong_type"
    MISSING_COLUMN = "missing_column"
    MISSING_TAGS = "missing_tags"
    EXTRA_TAG = "extra_tag"
    EMPTY_QUESTION = "empty_question"
    EMPTY_SOLUTION = "empty_solution"
    EMPTY_TRACE = "empty_trace"
    NO_ANSWER = "no_answer"
    BAD_ANSWER = "bad_answer"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOO_LONG = "too_long"


class BadRowError(Exception):
    """A row cannot be used. The datamodule catches and counts these errors; no user sees one."""

    def __init__(self, reason: BadRowReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Problem:
    """One question with its solution, tokenised once into the pieces that are spliced around an explanation.

    Teacher sequence: teacher_prefix + think_prefix + completion.
    Student sequence: student_prefix + think_prefix + explanation body + student_suffix + solution_ids.
    The student's pieces are in its tokens; if these are not the teacher's, think_prefix is empty.

    Example:
        Of `{"question": "1 + 1?", "solution": "2"}`, with one letter per token and tags in angle brackets:
        teacher_prefix `<user>1 + 1? 2<explain>`, student_prefix `<user>1 + 1?<think>`, student_suffix
        `</think><solution>`, solution_ids `2`.

    Attributes:
        row: Number of the row in its source, from 1.
        question: The question's text.
        solution: The text between the solution tags, with the newlines around it.
        teacher_prefix: Tokens through the opening explanation tag.
        think_prefix: The separator after that tag. It is given, so r_KL counts it only with score_given.
        student_prefix: Tokens through the opening thought tag.
        student_suffix: The closing thought tag through the opening solution tag.
        solution_ids: The S tokens that r_SS scores.
        student_system_prompt: The row's system prompt; None: the format's.
        given_completion: The completion to be scored, if the row has one.
        columns: The source row as it was read.
        teacher_view: In on-policy distillation, where the prompt above is the student's: what the teacher
            reads before the student's tokens, in the tokens of the student.
    """

    row: int
    question: str
    solution: str
    teacher_prefix: list[int]
    think_prefix: list[int]
    student_prefix: list[int]
    student_suffix: list[int]
    solution_ids: list[int]
    student_system_prompt: str | None = None
    given_completion: Completion | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    teacher_view: list[int] = field(default_factory=list)

    @property
    def reference(self) -> dict[str, Any]:
        """Return the columns by which an answer is judged, with the solution among them."""
        return {"solution": self.solution, **self.columns}

    @property
    def teacher_prompt(self) -> list[int]:
        """Return the tokens that the engine completes."""
        return self.teacher_prefix + self.think_prefix


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one prompt.

    Example:
        `Completion([271, 9, 2], [-0.2, -1.5, -0.1], "stop", seed=7)`: three tokens, the end tag last.

    Attributes:
        token_ids: The sampled tokens, end tag included.
        log_probs: Their log-probs, nats, at the sampling temperature, over all words; None: unknown.
        finish_reason: Why sampling ended.
        seed: The seed of the sampling, for the record.
        worker: The worker that sampled it, for the record.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: FinishReason
    seed: int | None = None
    worker: str | None = None


@dataclass(frozen=True)
class ModelView:
    """A completion as another model reads it: a student of RLT, or the teacher of StudentOPDData.

    Both models compare tokens of the completion, which the policy sampled, with tokens of their own:

        completion      So  x  =  123 45  .  </explanation>      num_tokens 5, start 0
        token_ids       So  x  =  1  2345 .                      num_own 5
        spans           1,1 1,1 1,1  2,2

    Attributes:
        problem: The problem with the pieces of this model's context.
        completion: The completion.
        token_ids: Its tokens in place of the completion's.
        num_tokens: How many of the completion's tokens are compared, from `start`.
        num_own: How many of `token_ids` are compared with them: the first ones.
        start: The first of the completion's tokens that is compared.
        spans: If its tokens are others: tokens of teacher and student in each piece of text that ends with a
            token of both, as far as tokens are compared. None: token by token.
        num_left_out: If its tokens are others: tokens of the completion after the spans, whose character is
            not complete.
    """

    problem: Problem
    completion: Completion
    token_ids: list[int]
    num_tokens: int
    num_own: int
    start: int = 0
    spans: list[tuple[int, int]] | None = None
    num_left_out: int | None = None

    @property
    def compared(self) -> list[int]:
        """Return the completion's tokens that are compared."""
        return self.completion.token_ids[self.start : self.start + self.num_tokens]


@dataclass(frozen=True)
class Rollout:
    """A completion attached to its problem, and as another model reads it.

    Example:
        Of a completion with the tokens `So`, separator and closing tag: closed True, and a view with
        `So` and the separator as token_ids, num_tokens 1.

    Attributes:
        problem: The problem, with the pieces of the student.
        completion: The completion.
        text: The explanation, or a student's whole answer, for people.
        closed: Whether it ended as it must: an explanation with its tag, an answer with its eos.
        view: As the student reads it; in StudentOPDData as the teacher does. None if nobody reads anything.
    """

    problem: Problem
    completion: Completion
    text: str
    closed: bool
    view: ModelView | None = None

    def require_view(self) -> ModelView:
        """Return the view of an explanation or a thought, which always has one."""
        assert self.view is not None, f"nobody reads the completion of row {self.problem.row}"
        return self.view

    @property
    def empty(self) -> bool:
        """Return whether the text is only white space."""
        return not self.text.strip()


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a batch, stamped with the version of the weights that sampled them.

    Example:
        2 problems with group_size 3 have N = 6 rollouts, the first three of the first problem.

    Attributes:
        rollouts: N = P * group_size rollouts, those of a problem in adjacent rows.
        group_size: Completions per problem.
        policy_version: Optimizer steps that the sampling policy had taken.
        temperature: The sampling temperature, at which policy and reference log-probs are taken too.
    """

    rollouts: list[Rollout]
    group_size: int
    policy_version: int
    temperature: float


class Batch:
    """What a loader makes of some items, which are its first field."""

    def __iter__(self) -> Iterator[Any]:
        """Yield a tensor of as many rows as there are items: by it Lightning weighs what hooks log."""
        import torch

        items, *_ = vars(self).values()
        yield torch.empty(len(items), device="cpu")


@dataclass
class PromptBatch(Batch):
    """One RL iteration of one rank: the loader brings the problems, the module sets the rest for callbacks.

    Attributes:
        problems: The problems of this rank; dynamic sampling may put others in place.
        rollouts: Their completions; `rlt predict` may read them from the data.
        step: The StepBatch (rollouts/step.py) with their rewards and, in training, those of all ranks.
        spare: Whether it only lets this rank take part in what all ranks do together: nobody keeps its rows.
    """

    problems: list[Problem]
    rollouts: Rollouts | None = None
    step: Any = None
    spare: bool = False


@dataclass(frozen=True)
class SFTExample:
    """One token sequence of supervised fine-tuning; the loss counts the tokens where `loss_mask` is True.

    Example:
        `SFTExample(1, [5, 7, 9, 2], [False, False, True, True])`: a prompt of two tokens, then two to learn.

    Attributes:
        row: Number of the row in its source, from 1.
        token_ids: Prompt and completion.
        loss_mask: True on completion tokens.
        num_cut: Tokens that were cut off the end.
    """

    row: int
    token_ids: list[int]
    loss_mask: list[bool]
    num_cut: int = 0

    def truncated(self, max_length: int) -> SFTExample:
        """Return the example with only its first tokens."""
        num_cut = max(0, len(self.token_ids) - max_length)
        return SFTExample(self.row, self.token_ids[:max_length], self.loss_mask[:max_length], num_cut)


@dataclass
class SFTBatch(Batch):
    """The examples of one optimizer step of one rank.

    Attributes:
        examples: The examples.
        step: The StepBatch of them, set by the module; a reward is an example's mean log-prob.
    """

    examples: list[SFTExample]
    step: Any = None


def as_list(value: Any) -> list[Any]:
    """Return a setting that may be one object, a list, a switch or nothing as a list of objects."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
