"""Completions are scored while others of the step are sampled: same results, also when workers fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import full
from commands import wait_until
from fake_worker import END, FakeWorker
from fleets import PROMPTS, SAMPLING, SEEDS, assert_each_prompt_once, start, undisturbed
from fleets import token_ids as ids
from grpo import Witness, data, module
from outside import Outside, Waiting, scored  # noqa: F401
from sampling import build_requests
from trainers import bare_trainer

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.engines import EngineError, HFEngine, Sampling, WorkersLost
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.modules.passes import PassRunner
from rlt_lightning.rollouts.dispatcher import Dispatcher
from rlt_lightning.rollouts.request import Chunk, RolloutRequest
from rlt_lightning.types import Completion

__all__ = ["start"]  # a fixture
ONE_RANK: Any = SimpleNamespace(world_size=1)
TEN = Sampling(temperature=0.7, max_completion_length=10)


@pytest.fixture
def fit(tiny_model: str, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Trains two steps with an engine; returns the module and what each step saw."""

    def train(engine: HFEngine, precision: Any = "32-true", **options: Any) -> tuple[Any, Witness]:
        witness = Witness()
        callback = RolloutCallback(engine, TEN, **options)
        # A chunk of one group is enough: 4 completions of at most 10 tokens.
        rlt = module(tiny_model, micro_batch_tokens=16)
        run = bare_trainer(tmp_path, callback, witness, steps=2, precision=precision)
        run.fit(rlt, datamodule=data(tiny_model, tmp_path))
        return rlt, witness

    return train


def rewards(witness: Witness) -> torch.Tensor:
    return torch.stack([batch.step.rewards for batch in witness.batches if batch.step])


def rows(witness: Witness) -> list[list[int]]:
    return [r.completion.token_ids for batch in witness.batches for r in batch.rollouts.rollouts]  # type: ignore[union-attr]


@pytest.mark.parametrize("precision", ["32-true", full("bf16-mixed")])
def test_groups_are_scored_before_the_last_is_sampled(fit: Any, scored: Any, precision: str) -> None:
    engine = Waiting(patience_s=60)
    scored(engine)
    early, seen = fit(engine, precision)
    late, expected = fit(Outside(), precision, score_early=False)
    assert rows(seen) == rows(expected)
    close = {"rtol": 1e-5, "atol": 1e-5} if precision == "32-true" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(rewards(seen), rewards(expected), **close)
    if precision == "32-true":
        for name, tensor in early.policy.state_dict().items():
            torch.testing.assert_close(tensor, late.policy.state_dict()[name], rtol=1e-4, atol=2e-5)


def test_without_it_nothing_is_scored_meanwhile(fit: Any, scored: Any) -> None:
    engine = Waiting(patience_s=0.5)
    scored(engine)
    with pytest.raises(EngineError, match="Nothing was scored"):
        fit(engine, score_early=False)


def test_an_engine_that_brings_all_at_the_end_is_scored(fit: Any) -> None:
    _, seen = fit(Outside())
    assert len(rows(seen)) == 16


