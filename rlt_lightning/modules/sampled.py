"""What training on sampled completions shares: the batch's rollouts, their losses, and one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.modules.checked import get_frozen_ready
from rlt_lightning.modules.frozen import FrozenModel
from rlt_lightning.modules.logged import mismatch_metrics
from rlt_lightning.modules.phases import PhaseStats, forward_flops
from rlt_lightning.modules.reading import Reading
from rlt_lightning.modules.scorer import sampled_log_probs
from rlt_lightning.modules.shares import StepTotals
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.numerics.packing import Extent, MicroBatch, PackedSequences, ScoredSequence
from rlt_lightning.pretrained import Dtype
from rlt_lightning.types import InputError, PromptBatch, Rollout, Rollouts

# loss_of(micro_batch, packed, totals) returns a micro-batch's loss, its metrics, and the engine's mismatch.
MicroBatchLoss = Callable[
    [MicroBatch, PackedSequences, StepTotals], tuple[Tensor, dict[str, Tensor], Mismatch]
]


class SampledModule(PolicyModule):
    """A model that trains on completions which RolloutCallback attaches to the batch.

    Args:
        group_size: Completions per problem.
        importance_sampling: Weights pi_trainer / pi_engine, see `RLTModule`.
        mismatch_alarm: Mean |trainer - engine| in nats per token above which a step warns; None: never.
        max_staleness: Optimizer steps by which the sampling weights may lag behind.
        offload_frozen: Keep frozen models in pinned host memory while they are not used.
        options: Those of `PolicyModule`.
    """

    def __init__(
        self,
        *,
        group_size: int,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None,
        mismatch_alarm: float | None,
        max_staleness: int,
        offload_frozen: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.group_size = group_size
        self.importance_sampling = importance_sampling
        # RolloutCallback chooses for "auto", once it knows the engine.
        self.importance_weights = None if importance_sampling == "auto" else importance_sampling
        self.mismatch_alarm = mismatch_alarm
        self.max_staleness = max_staleness
        self.offload_frozen = offload_frozen
        # Another copy of the initial model, which ReferenceSync moves towards the policy if it is used.
        self.reference: FrozenModel | None = None
        self.reference_moves = False
        self.reading: Reading | None = None  # of the step that begins; None: training_step reads all

    def frozen_readers(self) -> list[tuple[str, FrozenModel]]:
        """Return the frozen models that read completions, with their names."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Load the trained model, and refuse to move shards of frozen ones."""
        super().configure_model()
        if self.offload_frozen and self.sharding.sharded:
            raise InputError(
                "model.offload_frozen is for whole models, but this strategy shards them. Set it to false; "
                "--config overlays/cpu_offload keeps shards in main memory."
            )

    def load_frozen(self, name: str, dtype: Dtype, role: str) -> FrozenModel:
        """Load a model that is only read: on the default device, or in main memory if it is offloaded."""
        # Lightning makes the GPU the default device inside configure_model, and the GPU may lack the memory.
        with torch.device("cpu") if self.offload_frozen else nullcontext():
            return FrozenModel(self.load(name, dtype, role), self.offload_frozen)

    @torch.no_grad()
    def get_ready(self) -> None:
        """Place frozen models too, since Lightning moves only what it trains."""
        super().get_ready()
        get_frozen_ready(self, self.frozen_readers())

    def build_metadata(self) -> dict[str, Any]:
        """See `PolicyModule.build_metadata`."""
        metadata = super().build_metadata()
        metadata["training"]["group size"] = self.group_size
        if self.importance_weights is not None:
            metadata["training"]["importance sampling"] = str(self.importance_weights)
        return metadata

    def require_rollouts(self, batch: PromptBatch) -> Rollouts:
        """Return the batch's rollouts, or say which callback should have brought them."""
        rollouts = batch.rollouts
        if rollouts is None:
            raise InputError(
                "Every batch needs rollouts, but this one has none. Add "
                "rlt_lightning.callbacks.RolloutCallback to trainer.callbacks."
            )
        staleness = self.global_step - rollouts.policy_version
        if not 0 <= staleness <= self.max_staleness:
            raise RuntimeError(
                f"Rollouts may be at most model.max_staleness={self.max_staleness} optimizer steps old, but "
                f"RolloutCallback brought some of version {rollouts.policy_version} at step "
                f"{self.global_step}."
            )
        return rollouts

    def update(
        self,
        sequences: list[ScoredSequence],
        extents: list[Extent],
        loss_of: MicroBatchLoss,
        cost: PhaseStats,
    ) -> dict[str, Any]:
        """Accumulate a loss over packed micro-batches and take one optimizer step.

        Args:
            sequences: What the policy computes for each completion of this rank's share; scored tokens enter
                the loss.
            extents: Their lengths.
            loss_of: Returns the loss of one micro-batch, such that those of a step add up.
            cost: Counts the tokens that the policy computes.
        """
        totals = StepTotals(*self.sum_over_ranks(len(sequences), sum(sum(s.scored) for s in sequences)))
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        plan = self.plan(extents, meeting=True)
        metrics: dict[str, Any] = {}
        mismatch = Mismatch()
        for number, (micro_batch, weight) in enumerate(plan):
            # The strategy averages gradients over ranks, so a rank's share counts world_size times.
            share = weight * self.trainer.world_size
            packed = self.packed(sequences, micro_batch)
            flops = self.forwards_per_step * forward_flops(self.policy, packed)
            cost.count(packed, sequences, micro_batch, weight, flops)
            with self.sharding.micro_batch(last=number == len(plan) - 1):
                loss, loss_metrics, row_mismatch = loss_of(micro_batch, packed, totals)
                self.manual_backward(share * loss)
            for name, value in loss_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + share * value
            # A row of weight 0 is computed only because other ranks compute one.
            if weight:
                mismatch += row_mismatch
        metrics |= self.optimizer_step_now()
        mismatch = Mismatch(self.max_over_ranks(mismatch.largest), *self.sum_over_ranks(*mismatch.sums()))
        return metrics | mismatch_metrics(mismatch, self.mismatch_alarm, self.global_step)

    def engine_weights(
        self, rows: list[Rollout], log_probs: Tensor, token_mask: Tensor, stale: bool
    ) -> tuple[Tensor | None, Tensor | None, Mismatch]:
        """Compare the policy's log-probs of n completions with those that the engine reported.

        Args:
            rows: The completions.
            log_probs: The policy's, (n, T), nats.
            token_mask: True on completion tokens, (n, T).
            stale: Whether older weights sampled them.

        Returns:
            The engine's log-probs, (n, T), where the loss needs their ratio; importance weights, (n, T), if
            they are used; and how far engine and trainer differ.
        """
        engine_log_probs = sampled_log_probs(rows, log_probs, stale or self.importance_weights is not None)
        if engine_log_probs is None:
            return None, None, Mismatch()
        mismatch = Mismatch.between(log_probs, engine_log_probs, token_mask)
        weights = None
        if self.importance_weights is not None:
            weights = self.importance_weights(log_probs, engine_log_probs, token_mask)
        return engine_log_probs if stale and weights is None else None, weights, mismatch
