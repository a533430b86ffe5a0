"""Questions of evaluation sets, and the responses to them that are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlt_lightning.types import FinishReason


@dataclass(frozen=True)
class EvaluationProblem:
    """One question of an evaluation set.

    Attributes:
        id: The name of the set, a slash, and the question's id in the set, such as `gsm8k/17`.
        set_name: The name of the set.
        question: The question's text.
        prompt: Tokens through the opening of the assistant's turn; empty if responses are given.
        reference: What the judge compares an answer with.
        private: Whether nothing may be written that could quote the question.
    """

    id: str
    set_name: str
    question: str
    prompt: list[int]
    reference: Mapping[str, Any]
    private: bool


@dataclass(frozen=True)
class Response:
    """A model's whole turn in answer to a question, tags included.

    Attributes:
        text: The text.
        num_tokens: Sampled tokens; None if the response was given.
        finish_reason: Why sampling ended; None if the response was given.
        num_thinking_tokens: Tokens of the thought, if a budget was forced.
    """

    text: str
    num_tokens: int | None = None
    finish_reason: FinishReason | None = None
    num_thinking_tokens: int | None = None


@dataclass
class EvaluationBatch:
    """Questions of one set. ResponseCallback attaches the responses, the module the judged records.

    Attributes:
        problems: The questions.
        responses: The responses to each question, equally many for each.
        records: One record of each judged response.
    """

    problems: list[EvaluationProblem]
    responses: list[list[Response]] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
