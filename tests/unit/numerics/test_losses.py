"""Policy losses against TRL's figures, hand-worked numbers and an obvious loop; advantages by hand."""

import json
import math
from typing import Any

import pytest
import torch
from cases import GOLDEN_FOLDER
from torch import Tensor

from rlt_lightning.numerics import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GroupCenteredAdvantages,
    GroupNormalisedAdvantages,
    GRPOLoss,
    GSPOLoss,
    LeaveOneOutAdvantages,
    PolicyLoss,
    ShuffledAdvantages,
)
from rlt_lightning.numerics.advantages import zero_std_groups

GOLDEN = json.loads((GOLDEN_FOLDER / "grpo_loss.json").read_text())
GOLDEN_LOSSES: dict[str, PolicyLoss] = {
    "grpo on-policy": GRPOLoss(),
    "grpo": GRPOLoss(),
    "grpo no kl": GRPOLoss(kl_coef=0),
    "clip-higher": GRPOLoss(clip_eps_high=0.28),
    "bnpo": DAPOLoss(),
    "dr_grpo": DrGRPOLoss(kl_coef=0, max_completion_length=9),
    "dapo": DAPOLoss(clip_eps_high=0.28, kl_coef=0),
    "gspo": GSPOLoss(clip_eps_low=3e-4, clip_eps_high=4e-4, kl_coef=0),
    "cispo": CISPOLoss(clip_eps_high=4.0, kl_coef=0),  # TRL's epsilon_high bounds the ratio, not ratio - 1
}
EVERY_LOSS = [
    GRPOLoss(kl_coef=0.3),
    DrGRPOLoss(max_completion_length=11, unbiased_kl=False),
    DAPOLoss(clip_eps_low=0.1, clip_eps_high=0.28),
    GSPOLoss(clip_eps_low=0.05, clip_eps_high=0.06),
    CISPOLoss(clip_eps_high=0.3),
]
by_class = pytest.mark.parametrize("policy_loss", EVERY_LOSS, ids=lambda loss: type(loss).__name__)


def random_batch(num_rows: int = 6, num_tokens: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(num_rows, num_tokens, generator=generator, dtype=torch.float64)

    log_probs = -noise().abs()
    token_mask = torch.rand(num_rows, num_tokens, generator=generator) < 0.6  # holes too, not only at the end
    token_mask[:, 0] = True
    return {
        "log_probs": log_probs.requires_grad_(),
        "old_log_probs": log_probs.detach() + 0.3 * noise(),
        "ref_log_probs": log_probs.detach() + 0.5 * noise(),
        "advantages": noise()[:, 0],
        "token_mask": token_mask,
        "importance_weights": noise().exp(),
    }


def loss_and_grad(policy_loss: PolicyLoss, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    loss, _ = policy_loss(**batch)
    (grad,) = torch.autograd.grad(loss, batch["log_probs"])
    return loss.detach(), grad


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_equal_trl(case):
    def tensor(name: str) -> Tensor:
        return torch.tensor(GOLDEN[name], dtype=torch.float64)

    batch = {
        "log_probs": tensor("log_probs").requires_grad_(),
        "old_log_probs": tensor("old_log_probs") if case["off_policy"] else None,
        "ref_log_probs": tensor("ref_log_probs"),
        "advantages": tensor("advantages"),
        "token_mask": torch.arange(9) < torch.tensor(GOLDEN["lengths"])[:, None],
    }
    loss, grad = loss_and_grad(GOLDEN_LOSSES[case["name"]], batch)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=0, atol=1e-9)


def test_advantages_equal_trl():
    rewards = torch.tensor(GOLDEN["rewards"], dtype=torch.float64)
    advantages = GroupNormalisedAdvantages()(rewards, GOLDEN["group_size"])
    expected = torch.tensor(GOLDEN["advantages"], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-6)


def test_grpo_loss_by_hand():
    # Row 1, A = 2: ratios 1 and e^ln(1.5) = 1.5, clipped to 1.2: surrogates 2 and 2.4, mean 2.2.
    # Row 2, A = -1: ratio 0.5, clipped to 0.8: min(-0.5, -0.8) = -0.8. Loss -(2.2 - 0.8) / 2 = -0.7.
    # KL: q/p is 1, 1 and 2: k3 = 0, 0 and 2 - 1 - ln 2, times ratio 0.5: mean (0 + 0.5 (1 - ln 2)) / 2.
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]])
    old_log_probs = torch.tensor([[-1.0, -2.0 - math.log(1.5)], [-3.0 + math.log(2), math.inf]])
    ref_log_probs = torch.tensor([[-1.0, -2.0], [-3.0 + math.log(2), -math.inf]])
    loss, metrics = GRPOLoss(kl_coef=0.1)(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        advantages=torch.tensor([2.0, -1.0]),
        token_mask=torch.tensor([[True, True], [True, False]]),
    )
    kl = 0.5 * (1 - math.log(2)) / 2
    assert loss.item() == pytest.approx(-0.7 + 0.1 * kl, abs=1e-6)
    assert metrics["policy/kl_ref"].item() == pytest.approx(kl, abs=1e-6)
    assert metrics["policy/clip_frac"].item() == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["policy/clip_frac_high"].item() == pytest.approx(0.5 / 2)  # row 1's second token
    assert metrics["policy/clip_frac_low"].item() == pytest.approx(1.0 / 2)
    assert metrics["policy/ratio_mean"].item() == pytest.approx((1.25 + 0.5) / 2)


