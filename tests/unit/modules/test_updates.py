"""Several updates of the policy on the completions of one iteration."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo import TEMPERATURE, Witness, fit, module, slow_log_probs
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from trainers import bare_trainer

from rlt_lightning.modules import RLTModule
from rlt_lightning.numerics.advantages import GroupNormalisedAdvantages
from rlt_lightning.numerics.losses import CISPOLoss, GRPOLoss, GSPOLoss, PolicyLoss
from rlt_lightning.strategies.fsdp2 import FSDP2
from rlt_lightning.types import InputError

LR = 0.05


class PlainSteps(RLTModule):
    """RLT by SGD: a step shows a gradient as it is."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=LR)


def update_slowly(
    policy: Any, rollouts: Any, rewards: Tensor, loss: PolicyLoss, updates: int, epochs: int
) -> list[dict[str, Tensor]]:
    """The weights after each update: one sequence after the other, nothing packed."""
    advantages, policy = GroupNormalisedAdvantages()(rewards, 4), copy.deepcopy(policy)

    def log_probs(rows: Any) -> tuple[Tensor, Tensor]:
        values = [
            slow_log_probs(policy, row.problem.teacher_prompt, row.completion.token_ids, TEMPERATURE)
            for row in rows
        ]
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(v)) for v in values], batch_first=True)
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True), mask.bool()

    with torch.no_grad():
        old = [log_probs([row])[0][0] for row in rollouts]
    found, size = [], len(rollouts) // updates
    for _ in range(epochs):
        for first in range(0, len(rollouts), size):
            rows = slice(first, first + size)
            values, mask = log_probs(rollouts[rows])
            padded = torch.nn.utils.rnn.pad_sequence(old[rows], batch_first=True)
            columns = {"log_probs": values, "old_log_probs": padded, "token_mask": mask}
            value, _ = loss(advantages=advantages[rows], **columns)
            gradients = torch.autograd.grad(value, list(policy.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
                    parameter -= LR * gradient
            found.append({name: p.detach().clone() for name, p in policy.named_parameters()})
    return found


@pytest.mark.parametrize(
    ("loss", "updates", "epochs"),
    [
        (GRPOLoss(clip_eps_low=0.01, clip_eps_high=0.01, kl_coef=0.0), 2, 2),
        (GSPOLoss(clip_eps_low=0.9, clip_eps_high=9.0, kl_coef=0.0), 1, 3),
        (CISPOLoss(clip_eps_high=0.01, kl_coef=0.0), 2, 1),
    ],
    ids=["grpo", "gspo", "cispo"],
)
def test_updates_equal_the_slow_obvious_ones(
    loss: PolicyLoss, updates: int, epochs: int, tiny_model: str, tmp_path: Path
) -> None:
    witness = Witness()
    settings: dict[str, Any] = {"group_size": 4, "policy_loss": loss, "micro_batch_tokens": 300}
    settings |= {"updates_per_rollout": updates, "num_epochs": epochs}
    rlt = PlainSteps(tiny_model, tiny_model, **settings)
    rlt.optimizer_config = module(tiny_model).optimizer_config  # no clipping
    fitted = fit(tmp_path, rlt, witness)
    assert fitted.global_step == 1
    step, rollouts = witness.one_step()
    policy = witness.load_policy(tiny_model)
    steps = update_slowly(policy, rollouts, step.rewards, loss, updates, epochs)
    before, after = witness.weights_before, dict(rlt.policy.named_parameters())
    for name, expected in steps[-1].items():
        # The weights of a norm are near 1 and move little: their last digit counts.
        last_digit = torch.finfo(torch.float32).eps * float(expected.abs().max())
        bound = 1e-4 * float((expected - before[name]).abs().max()) + last_digit
        torch.testing.assert_close(after[name].detach(), expected, atol=bound, rtol=0, msg=name)
    # The later updates are seen: the ratio is not 1 in all of them.
    moved = max(float((steps[-1][n] - steps[0][n]).abs().max()) for n in before)
    assert moved > 1e-5
    assert float(fitted.callback_metrics["policy/ratio_mean"]) != 1.0


def test_a_mini_batch_has_a_completion_for_every_process(tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model, updates_per_rollout=2)
    rlt.trainer = bare_trainer(tmp_path, devices=5, strategy=DDPStrategy())
    rlt.trainer.datamodule = SimpleNamespace(
        prompts_per_step=2, count_ids=lambda: None, brings_completions=False, samples="explanations"
    )
    rlt.require_data = lambda data: None
    with pytest.raises(InputError, match="updates_per_rollout 2 leaves 4 for 5"):
        rlt.setup("fit")


def test_ranks_that_meet_have_equally_many_held_out_rows(tiny_model: str, tmp_path: Path) -> None:
    rlt = module(tiny_model)
    rlt.trainer = bare_trainer(tmp_path, devices=2, strategy=FSDP2())
    held_out: dict[str, Any] = {"val_items": range(3), "val_batch_size": 2}
    rlt.trainer.datamodule = SimpleNamespace(count_ids=lambda: None, **held_out)
    rlt.require_data = lambda data: None
    with pytest.raises(InputError, match=r"weights in shards for 2 processes.* but are 3 and 2"):
        rlt.setup("fit")
