"""The engine protocol: what a rollout can come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlt_lightning.models.weights import NamedTensor
from rlt_lightning.types import Completion, InputError

PROBE_TOKENS = 64  # of a prompt, by which workers are verified
SEED_MASK = 2**62 - 1  # vLLM takes signed 64-bit seeds and adds the number of the completion


class EngineError(RuntimeError):
    """An engine failed: the message says which worker, what happened and what to do."""


class WorkersLost(EngineError):
    """No worker with the current weights is left. Push the weights, then ask again for what is missing.

    Args:
        message: What happened.
        finished: Completions of the prompts that were done before, by their position.
    """

    def __init__(self, message: str, finished: dict[int, list[Completion]]) -> None:
        super().__init__(message)
        self.finished = finished


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

    @property
    def truncates(self) -> bool:
        """Whether tokens come from another distribution than the policy's at `temperature`."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1

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


def require_context(num_tokens: int, max_model_len: int) -> None:
    """Check that prompt and completion fit into what the engine takes, in tokens."""
    if num_tokens > max_model_len:
        raise InputError(
            f"Prompt and completion must fit into the workers' --max-model-len of {max_model_len} tokens, "
            f"but need {num_tokens}. Raise it, or lower sampling.max_completion_length or "
            "data.max_prompt_length."
        )


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out. Every call either returns or raises EngineError within its deadline.

    An engine samples with the trainer's own model, on every rank for itself (`in_process`), or it has copies
    of the weights elsewhere. Then rank 0 alone talks to it, for all ranks.
    """

    in_process: bool
    reports_log_probs: bool
    takes_adapters: bool  # whether it is pushed a LoRA's matrices rather than merged weights
    max_model_len: int  # tokens of prompt and completion that it takes; known once it is started
    unverified: bool  # whether a worker has never been verified since it came, or came back
    policy_version: int  # of the weights that all its workers hold; -1 if some need a push
    takes_turns: bool  # whether it shares its GPUs with training, and rests meanwhile

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Get ready to serve; safe to call twice.

        Args:
            model: The trainer's teacher; None where workers serve weights of their own (NoPush).
            tokenizer: Its tokenizer.
            folder: The run folder, for logs and what else the engine writes.
        """

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        num_completions: int,
        stop: str,
        seeds: list[int],
        limits: list[int] | None = None,
    ) -> list[list[Completion]]:
        """Sample `num_completions` per prompt.

        Args:
            prompts: P prompts, token ids.
            sampling: Temperature and limits.
            num_completions: Completions per prompt, the group size.
            stop: The end tag. A completion ends with the token in which this text ends; '': only with an
                end-of-sequence token.
            seeds: One per prompt. The same seed gives the same random numbers, whatever else is in the batch.
            limits: Tokens sampled at most, one per prompt; None: sampling.max_completion_length for all.

        Returns:
            P lists of `num_completions`. Log-probs are of the full distribution at `sampling.temperature`, at
            1 when it is 0, nats; None where the engine does not know them.

        Raises:
            WorkersLost: If a push is needed before the rest can be sampled.
        """

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Bring these weights to every worker that can be reached; see `policy_version` for the outcome."""

    def join_update(self, named_tensors: list[NamedTensor]) -> None:
        """Take part, on the ranks other than 0, in the gathering of sharded weights."""

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Raise if a worker's weights are not those of the trainer.

        Args:
            token_ids: A text.
            log_probs: The trainer's log-probs of all its tokens but the first at temperature 1, nats, by
                policy version: the current one and, to tell what a stale worker holds, earlier ones.
        """

    def health(self) -> None:
        """Bring back the workers that can be, and wake them; raise EngineError if none can serve."""

    def rest(self) -> None:
        """Leave the GPUs to training, if the engine takes turns, until the next `health`."""

    def close(self) -> None:
        """Free what the engine holds; safe to call twice."""


def generate_patiently(
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    num_completions: int,
    stop: str,
    seeds: list[int],
    limits: list[int] | None = None,
) -> list[list[Completion]]:
    """`Engine.generate`, with lost workers waited for until all is sampled.

    Raises:
        WorkersLost: If they came back without the current weights.
    """
    finished: dict[int, list[Completion]] = {}
    while missing := [i for i in range(len(prompts)) if i not in finished]:
        asked, their_seeds = [prompts[i] for i in missing], [seeds[i] for i in missing]
        their_limits = None if limits is None else [limits[i] for i in missing]
        try:
            groups = engine.generate(asked, sampling, num_completions, stop, their_seeds, their_limits)
            finished |= dict(zip(missing, groups, strict=True))
        except WorkersLost as error:
            finished |= {missing[i]: group for i, group in error.finished.items()}
            engine.health()
            if engine.policy_version < 0:
                raise WorkersLost(str(error), finished) from error
    return [finished[i] for i in range(len(prompts))]