@by_class
def test_each_token_may_have_its_own_advantage(policy_loss: PolicyLoss) -> None:
    batch = random_batch()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(batch["log_probs"].shape, generator=generator, dtype=torch.float64)
    whole, grad = loss_and_grad(policy_loss, batch | {"advantages": tokens})
    spread = batch["advantages"][:, None].expand_as(tokens)
    same, _ = loss_and_grad(policy_loss, batch | {"advantages": spread})
    torch.testing.assert_close(same, loss_and_grad(policy_loss, batch)[0])
    if isinstance(policy_loss, GSPOLoss):  # a token's ratio depends on all tokens
        return
    for t in range(tokens.shape[1]):
        _, of_column = loss_and_grad(policy_loss, batch | {"advantages": tokens[:, t]})
        torch.testing.assert_close(grad[:, t], of_column[:, t])
    assert whole != same


def slow_loss(policy_loss: PolicyLoss, batch: dict[str, Tensor]) -> Tensor:
    """The losses as their papers write them, token by token."""
    log_probs, old, ref, advantages, token_mask, weights = batch.values()
    low, high = 1 - policy_loss.clip_eps_low, 1 + policy_loss.clip_eps_high
    rows, all_tokens = [], []
    for i in range(len(log_probs)):
        tokens = [t for t in range(log_probs.shape[1]) if token_mask[i, t]]
        mean_log_ratio = sum((log_probs[i, t] - old[i, t]) for t in tokens) / len(tokens)
        losses = []
        for t in tokens:
            is_sequence = isinstance(policy_loss, GSPOLoss)
            ratio = (mean_log_ratio if is_sequence else log_probs[i, t] - old[i, t]).exp()
            clipped = min(max(ratio, torch.tensor(low)), torch.tensor(high))
            surrogate = min(ratio * advantages[i], clipped * advantages[i])
            if isinstance(policy_loss, CISPOLoss):
                surrogate = min(ratio.item(), high) * advantages[i] * log_probs[i, t]
            kl = (ref[i, t] - log_probs[i, t]).exp() - (ref[i, t] - log_probs[i, t]) - 1
            kl_weight = policy_loss.kl_coef * (weights[i, t] * ratio if policy_loss.unbiased_kl else 1)
            losses.append(kl_weight * kl - weights[i, t] * surrogate)
        length = policy_loss.max_completion_length if isinstance(policy_loss, DrGRPOLoss) else len(tokens)
        rows.append(sum(losses) / length)
        all_tokens += losses
    per_token = isinstance(policy_loss, DAPOLoss)
    return sum(all_tokens) / len(all_tokens) if per_token else sum(rows) / len(rows)


@by_class
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_equals_an_obvious_loop(policy_loss, seed):
    batch = random_batch(seed=seed)
    expected = slow_loss(policy_loss, batch)
    (expected_grad,) = torch.autograd.grad(expected, batch["log_probs"])
    loss, grad = loss_and_grad(policy_loss, batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-6)


@by_class
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_padding_reaches_neither_loss_nor_gradient(policy_loss, garbage):
    batch = random_batch()
    expected, expected_grad = loss_and_grad(policy_loss, batch)
    mask = batch.pop("token_mask")
    padding = ~mask
    batch["advantages"] = batch["advantages"][:, None].expand(mask.shape)
    dirty = {name: values.detach().masked_fill(padding, garbage) for name, values in batch.items()}
    dirty |= {"log_probs": dirty["log_probs"].requires_grad_(), "token_mask": mask}
    loss, grad = loss_and_grad(policy_loss, dirty)
    assert torch.equal(loss, expected)
    assert all(metric.isfinite() for metric in policy_loss(**dirty)[1].values())
    assert torch.equal(grad, expected_grad)
    assert not grad[padding].any()


