"""Supervised fine-tuning: the teacher's warm-up (stage 1) and the student's distillation (stage 4)."""

from __future__ import annotations

from typing import Unpack

import numpy as np
import torch

from rlt_lightning.datamodules.stages import StudentSFTData, TeacherSFTData
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import context_length
from rlt_lightning.models.packed import compute_log_probs
from rlt_lightning.modules.base import PolicyModule, PolicyOptions, follow_options
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.packing import Layout, ScoredSequence, SequenceLengths
from rlt_lightning.numerics.rewards import FiniteChecks
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

    @follow_options
    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        optimizer: OptimizerConfig = OptimizerConfig(1e-5, 1e-4, (0.9, 0.95), "cosine", warmup_frac=0.05),
        *,
        layout: Layout = "packed",
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(pretrained=pretrained, optimizer=optimizer, layout=layout, **options)
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str) -> None:
        """Check that every example fits into the model's context, before anything is loaded."""
        super().setup(stage)
        if stage == "predict":
            raise InputError(
                "`rlt predict` scores or writes explanations, but SFTModule only trains. To let the trained "
                "model answer, use `rlt test --config recipe_7b/evaluate`; to let it explain, name it as "
                "model.teacher of an RLTModule."
            )
        data = get_stratos_data(self.trainer)
        context = context_length(self.pretrained, self.trust_remote_code)
        items = data.all_items
        lengths = items.sum_columns("token_ids") if items.is_examples else items.rows[:0]
        for place in np.flatnonzero(lengths > context)[:1]:
            raise InputError(
                f"Examples must fit into the model's context of {context} tokens, but row "
                f"{items.rows[place]} has {lengths[place]}. Lower data.max_length: longer rows are "
                "counted and kept out, or truncated with data.long_traces."
            )

    def training_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Take one optimizer step over all examples of the batch."""
        num_tokens = float(sum(sum(example.loss_mask) for example in batch.examples))
        [total_tokens] = self.sum_over_ranks(num_tokens)
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss, checks = torch.zeros((), device=self.device), FiniteChecks()
        sequences = [build_example_sequence(example) for example in batch.examples]
        with self.phase("train") as stats:
            lengths = [measure_length(sequence) for sequence in sequences]
            for micro_batch in self.pack(sequences, lengths, stats):
                packed = micro_batch.packed
                log_probs, _ = self.run(compute_log_probs, packed, 1.0, self.head)
                chosen = [batch.examples[i] for i in micro_batch.indices]
                counts = [sum(example.loss_mask) for example in chosen]
                checks.add(log_probs, counts, "completion log-prob", [example.row for example in chosen])
                share = -micro_batch.scale * log_probs.sum() / total_tokens
                self.manual_backward(share)
                loss += share.detach()
            checks.require()
            metrics = self.optimizer_step_now()
        metrics |= self.speed_metrics(sum(len(example.token_ids) for example in batch.examples))
        metrics["policy/loss"] = loss
        metrics |= {"data/completion_tokens": total_tokens, "data/epoch": float(self.current_epoch)}
        self.log_step(metrics, len(batch.examples))

    def validation_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Keep the mean loss per completion token of held-out rows."""
        num_tokens = sum(sum(example.loss_mask) for example in batch.examples)
        sequences = [build_example_sequence(example) for example in batch.examples]
        with self.phase("score"):
            lengths = [measure_length(sequence) for sequence in sequences]
            sums = [
                weight
                * self.run(compute_log_probs, self.pack_sequences(sequences, micro_batch), 1.0, self.head)[
                    0
                ].sum()
                for micro_batch, weight in self.plan_forward(lengths)
            ]
        self.held_out.add({"policy/val_loss": -sum(sums) / num_tokens}, num_tokens, {})


def build_example_sequence(example: SFTExample) -> ScoredSequence:
    """Return an example's tokens, of which the completion's are scored."""
    return ScoredSequence([], example.token_ids, example.loss_mask)


def measure_length(sequence: ScoredSequence) -> SequenceLengths:
    """Return the length of a sequence that shares no prefix."""
    return SequenceLengths(None, 0, len(sequence.rest))
