"""The base of RLTModule and OPDModule: the sampler, frozen models, and weights of completions."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from rlt_lightning.datamodules.stages import ReadData, StudentOPDData, StudentRLData
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.models.kernels import fuse_blocks
from rlt_lightning.models.load import Dtype
from rlt_lightning.modules.base import PolicyModule, PolicyOptions, UpdateBatch, check_model
from rlt_lightning.modules.frozen import FrozenModel
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.scorer import pad_engine_log_probs
from rlt_lightning.modules.step_metrics import mismatch_metrics, require_agreement, rollout_metrics
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling, measure_mismatch
from rlt_lightning.numerics.packing import Layout
from rlt_lightning.numerics.rewards import FiniteChecks
from rlt_lightning.rollouts.sampler import Sampler
from rlt_lightning.rollouts.shards import Shards
from rlt_lightning.run.ranks import gather_from_ranks
from rlt_lightning.types import InputError, Rollout, Rollouts

T = TypeVar("T")


@dataclass
class UpdateSums:
    """Metrics of an update, added up over its micro-batches.

    Attributes:
        metrics: Sums of each metric.
        mismatches: How far engine and trainer differ in each micro-batch; see `measure_mismatch`.
        checks: What must be finite before the optimizer steps.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    mismatches: list[Tensor] = field(default_factory=list)
    checks: FiniteChecks = field(default_factory=FiniteChecks)

    def add(self, micro_batch: UpdateBatch, metrics: dict[str, Tensor], mismatch: Tensor | None) -> None:
        """Add a micro-batch's part of each metric."""
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + micro_batch.scale * value
        if micro_batch.scale and mismatch is not None:
            self.mismatches.append(mismatch)


class OnPolicyOptions(PolicyOptions, total=False):
    """The options that a module of this kind passes on to `OnPolicyModule` and `PolicyModule`."""

    optimizer: OptimizerConfig
    layout: Layout
    mismatch_alarm: float | None
    mismatch_limit: float | None
    max_staleness: int
    offload_frozen: bool