@by_class
def test_micro_batches_sum_to_the_whole_batch(policy_loss):
    batch = random_batch()
    whole, whole_metrics = policy_loss(**batch)
    (whole_grad,) = torch.autograd.grad(whole, batch["log_probs"])
    totals = {"num_tokens": int(batch["token_mask"].sum()), "num_sequences": 6}
    parts = [
        policy_loss(**{name: values[rows] for name, values in batch.items()}, **totals)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    (grad,) = torch.autograd.grad(sum(loss for loss, _ in parts), batch["log_probs"])
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(grad, whole_grad)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), value)
        assert not value.requires_grad


@by_class
def test_a_row_without_tokens_adds_nothing_but_keeps_the_graph(policy_loss):
    batch = random_batch(num_rows=1)
    batch["token_mask"] = torch.zeros_like(batch["token_mask"])
    loss, grad = loss_and_grad(policy_loss, batch)
    assert loss.item() == 0
    assert not grad.any()


def test_kl_without_reference_is_an_error():
    batch = {**random_batch(), "ref_log_probs": None}
    with pytest.raises(ValueError, match=r"kl_coef is 0\.04"):
        GRPOLoss()(**batch)
    _, metrics = GRPOLoss(kl_coef=0)(**batch)
    clips = {f"policy/clip_frac{end}" for end in ("", "_low", "_high")}
    assert set(metrics) == {"policy/ratio_mean", *clips}


def test_loss_options_are_checked():
    with pytest.raises(ValueError, match="clip_eps_low must be at least 0"):
        GRPOLoss(clip_eps_low=-0.1)
    with pytest.raises(ValueError, match="max_completion_length must be at least 1"):
        DrGRPOLoss(max_completion_length=0)


def test_advantages_by_hand():
    # Group (1, 2, 6): mean 3, deviations -2, -1, 3, std sqrt(14 / 2) = sqrt 7; others' means 4, 3.5, 1.5.
    rewards = torch.tensor([1.0, 2.0, 6.0])
    deviations = torch.tensor([-2.0, -1.0, 3.0])
    normalised = GroupNormalisedAdvantages(eps=0.5)(rewards, 3)
    torch.testing.assert_close(normalised, deviations / (math.sqrt(7) + 0.5))
    torch.testing.assert_close(GroupCenteredAdvantages()(rewards, 3), deviations)
    torch.testing.assert_close(LeaveOneOutAdvantages()(rewards, 3), torch.tensor([-3.0, -1.5, 4.5]))


@pytest.mark.parametrize(
    "estimator", [GroupNormalisedAdvantages, GroupCenteredAdvantages, LeaveOneOutAdvantages]
)
def test_equal_rewards_give_exactly_zero(estimator):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.3])  # the mean of three 0.1 is not 0.1 in fp32
    advantages = estimator()(rewards, group_size=3)
    assert advantages[:3].tolist() == [0, 0, 0]
    assert advantages[5] > 0
    assert zero_std_groups(rewards, 3).tolist() == [True, False]


def test_advantages_of_close_rewards_sum_to_nothing():
    rewards = -11.77 + 0.002 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    sums = GroupNormalisedAdvantages()(rewards.flatten(), 8).view(64, 8).sum(dim=1)
    assert sums.abs().max() < 1e-5  # rounding the mean alone would leave 1e-3


def test_shuffled_advantages_stay_in_their_group_and_need_no_state():
    rewards = torch.randn(64, generator=torch.Generator().manual_seed(0))
    right = GroupNormalisedAdvantages()(rewards, 8)
    shuffled = ShuffledAdvantages(seed=1)(rewards, 8)
    assert torch.equal(shuffled.view(8, 8).sort(dim=1)[0], right.view(8, 8).sort(dim=1)[0])
    assert not torch.equal(shuffled, right)
    assert torch.equal(shuffled, ShuffledAdvantages(seed=1)(rewards, 8))
    assert not torch.equal(shuffled, ShuffledAdvantages(seed=2)(rewards, 8))
    other = ShuffledAdvantages(seed=1, estimator=GroupCenteredAdvantages())(rewards, 8)
    assert torch.equal(other.view(8, 8).argsort(dim=1), shuffled.view(8, 8).argsort(dim=1))


def test_nan_rewards_are_not_hidden():
    assert GroupNormalisedAdvantages()(torch.tensor([math.nan, 1.0]), 2).isnan().all()


@pytest.mark.parametrize(("num_rewards", "group_size"), [(4, 1), (4, 3)])
def test_impossible_groups_are_an_error(num_rewards, group_size):
    with pytest.raises(ValueError, match="group_size"):
        GroupCenteredAdvantages()(torch.zeros(num_rewards), group_size)
