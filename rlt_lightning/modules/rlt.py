"""Reinforcement-Learned Teachers: GRPO of a teacher against a frozen student. Start at `training_step`.

The life of a step, on every rank; the steps marked * wait for the other ranks:

    StratosDataModule        batch.problems: this rank's part of the step (`collate` in stratos.py, loader.py)
    RolloutCallback          batch.rollouts: group_size completions per problem, with their policy_version;
                             with dynamic sampling batch.scores too, and other problems where they are equal
    Reading*                 in waves while others are sampled, or all at once in training_step (`reading.py`)
      ├ Share*               divide all ranks' rollouts by their tokens (`shares.py`)
      └ Scorer               student and teacher read this rank's share; the reference too (`scorer.py`)
    training_step
      ├ require_rollouts     refuse missing or stale rollouts
      ├ rewards*             what the student said, of whole groups, becomes batch.scores
      ├ advantages*          compare within each group → (N,), then those of the share
      ├ update_policy        `update` in sampled.py:
      │   ├ sum_over_ranks*  sequences and tokens of the whole step, which the loss divides by
      │   ├ plan*            divide the share into micro-batches, equally many on all ranks
      │   ├ for each of them micro_batch_loss → manual_backward; the last backward sums gradients*
      │   └ optimizer step*  `optimizer_step_now` in base.py: clip by the global norm, AdamW, schedule
      └ log_step*            means over ranks → metrics.csv, W&B; callbacks read batch.scores

With sharded weights, each forward and backward waits for the other ranks too. To follow a batch, open
`datamodules/stratos.py`, `callbacks/rollout.py`, this file, `scorer.py` (reward) and `base.py` (optimizer
step). `models/packed.py` runs a micro-batch through a model; `numerics/` computes, `logged.py` counts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA, without_adapter
from rlt_lightning.models.packed import HeadOptions, log_probs_of
from rlt_lightning.modules.frozen import FrozenModel, ReadModel
from rlt_lightning.modules.logged import held_out_metrics, reward_metrics, rollout_metrics
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.reading import read_all
from rlt_lightning.modules.sampled import SampledModule
from rlt_lightning.modules.scorer import (
    Named,
    Scorer,
    Students,
    require_scorable,
    sampled_extents,
    sampled_sequence,
)
from rlt_lightning.modules.shares import StepTotals, require_group
from rlt_lightning.modules.text_reward import TextReward
from rlt_lightning.numerics.advantages import AdvantageEstimator, GroupNormalisedAdvantages
from rlt_lightning.numerics.balance import imbalance
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.numerics.losses import GRPOLoss, PolicyLoss
from rlt_lightning.numerics.packing import Layout, MicroBatch, PackedSequences, to_padded
from rlt_lightning.numerics.rewards import Reward, RLTReward, require_finite
from rlt_lightning.numerics.students import Reduction
from rlt_lightning.pretrained import Dtype
from rlt_lightning.types import InputError, PromptBatch, Rollouts, Scores


class RLTModule(SampledModule):
    """Train a teacher to write explanations that help a frozen student (RLT, arXiv:2506.08388, section 3).

    Args:
        teacher: Model to train: local folder, hub id, miniature or smollm2-135m.
        student: Frozen model that scores the explanations, with any tokenizer; None if the reward needs none.
        group_size: Completions per problem, G; 64 in the paper.
        reward: The RLT reward and its options, or a subclass with further terms; or a TextReward:
            CorrectnessReward makes this traditional RL.
        advantages: How rewards of a group become advantages; None: GroupNormalisedAdvantages().
        policy_loss: GRPO or a variant of it; None: GRPOLoss().
        optimizer: AdamW, its schedule and gradient clipping.
        importance_sampling: Weights pi_trainer / pi_engine, capped. "auto": of tokens, capped at 2, if the
            engine is outside the process, unless rollouts are asynchronous. None: no weights; stale rollouts
            are then clipped by their ratio instead.
        mismatch_alarm: Mean |trainer - engine| in nats per token above which a step warns; None: never.
        max_staleness: Optimizer steps by which the sampling weights may lag behind.
        micro_batch_tokens: Tokens per forward; a longer sequence gets a forward by itself.
        layout: How sequences share a forward: "shared_prefix" computes a group's prompt once, "packed" for
            each completion, "auto" chooses by a cost model, "single" runs one sequence at a time.
        head: How log-probs are computed from hidden states.
        teacher_log_probs: The teacher's log-probs in r_KL. "rollout": the engine's, if it sent them at the
            reward's temperature, else of another forward. "recompute": always of another forward.
        offload_frozen: Keep student and reference in pinned host memory while they are not used.
        dtype: Type of the trained weights and the reference's.
        student_dtype: Type of the student's weights.
        gradient_checkpointing: Recompute activations in the backward pass.
        attn_implementation: transformers' name; None: ours, which shares prefixes.
        trust_remote_code: Run code that comes with a model.
        seed: Seed of everything random inside a step.
        lora: Train low-rank adapters, in fp32, and freeze the weights; None: train all.
        kernels: Which fused kernels compute the same numbers faster.
        students: Several in its place, with weights or without.
        student_reduction: How their rewards become one: the weighted "mean", or the smallest, "min".

    Raises:
        InputError: If group_size is below 2, since a group of one has no baseline.
    """

    def __init__(
        self,
        teacher: str = DEFAULT_MODEL,
        student: str | None = DEFAULT_MODEL,
        group_size: int = 8,
        reward: Reward = RLTReward(),
        advantages: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None = "auto",
        mismatch_alarm: float | None = 0.1,
        max_staleness: int = 0,
        micro_batch_tokens: int = 16384,
        layout: Layout = "auto",
        head: HeadOptions = HeadOptions(),
        teacher_log_probs: Literal["rollout", "recompute"] = "rollout",
        offload_frozen: bool = False,
        dtype: Dtype = "float32",
        student_dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
        lora: LoRA | None = None,
        kernels: Kernels = Kernels(),
        students: Named | None = None,
        student_reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            pretrained=teacher,
            group_size=group_size,
            optimizer=optimizer,
            importance_sampling=importance_sampling,
            mismatch_alarm=mismatch_alarm,
            max_staleness=max_staleness,
            micro_batch_tokens=micro_batch_tokens,
            layout=layout,
            head=head,
            offload_frozen=offload_frozen,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            seed=seed,
            lora=lora,
            kernels=kernels,
        )
        require_group(group_size)
        self.students = Students.of(student, students, student_reduction).ready_for(reward)
        self.reward = reward
        self.advantages = advantages or GroupNormalisedAdvantages()
        self.policy_loss = policy_loss or GRPOLoss()
        self.student_dtype: Dtype = student_dtype
        self.teacher_log_probs = teacher_log_probs
        self.student_models: list[FrozenModel] = []

    def setup(self, stage: str) -> None:
        """Check, before any model is loaded, that the reward can judge completions for this data."""
        super().setup(stage)
        data = stratos_of(self.trainer)
        if data.task not in self.reward.tasks:
            raise InputError(
                f"data.task must be {' or '.join(self.reward.tasks)} for {type(self.reward).__name__}, but "
                f"is {data.task}. Set it, or another model.reward."
            )
        if isinstance(self.reward, TextReward):
            self.reward.check(data.problems)
        require_scorable(self.reward, data.readers.formats, self.students.names)

    def configure_model(self) -> None:
        """Load teacher, student and, where the loss has a KL penalty, the reference."""
        if self.entry is not None:
            return
        super().configure_model()
        for name in self.students.names:
            self.student_models.append(self.load_frozen(name, self.student_dtype, "the frozen student"))
        # The policy without its adapter is the initial teacher.
        is_base = self.lora is not None and not self.reference_moves
        if self.trainer.training and self.policy_loss.kl_coef and not is_base:
            role = "the reference of the KL penalty"
            self.reference = self.load_frozen(self.pretrained, self.dtype_name, role)

    def types(self) -> dict[str, str]:
        """Add the student's type."""
        return super().types() | {"model.student_dtype": self.student_dtype}

    def frozen_readers(self) -> list[tuple[str, FrozenModel]]:
        """See `SampledModule.frozen_readers`."""
        return list(zip(self.students.names, self.student_models, strict=True))

    def build_metadata(self) -> dict[str, Any]:
        """See `PolicyModule.build_metadata`."""
        metadata = super().build_metadata()
        metadata["training"]["reward"] = type(self.reward).__name__
        if students := self.students.in_words():
            metadata["training"]["frozen student"] = students
        return metadata

    def recipe(self) -> dict[str, Any]:
        """Return the models and the reward of a prediction, for a data card."""
        options = {name: v for name, v in vars(self.reward).items() if isinstance(v, (int, float, str))}
        reward = ", ".join([type(self.reward).__name__, *(f"{name} {v}" for name, v in options.items())])
        students = self.students.in_words()
        models = {"teacher": self.pretrained, "student": students} if students else {"model": self.pretrained}
        return models | {"reward": reward}

    def teardown(self, stage: str) -> None:
        """Close the reward; after an exception RolloutCallback does it."""
        self.reward.close()

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run one RLT iteration: score with the student, compare within groups, step the teacher."""
        rollouts = self.require_rollouts(batch)
        unscored = batch.scores is None  # dynamic sampling has scored them to decide which to keep
        reading, self.reading = (self.reading or read_all(self, rollouts, unscored)).in_order(), None
        share = reading.share
        if batch.scores is None:
            with self.phase("score"):
                own = share.scores_of_own(reading.scores)
                batch.scores = self.scorer.rewards(rollouts.rollouts, own)
        rewards = batch.scores.terms.reward  # (N,)
        with self.phase("train") as cost:
            advantages = share.of_share(self.advantages(rewards, self.group_size))  # (share,)
            read = replace(rollouts, rollouts=share.rollouts)
            metrics = self.update_policy(read, advantages, reading.references, cost)
        metrics |= reward_metrics(batch.scores, self.group_size) | rollout_metrics(rollouts)
        metrics["rollout/staleness"] = float(self.global_step - 1 - rollouts.policy_version)
        metrics |= self.speed_metrics(sum(len(r.completion.token_ids) for r in rollouts.rollouts))
        metrics["perf/rank_imbalance"] = imbalance(share.loads)
        self.log_step(metrics | batch.counts, len(rollouts.rollouts))

    def update_policy(
        self, rollouts: Rollouts, advantages: Tensor, references: list[Tensor], cost: PhaseStats
    ) -> dict[str, Any]:
        """Take one optimizer step on the policy loss.

        Args:
            rollouts: This rank's share, N completions.
            advantages: Their advantages, (N,).
            references: The reference's log-probs of their tokens, N of (T,); empty without a KL penalty.
            cost: Counts the tokens that the policy computes.
        """
        own = rollouts.rollouts
        loss_of = partial(self.micro_batch_loss, rollouts, advantages, references)
        return self.update([sampled_sequence(row) for row in own], sampled_extents(own), loss_of, cost)

    def micro_batch_loss(
        self,
        rollouts: Rollouts,
        advantages: Tensor,
        references: list[Tensor],
        micro_batch: MicroBatch,
        packed: PackedSequences,
        totals: StepTotals,
    ) -> tuple[Tensor, dict[str, Tensor], Mismatch]:
        """Return the loss of one micro-batch of n rollouts, its metrics, and the engine's mismatch.

        Args:
            rollouts: All N rollouts of this rank's step.
            advantages: Their advantages, (N,).
            references: The reference's log-probs of their tokens, N of (T,); empty without a KL penalty.
            micro_batch: Which n of them are meant.
            packed: Their tokens in one row.
            totals: Sequences and tokens of the whole step.
        """
        rows = [rollouts.rollouts[i] for i in micro_batch.indices]
        lengths = [len(row.completion.token_ids) for row in rows]
        flat, entropy = self.run(log_probs_of, packed, rollouts.temperature, self.head, True)  # (M,)
        log_probs, token_mask = to_padded(flat, lengths)  # (n, T), the only term with gradient
        require_finite(log_probs, "policy log-prob", [row.problem.row for row in rows])
        stale = rollouts.policy_version < self.global_step
        old_log_probs, weights, mismatch = self.engine_weights(rows, log_probs, token_mask, stale)
        reference = torch.cat([references[i] for i in micro_batch.indices]) if references else None
        loss, metrics = self.policy_loss(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            ref_log_probs=None if reference is None else to_padded(reference, lengths)[0],
            importance_weights=weights,
            advantages=advantages[torch.tensor(micro_batch.indices, device=self.device)],
            token_mask=token_mask,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
        )
        entropy_share = entropy.detach().sum() / totals.num_tokens
        return loss, metrics | {"policy/loss": loss.detach(), "policy/entropy": entropy_share}, mismatch

    @property
    def scorer(self) -> Scorer:
        """Return what scores completions with this module's models."""
        # The policy without its adapter is the initial teacher.
        reference = self.reference or ReadModel(partial(self.run, without_adapter))
        return Scorer(
            self.reward,
            self.students,
            self.student_models,
            self.run,
            self.plan_forward,
            self.device,
            self.head,
            stratos_of(self.trainer).readers,
            self.recomputes,
            reference if self.policy_loss.kl_coef else None,
        )

    def score(self, rollouts: Rollouts) -> Scores:
        """Compute the reward of every rollout, the RLT reward with the student."""
        return self.scorer(rollouts.rollouts, rollouts.temperature)

    def recomputes(self, unknown: bool) -> bool:
        """Return whether to recompute the teacher's log-probs, of which this rank's may be unknown."""
        # Ranks with sharded weights run each forward together, so they must decide alike.
        together = self.sharding.sharded
        return self.teacher_log_probs == "recompute" or bool(
            self.max_over_ranks(unknown) if together else unknown
        )

    # Validation and prediction

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Keep the held-out reward, its terms, completion length and the fraction of closed explanations."""
        rollouts = self.require_rollouts(batch)
        with self.phase("score"):
            scores = self.score(rollouts)
            mismatch = self.scorer.engine_mismatch(rollouts.rollouts, rollouts.temperature)
        largest = {"rollout/val_mismatch_max": mismatch.largest} if mismatch.num_tokens else {}
        self.validation.add(held_out_metrics(scores, rollouts), len(rollouts.rollouts), largest)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Score the rollouts, which may come with the data; a callback writes the batch's scores."""
        with self.phase("score"):
            batch.scores = self.score(self.require_rollouts(batch))
