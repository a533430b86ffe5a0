"""Training with an engine outside the process: what overlaps, what a checkpoint holds, what survives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Thread
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_runs import SAMPLING, STEPS, Witness, assert_same, fit
from cases import full
from commands import wait_until
from fake_worker import FakeWorker, worker_of
from lightning.pytorch import Trainer

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.engines import EngineError, VLLMEngine
from rlt_lightning.models.load import load_model
from rlt_lightning.modules import RLTModule
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.types import Completion, InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
GONE_S = 1.2  # to wait for a worker that does not come back
ASKED = 4  # requests of a step: one for each of two completions of two prompts


@pytest.fixture(scope="module")
def whole(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Witness:
    """A run that nothing disturbs."""
    with worker_of(tiny_model) as worker:
        witness = fit(tiny_model, tmp_path_factory.mktemp("whole"), worker)
        assert len(worker.bodies) == ASKED * STEPS  # each completion of each step once, none after the last
        assert len({(str(body["prompt"]), body["seed"]) for body in worker.bodies}) == ASKED * STEPS
        assert sorted(Counter(str(body["prompt"]) for body in worker.bodies).values()) == [2] * 6 + [4] * 2
        assert sorted(worker.tensors) == sorted(name for name, _ in load_model(tiny_model).named_parameters())
    return witness


def test_rollouts_are_one_step_old_but_for_the_first(whole: Witness) -> None:
    assert [staleness for staleness, _ in whole.steps] == [0, 1, 1, 1, 1]


def test_the_next_step_is_sampled_while_this_one_is_trained(tiny_model: str, tmp_path: Path) -> None:
    seen: list[int] = []
    with worker_of(tiny_model) as worker:

        class Peek(Witness):
            def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
                wait_until(lambda: len(worker.delivered) >= ASKED * min(3, module.global_step + 2))
                seen.append(len(worker.delivered))

        fit(tiny_model, tmp_path, worker, witness=Peek(), steps=3)
    assert seen == [2 * ASKED, 3 * ASKED, 3 * ASKED]  # the first step's, and always the next one's


def test_without_overlap_rollouts_are_never_stale(tiny_model: str, tmp_path: Path, whole: Witness) -> None:
    with worker_of(tiny_model) as worker:
        steps = fit(tiny_model, tmp_path, worker, asynchronous=False, max_staleness=0).steps
    assert [staleness for staleness, _ in steps] == [0] * STEPS
    assert [seen for _, seen in steps] == [seen for _, seen in whole.steps]  # seeded by step and problem


def test_settings_that_would_bias_are_refused(tiny_model: str, tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match="need the log-probs that tokens were sampled with")
    with FakeWorker() as worker, refused:
        fit(tiny_model, tmp_path, worker, log_probs="trainer")
    assert worker.calls == []  # before anything is asked for


def test_a_request_survives_a_checkpoint(tmp_path: Path) -> None:
    done = {1: Completion([3, 4], [-0.1, -0.25], "stop", seed=2**62 + 1, worker="http://w")}
    request = RolloutRequest([5, 6], [[1, 2], [3]], [2**63 - 1, 8], 4, SAMPLING, 1, "</end>", done)
    callback, other = (RolloutCallback(VLLMEngine(["http://w"]), asynchronous=True) for _ in range(2))
    for each in (callback, other):
        each.sampler.bind(SimpleNamespace(world_size=1), RLTModule())  # type: ignore[arg-type]
    callback.sampler.pending = request
    torch.save(callback.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.sampler.pending == request
    callback.sampler.pending = None
    other.load_state_dict(callback.state_dict())
    assert other.sampler.pending is None


def test_a_killed_run_goes_on_with_the_completions_it_would_have_had(
    tiny_model: str, tmp_path: Path, whole: Witness
) -> None:
    class Killed(Witness):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            if module.global_step == 3:
                wait_until(lambda: len(worker.delivered) == ASKED * 5)  # nothing is sampled any more
                raise KeyError("killed")

    with worker_of(tiny_model) as worker:
        killed = Killed()
        with pytest.raises(KeyError, match="killed"):
            fit(tiny_model, tmp_path, worker, witness=killed)
        asked = len(worker.bodies)
        resumed = fit(tiny_model, tmp_path, worker, resume=tmp_path / "checkpoints" / "step=000003.ckpt")
        assert len(worker.bodies) == asked + ASKED  # step 3's came from the checkpoint
    assert_same(killed, resumed, whole=whole)


def dies_at(step: int, worker: FakeWorker) -> Witness:
    """Closes the worker once the completions of the step after are there."""

    def close() -> None:
        wait_until(lambda: len(worker.delivered) >= ASKED * (step + 1))
        worker.close()

    return Witness({step: close})


@pytest.mark.full
def test_a_worker_lost_after_sampling_leaves_a_checkpoint_to_go_on_from(
    tiny_model: str, tmp_path: Path, whole: Witness
) -> None:
    with worker_of(tiny_model) as worker:
        stopped = dies_at(2, worker)
        with pytest.raises(EngineError, match="--resume true"):
            fit(tiny_model, tmp_path, worker, witness=stopped, every=100, recovery_timeout_s=GONE_S)
        assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == ["step=000002.ckpt"]
        worker.restart()
        worker.open()
        resumed = fit(tiny_model, tmp_path, worker, resume=tmp_path / "checkpoints" / "step=000002.ckpt")
    assert_same(stopped, resumed, whole=whole)


@pytest.mark.parametrize("step", [2, full(4)])  # in the middle and at the end of an epoch
def test_a_worker_lost_while_sampling_leaves_a_checkpoint_to_go_on_from(
    tiny_model: str, tmp_path: Path, whole: Witness, step: int
) -> None:
    # It answers for one prompt of the step that follows, and dies in the middle of the other.
    with worker_of(tiny_model, faults=("",) * (ASKED * step + 3) + ("die",)) as worker:
        stopped = Witness()
        with pytest.raises(EngineError, match="--resume true"):
            fit(tiny_model, tmp_path, worker, witness=stopped, every=100, recovery_timeout_s=GONE_S)
        assert [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")] == [f"step={step:06d}.ckpt"]
        asked = len(worker.bodies)
        worker.restart()
        worker.open()
        resumed = fit(tiny_model, tmp_path, worker, resume=tmp_path / "checkpoints" / f"step={step:06d}.ckpt")
        assert len(worker.bodies) == asked + 2 + ASKED * (STEPS - step - 1)  # the whole group is kept
    assert [seen for _, seen in stopped.steps + resumed.steps] == [seen for _, seen in whole.steps]


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_resume_without_workers_leaves_the_checkpoint_alone(
    tiny_model: str, tmp_path: Path, asynchronous: bool
) -> None:
    with worker_of(tiny_model) as worker:
        fit(tiny_model, tmp_path, worker, steps=3, asynchronous=asynchronous)
        checkpoint = tmp_path / "checkpoints" / "step=000003.ckpt"
        before = {path: path.read_bytes() for path in checkpoint.rglob("*.*")}
        worker.close()
        for _ in range(2):
            with pytest.raises(EngineError, match="must answer"):
                fit(
                    tiny_model,
                    tmp_path,
                    worker,
                    resume=checkpoint,
                    asynchronous=asynchronous,
                    recovery_timeout_s=GONE_S,
                )
            assert {path: path.read_bytes() for path in checkpoint.rglob("*.*")} == before


@pytest.mark.parametrize("answered", [1, full(2)])
def test_a_worker_that_comes_back_in_time_changes_no_completion(
    tiny_model: str, tmp_path: Path, whole: Witness, answered: int
) -> None:
    # It dies at one of the third step's two prompts, or after both. What comes later is by newer weights.
    faults = ("",) * (2 * ASKED + 2 * answered) + ("die",) * (answered < 2)
    with worker_of(tiny_model, faults=faults) as worker:

        def restart() -> None:
            wait_until(lambda: answered == 2 or worker.server is None)
            worker.close()
            worker.restart()
            Thread(target=lambda: (sleep(0.3), worker.open())).start()

        witness = Witness({2: restart})
        seen = fit(tiny_model, tmp_path, worker, witness=witness, steps=4).steps
    assert [completions for _, completions in seen] == [completions for _, completions in whole.steps[:4]]
    if answered < 2:
        assert [staleness for staleness, _ in seen] == [0, 1, answered, 1]  # a mixed step counts as stale


@pytest.mark.full
def test_a_worker_that_dies_changes_nothing_while_another_serves(
    tiny_model: str, tmp_path: Path, whole: Witness
) -> None:
    with worker_of(tiny_model, faults=("", "", "", "die")) as first, worker_of(tiny_model) as second:
        seen = fit(tiny_model, tmp_path, first, second)
    assert_same(seen, whole=whole)
