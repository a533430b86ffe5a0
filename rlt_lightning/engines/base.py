"""The protocol of engines, which sample completions, and the order in which it is called.

    before anything is loaded   describe, load_own_model
    once                        start, use_sharded_model
    every step                  health ─▶ update_weights ─▶ verify ─▶ sample ─▶ put_to_sleep
                                  ▲       (gather_weights              │ WorkersLost
                                  │        on the other ranks)         │
                                  └────────────────────────────────────┘
    at the end, or on an error  close

health and update_weights are repeated until `policy_version` is the current step; an engine
that cannot get there must raise in health. verify follows a push: the first, every `verify_every_n_steps`,
and whenever the engine says that it is `unverified`. put_to_sleep is called if the engine `takes_turns`.
`sample` yields each completion as soon as it is finished, so that completions are scored while others are
sampled.

rollouts/dispatcher.py makes all calls from `start` on, for training, evaluation and commands alike.

    call                  SHARED_WEIGHTS    PER_RANK      SERVER: rank 0            SERVER: other ranks
    start, health         every rank        every rank    yes                       -
    use_sharded_model     every rank        -             -                         -
    update_weights        every rank        every rank    yes                       gather_weights instead
    verify                -                 every rank    yes                       -
    sample                every rank        every rank    in a background thread    -
    put_to_sleep          every rank        every rank    yes                       -
    close                 every rank        every rank    yes                       yes

An engine raises EngineError or InputError: the run then ends with their message in one line. Any other error
is taken for a bug and printed with its traceback. rlt_lightning/types.py draws all error classes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlt_lightning.models.weights import NamedTensor
from rlt_lightning.run.console import make_printable
from rlt_lightning.types import Completion, InputError, require_limits

# Workers are verified by the first tokens of a prompt: this many.
PROBE_TOKENS = 64
# The largest difference that rounding explains, nats, mean over a text; by the coarsest data type that
# weights have in the trainer, in the worker or on the way.
AGREEMENT = {"float32": 5e-4, "float16": 0.02, "bfloat16": 0.1}
# Servers take signed 64-bit seeds, and the number of the completion is added.
SEED_MASK = 2**62 - 1


class EngineError(RuntimeError):
    """An engine failed: the message says which worker, what happened and what to do, in one line.

    It may quote a worker, so what could control a terminal is left out of it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(make_printable(message))


class WorkersLost(EngineError):
    """The workers need the weights. Push them, then ask again for what is missing."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. The defaults are the released recipe's.

    Args:
        temperature: Divides the logits; 0 is greedy (validation and generation only).
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
        """Tell whether tokens come from another distribution than the policy's at `temperature`."""
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
        require_limits(self, limits, "Sampling must satisfy", "Correct the sampling section")


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, to be completed `num_completions` times.

    The same seed gives the same completions, whatever else is sampled at the same time. Step and row are for
    engines that look completions up.
    """

    prompt: list[int]
    seed: int
    num_completions: int = 1
    max_tokens: int | None = None  # of each completion; None: sampling.max_completion_length
    step: int | None = None  # the training step that it is for, from 0; None: no step of training
    row: int | None = None  # the problem's number in its source

    @property
    def seeds(self) -> list[int]:
        """Return a seed for each completion, for a server that is asked for one at a time."""
        return [(self.seed & SEED_MASK) + i for i in range(self.num_completions)]

    def limit(self, sampling: Sampling) -> int:
        """Return the tokens that each completion may have."""
        return sampling.max_completion_length if self.max_tokens is None else self.max_tokens


def require_context(num_tokens: int, max_model_len: int) -> None:
    """Raise InputError if prompt and completion, in tokens, do not fit into the workers' context."""
    if num_tokens > max_model_len:
        raise InputError(
            f"Prompt and completion must fit into the workers' --max-model-len of {max_model_len} tokens, "
            f"but need {num_tokens}. Raise it, or lower rollouts.sampling.max_completion_length or "
            "data.max_prompt_length."
        )


class Placement(Enum):
    """Where an engine samples, and with whose weights.

    SHARED_WEIGHTS: every rank has one, which samples its part with the trainer's own model, and so with the
        weights that are trained.
    PER_RANK: every rank has one, which samples its part with a copy of the weights. All ranks push together,
        as soon as one of them needs it where weights are in shards, and each verifies its copy.
    SERVER: one engine elsewhere samples for all ranks with copies of the weights. Only rank 0 talks to it, so
        all ranks get what rank 0 got, also an error.
    """

    SHARED_WEIGHTS = "shared_weights"
    PER_RANK = "per_rank"
    SERVER = "server"