def test_no_chunk_of_a_fresh_request_is_empty(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    stream = Dispatcher.stream

    def watched(self: Dispatcher, request: RolloutRequest, *limits: float) -> Iterator[Chunk]:
        for chunk in stream(self, request, *limits):
            sizes.append(len(chunk.completions))
            yield chunk

    monkeypatch.setattr(Dispatcher, "stream", watched)
    fit(HFEngine())
    assert sizes == [8, 8]  # it is submitted, and then awaited


def test_a_failed_forward_stops_the_run_at_once(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Waiting(patience_s=60)

    def spoilt(self: PassRunner, *arguments: Any) -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(PassRunner, "run", spoilt)
    with pytest.raises(MemoryError):
        fit(engine)
    assert not engine.go.is_set()
    assert not engine.gave_up  # it still samples: nobody has waited for it
    engine.go.set()


def build_request(num_prompts: int = 2) -> RolloutRequest:
    return RolloutRequest([5, 6][:num_prompts], [[1], [2]][:num_prompts], [0, 0], 0, SAMPLING, 2, END)


def completion(*token_ids: int) -> Completion:
    return Completion(list(token_ids), None, "length")


class Asked:
    """A request that an engine samples in the background: it yields what `bring` is told, until `end`."""

    def __init__(self, request: RolloutRequest) -> None:
        self.request = request
        self.queue: SimpleQueue[Any] = SimpleQueue()
        samples, numbers = request.open()
        self.seen = Event()
        self.prompts = [sample.prompt for sample in samples]
        self.done = run_in_background(lambda: request.receive(self.samples(), numbers))

    def samples(self) -> Iterator[tuple[int, Completion]]:
        while (arrival := self.queue.get()) is not None:
            if isinstance(arrival, Exception):
                raise arrival
            if arrival == "all came":
                self.seen.set()
            else:
                yield arrival

    def bring(self, *completions: tuple[int, Completion]) -> None:
        """Let the engine yield these, and wait until it has."""
        self.seen.clear()
        for pair in completions:
            self.queue.put(pair)
        self.queue.put("all came")
        assert self.seen.wait(60)

    def end(self, error: Exception | None = None) -> None:
        self.queue.put(error)
        self.done.result(timeout=570)


def test_a_chunk_has_at_least_its_tokens_and_all_that_is_there() -> None:
    request = build_request()
    asked = Asked(request)
    asked.bring((2, completion(7, 8)), (1, completion(7, 8)), (0, completion(7, 8)))
    chunk = request.next_chunk(min_tokens=4)
    assert (sorted(chunk.completions), chunk.complete, request.is_sampling) == ([0, 1, 2], False, True)
    request.deliver(chunk)
    asked.bring((3, completion(7, 8)))
    asked.end()
    chunk = request.next_chunk(min_tokens=4)
    assert (list(chunk.completions), chunk.complete, request.is_sampling) == ([3], True, False)
    request.deliver(chunk)
    assert request.next_chunk(4) == ({}, True)


def test_what_was_scored_stays_when_workers_are_lost_midway() -> None:
    request = build_request()
    asked = Asked(request)
    asked.bring((2, completion(3)), (0, completion(1)), (1, completion(2)))
    asked.end(WorkersLost("lost"))
    chunk = request.next_chunk(100)
    assert (sorted(chunk.completions), chunk.complete, request.needs_sampling) == ([0, 1, 2], False, True)
    request.deliver(chunk)
    again = Asked(request)
    assert again.prompts == [[2]]  # only the group that is not whole is asked for again
    again.bring((0, completion(99)), (1, completion(4)))
    again.end()
    chunk = request.next_chunk(100)
    assert (list(chunk.completions), chunk.complete) == ([3], True)
    request.deliver(chunk)
    assert request.completions[2] == completion(3)  # the first version, which was scored


def test_all_at_once_waits_for_what_lost_workers_have_left() -> None:
    request = build_request()
    asked = Asked(request)
    asked.bring((0, completion(1)))
    asked.end(WorkersLost("lost"))
    assert (request.next_chunk(math.inf), request.needs_sampling) == (({}, False), True)
    again = Asked(request)
    again.bring(*((number, completion(number)) for number in range(4)))
    again.end()
    assert sorted(request.next_chunk(math.inf).completions) == [0, 1, 2, 3]


class Failing(Outside):
    """Fails once."""

    failed = False

    def sample(self, requests: Any, sampling: Any, stop: str) -> Iterator[tuple[int, Completion]]:
        if not self.failed:
            self.failed = True
            raise EngineError("broken")
        yield from super().sample(requests, sampling, stop)


def test_a_fit_after_one_that_failed_samples_anew(tiny_model: str, tmp_path: Path) -> None:
    callback, witness = RolloutCallback(Failing(), TEN), Witness()
    with pytest.raises(EngineError, match="broken"):
        bare_trainer(tmp_path, callback).fit(module(tiny_model), datamodule=data(tiny_model, tmp_path))
    again = bare_trainer(tmp_path, callback, witness)
    fit = run_in_background(lambda: again.fit(module(tiny_model), datamodule=data(tiny_model, tmp_path)))
    fit.result(timeout=570)
    assert len(rows(witness)) == 8


def test_a_checkpoint_waits_only_for_what_it_keeps() -> None:
    for asynchronous in (False, True):
        callback = RolloutCallback(Outside(), asynchronous=asynchronous)
        callback.sampler.bind(ONE_RANK, module("miniature"))
        request = callback.sampler.pending = build_request(1)
        asked = Asked(request)
        if asynchronous:
            asked.bring((0, completion(0)), (1, completion(1)))
            asked.end()
        assert list(callback.state_dict()) == (["request"] if asynchronous else [])


def test_an_engine_yields_each_completion_as_it_comes(start: Any) -> None:
    # The fast worker's completions come while the slow one has its first.
    fast, slow = FakeWorker(), FakeWorker(gate=Event())
    engine = start(slow, fast, max_sequences=1)

    def let_the_slow_one_go_on() -> None:
        assert slow.gate is not None
        wait_until(lambda: len(fast.delivered) > 3)  # three have come: it was asked for the next
        slow.gate.set()

    waited = run_in_background(let_the_slow_one_go_on)
    found = list(engine.sample(build_requests(PROMPTS, SEEDS, 2), SAMPLING, END))
    waited.result()
    assert [c.worker for _, c in found[:3]] == [fast.url] * 3
    assert sorted(index for index, _ in found) == list(range(16))
    ordered = [completion for _, completion in sorted(found, key=lambda pair: pair[0])]
    assert ids([ordered[i : i + 2] for i in range(0, 16, 2)]) == undisturbed()
    assert [c.seed for c in ordered] == [seed + i for seed in SEEDS for i in range(2)]


def test_whoever_wants_no_more_completions_ends_the_calls(start: Any) -> None:
    worker = FakeWorker(faults=("", "hang"))
    completions = start(worker, max_sequences=1).sample(build_requests(PROMPTS, SEEDS, 1), SAMPLING, END)
    assert next(completions)[0] == 0
    completions.close()
    assert len(worker.bodies) <= 2


def test_greedy_completions_are_asked_for_once(start: Any) -> None:
    worker = FakeWorker()
    greedy = Sampling(temperature=0, max_completion_length=6)
    found = dict(start(worker).sample(build_requests(PROMPTS, SEEDS, 2), greedy, END))
    assert_each_prompt_once(worker, number=1)
    assert all(found[i] == found[i + 1] for i in range(0, 16, 2))
