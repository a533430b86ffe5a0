"""A request for completions, and those that have arrived.

On the rank that talks to the engine a completion goes from one thread to the other:

    engine's thread     receive ─▶ arrivals ──┐
    trainer's thread                      next_chunk ─▶ completions ─▶ a chunk, which all ranks get

What an engine lost with its workers is sampled again, group by group. A completion that has already arrived
stays as it is: its second version is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

from rlt_lightning.engines.base import SampleRequest, Sampling, WorkersLost
from rlt_lightning.run.console import waiting_for
from rlt_lightning.types import Completion, Problem, Rollout, Rollouts


class Chunk(NamedTuple):
    """Completions that have come since the chunk before.

    Attributes:
        completions: The completions by number.
        complete: Whether nothing of the request is missing any more.
    """

    completions: dict[int, Completion]
    complete: bool


@dataclass
class RolloutRequest:
    """The completions that all ranks of one step are waiting for.

    Example:
        Two problems with three completions each have the numbers 0 to 5; `missing` names problems, 0 and 1.

    Attributes:
        rows: Row numbers of the problems, of all ranks in rank order.
        prompts: Their prompts, token ids.
        seeds: One for each.
        policy_version: Optimizer steps of the weights that sample; of the oldest, if weights differ.
        sampling: Temperature and limits.
        num_completions: Completions per problem.
        stop: The end tag.
        completions: Those that have arrived, by number: group g's begin with g * num_completions.
        step: The training step that they are for, from 0; None: no step of training.
        limits: Tokens of each problem's completions; None: sampling.max_completion_length.
        problems: The problems themselves; a checkpoint holds none.
        slots: Which of the step's problems each one is, or replaces.
        logged: Those that this rank logs and records: the problems that the loader gave it.
        asked: The problems that this rank asks the engine for; None: all.
        build: Attaches a completion to its problem.
    """

    rows: list[int]
    prompts: list[list[int]]
    seeds: list[int]
    policy_version: int
    sampling: Sampling
    num_completions: int
    stop: str
    completions: dict[int, Completion] = field(default_factory=dict)
    step: int | None = None
    limits: Sequence[int] | None = None
    problems: list[Problem] = field(default_factory=list, compare=False)
    slots: Sequence[int] = field(default=(), compare=False)
    logged: Sequence[int] = field(default=(), compare=False)
    asked: Sequence[int] | None = field(default=None, compare=False)
    build: Callable[[Problem, Completion], Rollout] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.delivered: set[int] = set()  # numbers that were in a chunk
        self.rollouts: dict[int, Rollout] = {}  # built by `build_rollout`
        # On the rank that talks to the engine: its completions, then None or its error.
        self.arrivals: SimpleQueue[tuple[int, Completion] | BaseException | None] = SimpleQueue()
        self.is_sampling = False  # on that rank: whether more may come

    # Completions

    @property
    def missing(self) -> list[int]:
        """Return the problems of which this rank still awaits completions."""
        size = self.num_completions
        asked = range(len(self.prompts)) if self.asked is None else self.asked
        return [i for i in asked if any(i * size + j not in self.completions for j in range(size))]

    @property
    def needs_sampling(self) -> bool:
        """Return whether completions are missing that no engine samples: not yet, or not after a loss."""
        return bool(self.missing) and not self.is_sampling

    @property
    def logged_numbers(self) -> list[int]:
        """Return the numbers of the completions of the problems that this rank logs."""
        size = self.num_completions
        return [i * size + j for i in self.logged for j in range(size)]

    def build_rollout(self, number: int) -> Rollout:
        """Return a completion attached to its problem; a rank builds only what it needs."""
        if number not in self.rollouts:
            assert self.build is not None
            problem = self.problems[number // self.num_completions]
            self.rollouts[number] = self.build(problem, self.completions[number])
        return self.rollouts[number]

    def build_rollouts(self, numbers: Iterable[int]) -> Rollouts:
        """Return completions attached to their problems, as a module reads them."""
        rollouts = [self.build_rollout(number) for number in numbers]
        return Rollouts(rollouts, self.num_completions, self.policy_version, self.sampling.temperature)

    def count_tokens(self, number: int) -> tuple[int, int]:
        """Return the tokens of a completion's prompt, and of the completion."""
        prompt = self.prompts[number // self.num_completions]
        return len(prompt), len(self.completions[number].token_ids)

    def sum_tokens(self, numbers: Iterable[int]) -> int:
        """Return how many tokens these completions have."""
        return sum(len(self.completions[number].token_ids) for number in numbers)

    # From the engine

    def open(self) -> tuple[list[SampleRequest], list[int]]:
        """Note that the engine now samples the missing completions.

        Returns:
            The requests to the engine, and the numbers of their completions.
        """
        self.arrivals, self.is_sampling = SimpleQueue(), True
        missing, size = self.missing, self.num_completions
        numbers = [i * size + j for i in missing for j in range(size)]
        limits: Sequence[int | None] = self.limits or [None] * len(self.prompts)
        requests = [
            SampleRequest(self.prompts[i], self.seeds[i], size, limits[i], self.step, self.rows[i])
            for i in missing
        ]
        return requests, numbers

    def receive(self, samples: Iterable[tuple[int, Completion]], numbers: Sequence[int]) -> None:
        """Take an engine's completions until it ends; in a thread, unless the engine is in this process.

        Args:
            samples: Completions with their index in `numbers`.
            numbers: The numbers that `open` returned.
        """
        arrivals, end = self.arrivals, None
        try:
            for index, completion in samples:
                arrivals.put((numbers[index], completion))
        except BaseException as error:
            end = error
        arrivals.put(end)

    def collect(self) -> None:
        """Wait for the completions that the engine samples, and keep them.

        Completions that were lost with workers stay missing. Any other error is raised once:
        afterwards the engine may be asked again.
        """
        self._take(math.inf)

    def next_chunk(self, min_tokens: float) -> Chunk:
        """Wait for completions of `min_tokens` or the engine's last one; infinity: for all.

        Returns:
            The completions of no earlier chunk. With infinity none if workers were lost before all came.
        """
        self._take(min_tokens)
        complete = not self.missing
        fresh = sorted(self.completions.keys() - self.delivered)
        if not complete and min_tokens == math.inf:
            fresh = []
        chunk = {number: self.completions[number] for number in fresh}
        return Chunk(chunk, complete and not self.is_sampling)

    def deliver(self, chunk: Chunk) -> None:
        """Keep a chunk, which all ranks get alike."""
        self.completions |= chunk.completions
        self.delivered |= chunk.completions.keys()

    def _take(self, min_tokens: float) -> None:
        """Move arrivals to `completions` until those in no chunk have `min_tokens`, or no more come."""
        num_tokens = self.sum_tokens(self.completions.keys() - self.delivered)
        with waiting_for("the engine's completions"):
            while self.is_sampling:
                try:
                    arrival = self.arrivals.get(block=num_tokens < min_tokens)
                except Empty:
                    return
                if isinstance(arrival, tuple):
                    number, completion = arrival
                    if number not in self.completions:
                        self.completions[number] = completion
                        num_tokens += len(completion.token_ids)
                    continue
                self.is_sampling = False
                if arrival is not None and not isinstance(arrival, WorkersLost):
                    raise arrival

    # In a checkpoint

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain values, such as a checkpoint may hold: whole groups only."""
        size, missing = self.num_completions, set(self.missing)
        finished = {n: vars(c) for n, c in self.completions.items() if n // size not in missing}
        state = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.compare}
        return state | {"sampling": vars(self.sampling), "completions": finished}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> Self:
        """Return the request whose `to_plain` returned this."""
        finished = {number: Completion(**entry) for number, entry in state["completions"].items()}
        return cls(**state | {"sampling": Sampling(**state["sampling"]), "completions": finished})
