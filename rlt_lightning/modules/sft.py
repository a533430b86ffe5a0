"""Supervised fine-tuning: the teacher's warm-up (stage 1) and the student's distillation (stage 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlt_lightning.datamodules.stages import StudentSFTData, TeacherSFTData
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import context_length
from rlt_lightning.modules.losses import LossInputs, LossOutput, LossTerm
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.numerics.packing import Layout
from rlt_lightning.rollouts.columns import REWARD
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.types import InputError, SFTBatch, SFTExample


class SFTModule(PolicyModule):
    """Fit a language model to completions: packed, with the loss on completion tokens only.

    loss = - sum_t log p_t / number of completion tokens of the whole optimizer step

    Args:
        pretrained: Model to start from: local folder, hub id, or a name such as miniature.
        optimizer: AdamW, its schedule and gradient clipping; the defaults are the released recipe's.
        layout: How examples share a forward; "packed", since examples share no prefix.
        options: Those of `PolicyModule`, such as dtype and lora.
    """

    data_classes = (StudentSFTData, TeacherSFTData)

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        optimizer: OptimizerConfig = OptimizerConfig(1e-5, 1e-4, (0.9, 0.95), "cosine", warmup_frac=0.05),
        *,
        layout: Layout = "packed",
        **options: Any,
    ) -> None:
        super().__init__(pretrained=pretrained, optimizer=optimizer, layout=layout, **options)

    def setup(self, stage: str) -> None:
        """Check that every example fits into the model's context, before anything is loaded."""
        super().setup(stage)
        data = get_stratos_data(self.trainer)
        context = context_length(self.pretrained, self.trust_remote_code)
        items = data.all_items
        lengths = items.sum_columns("token_ids") if items.is_examples else items.rows[:0]
        for index in np.flatnonzero(lengths > context)[:1]:
            raise InputError(
                f"Examples must fit into the model's context of {context} tokens, but row "
                f"{items.rows[index]} has {lengths[index]}. Lower data.max_length: longer rows are "
                "counted and kept out, or truncated with data.long_traces."
            )

    def training_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Take one optimizer step over all examples of the batch."""
        step = batch.step = StepBatch.of_examples(batch.examples)
        with self.phase("train") as stats:
            # Forward, loss and backward of each micro-batch.
            self.forward_backward(self.build_runner().updates(step, step.shard, [CompletionLoss()], stats))
            self.ranks.raise_together(step)
            score_examples(step)
            metrics = step.metrics | self.optimizer_step_now()
        metrics |= self.speed_metrics(sum(len(example.token_ids) for example in batch.examples))
        # Complete passes over the data.
        self.log_step(metrics | {"data/epoch": float(self.current_epoch)}, len(batch.examples))

    def validation_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Keep the mean loss per completion token of held-out rows."""
        step = batch.step = StepBatch.of_examples(batch.examples)
        with self.phase("score"):
            self.build_runner().run(
                step, step.shard, lambda row: [CompletionLoss().scoring_pass(row)], recompute=True
            )
        score_examples(step)
        log_probs = torch.cat([*step.tokens["completion"].values()])
        self.held_out.add({"policy/val_loss": -log_probs.mean()}, len(log_probs), {})


class CompletionLoss(LossTerm):
    """Minus the log-probs of the tokens that count, divided by their number in the whole step."""

    def scoring_pass(self, rollout: Any) -> ScoringPass:
        """Return an example's tokens, of which the completion's are scored."""
        example: SFTExample = rollout
        scored = {"completion": (example.loss_mask.index(True), len(example.token_ids))}
        return ScoringPass(POLICY, [], example.token_ids, scored, temperature=1.0)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss."""
        values = inputs.computed.values
        loss = -values.sum() / inputs.micro.num_scored
        # Tokens in the loss of this step.
        num_tokens = torch.tensor(float(len(values)), device="cpu")
        return LossOutput(loss, {"policy/loss": loss.detach(), "data/completion_tokens": num_tokens})


def score_examples(step: StepBatch) -> None:
    """Reward each example with the mean of its log-probs, nats."""
    means = [step.tokens["completion"][row].mean() for row in step.shard]
    step.put_numbers(step.shard, {REWARD: torch.stack(means)})
    step.set_scores(step.table)
