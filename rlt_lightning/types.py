"""Dataclasses that cross folders. Token ids travel from the engine to the loss; text is for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self

# The processes that judge answers import this module, and start faster without torch.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "eos", "length"]  # end tag sampled | end-of-sequence token | token limit


class InputError(ValueError):
    """Something the user controls is wrong. `rlt` prints its message on one line, without a traceback."""


@dataclass(frozen=True)
class Problem:
    """One question with its solution, tokenised once into the pieces that are spliced around an explanation.

    Teacher sequence: teacher_prefix + think_prefix + completion.
    Student sequence: student_prefix + think_prefix + explanation body + student_suffix + solution_ids.
    """

    row: int  # number of the row in its source, from 1
    question: str
    solution: str  # text between the solution tags, surrounding newlines included
    teacher_prefix: list[int]  # through the opening explanation tag
    think_prefix: list[int]  # the separator after that tag: given, so r_KL counts it only with score_given
    student_prefix: list[int]  # through the opening thought tag
    student_suffix: list[int]  # closing thought tag through the opening solution tag
    solution_ids: list[int]  # the S tokens that r_SS scores
    student_system_prompt: str | None = None  # the row's own; None: the format's
    given_completion: Completion | None = None  # to be scored, when the row carries one
    columns: dict[str, Any] = field(default_factory=dict)  # the source row as it was read

    @property
    def reference(self) -> dict[str, Any]:
        """What an answer is judged by: the columns of the row, its solution among them."""
        return {"solution": self.solution, **self.columns}

    @property
    def teacher_prompt(self) -> list[int]:
        """What the engine is given."""
        return self.teacher_prefix + self.think_prefix


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one prompt: the sampled token ids, end tag included."""

    token_ids: list[int]
    log_probs: (
        list[float] | None
    )  # nats, at the sampling temperature, over the full vocabulary; None: not known
    finish_reason: FinishReason
    seed: int | None = None  # that it was sampled with, for the record
    worker: str | None = None  # that sampled it, for the record


@dataclass(frozen=True)
class Rollout:
    """A completion attached to its problem, with the spans that the reward needs, in tokens."""

    problem: Problem
    completion: Completion
    num_body: int  # completion tokens before the closing tag: what is copied into the student's context
    num_think: int  # of those, the tokens that r_KL counts: without the separator before the closing tag
    text: str  # the explanation, or a student's whole answer, for people
    closed: bool  # whether it was ended as it must be: an explanation by its tag, an answer by its eos

    @property
    def body(self) -> list[int]:
        """The tokens that are copied into the student's context."""
        return self.completion.token_ids[: self.num_body]

    @property
    def empty(self) -> bool:
        """Whether nothing but white space was written."""
        return not self.text.strip()


@dataclass(frozen=True)
class Rollouts:
    """`group_size` rollouts per problem in adjacent rows, stamped with the weights that sampled them."""

    rollouts: list[Rollout]  # N = P * group_size
    group_size: int
    policy_version: int  # optimizer steps taken by the policy that sampled them
    temperature: float  # that they were sampled at; policy and reference log-probs are taken at it


@dataclass(frozen=True)
class Scores:
    """The reward of N rollouts, its terms, and the tokens behind them."""

    terms: RewardTerms  # each (N,)
    # Empty where no model was asked:
    solution_log_probs: list[Tensor]  # N of (S,), nats, at the student's temperature
    think_tokens: list[list[int]]  # N of K token ids: those that r_KL counts
    kl: list[Tensor]  # N of (K,), nats: their KL


@dataclass
class PromptBatch:
    """One RL iteration of one rank. RolloutCallback attaches the rollouts, the module their scores."""

    problems: list[Problem]
    rollouts: Rollouts | None = None
    scores: Scores | None = None


@dataclass(frozen=True)
class SFTExample:
    """One token sequence of supervised fine-tuning; the loss counts the tokens where `loss_mask` is True."""

    row: int
    token_ids: list[int]
    loss_mask: list[bool]
    num_cut: int = 0  # tokens that were cut off its end

    def truncated(self, max_length: int) -> SFTExample:
        """Keep the first tokens."""
        num_cut = max(0, len(self.token_ids) - max_length)
        return SFTExample(self.row, self.token_ids[:max_length], self.loss_mask[:max_length], num_cut)


@dataclass(frozen=True)
class SFTBatch:
    """The examples of one optimizer step of one rank."""

    examples: list[SFTExample]


@dataclass(frozen=True)
class EvaluationProblem:
    """One question of an evaluation set."""

    id: str  # set/own id
    set_name: str
    question: str
    prompt: list[int]  # through the opening of the assistant's turn; empty where responses are given
    reference: Mapping[str, Any]  # what the judge compares with
    private: bool  # whether nothing that could quote it may be written


@dataclass(frozen=True)
class Response:
    """A model's whole turn in answer to a question, tags included."""

    text: str
    num_tokens: int | None = None  # sampled; None where the response was given
    finish_reason: FinishReason | None = None
    num_thinking_tokens: int | None = None  # where a budget was forced


@dataclass
class EvaluationBatch:
    """Questions of one set. ResponseCallback attaches the responses, the module the judged records."""

    problems: list[EvaluationProblem]
    responses: list[list[Response]] | None = None  # equally many of each problem
    records: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class RewardTerms:
    """The reward of each completion; a subclass adds what it is made of. All (N,)."""

    reward: Tensor

    def parts(self) -> dict[str, Tensor]:
        """What is logged beside the reward, as means, in training and validation: reward/NAME."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def details(self) -> dict[str, Tensor]:
        """What is logged in training alone, as means, by its whole name."""
        return {}

    def recorded(self) -> dict[str, Tensor]:
        """What is written down for every completion."""
        return {"reward": self.reward, **self.parts()}

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return type(self)(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def as_list(value: Any) -> list[Any]:
    """Return a setting that may be one object, a list, a switch or nothing as a list of objects."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
