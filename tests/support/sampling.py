"""Call an engine once and return what it sampled as lists, for short tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlt_lightning.engines import Engine, Sampling, build_requests
from rlt_lightning.types import Completion


def sample_groups(
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    number: int,
    stop: str,
    seeds: list[int],
    limits: list[int] | None = None,
) -> list[list[Completion]]:
    """The completions of every prompt; unlike `sample_all`, it does not wait for lost workers."""
    found = dict(engine.sample(build_requests(prompts, seeds, number, limits), sampling, stop))
    assert sorted(found) == list(range(len(prompts) * number))
    return [[found[i * number + j] for j in range(number)] for i in range(len(prompts))]


def numbered(groups: Iterable[Iterable[Completion]]) -> Iterator[tuple[int, Completion]]:
    """What `Engine.sample` yields of whole groups."""
    return enumerate(completion for group in groups for completion in group)
