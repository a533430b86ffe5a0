"""Workers that share GPUs with training sleep while it runs, and get no requests while they sleep."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import rlt
from fake_worker import FakeWorker, worker_of
from fits import sampled_by, small_fit
from fleets import WEIGHTS, generate, launched, processes_of, start, start_engine, undisturbed
from fleets import token_ids as ids
from turns import turns

from rlt_lightning.engines import EngineError

__all__ = ["start"]  # a fixture


def test_workers_wake_for_the_push_and_sleep_once_all_is_sampled(start: Any) -> None:
    workers = FakeWorker(), FakeWorker()
    engine = start(*workers, sleep=True)
    for step in (1, 2):
        engine.health()
        engine.update_weights(WEIGHTS, step)
        assert ids(generate(engine)) == undisturbed()
        engine.put_to_sleep()
        assert all(worker.asleep for worker in workers)
        assert engine.policy_version == -1  # the weights are gone: a push follows
    engine.health()
    assert all(worker.asleep for worker in workers)
    for worker in workers:
        assert re.fullmatch(r"wwp(wpc*s){2}", turns(worker.calls)), turns(worker.calls)


def test_every_push_wakes_the_workers_first(start: Any) -> None:
    worker = FakeWorker()  # refuses an update while it sleeps, by which vLLM would end
    engine = start(worker, sleep=True)
    engine.put_to_sleep()
    engine.update_weights(WEIGHTS, 1)  # without a look at its health
    assert engine.policy_version == 1
    assert turns(worker.calls) == "wwpswp"


def test_a_worker_that_dropped_its_weights_is_verified_again(start: Any) -> None:
    engine = start(FakeWorker(), sleep=True)
    engine.fleet.verified = True
    engine.put_to_sleep()
    engine.health()
    assert engine.policy_version == -1
    engine.update_weights(WEIGHTS, 1)
    assert engine.policy_version == 1
    assert engine.unverified


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_worker_that_another_run_left_asleep_is_woken(sleeps: bool, start: Any) -> None:
    worker = FakeWorker()
    worker.asleep = True
    engine = start(worker, sleep=sleeps)
    assert ids(generate(engine)) == undisturbed()


def test_a_worker_that_would_keep_its_memory_is_refused(start: Any) -> None:
    with pytest.raises(EngineError, match="Start it with --enable-sleep-mode"):
        start(FakeWorker(frees=False), sleep=True)
    start(FakeWorker(frees=False))


def test_a_worker_that_never_falls_asleep_ends_the_run(start: Any) -> None:
    engine = start(FakeWorker(broken={"/sleep": 500}), FakeWorker(), sleep=True)
    with pytest.raises(EngineError, match=r"lost twice in one iteration.*/sleep"):
        engine.put_to_sleep()


def test_training_waits_for_a_worker_that_is_being_started_again(tmp_path: Path) -> None:
    engine = launched(tmp_path, num_workers=2)
    engine.fleet.sleeps = True
    start_engine(engine, tmp_path)
    try:
        engine.update_weights(WEIGHTS, 0)
        first, second = processes_of(engine)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        engine.put_to_sleep()  # a start takes memory of the GPU: not while it trains
        assert [process.poll() for process in processes_of(engine)] == [None, None]
        assert processes_of(engine)[1] is second
        assert engine.policy_version == -1  # it needs a push
    finally:
        engine.close()


def test_a_run_with_validation_takes_turns(tiny_model: str, tmp_path: Path) -> None:
    with worker_of(tiny_model) as worker:
        words = [*sampled_by(worker.url), "--rollouts.engine.sleep=true", "--data.val_rows=2"]
        words += ["--trainer.max_steps=2", "--trainer.val_check_interval=1"]
        words += ["--rollouts.sampling.max_completion_length=4"]
        result = rlt(*small_fit(tiny_model, tmp_path / "run", *words))
        assert result.returncode == 0, result.stderr
        assert "Lost vLLM worker" not in result.stderr  # what a sleeping one is asked for, it refuses
        # Step, validation with the weights after it, step, validation: each wakes a worker without weights.
        assert re.fullmatch(r"w(wpc+s){4}", turns(worker.calls)), worker.calls
        assert worker.asleep
