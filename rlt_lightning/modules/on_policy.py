"""A module that trains on completions: the sampler, frozen models and importance weights."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, TypeGuard

import torch

from rlt_lightning.datamodules.stages import ReadData, StudentOPDData, StudentRLData
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.models.kernels import fuse_blocks
from rlt_lightning.models.load import Dtype
from rlt_lightning.models.lora import without_adapter
from rlt_lightning.modules.checks import require_whole_models
from rlt_lightning.modules.frozen import Model
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.modules.step_metrics import mismatch_metrics, require_agreement, rollout_metrics
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.rollouts.sampler import Sampler
from rlt_lightning.rollouts.step import POLICY, REFERENCE, Shards, StepBatch
from rlt_lightning.run.ranks import ask_callbacks
from rlt_lightning.types import InputError, PromptBatch


class OnPolicyModule(PolicyModule):
    """A model that trains on completions, which it asks the sampler of RolloutCallback for.

    Args:
        group_size: Completions per problem.
        importance_sampling: Weights pi_trainer / pi_engine, see `RLTModule`.
        mismatch_limit: Mean (trainer - engine)^2, as a part of the variance of the trainer's log-probs, above
            which the run stops before the step, since these log-probs enter the reward; None: never. At 1 the
            engine's log-probs tell no more than a constant.
        max_staleness: Optimizer steps by which the sampling weights may lag behind.
        offload_frozen: Keep frozen models in pinned host memory while they are not used.
        options: Those of `PolicyModule`.
    """

    is_on_policy = True
    answer_weight = 0.0  # of the answer term, in the modules that have one
    data_classes: ClassVar[tuple[type[StratosDataModule], ...]] = (ReadData, StudentRLData, StudentOPDData)

    def __init__(
        self,
        *,
        group_size: int,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None,
        mismatch_limit: float | None = 0.5,
        max_staleness: int = 0,
        offload_frozen: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.group_size = group_size
        self.importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None = importance_sampling
        self.mismatch_limit = mismatch_limit
        self.max_staleness = max_staleness
        self.offload_frozen = offload_frozen
        # Another copy of the initial model, which ReferenceSync moves towards the policy if it is used.
        self.reference: Model | None = None
        # The frozen models that read completions, by name.
        self.models: dict[str, Model] = {}
        self.sampler: Sampler | None = None

    @property
    def reference_moves(self) -> bool:
        """Return whether a callback moves the reference, which is then a copy even beside a LoRA."""
        return bool(ask_callbacks(self.trainer, "moves_reference"))

    @property
    def importance_weights(self) -> TruncatedImportanceSampling | None:
        """Return the weights pi_trainer / pi_engine; for "auto" those that suit the engine."""
        if self.importance_sampling == "auto":
            return self.require_sampler().importance_weights
        return self.importance_sampling

    def load_frozen_models(self) -> None:
        """Refuse to move shards of frozen models."""
        require_whole_models(self.offload_frozen, self.sharding.sharded)

    def load_frozen(self, name: str, dtype: Dtype, role: str) -> Model:
        """Load a model that is only read: on the default device, or in main memory if it is offloaded."""
        # Lightning makes the GPU the default device inside configure_model, and the GPU may lack the memory.
        with torch.device("cpu") if self.offload_frozen else nullcontext():
            return Model.frozen(self.load(name, dtype, role), self.offload_frozen)

    @torch.no_grad()
    def get_ready(self) -> None:
        """Place frozen models too: Lightning moves only the trained one."""
        super().get_ready()
        get_frozen_ready(self, self.models)

    def list_models(self) -> dict[str, Model]:
        """Add the frozen models and the reference: the policy at the start, which is that without adapter."""
        reference = self.reference or Model(partial(self.run, without_adapter), is_policy=True)
        return super().list_models() | self.models | {REFERENCE: reference}

    def needs_reference(self, trains: bool) -> bool:
        """Return whether the initial model is needed, in a training or otherwise."""
        return False

    def list_scorers(self) -> tuple[str, ...]:
        """Return the names of the models that read completions without gradient, in a planned step."""
        return self.frozen_names or (POLICY,)

    def list_readers(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return the models that read completions: role, name and the columns of items around one."""
        return []

    # Completions

    def attach(self, sampler: Sampler) -> None:
        """Ask this sampler for completions from now on; RolloutCallback calls it before a model is loaded."""
        self.sampler = sampler

    def require_sampler(self) -> Sampler:
        """Return the sampler, or raise an error that names the callback that should have provided it."""
        if self.sampler is None:
            raise InputError(
                "Every batch needs rollouts, but nothing brings them. Add "
                "rlt_lightning.callbacks.RolloutCallback to trainer.callbacks."
            )
        return self.sampler

    def log_iteration(self, batch: PromptBatch, step: StepBatch, metrics: dict[str, Any]) -> None:
        """Log a step's metrics and those of this rank's completions, and give callbacks the step."""
        rollouts, shards = step.list_rollouts(step.logged), step.shards
        assert shards is not None
        batch.rollouts, batch.step = rollouts, step
        batch.problems = [row.problem for row in rollouts.rollouts[:: self.group_size]]
        metrics |= rollout_metrics(rollouts)
        metrics["rollout/length_min"] = float(min(shards.lengths))
        metrics["rollout/length_max"] = float(max(shards.lengths))
        # Optimizer steps between the weights that sampled and those that were trained.
        metrics["rollout/staleness"] = float(self.global_step - 1 - rollouts.policy_version)
        metrics |= self.speed_metrics(sum(len(r.completion.token_ids) for r in rollouts.rollouts))
        # Tokens of the process that has most of them, over the mean.
        metrics["perf/rank_imbalance"] = shards.imbalance
        self.log_step(metrics, len(rollouts.rollouts))

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
        """Return an empty load balancer."""
        shares_prefix = self.chosen_layout in ("auto", "shared_prefix")
        trainer = self.trainer
        return Shards(trainer.global_rank, trainer.world_size, self.group_size, shares_prefix)

    # The policy update

    def finish_update(self, step: StepBatch, is_last_update: bool = True) -> dict[str, Any]:
        """Step the optimizer; return the metrics of the update over all ranks.

        Args:
            step: The step.
            is_last_update: Whether it is the last update of the iteration; see `optimizer_step_now`.

        Raises:
            NonFiniteError: If a log-prob or gradient is NaN or infinite.
            EngineError: If engine and trainer differ too much; the optimizer has not stepped then.
        """
        self.ranks.raise_together(step)
        (metrics, step.metrics), (mismatches, step.mismatches) = (step.metrics, {}), (step.mismatches, {})
        by_worker = {}
        for worker in step.list_workers():
            on_rank = Mismatch.read(mismatches.get(worker, []))
            mismatch = Mismatch(*self.ranks.max(on_rank.largest), *self.ranks.sum(*on_rank.sums()))
            require_agreement(mismatch, self.mismatch_limit, self.global_step + 1, worker)
            by_worker[worker] = mismatch
        metrics |= self.optimizer_step_now(is_last_update)
        masks = self.importance_weights is not None and self.importance_weights.mode == "mask"
        return metrics | mismatch_metrics(by_worker, self.global_step, masks)


def is_on_policy(module: object) -> TypeGuard[OnPolicyModule]:
    """Return whether a module asks a sampler for completions."""
    return getattr(module, "is_on_policy", False)


def get_frozen_ready(module: OnPolicyModule, scoring: dict[str, Model]) -> None:
    """Place the frozen models, fuse the reference, and choose kernels and layouts of those that score.

    The reference is fused like the policy, so that their log-probs are equal where their weights are.
    """
    for frozen in (*scoring.values(), module.reference):
        if frozen is not None:
            frozen.place(module.device, module.sharding)
    if module.reference is not None:
        precision, device = module.trainer.precision_plugin, module.trainer.strategy.root_device
        with module.reference.loaded_on(module.device) as run, precision.forward_context():
            fuse_blocks(run, module.pretrained, module.kernels, device)
    kl_options = None if module.reward is None else module.reward.find_kl(temperature=1.0)
    exact_kl = kl_options is not None and kl_options.kl_estimator == "exact"
    for name, model in scoring.items():
        with model.loaded_on(module.device) as run:
            module.check_model(run, name, Divergence("forward") if exact_kl else module.head_loss)
