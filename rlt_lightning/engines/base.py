"""The engine protocol: what a rollout can come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rlt_lightning.types import Completion, InputError


class EngineError(RuntimeError):
    """An engine failed: the message says which worker, what happened and what to do."""


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. The defaults are the released recipe's.

    Args:
        temperature: Of the softmax; 0 is greedy (validation and generation only).
        top_p: Nucleus mass kept; 1 keeps all.
        top_k: Number of tokens kept; 0 keeps all.
        min_p: Smallest kept probability relative to the likeliest token; 0 keeps all.
        repetition_penalty: Divides the logit of tokens already present; 1 is off.
        max_completion_length: Tokens sampled at most, end tag included.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_completion_length: int = 16384

    def __post_init__(self) -> None:
        limits = {
            "temperature >= 0": self.temperature >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "top_k >= 0": self.top_k >= 0,
            "0 <= min_p < 1": 0 <= self.min_p < 1,
            "repetition_penalty > 0": self.repetition_penalty > 0,
            "max_completion_length >= 1": self.max_completion_length >= 1,
        }
        if broken := [limit for limit, holds in limits.items() if not holds]:
            raise InputError(
                f"Sampling must satisfy {' and '.join(broken)}, but got {self}. Correct the sampling section."
            )


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out. Every call either returns or raises EngineError within its deadline.

    An engine may share the trainer's weights (hf) or hold its own copy in another process (vllm).
    """

    policy_version: int  # version of the weights it samples from; -1 before the first update

    def start(self, model: Any, tokenizer: Any) -> None:
        """Get ready to serve. `model` is the trainer's teacher, `tokenizer` its tokenizer."""

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, num_completions: int, stop: str, seeds: list[int]
    ) -> list[list[Completion]]:
        """Sample `num_completions` per prompt.

        Args:
            prompts: P prompts, token ids.
            sampling: Temperature and limits.
            num_completions: Completions per prompt, the group size.
            stop: The end tag. A completion ends with the token in which this text ends.
            seeds: One per prompt. The same seed gives the same completions, whatever else is in the batch.

        Returns:
            P lists of `num_completions`. Log-probs are of the full distribution at `sampling.temperature`
            (before top-p, top-k, min-p and repetition penalty), nats.
        """

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Sample from these weights from now on."""

    def health(self) -> None:
        """Raise EngineError if the engine cannot serve."""

    def close(self) -> None:
        """Free what the engine holds; safe to call twice."""
