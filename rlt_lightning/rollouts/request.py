"""One step's request to an engine, for all ranks, with the completions that have arrived so far.

Completions are numbered from 0 over the step, group after group: with 3 completions per problem, the second
problem's first one has number 3. How a completion travels on the rank that talks to the engine:

    engine's thread     receive ─▶ arrivals ──┐
    trainer's thread                      next_chunk ─▶ completions ─▶ a chunk, which all ranks get

Completions that the engine lost with its workers are requested again, group by group. One that has already
arrived stays as it is: its second version is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import torch

from rlt_lightning.console import waiting_for
from rlt_lightning.engines.base import SampleRequest, Sampling, WorkersLost
from rlt_lightning.types import Completion, Problem, Rollout, Rollouts


class Chunk(NamedTuple):
    """Completions that have come since the chunk before.

    Attributes:
        completions: The completions by number.
        complete: Whether nothing of the request is missing any more.
        sampling: Whether the engine still samples. If it does not and some are missing, submit the request.
        waited_s: Seconds since the engine has finished; 0 while it samples.
    """

    completions: dict[int, Completion]
    complete: bool
    sampling: bool
    waited_s: float


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
        completions: What has come, by number.
        step: The training step that they are for, from 0; None: validation or prediction.
        problems: The problems themselves; a checkpoint holds none.
        places: Which of the step's problems each one is, or replaces.
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
    problems: list[Problem] = field(default_factory=list, compare=False)
    places: Sequence[int] = field(default=(), compare=False)
    logged: Sequence[int] = field(default=(), compare=False)
    asked: Sequence[int] | None = field(default=None, compare=False)
    build: Callable[[Problem, Completion], Rollout] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.delivered: set[int] = set()  # numbers that were in a chunk
        self.rollouts: dict[int, Rollout] = {}  # what `build_rollout` has built
        # On the rank that talks to the engine: what has come, and at its end None or the error.
        self.arrivals: SimpleQueue[tuple[int, Completion] | BaseException | None] = SimpleQueue()
        self.sampling_now = False
        self.ended_at = 0.0  # time.monotonic()

    # What is there

    @property
    def missing(self) -> list[int]:
        """Return the problems without all of their completions, as far as this rank asks for them."""
        size = self.num_completions
        asked = range(len(self.prompts)) if self.asked is None else self.asked
        return [i for i in asked if any(i * size + j not in self.completions for j in range(size))]

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
        """Return the tokens of a completion's prompt, and its own."""
        prompt = self.prompts[number // self.num_completions]
        return len(prompt), len(self.completions[number].token_ids)

    def sum_tokens(self, numbers: Iterable[int]) -> int:
        """Return how many tokens these completions have."""
        return sum(len(self.completions[number].token_ids) for number in numbers)

    # From the engine

    def open(self) -> tuple[list[SampleRequest], list[int]]:
        """Note that the engine is now asked for what is missing.

        Returns:
            What it is asked for, and the numbers of these completions.
        """
        self.arrivals, self.sampling_now = SimpleQueue(), True
        missing, size = self.missing, self.num_completions
        numbers = [i * size + j for i in missing for j in range(size)]
        requests = [
            SampleRequest(self.prompts[i], self.seeds[i], size, step=self.step, row=self.rows[i])
            for i in missing
        ]
        return requests, numbers

    def receive(self, samples: Iterable[tuple[int, Completion]], numbers: Sequence[int]) -> None:
        """Take what an engine yields until it ends; in a thread, unless the engine is in this process.

        Args:
            samples: Completions with their index in `numbers`.
            numbers: What `open` returned.
        """
        arrivals, end = self.arrivals, None
        try:
            for index, completion in samples:
                arrivals.put((numbers[index], completion))
        except BaseException as error:
            end = error
        self.ended_at = time.monotonic()
        arrivals.put(end)

    def collect(self) -> None:
        """Wait for what the engine was asked for, and keep it.

        What it did not finish, because it lost its workers, stays missing. Any other error is raised once:
        afterwards the engine may be asked again.
        """
        self._take(math.inf)

    def next_chunk(self, min_tokens: float) -> Chunk:
        """Wait until what has come has `min_tokens`, or the engine has no more; infinity: until all is there.

        Returns:
            What no chunk had before. With infinity it is empty if workers were lost before all was there.
        """
        self._take(min_tokens)
        complete = not self.missing
        fresh = sorted(self.completions.keys() - self.delivered)
        if not complete and min_tokens == math.inf:
            fresh = []
        chunk = {number: self.completions[number] for number in fresh}
        waited_s = 0.0 if self.sampling_now or not self.ended_at else time.monotonic() - self.ended_at
        return Chunk(chunk, complete and not self.sampling_now, self.sampling_now, waited_s)

    def deliver(self, chunk: Chunk) -> None:
        """Keep a chunk, which all ranks get alike."""
        self.completions |= chunk.completions
        self.delivered |= chunk.completions.keys()

    def _take(self, min_tokens: float) -> None:
        """Move arrivals to `completions` until those in no chunk have `min_tokens`, or no more come."""
        num_tokens = self.sum_tokens(self.completions.keys() - self.delivered)
        total = len(self.prompts) * self.num_completions

        def describe() -> str:
            return f"the engine's completions, {len(self.completions)} of {total} are there"

        with waiting_for(describe):
            while self.sampling_now:
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
                self.sampling_now = False
                if arrival is not None and not isinstance(arrival, WorkersLost):
                    raise arrival

    # In a checkpoint

    def to_plain(self) -> dict[str, Any]:
        """Return it as tensors and plain values, such as a checkpoint may hold: whole groups only."""
        size = self.num_completions
        missing = set(self.missing)
        groups = {
            i: [
                {
                    **vars(completion),
                    "token_ids": torch.tensor(completion.token_ids, dtype=torch.int32),
                    "log_probs": completion.log_probs and torch.tensor(completion.log_probs),
                }
                for completion in (self.completions[i * size + j] for j in range(size))
            ]
            for i in range(len(self.prompts))
            if i not in missing
        }
        settings = {"rows": self.rows, "prompts": self.prompts, "seeds": self.seeds, "stop": self.stop}
        settings |= {"policy_version": self.policy_version, "num_completions": size, "step": self.step}
        return settings | {"sampling": vars(self.sampling), "finished": groups}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> Self:
        """Return the request whose `to_plain` returned this."""

        def build_completion(entry: dict[str, Any]) -> Completion:
            lists = {name: v.tolist() for name, v in entry.items() if isinstance(v, torch.Tensor)}
            return Completion(**entry | lists)

        settings = {name: value for name, value in state.items() if name not in ("sampling", "finished")}
        completions = {
            position * state["num_completions"] + number: build_completion(entry)
            for position, group in state["finished"].items()
            for number, entry in enumerate(group)
        }
        return cls(**settings, sampling=Sampling(**state["sampling"]), completions=completions)
