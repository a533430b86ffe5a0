"""The methods in examples/, each a subclass: each trains a step, and its numbers are checked by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT
from grpo import Witness, data, module, rollout_callback, slow_log_probs
from trainers import bare_trainer

from rlt_lightning.datamodules import StudentRLData, TeacherRLData
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.credits import RatioCredit, RewardCredit
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics import DAPOLoss, GroupCenteredAdvantages
from rlt_lightning.rewards import TextReward
from rlt_lightning.rollouts.columns import REWARD, Term, columns_of
from rlt_lightning.rollouts.step import StepBatch


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = ("hurdle_reward", "joint_stage", "masked_ratio_loss", "preference_pairs", "step_reward")
    for name in names:
        sys.modules.pop(name, None)


def fit(rlt: Any, model: str, folder: Path, rows: Any = None) -> tuple[Any, dict[str, Any], Witness]:
    witness = Witness()
    trainer = bare_trainer(folder, rollout_callback(), witness)
    trainer.fit(rlt, datamodule=rows or data(model, folder))
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
    policy = witness.load_policy(tiny_model)
    rows, loss = batch.rollouts.rollouts, torch.zeros(())
    num_tokens = sum(len(row.completion.token_ids) for row in rows)
    for row, advantage in zip(rows, batch.step.advantages, strict=True):
        log_probs = slow_log_probs(policy, row.problem.teacher_prompt, row.completion.token_ids, 0.7)
        loss = loss - advantage * log_probs.sum() / num_tokens
    loss.backward()
    witness.require_gradients(policy, 1e-4)


def test_a_term_of_the_reward_is_made_of_tokens(tiny_model: str, tmp_path: Path) -> None:
    from hurdle_reward import HurdleReward

    reward = HurdleReward(hurdle_weight=0.5, threshold=-9.0)
    step: Any = StepBatch([], 1, 1.0, 0)
    step.tokens["solution"] = {2: torch.tensor([-1.0, -9.5, -9.0]), 5: torch.tensor([-10.0, -2.0])}
    # One of 3 tokens is below -9, and one of 2: padding is none.
    terms = reward.extra_terms(step, [2, 5])
    torch.testing.assert_close(terms["hurdles"], torch.tensor([-0.5 / 3, -0.5 / 2]))

    rlt = RLTModule(tiny_model, tiny_model, group_size=4, reward=reward)
    options: Any = {"prompts_per_step": 2, "tokenizer": tiny_model, "student_tokenizer": tiny_model}
    texts = [
        {"question": f"What is {n} + 4?", "solution": f"So the answer is \\boxed{{{n + 4}}}."}
        for n in range(8)
    ]
    rows = TeacherRLData(texts, output_dir=str(tmp_path), **options)
    batch, metrics, _ = fit(rlt, tiny_model, tmp_path, rows)
    model, step = module(tiny_model).load(tiny_model, "float32").model, batch.step
    for number, row in enumerate(batch.rollouts.rollouts):
        problem, view = row.problem, row.require_view()
        before = problem.student_prefix + problem.think_prefix + view.token_ids + problem.student_suffix
        with torch.no_grad():
            log_probs = slow_log_probs(model, before, problem.solution_ids, 0.7)
        expected = -0.5 * float((log_probs < -9.0).float().mean())
        assert float(step.table[Term("hurdles")][number]) == pytest.approx(expected, abs=1e-5)
        total = sum(values[number] for values in columns_of(step.table, Term).values())
        assert float(step.rewards[number]) == pytest.approx(float(total), abs=1e-4)
    assert batch.step.table[Term("hurdles")].std() > 0
    assert float(metrics["reward/hurdles"]) < 0


class EvenSum(TextReward):
    """1 for an answer whose token ids have an even sum, which random models sample as often as an odd one."""

    judges = ("answers",)

    def __call__(self, rollouts: list[Any], tags: Any) -> dict[str, Any]:
        return {REWARD: torch.tensor([float(sum(row.completion.token_ids) % 2 == 0) for row in rollouts])}


@pytest.mark.parametrize("plus", [0.0, 1.0], ids=["JOLT", "JOLT+"])
def test_both_roles_have_the_gradient_of_jolt(plus: float, tiny_model: str, tmp_path: Path) -> None:
    from joint_stage import JOLTModule, RoleCredit, TwoViewData

    texts = [{"question": f"What is {n} + 4?", "solution": f"\\boxed{{{n + 4}}}"} for n in range(8)]
    rows = TwoViewData(texts, tokenizer=tiny_model, prompts_per_step=2, output_dir=str(tmp_path), view="hint")
    options: Any = {"optimizer": OptimizerConfig(1e-3, max_grad_norm=0), "reward": EvenSum()}
    options |= {"advantages": GroupCenteredAdvantages(), "policy_loss": DAPOLoss(kl_coef=0.0)}
    jolt = JOLTModule(tiny_model, None, group_size=4, micro_batch_tokens=300, **options)
    jolt.credit = RoleCredit(
        RewardCredit() + 0.3 * RatioCredit(), plus * RewardCredit() + 0.7 * RatioCredit()
    )
    batch, _, witness = fit(jolt, tiny_model, tmp_path, rows)
    policy = witness.load_policy(tiny_model)
    rollouts, loss = batch.rollouts.rollouts, torch.zeros(())
    roles = [row.problem.row < 0 for row in rollouts]
    assert roles == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    num_tokens = sum(len(row.completion.token_ids) for row in rollouts)
    groups = batch.step.rewards.view(4, 4)
    advantages = (groups - groups.mean(1, keepdim=True)).view(-1)
    assert advantages.abs().max() > 0
    for row, is_teacher, advantage in zip(rollouts, roles, advantages, strict=True):
        tokens = row.completion.token_ids
        own = slow_log_probs(policy, row.problem.teacher_prompt, tokens, 0.7)
        with torch.no_grad():
            other = slow_log_probs(policy, row.problem.teacher_view, tokens, 0.7)
        # Eqs. 19 and 20, with log p_teacher - log p_student = own - other where the teacher sampled.
        delta = own.detach() - other if is_teacher else other - own.detach()
        weights = advantage - 0.3 * delta if is_teacher else plus * advantage + 0.7 * delta
        loss = loss - (weights * own).sum() / num_tokens
    loss.backward()
    witness.require_gradients(policy)


@pytest.mark.parametrize("updates", [1, 2])
def test_steps_are_credited_to_their_tokens(updates: int, miniature: str, tmp_path: Path) -> None:
    from step_reward import StepModule, StepReward, judge_steps

    texts = ["4", " times", " 3", " is", " 2", ",", " 2", " add", " 5", " is", " 8"]
    assert judge_steps(texts).tolist() == [0] * 4 + [1] + [0] * 5 + [-1]
    options = {"optimizer": OptimizerConfig(1e-3, max_grad_norm=0), "reward": StepReward()}
    steps = StepModule(miniature, None, group_size=4, updates_per_rollout=updates, **options)
    kinds = {"tags": "r1", "student_system_prompt": "", "num_embedded_rows": 8, "prompts_per_step": 2}
    rows = StudentRLData(tokenizer=miniature, output_dir=str(tmp_path), **kinds)
    witness = Witness()
    trainer = bare_trainer(tmp_path, rollout_callback(length=40), witness)
    trainer.fit(steps, datamodule=rows)
    [step] = [batch.step for batch in witness.batches]
    assert sorted(step.tokens["steps"]) == list(range(8))
    assert any(values.any() for values in step.tokens["steps"].values())
    if updates > 1:
        return  # other weights have sampled than those before the last update
    policy = witness.load_policy(miniature)
    loss = torch.zeros(())
    for row, rollout in enumerate(step.rollouts(range(8))):
        tokens = rollout.completion.token_ids
        own = slow_log_probs(policy, rollout.problem.teacher_prompt, tokens, 0.7)
        credit = step.advantages[row] + 0.3 * step.tokens["steps"][row]
        loss = loss - (credit * own).mean() / 8
    loss.backward()
    witness.require_gradients(policy)


def test_pairs_are_trained_by_dpo(tiny_model: str, tmp_path: Path) -> None:
    from preference_pairs import DPOModule, PairData

    rows = [{"prompt": f"{n} + 4?", "chosen": f"It is {n + 4}.", "rejected": "No " * n} for n in range(1, 7)]
    data = PairData(rows, tokenizer=tiny_model, prompts_per_step=3, output_dir=str(tmp_path))
    options = {"optimizer": OptimizerConfig(1e-3, max_grad_norm=0), "micro_batch_tokens": 64}
    witness = Witness()
    trainer = bare_trainer(tmp_path, witness, steps=2)
    trainer.fit(DPOModule(tiny_model, beta=0.5, **options), datamodule=data)
    policy, reference = witness.load_policy(tiny_model), module(tiny_model).load(tiny_model, "float32").model
    losses = []
    answers = witness.batches[1].rollouts
    for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
        assert chosen.problem is rejected.problem
        margin = torch.zeros(())
        for sign, row in ((0.5, chosen), (-0.5, rejected)):
            tokens = row.problem.teacher_prompt, row.completion.token_ids, 1.0
            before, after = (slow_log_probs(model, *tokens).sum() for model in (reference, policy))
            margin = margin + sign * (after - before)
        losses.append(-torch.nn.functional.logsigmoid(margin))
    loss = torch.stack(losses).mean()
    assert float(trainer.callback_metrics["policy/loss"]) == pytest.approx(float(loss), abs=1e-5)
    assert abs(float(loss) - math.log(2)) > 1e-3
    loss.backward()
    witness.require_gradients(policy)
