"""Supervised fine-tuning: the teacher's warm-up (stage 1) and the student's distillation (stage 4)."""

from __future__ import annotations

import torch

from rlt_lightning.modules.base import Dtype, OptimizerConfig, PolicyModule, pack
from rlt_lightning.modules.logged import speed_metrics
from rlt_lightning.numerics.packing import PackedSequences, pack_by_tokens
from rlt_lightning.numerics.rewards import require_finite
from rlt_lightning.pretrained import EMBEDDED_MODEL
from rlt_lightning.types import SFTBatch


class SFTModule(PolicyModule):
    """Fit a language model to completions: packed, with the loss on completion tokens only.

    loss = - sum_t log p_t / number of completion tokens of the whole optimizer step

    Args:
        pretrained: Model to start from: embedded default, local folder or hub id.
        optimizer: AdamW, its schedule and gradient clipping; the defaults are the released recipe's.
        micro_batch_tokens: Tokens per forward; a longer example goes alone.
        head_chunk_size: Completion tokens per pass through the language-model head.
        dtype: Of the weights.
        gradient_checkpointing: Recompute activations in the backward pass.
        attn_implementation: transformers' name, None for its default.
        trust_remote_code: Run code that comes with the model.
        seed: Of everything random inside a step.
    """

    def __init__(
        self,
        pretrained: str = EMBEDDED_MODEL,
        optimizer: OptimizerConfig = OptimizerConfig(1e-5, 1e-4, (0.9, 0.95), "cosine", warmup_frac=0.05),
        micro_batch_tokens: int = 16384,
        head_chunk_size: int = 1024,
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            pretrained,
            optimizer,
            micro_batch_tokens,
            head_chunk_size,
            dtype,
            gradient_checkpointing,
            attn_implementation,
            trust_remote_code,
            seed,
        )

    def training_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """One optimizer step over all examples of the batch."""
        num_tokens = float(sum(sum(example.loss_mask) for example in batch.examples))
        [total_tokens] = self.sum_over_ranks(num_tokens)
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = torch.zeros((), device=self.device)
        with self.phase("train"):
            for indices, weight in self.same_on_every_rank(self.micro_batches(batch)):
                packed = self.pack_examples(batch, indices)
                log_probs, _ = self.trainer.strategy.model(packed, 1.0)  # type: ignore[misc]
                rows = [batch.examples[i].row for i in indices]
                require_finite(log_probs, "completion log-prob", [rows[i] for i in packed.sequence_of_scored])
                # The strategy averages gradients over ranks, so a rank's share counts world_size times.
                share = -weight * self.trainer.world_size * log_probs.sum() / total_tokens
                self.manual_backward(share)
                loss += share.detach()
            metrics = self.optimizer_step_now()
        metrics |= speed_metrics(self.phase.lap(), sum(len(example.token_ids) for example in batch.examples))
        metrics["policy/loss"] = loss
        metrics |= {"data/completion_tokens": num_tokens, "data/epoch": float(self.current_epoch)}
        self.log_step(metrics, len(batch.examples))

    def validation_step(self, batch: SFTBatch, batch_idx: int) -> None:
        """Mean loss per completion token of held-out rows."""
        num_tokens = sum(sum(example.loss_mask) for example in batch.examples)
        packed = [self.pack_examples(batch, indices) for indices in self.micro_batches(batch)]
        log_probs = torch.cat([self(micro_batch, 1.0)[0] for micro_batch in packed])
        self.log_validation({"policy/val_loss": -log_probs.sum() / num_tokens}, batch_size=num_tokens)

    def micro_batches(self, batch: SFTBatch) -> list[list[int]]:
        """Divide the examples by tokens, longest first."""
        return pack_by_tokens([len(example.token_ids) for example in batch.examples], self.micro_batch_tokens)

    def pack_examples(self, batch: SFTBatch, indices: list[int]) -> PackedSequences:
        """Lay some of the examples out in one row; the completion tokens are the scored ones."""
        chosen = [batch.examples[i] for i in indices]
        return pack([(example.token_ids, example.loss_mask) for example in chosen], self.device)