class Engine(ABC):
    """Token ids in, token ids out. Every call either returns or raises EngineError within its deadline.

    A class that derives from this one must write `start`, `sample`, `update_weights` and `verify`. All the
    rest has the defaults below, which suit an engine that restarts, gathers and frees nothing.
    """

    placement: Placement = Placement.SERVER
    reports_log_probs: bool = False  # whether completions bring log-probs at the temperature of sampling
    max_model_len: int = sys.maxsize  # tokens of prompt and completion; known once it is started
    unverified: bool = False  # the engine sets it while a worker that has joined or rejoined awaits `verify`
    policy_version: int = -1  # of the weights that all its workers hold; -1 if some need a push
    takes_turns: bool = False  # whether it shares its GPUs with training, and sleeps meanwhile
    # The first token ids, which may be sampled: those with a text, and with a row in every model that reads
    # them. Set before `start`; None: all.
    num_ids: int | None = None

    @abstractmethod
    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Get ready to serve; safe to call twice.

        Args:
            model: The trainer's teacher; None where nothing is pushed to workers (NoPush).
            tokenizer: Its tokenizer.
            folder: The run folder, for logs and other files that the engine writes.
        """

    @abstractmethod
    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """Yield each completion with its index, as soon as it is finished.

        Completions are numbered through the requests: with requests for 2 and 3 completions, the second
        request's first one has index 2. An engine that is no server may yield all of them at the end.

        Args:
            requests: The prompts.
            sampling: Temperature and limits.
            stop: The end tag. A completion ends with the token in which this text ends; '': only with an
                end-of-sequence token.

        Yields:
            Index and Completion. A Completion (types.py) has the sampled tokens, with those of the end tag
            or the end-of-sequence token; log-probs of the full distribution, in nats, at
            `sampling.temperature`, at 1 when it is 0, or None where the engine does not know them; and
            finish_reason "stop" (end tag), "eos" or "length". Its seed and worker are only recorded.

        Raises:
            WorkersLost: If a push is needed before the rest can be sampled. What was yielded stays valid.
                Only servers raise it: the ranks of other engines do not know of each other's loss.
        """

    @abstractmethod
    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Bring these weights to every worker.

        Set `self.policy_version = policy_version` once all workers hold them: the run pushes again until it
        is set.

        Args:
            named_tensors: Pairs of name and tensor: the teacher's weights under the names of its files, with
                a LoRA merged in. With SHARED_WEIGHTS, the model's parameters. Any other engine must take
                the tensors from `models.weights.gather_in_groups(named_tensors, group_bytes)`, which yields
                lists of whole tensors in this order, without the names. It must iterate to the end even if
                sending fails: the other ranks wait at every group. It must send a group to its end before it
                takes the next, so that no rank waits in a collective for one that is sending.
            policy_version: Optimizer steps that these weights have taken.
        """

    @abstractmethod
    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Raise if a worker's weights are not the trainer's.

        Args:
            token_ids: A text.
            log_probs: The trainer's log-probs of all its tokens but the first at temperature 1, nats, by
                policy version: the current one and, to recognise a stale worker, earlier ones.
        """

    def load_own_model(self, name: str) -> bool:
        """Let workers load a trained model themselves, if nothing is pushed to them.

        Args:
            name: Name of the model, for workers that the engine starts and whose settings name none.

        Returns:
            Whether they do: the trainer then loads no model, and `start` gets None.
        """
        return False

    def use_sharded_model(self, run: Callable[..., Any], on_any_rank: Callable[[bool], bool]) -> None:
        """Sample with weights in shards on all ranks; called after `start`, only with SHARED_WEIGHTS.

        All ranks must then call the model equally often.

        Args:
            run: The way into the model: run(function, *arguments) is function(model, *arguments).
            on_any_rank: on_any_rank(flag) tells every rank whether the flag is set on one of them.
        """
        return

    def gather_weights(self, named_tensors: list[NamedTensor]) -> None:
        """Gather sharded weights in step with rank 0, which pushes them; called on all other ranks.

        The default gathers nothing. A server that is used with sharded weights must
        iterate over `gather_in_groups`, with the same `group_bytes` as its `update_weights`.
        """
        return

    def health(self) -> None:
        """Bring back lost workers; raise EngineError if none can serve."""
        return

    def put_to_sleep(self) -> None:
        """Leave the GPUs to training until the next push, if the engine takes turns."""
        return

    def close(self) -> None:
        """Free the engine's processes and memory; safe to call twice."""
        return


def stream_completions(
    engine: Engine, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
) -> Iterator[tuple[int, Completion]]:
    """Yield the completions of `Engine.sample`.

    Raises:
        EngineError: If it ends before all came, or samples a token that it may not.
    """
    missing = set(range(sum(request.num_completions for request in requests)))
    for index, completion in engine.sample(requests, sampling, stop):
        if engine.num_ids is not None and max(completion.token_ids, default=0) >= engine.num_ids:
            raise EngineError(
                f"{type(engine).__name__} must sample the {engine.num_ids} tokens that have a text and a row "
                f"in all models, but sampled {max(completion.token_ids)}. Let it leave out the others."
            )
        missing.discard(index)
        yield index, completion
    if missing:
        raise EngineError(
            f"{type(engine).__name__}.sample must yield every completion or raise WorkersLost, but "
            f"{len(missing)} did not come, the first with index {min(missing)}. Correct the engine."
        )


def find_disagreement(scores: list[float], log_probs: dict[int, list[float]], bound: float) -> str | None:
    """Say how a worker's log-probs differ from the trainer's of the latest version; None if they agree.

    Even within the bound, a worker is stale if its log-probs are more than four times nearer to an earlier
    version than to the latest: a small step moves log-probs by less than the bound, yet by more than rounding
    does.

    Args:
        scores: The worker's log-probs of a text, nats.
        log_probs: The trainer's log-probs of the text, nats, by policy version.
        bound: The largest mean difference that rounding explains, nats.
    """
    distances = {version: mean_distance(scores, values) for version, values in log_probs.items()}
    latest = max(distances)
    nearest = min(distances, key=distances.__getitem__)
    error = distances[latest]
    if nearest != latest and distances[nearest] < error / 4:
        return (
            f"its log-probs differ by {error:.2g} nats per token from those of step {latest} and by "
            f"{distances[nearest]:.2g} from those of step {nearest}: later pushes have not arrived."
        )
    if not error <= bound:
        return (
            f"its log-probs differ by {error:.2g} nats per token (at most {bound:g} is rounding) and fit no "
            "earlier step either."
        )
    return None


def mean_distance(a: list[float], b: list[float]) -> float:
    """Return the mean absolute difference."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
