"""What one step asks of an engine, kept until all of it has come."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from rlt_lightning.engines.base import Sampling, WorkersLost
from rlt_lightning.types import Completion


@dataclass
class Order:
    """Completions that all ranks of one step are waiting for."""

    rows: list[int]  # of the problems of all ranks, in rank order
    prompts: list[list[int]]
    seeds: list[int]
    policy_version: int  # of the weights that sample them; older, if some are sampled later, than theirs
    sampling: Sampling
    num_completions: int
    stop: str
    finished: dict[int, list[Completion]] = field(default_factory=dict)  # by position in `prompts`
    asked: list[int] = field(default_factory=list)  # positions that the engine was asked for
    future: Future[list[list[Completion]]] | None = None  # of those, while they are sampled; on rank 0

    def wait(self) -> None:
        """Wait until the engine has finished, or failed."""
        if self.future is not None:
            wait([self.future])

    def take(self) -> None:
        """Wait for what the engine was asked for and keep it; what lost workers left stays missing."""
        if self.future is None:
            return
        try:
            groups = dict(enumerate(self.future.result()))
        except WorkersLost as error:
            groups = error.finished
        self.finished |= {self.asked[i]: group for i, group in groups.items()}
        self.future = None

    def complete(self) -> bool:
        """Wait, and tell whether nothing is missing."""
        self.take()
        return len(self.finished) == len(self.prompts)

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
        """Return what `to_plain` was called of."""

        def completion(entry: dict[str, Any]) -> Completion:
            lists = {name: v.tolist() for name, v in entry.items() if isinstance(v, torch.Tensor)}
            return Completion(**entry | lists)

        finished = {position: list(map(completion, group)) for position, group in state["finished"].items()}
        return cls(**state | {"sampling": Sampling(**state["sampling"]), "finished": finished})
