"""What one step asks of an engine, and the completions that have come so far."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from rlt_lightning.engines.base import Sampling, WorkersLost
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.types import Completion


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
    future: Future[list[list[Completion]]] | None = None  # their completions, on the rank that asked

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

        What the engine did not finish, because it lost its workers, stays missing.
        """
        if self.future is not None:
            try:
                what = f"the engine's completions of {len(self.asked)} prompts"
                with waiting_for(what, on_terminal=False):
                    groups = dict(enumerate(self.future.result()))
            except WorkersLost as error:
                groups = error.finished
            self.finished |= {self.asked[i]: group for i, group in groups.items()}
            self.future = None
        return not self.missing

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
