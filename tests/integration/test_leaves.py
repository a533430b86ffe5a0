"""New methods as leaf classes of examples/: each takes a step, and what it computes is checked by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT
from grpo import Witness, data, module, rollout_callback, slow_log_probs
from trainers import bare_trainer

from rlt_lightning.modules.optimizer import OptimizerConfig


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("joint_stage", "masked_ratio_loss", "pedagogical_reward"):
        sys.modules.pop(name, None)


def fit(rlt: Any, model: str, folder: Path) -> tuple[Any, dict[str, Any], Witness]:
    witness = Witness()
    trainer = bare_trainer(folder, rollout_callback(), witness)
    trainer.fit(rlt, datamodule=data(model, folder))
    [batch] = witness.batches
    return batch, trainer.callback_metrics, witness


def test_a_loss_reads_the_engines_log_probs(tiny_model: str, tmp_path: Path) -> None:
    from masked_ratio_loss import MaskedRatioModule

    rlt = MaskedRatioModule(
        tiny_model, tiny_model, group_size=4, optimizer=OptimizerConfig(1e-3, max_grad_norm=0)
    )
    batch, metrics, witness = fit(rlt, tiny_model, tmp_path)
    assert float(metrics["policy/kept_frac"]) == 1
    # On policy the ratio is 1 but for rounding: the gradient is that of - A * log pi, averaged over tokens.
    policy = module(tiny_model).load(tiny_model, "float32").model
    policy.load_state_dict(witness.weights_before, strict=False)
    rows, loss = batch.rollouts.rollouts, torch.zeros(())
    num_tokens = sum(len(row.completion.token_ids) for row in rows)
    for row, advantage in zip(rows, batch.step.advantages, strict=True):
        log_probs = slow_log_probs(policy, row.problem.teacher_prompt, row.completion.token_ids, 0.7)
        loss = loss - advantage * log_probs.sum() / num_tokens
    loss.backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        bound = 1e-4 * float(parameter.grad.abs().max()) + 1e-7
        torch.testing.assert_close(witness.gradients[name], parameter.grad, atol=bound, rtol=0, msg=name)


def test_a_reward_reads_what_surprises_the_student(tiny_model: str, tmp_path: Path) -> None:
    from pedagogical_reward import PedagogicalReward

    rlt = module(tiny_model, reward=PedagogicalReward(weight=0.5, threshold=2.0))
    batch, metrics, _ = fit(rlt, tiny_model, tmp_path)
    student = module(tiny_model).load(tiny_model, "float32").model
    for row, reward in zip(batch.rollouts.rollouts, batch.step.rewards.tolist(), strict=True):
        problem, view = row.problem, row.views[0]
        with torch.no_grad():
            prefix = problem.student_prefix + problem.think_prefix
            log_probs = slow_log_probs(student, prefix, view.compared, 1.0)
        spikes = float((-log_probs - 2.0).clamp(min=0).mean())
        assert reward == pytest.approx(-0.5 * spikes, abs=1e-4)  # random text has no right answer
    assert float(metrics["reward/correct"]) == 0
    assert float(metrics["reward/mean"]) == pytest.approx(float(metrics["reward/spikes"]), abs=1e-6)


def test_a_model_teaches_and_learns_in_one_step(tiny_model: str, tmp_path: Path) -> None:
    from joint_stage import JointModule

    from rlt_lightning.numerics import GRPOLoss

    options = {"policy_loss": GRPOLoss(kl_coef=0.0), "optimizer": OptimizerConfig(1e-3, max_grad_norm=0)}
    rlt = JointModule(tiny_model, distillation_weight=0.5, group_size=4, micro_batch_tokens=300, **options)
    batch, metrics, witness = fit(rlt, tiny_model, tmp_path)
    assert rlt.models == {}
    policy = module(tiny_model).load(tiny_model, "float32").model
    policy.load_state_dict(witness.weights_before, strict=False)
    rows, gradient, divergences = batch.rollouts.rollouts, torch.zeros(()), []
    for row, advantage in zip(rows, batch.step.advantages, strict=True):
        problem, think, ids = row.problem, row.views[0].compared, row.completion.token_ids
        log_probs = slow_log_probs(policy, problem.teacher_prompt, ids, 0.7)
        gradient = gradient - advantage * log_probs.mean() / len(rows)

        def read(prefix: list[int], tokens: list[int] = think) -> torch.Tensor:
            logits = policy(input_ids=torch.tensor([prefix + tokens])).logits[0, len(prefix) - 1 : -1]
            return (logits / 0.7).log_softmax(-1)

        teacher = read(problem.teacher_prompt).detach()
        student = read(problem.student_prefix + problem.think_prefix)
        divergences.append((teacher.exp() * (teacher - student)).sum(dim=1))
    mean = torch.cat(divergences).mean()
    assert float(metrics["policy/self_divergence"]) == pytest.approx(float(mean), rel=1e-4)
    (gradient + 0.5 * mean).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        bound = 1e-3 * float(parameter.grad.abs().max()) + 1e-7
        torch.testing.assert_close(witness.gradients[name], parameter.grad, atol=bound, rtol=0, msg=name)
