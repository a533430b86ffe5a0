"""Call an engine once and return what it sampled as lists; an engine that samples what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rlt_lightning.engines import Engine, HFEngine, SampleRequest, Sampling
from rlt_lightning.types import Completion


def build_requests(
    prompts: Sequence[list[int]], seeds: Sequence[int], number: int, limits: Sequence[int] | None = None
) -> list[SampleRequest]:
    """A request for each prompt, with its seed and, if any, its limit in tokens."""
    limit_of_each: Sequence[int | None] = limits or [None] * len(prompts)
    rows = zip(prompts, seeds, limit_of_each, strict=True)
    return [SampleRequest(prompt, seed, number, limit) for prompt, seed, limit in rows]


def sample_groups(
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    number: int,
    stop: str,
    seeds: list[int],
    limits: list[int] | None = None,
) -> list[list[Completion]]:
    """The completions of every prompt."""
    found = dict(engine.sample(build_requests(prompts, seeds, number, limits), sampling, stop))
    assert sorted(found) == list(range(len(prompts) * number))
    return [[found[i * number + j] for j in range(number)] for i in range(len(prompts))]


def numbered(groups: Iterable[Iterable[Completion]]) -> Iterator[tuple[int, Completion]]:
    """What `Engine.sample` yields of whole groups."""
    return enumerate(completion for group in groups for completion in group)


class Scripted(HFEngine):
    """Returns, for each request, what a function writes."""

    def __init__(self, write: Callable[[SampleRequest], list[Completion]]) -> None:
        super().__init__()
        self.write = write

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        yield from numbered(map(self.write, requests))
