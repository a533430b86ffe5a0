"""GRPO of a tiny model through the real trainer, against a slow and obvious version of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import needs_gpu
from grpo import TEMPERATURE, MovedReference, Witness, data, fit, module, rollout_callback, slow_log_probs
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.callbacks import ReferenceSync, RolloutCallback
from rlt_lightning.checkpoints.io import FolderCheckpointIO
from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import RatioCredit, RewardCredit, TokenCredit
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.phases import count_weights
from rlt_lightning.numerics.advantages import GroupNormalisedAdvantages
from rlt_lightning.numerics.finite import NonFiniteError
from rlt_lightning.numerics.losses import GRPOLoss
from rlt_lightning.rewards import RLTReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import Term
from rlt_lightning.rollouts.step import ScoringPass, StepBatch
from rlt_lightning.strategies.sharding import Unsharded
from rlt_lightning.types import Completion, InputError, Rollout, Rollouts


def slow_reward(policy: Any, student: Any, rollout: Rollout) -> float:
    """The released recipe's reward of one rollout, written out."""
    problem, think = rollout.problem, rollout.require_view().compared
    prefix = problem.student_prefix + problem.think_prefix
    with torch.no_grad():
        teacher = slow_log_probs(policy, problem.teacher_prompt, think, 0.7)
        kl = teacher - slow_log_probs(student, prefix, think, 0.7)
        context = prefix + rollout.require_view().token_ids + problem.student_suffix
        solution = slow_log_probs(student, context, problem.solution_ids, 0.7)
    r_ss = solution.mean() + 0.01 * solution.min()
    r_kl = kl.mean() + 0.01 * kl.max()
    return float(r_ss - 3 * r_kl - (0 if rollout.closed else 1))


def test_one_step_equals_the_slow_obvious_version(tiny_model: str, tmp_path: Path) -> None:
    witness = Witness()
    rlt = module(tiny_model, micro_batch_tokens=300, head=HeadOptions(1))  # several micro-batches and blocks
    fit(tmp_path, rlt, MovedReference(0.02), witness)  # else the KL penalty has no gradient

    policy = witness.load_policy(tiny_model)
    step, rows = witness.one_step()
    assert rlt.reference is not None
    rewards = torch.tensor([slow_reward(policy, next(iter(rlt.models.values())).model, row) for row in rows])
    torch.testing.assert_close(step.rewards, rewards, atol=1e-5, rtol=1e-5)

    advantages = GroupNormalisedAdvantages()(step.rewards, 4)  # their scale magnifies rounding
    loss = torch.zeros(())
    for row, advantage in zip(rows, advantages, strict=True):
        prompt, completion = row.problem.teacher_prompt, row.completion.token_ids
        log_probs = slow_log_probs(policy, prompt, completion, TEMPERATURE)
        with torch.no_grad():
            ref = slow_log_probs(rlt.reference.model, prompt, completion, TEMPERATURE)
        ratio = (log_probs - log_probs.detach()).exp()
        k3 = (ref - log_probs).exp() - (ref - log_probs) - 1
        loss = loss + (0.04 * ratio * k3 - ratio * advantage).mean() / len(rows)
    loss.backward()
    witness.require_gradients(policy, 1e-5)


Scored = tuple[RLTModule, Rollouts, StepBatch]