class OnPolicyModule(PolicyModule):
    """A model that trains on completions, which it asks the sampler of RolloutCallback for.

    Args:
        group_size: Completions per problem.
        importance_sampling: Weights pi_trainer / pi_engine, see `RLTModule`.
        mismatch_alarm: Mean |trainer - engine| in nats per token above which a step warns; None: never.
        mismatch_limit: The same above which the run stops before the step, since these log-probs enter the
            reward; None: never.
        max_staleness: Optimizer steps by which the sampling weights may lag behind.
        offload_frozen: Keep frozen models in pinned host memory while they are not used.
        options: Those of `PolicyModule`.
    """

    data_classes: ClassVar[tuple[type[StratosDataModule], ...]] = (ReadData, StudentRLData, StudentOPDData)

    def __init__(
        self,
        *,
        group_size: int,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None,
        mismatch_alarm: float | None = 0.1,
        mismatch_limit: float | None = 1.0,
        max_staleness: int = 0,
        offload_frozen: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.group_size = group_size
        self.importance_sampling = importance_sampling
        # RolloutCallback chooses for "auto", once it knows the engine.
        self.importance_weights = None if importance_sampling == "auto" else importance_sampling
        self.mismatch_alarm = mismatch_alarm
        self.mismatch_limit = mismatch_limit
        self.max_staleness = max_staleness
        self.offload_frozen = offload_frozen
        # Another copy of the initial model, which ReferenceSync moves towards the policy if it is used.
        self.reference: FrozenModel | None = None
        self.reference_moves = False
        # RolloutCallback sets it.
        self.sampler: Sampler | None = None

    def list_scoring_models(self) -> list[tuple[str, FrozenModel]]:
        """Return the frozen models that read completions, with their names."""
        raise NotImplementedError

    def load_frozen_models(self) -> None:
        """Refuse to move shards of frozen models."""
        if self.offload_frozen and self.sharding.sharded:
            raise InputError(
                "model.offload_frozen is for whole models, but this strategy shards them. Set it to false; "
                "--config hardware/cpu_offload keeps shards in main memory."
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
        get_frozen_ready(self, self.list_scoring_models())

    def build_metadata(self) -> dict[str, Any]:
        """See `PolicyModule.build_metadata`."""
        metadata = super().build_metadata()
        metadata["training"]["group size"] = self.group_size
        if self.importance_weights is not None:
            metadata["training"]["importance sampling"] = str(self.importance_weights)
        return metadata

    # Completions

    def require_sampler(self) -> Sampler:
        """Return what brings completions, or say which callback should have handed it over."""
        if self.sampler is None:
            raise InputError(
                "Every batch needs rollouts, but nothing brings them. Add "
                "rlt_lightning.callbacks.RolloutCallback to trainer.callbacks."
            )
        return self.sampler

    def measure_rollouts(self, rollouts: Rollouts, shards: Shards) -> dict[str, Any]:
        """Return what each step on completions logs after its update, of this rank's completions."""
        metrics: dict[str, Any] = rollout_metrics(rollouts)
        metrics["rollout/length_max"] = float(shards.longest)
        metrics["rollout/staleness"] = float(self.global_step - 1 - rollouts.policy_version)
        metrics |= self.speed_metrics(sum(len(r.completion.token_ids) for r in rollouts.rollouts))
        return metrics | {"perf/rank_imbalance": shards.imbalance}

    def require_fresh(self, policy_version: int) -> None:
        """Check that completions are not staler than allowed.

        Args:
            policy_version: Optimizer steps that the weights had taken which sampled them.
        """
        staleness = self.global_step - policy_version
        if not 0 <= staleness <= self.max_staleness:
            raise RuntimeError(
                f"Rollouts may be at most model.max_staleness={self.max_staleness} optimizer steps old, but "
                f"the sampler of RolloutCallback returned some of version {policy_version} at step "
                f"{self.global_step}."
            )

    def build_shards(self) -> Shards:
        """Return what divides a step's completions over ranks; nothing is divided yet."""
        shares_prefix = self.layout in ("auto", "shared_prefix")
        trainer = self.trainer
        return Shards(trainer.global_rank, trainer.world_size, self.group_size, shares_prefix)

    def gather(self, own: dict[int, T], what: str) -> dict[int, T]:
        """Return what all ranks have, by the number of the completion; `what` is waited for.

        It is pickled, so tensors must be on the CPU.
        """
        parts = gather_from_ranks(self.trainer, own, what)
        return {number: value for part in parts for number, value in part.items()}

    # The policy update

    def finish_update(self, sums: UpdateSums) -> dict[str, Any]:
        """Step the optimizer; return the metrics of the update over all ranks.

        Raises:
            EngineError: If engine and trainer differ too much; the optimizer has not stepped then.
        """
        sums.checks.require()
        own = Mismatch.read(sums.mismatches)
        mismatch = Mismatch(*self.max_over_ranks(own.largest), *self.sum_over_ranks(*own.sums()))
        require_agreement(mismatch, self.mismatch_limit, self.global_step + 1)
        metrics = sums.metrics | self.optimizer_step_now()
        masks = self.importance_weights is not None and self.importance_weights.mode == "mask"
        return metrics | mismatch_metrics(mismatch, self.mismatch_alarm, self.global_step, masks)

    def compare_with_engine(
        self, rows: list[Rollout], log_probs: Tensor, token_mask: Tensor, stale: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compare the policy's log-probs of n completions with those that the engine reported.

        Args:
            rows: The completions.
            log_probs: The policy's, (n, T), nats.
            token_mask: True on completion tokens, (n, T).
            stale: Whether older weights sampled them.

        Returns:
            The engine's log-probs, (n, T), where the loss needs their ratio; importance weights, (n, T), if
            they are used; and how far engine and trainer differ (`measure_mismatch`), if that is known.
        """
        engine_log_probs = pad_engine_log_probs(rows, log_probs, stale or self.importance_weights is not None)
        if engine_log_probs is None:
            return None, None, None
        weights = None
        if self.importance_weights is not None:
            weights = self.importance_weights(log_probs, engine_log_probs, token_mask)
        mismatch = measure_mismatch(log_probs, engine_log_probs, token_mask, weights)
        return engine_log_probs if stale and weights is None else None, weights, mismatch


def get_frozen_ready(module: OnPolicyModule, scoring: list[tuple[str, FrozenModel]]) -> None:
    """Place the frozen models that score, which choose a layout, and the reference.

    The reference is fused like the policy, so that their log-probs are equal where their weights are.
    """
    for frozen in (*(model for _, model in scoring), module.reference):
        if frozen is not None:
            frozen.place(module.device, module.sharding)
    if module.reference is not None:
        precision, device = module.trainer.precision_plugin, module.trainer.strategy.root_device
        with module.reference.loaded_on(module.device) as run, precision.forward_context():
            fuse_blocks(run, module.pretrained, module.kernels, device)
    exact_kl = getattr(getattr(module, "reward", None), "kl_estimator", "") == "exact"
    for name, model in scoring:
        with model.loaded_on(module.device) as run:
            check_model(module, run, name, exact_kl=exact_kl)
