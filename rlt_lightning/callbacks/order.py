"""What one step asks of an engine, and the completions that have come so far.

A completion's way on rank 0:

    engine's thread    arrive ─▶ arrivals ──┐
    trainer's thread                    next_wave ─▶ handed     scored while others are sampled
                       future ─▶ collect ───┴──────▶ finished   whole groups, which a checkpoint keeps

What the engine has lost with its workers is asked for again. A completion that was handed on stays as it is:
its second version is dropped.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

import torch

from rlt_lightning.engines.base import Sampling, WorkersLost
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.types import Completion

# Position of a prompt in its order, and number of the completion in its group.
Place = tuple[int, int]


class Wave(NamedTuple):
    """Completions that were finished since the last wave."""

    completions: dict[Place, Completion]
    complete: bool  # whether nothing of the order is missing any more
    sampling: bool  # whether the engine still samples; if it does not and some are missing, ask for them
    waited_s: float  # since the engine has finished; 0 while it samples


@dataclass
class Order:
    """Completions that all ranks of one step are waiting for."""

    rows: list[int]  # row numbers of the problems, of all ranks in rank order
    prompts: list[list[int]]
    seeds: list[int]
    policy_version: int  # of the weights that sample them; the oldest, if weights differ
    sampling: Sampling
    num_completions: int
    stop: str
    finished: dict[int, list[Completion]] = field(default_factory=dict)  # by position in `prompts`
    asked: list[int] = field(default_factory=list)  # positions that the engine was asked for last
    future: Future[None] | None = None  # of the engine's call, on the rank that asked
    arrived: dict[Place, Completion] = field(default_factory=dict, compare=False)  # on the rank that asked
    handed: dict[Place, Completion] = field(default_factory=dict)  # what waves have brought
    # On the rank that asked: what is finished and in no wave yet; None: the engine is done.
    arrivals: SimpleQueue[tuple[Place, Completion] | None] = field(
        default_factory=SimpleQueue, compare=False, repr=False
    )
    ended_at: float = field(default=0.0, compare=False)  # when the engine was done, time.monotonic()

    def follow(self, future: Future[None]) -> None:
        """Wait for the completions of `asked` from now on, until the engine has ended `future`."""
        self.future = future
        arrivals = self.arrivals

        def end(_: Any) -> None:
            self.ended_at = time.monotonic()
            arrivals.put(None)

        future.add_done_callback(end)

    def expect(self) -> list[int]:
        """Note that the engine is now asked for what is missing; return these positions."""
        self.asked = self.missing
        # What a failed call has brought of a group is sampled again, unless it was handed on.
        self.arrivals = SimpleQueue()
        self.arrived = dict(self.handed)
        return self.asked

    def wait(self) -> None:
        """Wait until the engine has finished, or failed."""
        if self.future is not None:
            wait([self.future])

    @property
    def missing(self) -> list[int]:
        """Return the positions of the prompts without completions."""
        return [i for i in range(len(self.prompts)) if i not in self.finished]

    def collect(self) -> bool:
        """Wait for what the engine was asked for and keep it; return whether nothing is missing.

        What the engine did not finish, because it lost its workers, stays missing. An error is raised once:
        afterwards the engine may be asked again.
        """
        if self.future is not None:
            with waiting_for(f"the engine's completions of {len(self.asked)} prompts", on_terminal=False):
                wait([self.future])
            future, self.future = self.future, None
            with suppress(WorkersLost):
                future.result()
            for position in self.asked:
                places = [(position, number) for number in range(self.num_completions)]
                if all(place in self.arrived for place in places):
                    self.finished[position] = [self.arrived[place] for place in places]
        return not self.missing

    def arrive(self, position: int, number: int, completion: Completion) -> None:
        """Take a completion from the engine's thread; `position` counts the prompts that were asked for."""
        place = self.asked[position], number
        # The first version, which may have been scored.
        self.arrivals.put((place, self.arrived.setdefault(place, completion)))

    def next_wave(self, min_tokens: int) -> Wave:
        """Wait until new completions have `min_tokens`, or the engine has no more; return all of them."""
        fresh = {} if self.future is None else self._arrived(min_tokens)
        if self.future is None:
            for position, group in self.finished.items():
                for number, completion in enumerate(group):
                    if (position, number) not in self.handed:
                        fresh[position, number] = completion
        self.handed |= fresh
        sampling = self.future is not None
        waited_s = 0.0 if sampling or not self.ended_at else time.monotonic() - self.ended_at
        return Wave(fresh, not sampling and not self.missing, sampling, waited_s)

    def _arrived(self, min_tokens: int) -> dict[Place, Completion]:
        """Return what has come and was not handed on; collect the order once the engine is done."""
        fresh: dict[Place, Completion] = {}
        num_tokens, total = 0, len(self.prompts) * self.num_completions

        def what() -> str:
            return f"the engine's completions, {len(self.handed) + len(fresh)} of {total} are there"

        with waiting_for(what, on_terminal=False):
            while True:
                try:
                    arrival = self.arrivals.get(block=num_tokens < min_tokens)
                except Empty:
                    return fresh
                if arrival is None:
                    self.collect()
                    return fresh
                place, completion = arrival
                if place not in self.handed:
                    fresh[place] = completion
                    num_tokens += len(completion.token_ids)

    def to_plain(self) -> dict[str, Any]:
        """Return it as tensors and plain values, such as a checkpoint may hold."""
        groups = {
            position: [
                {
                    **vars(completion),
                    "token_ids": torch.tensor(completion.token_ids, dtype=torch.int32),
                    "log_probs": completion.log_probs and torch.tensor(completion.log_probs),
                }
                for completion in group
            ]
            for position, group in self.finished.items()
        }
        settings = {"rows": self.rows, "prompts": self.prompts, "seeds": self.seeds, "stop": self.stop}
        settings |= {"policy_version": self.policy_version, "num_completions": self.num_completions}
        return settings | {"sampling": vars(self.sampling), "finished": groups}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> Self:
        """Return the order whose `to_plain` returned this."""

        def completion(entry: dict[str, Any]) -> Completion:
            lists = {name: v.tolist() for name, v in entry.items() if isinstance(v, torch.Tensor)}
            return Completion(**entry | lists)

        finished = {position: list(map(completion, group)) for position, group in state["finished"].items()}
        return cls(**state | {"sampling": Sampling(**state["sampling"]), "finished": finished})