@pytest.fixture(scope="module")
def one_step(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """A module that has made one step at a learning rate of almost 0, its rollouts and their scores."""
    witness, folder = Witness(), tmp_path_factory.mktemp("one_step")
    rlt = module(tiny_model, optimizer=OptimizerConfig(lr=1e-30))
    fit(folder, rlt, witness)
    [batch] = witness.batches
    assert batch.rollouts is not None
    return rlt, batch.rollouts, batch.step


@pytest.fixture
def scored(one_step: Scored, monkeypatch: pytest.MonkeyPatch) -> Scored:
    """The same, with settings of the reward that each test may change for itself."""
    rlt, rollouts, scores = one_step
    for name in ("reward", "teacher_log_probs"):
        monkeypatch.setattr(rlt, name, getattr(rlt, name))
    return rlt, rollouts, scores


def count_forwards(model: Any, function: Any) -> tuple[list[int], Any]:
    """Tokens of every forward of the model while the function runs, and what that returns."""
    tokens: list[int] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    result = function()
    hook.remove()
    return tokens, result


def test_the_reward_takes_the_teachers_log_probs_from_the_rollouts(scored: Scored) -> None:
    rlt, rollouts, scores = scored
    forwards, _ = count_forwards(rlt.policy, lambda: rlt.score(rollouts))
    assert forwards == []  # one forward, the student's
    rlt.teacher_log_probs = "recompute"
    forwards, recomputed = count_forwards(rlt.policy, lambda: rlt.score(rollouts))
    assert len(forwards) == 1
    torch.testing.assert_close(recomputed.rewards, scores.rewards, atol=1e-4, rtol=0)
    for row, values in scores.tokens["kl"].items():
        torch.testing.assert_close(values, recomputed.tokens["kl"][row], atol=1e-4, rtol=0)


class LyingEngine(HFEngine):
    """Reports log-probs that are too low."""

    def __init__(self, nats: float) -> None:
        super().__init__()
        self.nats = nats

    def sample(self, requests: Any, sampling: Any, stop: str) -> Iterator[tuple[int, Completion]]:
        for number, completion in super().sample(requests, sampling, stop):
            assert completion.log_probs is not None
            told = [value - self.nats for value in completion.log_probs]
            yield number, replace(completion, log_probs=told)


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_held_out_rewards_are_the_trainers(temperature: float, tiny_model: str, tmp_path: Path) -> None:
    found = []
    for nats in (0.0, 0.5):
        sampling = Sampling(temperature=temperature, max_completion_length=12)
        rollouts = rollout_callback(engine=LyingEngine(nats), val_sampling=sampling)
        validated = bare_trainer(tmp_path, rollouts)
        validated.validate(module(tiny_model), data(tiny_model, tmp_path, val_rows=3), verbose=False)
        found.append({name: float(value) for name, value in validated.callback_metrics.items()})
    honest, lying = found
    name = "rollout/val_mismatch_max"
    assert lying.pop(name) == pytest.approx(honest.pop(name) + 0.5, abs=1e-3)
    assert lying == honest


def test_given_tokens_cost_one_pass_over_each_prompt(scored: Scored) -> None:
    rlt, rollouts, _ = scored
    rlt.reward = RLTReward(score_given=True)
    forwards, found = count_forwards(rlt.policy, lambda: rlt.score(rollouts))
    prompts = {r.problem.row: len(r.problem.teacher_prompt) for r in rollouts.rollouts}
    assert forwards == [sum(prompts.values())]
    rlt.teacher_log_probs = "recompute"
    torch.testing.assert_close(found.rewards, rlt.score(rollouts).rewards, atol=1e-4, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
@pytest.mark.parametrize("source", ["rollout", "recompute"])
def test_score_given_adds_only_the_given_tokens(estimator: Any, source: Any, scored: Scored) -> None:
    rlt, rollouts, _ = scored
    rlt.teacher_log_probs = source
    rlt.reward = RLTReward(kl_estimator=estimator)
    step = rlt.score(rollouts)
    plain = [rlt.reward.list_tokens(step, i) for i in range(len(step))]
    rlt.reward = RLTReward(kl_estimator=estimator, score_given=True)
    step = rlt.score(rollouts)
    for i, row in enumerate(rollouts.rollouts):
        given = row.problem.think_prefix
        assert given  # of SmolLM2's tokenizer
        tokens = rlt.reward.list_tokens(step, i)
        assert plain[i].explanation == row.require_view().compared
        assert tokens.explanation == given + plain[i].explanation
        assert tokens.kl[len(given) :] == pytest.approx(plain[i].kl, abs=1e-5, rel=1e-5)
        assert tokens.solution_log_probs == pytest.approx(plain[i].solution_log_probs, abs=1e-5)
        assert len(tokens.kl) == len(tokens.explanation)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_explanations_without_a_token_have_no_kl(estimator: Any, scored: Scored) -> None:
    rlt, rollouts, _ = scored
    rlt.teacher_log_probs = "recompute"
    rlt.reward = RLTReward(kl_estimator=estimator)
    nothing: Any = {"token_ids": [], "num_tokens": 0, "num_own": 0}
    empty = [replace(r, view=replace(r.require_view(), **nothing), text="") for r in rollouts.rollouts]
    scores = rlt.score(replace(rollouts, rollouts=empty))
    assert {len(values) for values in scores.tokens["kl"].values()} == {0}
    assert scores.table[Term("kl")].abs().max() == 0
    assert scores.table[Term("format")].tolist() == [-1.0] * len(empty)


@pytest.mark.parametrize("case", ["no log-probs", "another temperature", "exact KL"])
def test_the_teacher_is_run_where_the_rollouts_cannot_tell(case: str, scored: Scored) -> None:
    rlt, rollouts, _ = scored
    if case == "no log-probs":
        build = rlt.trainer.datamodule.build_rollout
        rows = [build(r.problem, replace(r.completion, log_probs=None)) for r in rollouts.rollouts]
        rollouts = replace(rollouts, rollouts=rows)
    elif case == "another temperature":
        rlt.reward = RLTReward(teacher_temperature=0.8)
    else:
        rlt.reward = RLTReward(kl_estimator="exact")
    forwards, scores = count_forwards(rlt.policy, lambda: rlt.score(rollouts))
    assert len(forwards) == 1
    if case == "no log-probs":
        student = next(iter(rlt.models.values())).model
        for row, reward in zip(rollouts.rollouts, scores.rewards.tolist(), strict=True):
            assert reward == pytest.approx(slow_reward(rlt.policy, student, row), abs=1e-4)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_frozen_models_are_on_the_device_only_while_they_are_used(name: str, tiny_model: str) -> None:
    entry = module(tiny_model).load(tiny_model, "float32")
    device, whole = torch.device(name), Unsharded(None)

    def devices() -> set[str]:
        return {tensor.device.type for tensor in Model.frozen(entry).tensors()}

    frozen = Model.frozen(entry, offload=True)
    frozen.place(device, whole)
    kept = {name: tensor.clone() for name, tensor in frozen.model.state_dict().items()}
    with frozen.loaded_on(device):
        assert devices() == {name}
    for key, tensor in frozen.model.state_dict().items():
        assert torch.equal(tensor, kept[key]), key
    stays = Model.frozen(entry)
    stays.place(device, whole)
    with stays.loaded_on(torch.device("cpu")):
        assert devices() == {name}


def test_offloaded_models_are_loaded_into_main_memory(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning makes the root device the default one while models are loaded; here it is cpu:0, not cpu.
    defaults: dict[str, torch.device] = {}
    load = RLTModule.load

    def watched(self: Any, name: str, dtype: Any, role: str = "", *options: Any) -> Any:
        defaults[role] = torch.get_default_device()
        return load(self, name, dtype, role, *options)

    monkeypatch.setattr(RLTModule, "load", watched)
    rlt = module(tiny_model, offload_frozen=True, policy_loss=GRPOLoss(kl_coef=0.1))
    fit(tmp_path, rlt, strategy=SingleDeviceStrategy(torch.device("cpu", 0)))
    assert defaults == {
        "the trained model": torch.device("cpu", 0),
        "the frozen student": torch.device("cpu"),
        "the reference": torch.device("cpu"),
    }


def test_speed_and_memory_are_logged_by_phase(scored: Scored) -> None:
    rlt, rollouts, _ = scored
    metrics, rows = rlt.step_metrics, rollouts.rollouts
    assert metrics["perf/generate_tokens_per_s"] * metrics["perf/generate_s"] == pytest.approx(
        sum(len(r.completion.token_ids) for r in rows)
    )
    prompts = {r.problem.row: len(r.problem.teacher_prompt) for r in rows}
    computed = sum(prompts.values()) + sum(len(r.completion.token_ids) for r in rows)
    assert metrics["perf/train_tokens_per_s"] * metrics["perf/train_s"] == pytest.approx(computed)
    for phase in ("generate", "push", "score", "train"):
        assert 0.1 < metrics[f"perf/{phase}_peak_gib"] < 100


def test_weights_that_a_token_goes_through_by_hand(tiny_model: str) -> None:
    model = module(tiny_model).load(tiny_model, "float32").model
    # Per layer: q and o 64 x 64, k and v 64 x 32 (one head of 32), three of the MLP 64 x 128.
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    norms = 2 * 2 * 64 + 64  # vectors: not multiplied
    assert sum(p.numel() for p in model.parameters()) == weights + 64 * 8192 + norms
    assert count_weights(model) == weights


def test_gradients_are_clipped_to_the_global_norm(tiny_model: str, tmp_path: Path) -> None:
    witness = Witness()
    rlt = module(tiny_model, optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0.01))
    fitted = fit(tmp_path, rlt, witness)
    norm = torch.stack([gradient.norm() for gradient in witness.gradients.values()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.01), rtol=1e-3, atol=0)
    assert fitted.callback_metrics["policy/grad_norm"] > 0.1  # as it was before


def test_student_and_reference_are_in_no_optimizer_and_no_checkpoint(tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model)
    fit(tmp_path, rlt).save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("entry.model.") for name in saved)
    assert {id(p) for p in rlt.parameters()} == {id(p) for p in rlt.policy.parameters()}
    optimized = sum(len(group["params"]) for group in rlt.optimizers().param_groups)  # type: ignore[union-attr]
    assert optimized == len(list(rlt.policy.parameters()))
    initial = module(tiny_model).load(tiny_model, "float32").model.state_dict()
    for name, tensor in next(iter(rlt.models.values())).model.state_dict().items():
        torch.testing.assert_close(tensor, initial[name], atol=0, rtol=0)


def test_reference_moves_by_alpha_every_n_steps(tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model)
    initial = module(tiny_model).load(tiny_model, "float32").model.state_dict()
    fit(tmp_path, rlt, ReferenceSync(every_n_steps=2, alpha=0.9), steps=2)
    assert rlt.reference is not None
    named = rlt.reference.model.named_parameters()
    for (name, reference), policy in zip(named, rlt.policy.parameters(), strict=True):
        torch.testing.assert_close(reference, 0.9 * policy + 0.1 * initial[name])
        assert not reference.requires_grad
    assert (tmp_path / "reference" / "step=000002" / "model.safetensors").is_file()


def test_a_resumed_run_has_the_reference_that_had_moved(tiny_model: str, tmp_path: Path) -> None:
    class AtStart(Callback):
        """Keeps the reference before the first step."""

        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            weights = pl_module.reference.model.state_dict()
            self.weights = {name: tensor.clone() for name, tensor in weights.items()}

    checkpoint, moved = tmp_path / "checkpoints" / "step=000001.ckpt", module(tiny_model)
    options: dict[str, Any] = {"plugins": [FolderCheckpointIO()]}
    first = fit(tmp_path, moved, rollout_callback(4), ReferenceSync(every_n_steps=1), **options)
    first.save_checkpoint(checkpoint)
    start, sync = AtStart(), ReferenceSync(every_n_steps=5)
    resumed = bare_trainer(tmp_path, rollout_callback(4), sync, start, steps=2, **options)
    resumed.fit(module(tiny_model), datamodule=data(tiny_model, tmp_path), ckpt_path=str(checkpoint))
    assert moved.reference is not None
    expected = moved.reference.model.state_dict()
    given = module(tiny_model).load(tiny_model, "float32").model.state_dict()
    assert any((expected[name] != tensor).any() for name, tensor in given.items())
    assert start.weights.keys() == expected.keys()
    assert all(torch.equal(start.weights[name], tensor) for name, tensor in expected.items())


def test_without_kl_penalty_no_reference_is_held(tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model, policy_loss=GRPOLoss(kl_coef=0.0))
    fit(tmp_path, rlt)
    assert rlt.reference is None


class GhostReward(RLTReward):
    def scoring_passes(self, rollout: Rollout, student: Student) -> list[ScoringPass]:
        return [replace(scoring, model="ghost") for scoring in super().scoring_passes(rollout, student)]


class NoReward(RLTReward):
    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> dict[str, Tensor]:
        return {Term("kl"): super().measure(step, rows, student)[Term("kl")]}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("reward", GhostReward(), "names the model 'ghost', but this run has policy"),
        ("reward", NoReward(), "must have REWARD"),
        ("credit", RewardCredit() + TokenCredit("stepz"), "token column 'stepz', but there are"),
        ("credit", RewardCredit() + RatioCredit(by="nobody"), r"may ask policy, .*, but asks nobody"),
    ],
    ids=["model", "reward", "column", "credit"],
)
def test_unknown_names_fail(name: str, value: Any, message: str, tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model)
    setattr(rlt, name, value)
    with pytest.raises(InputError, match=message):
        fit(tmp_path, rlt)
    assert (rlt.policy is None) == ("ask" in message)  # a credit says by itself whom it asks


