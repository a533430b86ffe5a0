"""Groups of equal rewards are replaced: by the right problems, counted, and the same after a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import async_runs
import pytest
import torch
from cases import full
from compared import largest_difference
from compared import weights as weights_of_ranks
from fake_worker import worker_of
from lightning.pytorch import Callback, Trainer
from outside import Outside
from parity import Parity
from ranks import run
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.callbacks import Checkpoint, DynamicSampling, RolloutCallback
from rlt_lightning.datamodules import StratosDataModule, StudentRLData, TeacherRLData
from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.losses import GRPOLoss
from rlt_lightning.rewards import CorrectnessReward, Reward, RLTReward
from rlt_lightning.rollouts.columns import REWARD, Term
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.step import Shards, StepBatch
from rlt_lightning.types import Completion, InputError, Problem

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
GROUP_SIZE, PROMPTS, ROWS, STEPS = 4, 4, 11, 5  # an epoch has two full batches


# The arithmetic


def build_step(rows: Sequence[int], rewards: Sequence[float], shard: Sequence[int]) -> StepBatch:
    """A scored step of groups of two, of which this rank has read a shard; a reward is the only token."""
    texts = [Completion([int(reward)], None, "stop") for reward in rewards]
    problems: Any = [Problem(row, "?", "!", [], [], [], [], []) for row in rows]
    request = RolloutRequest([*rows], [[1]] * len(rows), [0] * len(rows), 0, Sampling(), 2, "")
    request.problems, request.completions = problems, dict(enumerate(texts))
    step = StepBatch.of_request(request, Shards(0, 1, 2, True))
    values = torch.tensor(rewards, dtype=torch.float32)
    step.tokens["kl"] = {row: -values[row : row + 1] for row in shard}
    step.texts["answers"] = {row: str(rewards[row]) for row in shard}
    step.put_numbers(shard, {REWARD: values[[*shard]]})
    step.set_scores({REWARD: values, Term("a"): values + 1})
    return step


def test_every_part_of_a_step_is_replaced() -> None:
    # Groups of the rows 3, 5 and 7; the first and the last are replaced by those of 9 and 11.
    step = build_step((3, 5, 7), (0, 1, 2, 3, 4, 5), shard=(0, 2, 4))
    step.replace(build_step((9, 11), (6, 7, 8, 9), shard=(1, 2)), [2, 0])
    assert step.rewards.tolist() == [8, 9, 2, 3, 6, 7]
    assert step.table[Term("a")].tolist() == [9, 10, 3, 4, 7, 8]
    assert [step.row_number(row) for row in range(6)] == [11, 11, 5, 5, 9, 9]
    assert [step.token_ids(row) for row in range(6)] == [[8], [9], [2], [3], [6], [7]]
    # What this rank has read moves with its row.
    assert step.measured == [0, 2, 5]
    assert {row: values.tolist() for row, values in step.tokens["kl"].items()} == {2: [-2], 5: [-7], 0: [-8]}
    assert step.texts["answers"] == {2: "2", 5: "7", 0: "8"}
    assert (step.counts.rounds, step.counts.dropped_groups, step.counts.dropped_tokens) == (1, 2, 4)
    assert [number for _, number in step.replaced] == [4, 5, 0, 1]


def test_equal_completions_get_the_same_numbers() -> None:
    step = build_step((3, 5), (1, 1, 1, 2), shard=range(4))
    step.table = {REWARD: torch.tensor([0.5, 0.4, 0.3, 0.2])}
    step.share(lambda table: table)
    # Of another problem it is another completion.
    assert step.table[REWARD].tolist() == pytest.approx([0.5, 0.5, 0.3, 0.2])


def test_at_least_one_round_is_allowed() -> None:
    with pytest.raises(InputError, match="max_rounds must be at least 1, but is 0"):
        DynamicSampling(max_rounds=0)


# Runs


@dataclass
class Seen(Callback):
    """What each step trained on and counted, and the last weights; it calls `at[step]` before that step."""

    at: dict[int, Any] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)  # sampled, dropped, rounds, kept
    batches: list[Any] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rescored: list[Tensor] = field(default_factory=list)  # the rewards again, all at once
    weights: dict[str, Tensor] = field(default_factory=dict)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.at.get(module.global_step, lambda: None)()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        names = ("sampled_problems", "dropped_groups", "refill_rounds", "kept_equal_groups")
        self.rows.append([problem.row for problem in batch.problems])
        metrics = module.step_metrics
        self.counts.append(
            [int(metrics[f"rollout/{name}"]) for name in names if f"rollout/{name}" in metrics]
        )
        self.batches.append(batch)
        # HFEngine brought the teacher's log-probs, so that new weights change nothing.
        self.rescored.append(module.score(batch.rollouts).rewards)
        self.grad_norms.append(float(module.step_metrics["policy/grad_norm"]))
        self.weights = {name: value.clone() for name, value in module.policy.state_dict().items()}


def fit(
    model: str,
    folder: Path,
    rounds: int | None = 2,
    reward: Reward | None = None,
    engine: HFEngine | None = None,
    seen: Seen | None = None,
    resume: Path | None = None,
    rows: int = ROWS,
    prompts: int = PROMPTS,
    score_early: bool = True,
    kind: Any = TeacherRLData,
    kl_coef: float = 0.04,
    steps: int = STEPS,
) -> tuple[Seen, StratosDataModule]:
    """Train; rounds None is without dynamic sampling."""
    seen = seen or Seen()
    dynamic = None if rounds is None else DynamicSampling(rounds)
    sampling = Sampling(max_completion_length=8)
    callback = RolloutCallback(engine, sampling, score_early=score_early, dynamic_sampling=dynamic)
    trainer = bare_trainer(folder, callback, seen, Checkpoint(1, save_top_k=-1), steps=steps)
    reward = Parity() if reward is None else reward
    module = RLTModule(
        model,
        model if isinstance(reward, RLTReward) else None,
        group_size=GROUP_SIZE,
        reward=reward,
        policy_loss=GRPOLoss(kl_coef=kl_coef),
        optimizer=OptimizerConfig(lr=1e-3),
        micro_batch_tokens=600,
    )
    datamodule = kind(
        source="chains",
        num_embedded_rows=rows,
        prompts_per_step=prompts,
        output_dir=str(folder),
        tags="r1",
        student_system_prompt="",
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=None if resume is None else str(resume))
    return seen, datamodule


def assert_same(*parts: Seen, whole: Seen) -> None:
    assert [rows for part in parts for rows in part.rows] == whole.rows
    assert [counts for part in parts for counts in part.counts] == whole.counts
    assert parts[-1].weights.keys() == whole.weights.keys() != set()
    for name, tensor in parts[-1].weights.items():
        assert torch.equal(tensor, whole.weights[name]), name


def simulated(data: StratosDataModule, rounds: int, steps: int = STEPS) -> tuple[list[list[int]], list[Any]]:
    """The rows and counts of each step, one problem at a time; even rows have equal rewards."""
    loader = data.step_loader()
    rows, size = [problem.row for problem in data.items], len(loader) * loader.batch_size
    places = ((e, i) for e in count() for i in range(size))
    order = [(e, i, rows[loader.list_epoch(e)[i]]) for e, i in islice(places, 50 * size)]
    step_rows, counts = [], []
    for _ in range(steps):
        if size - order[0][1] < loader.batch_size:
            order = order[size - order[0][1] :]
        batch, order = [row for _, _, row in order[: loader.batch_size]], order[loader.batch_size :]
        had, sampled, used = set(batch), len(batch), 0
        for _ in range(rounds):
            new: list[int] = []
            passed = 0
            while len(new) < sum(row % 2 == 0 for row in batch) and passed < size:
                row, order, passed = order[0][2], order[1:], passed + 1
                if row not in had:
                    had.add(row)
                    new.append(row)
            sampled, used = sampled + len(new), used + bool(new)
            incoming: Iterator[int] = iter(new)
            batch = [row if row % 2 else next(incoming, row) for row in batch]
        step_rows.append(batch)
        counts.append([sampled, sampled - loader.batch_size, used, sum(row % 2 == 0 for row in batch)])
    return step_rows, counts


@pytest.fixture(scope="module")
def whole(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run that nothing disturbs."""
    return fit(tiny_model, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize("rounds", [2, full(5)])
def test_the_next_problems_of_the_order_take_the_places(rounds: int, tiny_model: str, tmp_path: Path) -> None:
    # Two batches an epoch, so that rounds and batches cross the ends of epochs.
    seen, data = fit(tiny_model, tmp_path, rounds)
    rows, counts = simulated(data, rounds)
    assert seen.rows == rows
    assert seen.counts == counts
    assert {0, 1} <= {kept > 0 for _, _, _, kept in counts} or rounds == 5
    for batch, rescored in zip(seen.batches, seen.rescored, strict=True):
        torch.testing.assert_close(batch.step.rewards, rescored, rtol=1e-4, atol=1e-5)
        assert [r.problem.row for r in batch.rollouts.rollouts[::GROUP_SIZE]] == [
            p.row for p in batch.problems
        ]
        assert batch.step.table[Term("odd")].tolist() == [r.problem.row % 2 for r in batch.rollouts.rollouts]
        thoughts = [rollout.require_view().compared for rollout in batch.rollouts.rollouts]
        assert [len(batch.step.tokens["kl"][i]) for i in range(len(thoughts))] == [*map(len, thoughts)]


def test_nothing_to_drop_is_as_without(tiny_model: str, tmp_path: Path) -> None:
    off, _ = fit(tiny_model, tmp_path / "off", rounds=None, reward=RLTReward(), steps=3)
    on, _ = fit(tiny_model, tmp_path / "on", reward=RLTReward(), steps=3)
    assert on.counts == [[PROMPTS, 0, 0, 0]] * 3
    assert off.counts == [[]] * 3
    on.counts = off.counts
    assert_same(on, whole=off)


def test_if_all_groups_are_equal_the_step_is_kept_and_changes_nothing(
    tiny_model: str, tmp_path: Path
) -> None:
    # A model with random weights writes no tags: every answer earns -1.
    reward = CorrectnessReward()
    seen, _ = fit(tiny_model, tmp_path, 2, reward, kind=StudentRLData, kl_coef=0.0, steps=2, rows=24)
    assert seen.counts == [[3 * PROMPTS, 2 * PROMPTS, 2, PROMPTS]] * 2
    assert all(len(batch.rollouts.rollouts) == PROMPTS * GROUP_SIZE for batch in seen.batches)
    assert seen.grad_norms == [0, 0]


def test_a_round_ends_where_an_epoch_has_no_other_problem(tiny_model: str, tmp_path: Path) -> None:
    reward = CorrectnessReward()
    options: dict[str, Any] = {"kind": StudentRLData, "steps": 1, "rows": 4, "prompts": 2}
    seen, _ = fit(tiny_model, tmp_path, 5, reward, **options)
    # Beside the two of the step there are two others; then there is none.
    assert seen.counts == [[4, 2, 1, 2]]


# Early scoring, workers


@pytest.fixture(scope="module")
def late(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run with an engine outside the process, whose completions are scored in the end."""
    return fit(tiny_model, tmp_path_factory.mktemp("late"), engine=Outside(), score_early=False)[0]


@pytest.mark.full
def test_groups_that_were_scored_early_are_dropped_too(
    tiny_model: str, tmp_path: Path, whole: Seen, late: Seen
) -> None:
    early, _ = fit(tiny_model, tmp_path / "early", engine=Outside())
    assert early.rows == late.rows == whole.rows
    assert early.counts == late.counts == whole.counts
    for name, tensor in early.weights.items():
        torch.testing.assert_close(tensor, late.weights[name], rtol=1e-4, atol=2e-5)


@pytest.mark.full
def test_asynchronous_runs_resume_exactly(tiny_model: str, tmp_path: Path) -> None:
    def train(folder: Path, **options: Any) -> Any:
        settings = {"dynamic_sampling": DynamicSampling(2), "reward": Parity(), **options}
        with worker_of(tiny_model) as worker:
            return async_runs.fit(tiny_model, tmp_path / folder, worker, **settings)

    def stop() -> None:
        raise KeyError("killed")

    uninterrupted = train(Path("whole"))
    killed = async_runs.Witness({3: stop})
    with pytest.raises(KeyError):
        train(Path("killed"), witness=killed)
    checkpoint = tmp_path / "killed" / "checkpoints" / "step=000002.ckpt"
    resumed = train(Path("killed"), resume=checkpoint)
    killed.steps = killed.steps[:2]
    async_runs.assert_same(killed, resumed, whole=uninterrupted)
    assert [staleness for staleness, _ in uninterrupted.steps] == [0, 1, 1, 1, 1]
    odd = [all(row % 2 for row, _ in completions) for _, completions in uninterrupted.steps]
    assert sum(odd) >= 3


# Resuming, several processes


@pytest.mark.parametrize("done", [2])
def test_a_resumed_run_draws_the_same_problems(
    done: int, tiny_model: str, tmp_path: Path, whole: Seen
) -> None:
    def stop() -> None:
        raise KeyError("stopped")

    stopped = Seen(at={done: stop})
    with pytest.raises(KeyError):
        fit(tiny_model, tmp_path, seen=stopped)
    resumed, _ = fit(tiny_model, tmp_path, resume=tmp_path / "checkpoints" / f"step={done:06d}.ckpt")
    assert_same(stopped, resumed, whole=whole)


@pytest.fixture(scope="module")
def single(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dynamic") / "run"
    run(tiny_model, folder, "single", dynamic=2, prompts=4, rows=11)
    return folder


def steps_of(folder: Path) -> list[dict[str, float]]:
    return json.loads(folder.with_suffix(".json").read_text())


COUNTS = ("sampled_problems", "dropped_groups", "dropped_tokens", "refill_rounds", "kept_equal_groups")


@pytest.mark.parametrize(
    ("strategy", "early"), [full("ddp", False), full("fsdp2", False), full("zero3", True)]
)
def test_two_processes_train_as_one(
    strategy: str, early: bool, single: Path, tiny_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(tiny_model, folder, strategy, dynamic=2, prompts=4, rows=11, early=early)
    assert largest_difference(weights_of_ranks(folder), weights_of_ranks(single)) < 1e-5
    for ours, reference in zip(steps_of(folder), steps_of(single), strict=True):
        assert [ours[f"rollout/{n}"] for n in COUNTS] == [reference[f"rollout/{n}"] for n in COUNTS]
        lengths = ("rollout/length_min", "rollout/length_max", "perf/num_tokens")
        for name in ("reward/mean", "reward/std", *lengths):
            assert ours[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-6), name
        assert ours["reward/zero_std_frac"] == reference["reward/zero_std_frac"]
    assert any(step["reward/zero_std_frac"] for step in steps_of(single))
    refilled = [step["rollout/dropped_groups"] for step in steps_of(single)]
    assert any(number % 2 for number in refilled)  # so that ranks had parts of unlike size


@pytest.mark.parametrize("strategy", [full("zero3")])
def test_two_processes_resume_exactly(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dynamic": 2, "prompts": 4, "rows": 11}
    run(tiny_model, tmp_path / "whole", strategy, **options)
    checkpoint = tmp_path / "whole" / "checkpoints" / "step=000002.ckpt"
    run(tiny_model, tmp_path / "resumed", strategy, checkpoint=checkpoint, **options)
    ours, theirs = weights_of_ranks(tmp_path / "resumed"), weights_of_ranks(tmp_path / "whole")
    assert largest_difference(ours, theirs) == 0
