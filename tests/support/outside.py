"""Engines that act as if outside the process, and deliver completions when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any

import pytest

from rlt_lightning.engines import EngineError, HFEngine, Placement, SampleRequest, Sampling
from rlt_lightning.rewards import RLTReward
from rlt_lightning.types import Completion


class Outside(HFEngine):
    """Samples as workers do: for all ranks, in a thread. It tells of no completion before the last."""

    placement = Placement.SERVER
    unverified = False
    reports_log_probs = False


class Waiting(Outside):
    """Finishes the last group only when `go` is set, which is what the test waits for."""

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self.patience_s = patience_s
        self.go = Event()
        self.gave_up = False

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        completions = list(super().sample(requests, sampling, stop))
        self.go.clear()  # what an earlier step has scored does not count
        last = requests[-1].num_completions
        yield from completions[:-last]
        self.gave_up = not self.go.wait(self.patience_s)
        if self.gave_up:
            raise EngineError("Nothing was scored before the last group was sampled.")
        yield from completions[-last:]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Waiting], None]:
    """Lets an engine continue when a chunk has been scored."""

    def watch(engine: Waiting) -> None:
        right = RLTReward.measure

        def measure(self: RLTReward, *arguments: Any) -> Any:
            table = right(self, *arguments)
            engine.go.set()
            return table

        monkeypatch.setattr(RLTReward, "measure", measure)

    return watch