def test_forgetting_the_rollout_callback_is_loud(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rlt_lightning\.callbacks\.RolloutCallback"):
        bare_trainer(tmp_path).fit(module(tiny_model), datamodule=data(tiny_model, tmp_path))


def test_stale_rollouts_are_refused(tiny_model: str, tmp_path: Path) -> None:
    class Late(RolloutCallback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            request = self.sampler.request
            self.kept = request(batch.problems) if pl_module.global_step == 0 else self.kept
            self.sampler.request = lambda problems: self.kept  # type: ignore[method-assign]

    late = Late(sampling=Sampling(max_completion_length=4))
    with pytest.raises(RuntimeError, match=r"max_staleness=0 .* version 0 at step 1"):
        fit(tmp_path, module(tiny_model), late, steps=2)


def test_nan_in_the_student_stops_the_run_and_names_row_and_term(tiny_model: str, tmp_path: Path) -> None:
    class Poison(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            next(iter(pl_module.models.values())).model.get_output_embeddings().weight.data[0] = torch.nan

    with pytest.raises(NonFiniteError, match=r"log-prob 'solution' of \S+ must be finite, but row\(s\) \d+"):
        fit(tmp_path, module(tiny_model), Poison())


@dataclass(frozen=True)
class LogTerm(RLTReward):
    """A further term that is the log of 0 for the first completion."""

    extra_names = ("fine", "luck")

    def extra_terms(self, step: Any, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        ones = torch.ones(len(rows))
        return {"fine": ones, "luck": ones.index_fill(0, torch.tensor([0]), 0.0).log()}


class InfiniteLoss(GRPOLoss):
    """A loss that is divided by 0."""

    def __call__(self, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().__call__(**inputs)
        return loss.abs() / 0 + 1, metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reward": LogTerm()},
            r"Every term 'luck' of LogTerm .* row\(s\) \d.* have -inf\. .*correct LogTerm",
        ),
        (
            {"policy_loss": InfiniteLoss()},
            r"Every loss of InfiniteLoss .* row\(s\) \d.* have inf\. .*correct I",
        ),
    ],
    ids=["term", "loss"],
)
def test_a_class_that_makes_inf_is_named(options: Any, message: str, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=message):
        fit(tmp_path, module(tiny_model, **options))


def test_validation_inside_fit_logs_held_out_reward_and_its_terms(tiny_model: str, tmp_path: Path) -> None:
    options = {"steps": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}
    fitted = bare_trainer(tmp_path, rollout_callback(), **options)
    fitted.fit(module(tiny_model), datamodule=data(tiny_model, tmp_path, val_rows=3))
    metrics = {name: float(value) for name, value in fitted.callback_metrics.items() if "val_" in name}
    terms = {f"reward/val_{name}" for name in ("solution", "kl", "format")}
    others = {f"rollout/val_{name}" for name in ("length_mean", "closed_frac", "mismatch_max")}
    assert metrics.keys() == {"reward/val_mean"} | terms | others
    assert metrics["reward/val_mean"] == pytest.approx(sum(metrics[name] for name in terms), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "options", "length", "message"),
    [
        (
            {},
            {"precision": "bf16-true"},
            12,
            "trainer.precision must be 32-true or bf16-mixed, but is bf16-true",
        ),
        ({}, {"precision": "64-true"}, 12, "trainer.precision must be 32-true or bf16-mixed, but is 64-true"),
        ({"dtype": "float16"}, {}, 12, "model.dtype of a trained model must be float32 or bfloat16"),
        ({}, {}, 2040, r"teacher's context of 2048 tokens, but row \d+ needs"),
    ],
    ids=["bfloat16", "float64", "float16", "context"],
)
def test_what_cannot_train_is_refused_before_a_model_is_loaded(
    settings: Any, options: Any, length: int, message: str, tiny_model: str, tmp_path: Path
) -> None:
    rlt = module(tiny_model, **settings)
    with pytest.raises(InputError, match=message):
        fit(tmp_path, rlt, rollout_callback(length), **options)
    assert rlt.policy is None


class EqualEngine(HFEngine):
    """Gives all completions of a problem the same tokens, with log-probs that rounding tells apart."""

    def sample(self, requests: Any, sampling: Any, stop: str) -> Iterator[tuple[int, Completion]]:
        firsts: dict[tuple[int, ...], Completion] = {}
        prompts = {number: tuple(requests[number // 4].prompt) for number in range(4 * len(requests))}
        for number, completion in super().sample(requests, sampling, stop):
            first = firsts.setdefault(prompts[number], completion)
            assert first.log_probs is not None
            yield number, replace(first, log_probs=[value - 1e-7 * number for value in first.log_probs])


def test_group_of_equal_completions_has_no_spread(tiny_model: str, tmp_path: Path) -> None:
    witness = Witness()
    rlt = module(tiny_model, policy_loss=GRPOLoss(kl_coef=0.0), micro_batch_tokens=700)
    fitted = fit(tmp_path, rlt, rollout_callback(engine=EqualEngine()), witness)
    assert fitted.callback_metrics["reward/zero_std_frac"] == 1
    assert not any(gradient.any() for gradient in witness.gradients.values())
