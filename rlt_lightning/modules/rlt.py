"""Reinforcement-Learned Teachers: GRPO of a teacher against a frozen student. Start at `training_step`.

The life of a step, on every rank; the steps marked * wait for the other ranks:

    TeacherRLData             batch.problems: this rank's part of the step (`collate` in stratos.py)
    training_step
      ├ sampler.request*      the problems of all ranks (rollouts/sampler.py, from RolloutCallback)
      ├ sample_and_score      for each chunk of completions, alike on every rank:
      │   ├ sampler.stream*   what has come from the engine
      │   ├ divide            over ranks, by tokens: a rank's shard is a list of numbers (rollouts/shards.py)
      │   ├ scorer            students, teacher and reference read the shard (scorer.py)
      │   └ reward_groups*    once all are there: each rank rewards its own problems → rewards (N,), on all
      ├ request_others        dynamic sampling: again, for groups of equal rewards, or nearly equal ones
      ├ submit_next*          asynchronous rollouts: the engine samples the next step meanwhile
      ├ advantages            compare within each group → (N,)
      ├ update_policy         on the shard's micro-batches, equally many on all ranks (`pack` in base.py):
      │   ├ add_policy_gradient   log_probs → policy_loss → manual_backward; the last backward sums gradients*
      │   └ finish_update*    `optimizer_step_now` in base.py: clip by the global norm, AdamW, schedule
      └ log_iteration*        means over ranks → metrics.csv, W&B; callbacks read batch.rollouts, batch.scores

With sharded weights, each forward and backward waits for the other ranks too. `models/packed.py` runs a
micro-batch through a model; `numerics/` computes, `step_metrics.py` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from rlt_lightning.datamodules.stages import ScoringData, StudentRLData, TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import Dtype
from rlt_lightning.models.lora import without_adapter
from rlt_lightning.models.packed import compute_log_probs
from rlt_lightning.modules.base import follow_options
from rlt_lightning.modules.frozen import FrozenModel, ReadModel
from rlt_lightning.modules.on_policy import OnPolicyModule, OnPolicyOptions, UpdateSums
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.rollout_rows import predicted_rows
from rlt_lightning.modules.scored_completions import ScoredCompletions
from rlt_lightning.modules.scorer import (
    Scorer,
    StudentNames,
    Students,
    bring_to_host,
    build_sampled_sequence,
    measure_sampled_rows,
    require_scorable,
)
from rlt_lightning.modules.step_metrics import held_out_metrics, require_agreement, reward_metrics
from rlt_lightning.modules.text_reward import TextReward
from rlt_lightning.numerics.advantages import AdvantageEstimator, GroupNormalisedAdvantages
from rlt_lightning.numerics.importance import TruncatedImportanceSampling
from rlt_lightning.numerics.likelihood import find_kl_reward
from rlt_lightning.numerics.losses import GRPOLoss, PolicyLoss
from rlt_lightning.numerics.packing import to_padded
from rlt_lightning.numerics.rewards import Reward, RLTReward
from rlt_lightning.numerics.students import Reduction
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.run.jsonl import Row
from rlt_lightning.types import InputError, PromptBatch, Rollouts, Scores


class RLTModule(OnPolicyModule):
    """Train a teacher to write explanations that help a frozen student (RLT, arXiv:2506.08388, section 3).

    Args:
        teacher: Model to train: local folder, hub id, or a name such as miniature.
        student: Frozen model that scores the explanations, with any tokenizer; None if the reward needs none.
        group_size: Completions per problem, G; 64 in the paper.
        reward: The RLT reward and its options, or a subclass with further terms; or a TextReward:
            CorrectnessReward makes this traditional RL.
        advantages: How rewards of a group become advantages; None: GroupNormalisedAdvantages().
        policy_loss: GRPO or a variant of it; None: GRPOLoss().
        importance_sampling: Weights pi_trainer / pi_engine, truncated or masked. "auto": of tokens, capped at
            2, if the engine is outside the process, unless rollouts are asynchronous. None: no weights; stale
            rollouts are then clipped by their ratio instead.
        teacher_log_probs: The teacher's log-probs in r_KL. "rollout": the engine's, if it sent them at the
            reward's temperature, else of another forward; in validation the trainer's. "recompute": always
            of another forward.
        student_dtype: Type of the student's weights.
        students: Several in its place, with weights or without.
        student_reduction: How their rewards become one: the weighted "mean", or the smallest, "min".
        options: Those of `OnPolicyModule` and `PolicyModule`, such as optimizer, dtype and lora.

    Raises:
        InputError: If group_size is below 2, since a group of one has no baseline.
    """

    data_classes: ClassVar[tuple[type[StratosDataModule], ...]] = (TeacherRLData, ScoringData, StudentRLData)
    reference_role = "the reference of the KL penalty"

    @follow_options
    def __init__(
        self,
        teacher: str = DEFAULT_MODEL,
        student: str | None = DEFAULT_MODEL,
        group_size: int = 8,
        reward: Reward = RLTReward(),
        advantages: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        *,
        importance_sampling: TruncatedImportanceSampling | Literal["auto"] | None = "auto",
        teacher_log_probs: Literal["rollout", "recompute"] = "rollout",
        student_dtype: Dtype = "float32",
        students: StudentNames | None = None,
        student_reduction: Reduction = "mean",
        **options: Unpack[OnPolicyOptions],
    ) -> None:
        super().__init__(
            pretrained=teacher, group_size=group_size, importance_sampling=importance_sampling, **options
        )
        self.save_hyperparameters(logger=False)
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
        data = get_stratos_data(self.trainer)
        if stage == "fit" and isinstance(data, ScoringData):
            raise InputError(
                f"{type(self).__name__} trains on completions that it samples, but those of ScoringData are "
                "given. Choose TeacherRLData for data, or score them: `rlt predict`."
            )
        if isinstance(self.reward, TextReward):
            self.reward.check(data.problems)
        require_scorable(self.reward, data.student_views.formats, self.students.names)

    def require_data(self, data: Any) -> None:
        """See `PolicyModule.require_data`; the reward must judge what is sampled."""
        super().require_data(data)
        if data.samples not in self.reward.judges:
            raise InputError(
                f"{type(self.reward).__name__} judges {' or '.join(self.reward.judges)}, but the completions "
                f"of {type(data).__name__} are {data.samples}. Choose another class for data, or another "
                "model.reward."
            )

    def load_frozen_models(self) -> None:
        """Load the student and, where the loss has a KL penalty, the reference."""
        super().load_frozen_models()
        for name in self.frozen_names:
            self.student_models.append(self.load_frozen(name, self.student_dtype, "the frozen student"))
        # The policy without its adapter is the initial teacher.
        is_base = self.lora is not None and not self.reference_moves
        if self.needs_reference and not is_base:
            self.reference = self.load_frozen(self.pretrained, self.dtype_name, self.reference_role)

    @property
    def needs_reference(self) -> bool:
        """Return whether the initial model is asked."""
        return bool(self.trainer.training and self.policy_loss.kl_coef)

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """Return the names of the students that have weights of their own."""
        return self.students.names

    def types(self) -> dict[str, str]:
        """Add the student's type."""
        return super().types() | {"model.student_dtype": self.student_dtype}

    def list_scoring_models(self) -> list[tuple[str, FrozenModel]]:
        """See `OnPolicyModule.list_scoring_models`."""
        return list(zip(self.frozen_names, self.student_models, strict=True))

    def build_metadata(self) -> dict[str, Any]:
        """See `PolicyModule.build_metadata`."""
        metadata = super().build_metadata()
        metadata["training"]["reward"] = type(self.reward).__name__
        if students := self.students.describe():
            metadata["training"]["frozen student"] = students
        return metadata

    def build_card_metadata(self) -> dict[str, Any]:
        """Return the models and the reward of a prediction, for a data card."""
        options = {name: v for name, v in vars(self.reward).items() if isinstance(v, (int, float, str))}
        reward = ", ".join([type(self.reward).__name__, *(f"{name} {v}" for name, v in options.items())])
        students = self.students.describe()
        models = {"teacher": self.pretrained, "student": students} if students else {"model": self.pretrained}
        return models | {"reward": reward}

    def teardown(self, stage: str) -> None:
        """Close the reward; after an exception RolloutCallback does it."""
        self.reward.close()

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Run one RL iteration: sample, score with the student, compare within groups, step the teacher."""
        sampler = self.require_sampler()
        scored = self.sample_and_score(sampler.request(batch.problems))
        for _ in range(sampler.max_rounds):  # of dynamic sampling; 0 without it
            flat = scored.find_flat_groups(sampler.find_min_std(self.global_step + 1))
            others = sampler.request_others(flat)
            if others is None:
                break
            scored.replace(self.sample_and_score(others))
        sampler.submit_next()  # asynchronous rollouts: sampled while this step trains
        if sampler.max_rounds:
            self.divide_again(scored)
        with self.phase("train") as stats:
            advantages = self.advantages(scored.rewards, self.group_size)  # (N,), alike on every rank
            metrics = self.update_policy(scored, advantages, stats)
        self.log_iteration(batch, scored, metrics)

    def sample_and_score(self, request: RolloutRequest) -> ScoredCompletions:
        """Wait for completions and score them as they come; all ranks get all rewards.

        Each rank lets the models read its shard, then rewards its own problems: a judge is asked once.
        """
        sampler = self.require_sampler()
        scored = ScoredCompletions(request, self.build_shards())
        for chunk in sampler.stream(request):  # numbers of completions, alike on every rank
            with self.phase("score") as stats:
                part = scored.divide(chunk)
                # A rank without a part reads a dummy, since with sharded weights all ranks run a forward.
                rows = scored.build_rollouts(part or chunk[:1])
                options = rows, request.sampling.temperature
                students = self.scorer.score_students(*options, scored.collect_known_empty(), stats)
                # What dynamic sampling drops needs no reference.
                references = [] if sampler.max_rounds else self.scorer.reference_log_probs(*options, stats)
                scored.add(part, students, references)
        self.require_fresh(request.policy_version)
        with self.phase("score"):
            self.reward_groups(scored)
        return scored

    def reward_groups(self, scored: ScoredCompletions) -> None:
        """Reward this rank's problems from what models computed on any rank; all ranks get all rewards."""
        own = dict(zip(scored.students, bring_to_host(list(scored.students.values())), strict=True))
        scored.students = self.gather(own, "what models compute on all ranks")
        own_rewards: dict[int, tuple[float, torch.dtype]] = {}  # a rank without problems knows no dtype
        if scored.own:
            found = scored.list_scores_of_own()
            scored.scores = self.scorer.rewards(scored.build_rollouts(scored.own), found, self.group_size)
            values = scored.scores.terms.reward
            own_rewards = {
                number: (value, values.dtype)
                for number, value in zip(scored.own, values.tolist(), strict=True)
            }
        rewards = self.gather(own_rewards, "the rewards of all ranks")
        values_of_all, (dtype, *_) = zip(*(rewards[n] for n in range(len(scored.sources))), strict=True)
        scored.set_rewards(upload(values_of_all, self.device, dtype))  # (N,)

    def divide_again(self, scored: ScoredCompletions) -> None:
        """Divide the completions that dynamic sampling has left over ranks; let the reference read them."""
        with self.phase("score") as stats:
            rows = scored.build_rollouts(scored.divide_again(self.build_shards()))
            references = self.scorer.reference_log_probs(rows, scored.request.sampling.temperature, stats)
            scored.references = dict(zip(scored.shard, references, strict=bool(references)))

    def update_policy(
        self, scored: ScoredCompletions, advantages: Tensor, stats: PhaseStats
    ) -> dict[str, Any]:
        """Take one optimizer step on the policy loss of this rank's shard, and return its metrics.

        Args:
            scored: The step's completions.
            advantages: Their advantages, (N,).
            stats: Counts the tokens that the policy computes.
        """
        sums = UpdateSums()
        self.add_policy_gradient(scored, advantages, stats, sums)
        return self.finish_update(sums)

    def add_policy_gradient(
        self,
        scored: ScoredCompletions,
        advantages: Tensor,
        stats: PhaseStats,
        sums: UpdateSums,
        last: bool = True,
    ) -> None:
        """Run the backward of each micro-batch; `last`: the step has no further one. See `update_policy`."""
        rows, temperature = scored.build_rollouts(scored.shard), scored.request.sampling.temperature
        stale = scored.request.policy_version < self.global_step
        sequences = [build_sampled_sequence(row) for row in rows]
        # What the loss divides by, so that micro-batches of all ranks add up.
        num_sequences, num_tokens = self.sum_over_ranks(len(rows), sum(sum(s.scored) for s in sequences))
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        for micro_batch in self.pack(sequences, measure_sampled_rows(rows), stats, last):
            numbers = [scored.shard[i] for i in micro_batch.indices]
            chosen = [rows[i] for i in micro_batch.indices]
            lengths = [len(row.completion.token_ids) for row in chosen]
            flat, entropy = self.run(
                compute_log_probs, micro_batch.packed, temperature, self.head, True
            )  # (M,)
            log_probs, token_mask = to_padded(flat, lengths)  # (n, T), the only term with gradient
            sums.checks.add(flat, lengths, "policy log-prob", [row.problem.row for row in chosen])
            old_log_probs, weights, mismatch = self.compare_with_engine(chosen, log_probs, token_mask, stale)
            loss, metrics = self.policy_loss(
                log_probs=log_probs,
                old_log_probs=old_log_probs,
                ref_log_probs=scored.reference_log_probs(numbers),
                importance_weights=weights,
                advantages=advantages[upload(numbers, self.device)],
                token_mask=token_mask,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
            self.manual_backward(micro_batch.scale * loss)
            entropy_share = entropy.detach().sum() / num_tokens
            metrics |= {"policy/loss": loss.detach(), "policy/entropy": entropy_share}
            sums.add(micro_batch, metrics, mismatch)

    def log_iteration(self, batch: PromptBatch, scored: ScoredCompletions, metrics: dict[str, Any]) -> None:
        """Log a step's metrics, and give callbacks the scored completions of this rank's problems."""
        rollouts = scored.build_own_rollouts()
        batch.rollouts, batch.scores = rollouts, scored.scores
        batch.problems = [row.problem for row in rollouts.rollouts[:: self.group_size]]
        sampler = self.require_sampler()
        if sampler.max_rounds:
            kept = scored.find_flat_groups(sampler.find_min_std(self.global_step))
            batch.counts = scored.counts.compute_metrics(len(kept))
            batch.dropped = scored.dropped
            sampler.reward_std.add(torch.cat(scored.stds).tolist(), self.global_step)
        assert batch.scores is not None
        metrics |= reward_metrics(batch.scores, scored.rewards, self.group_size)
        metrics |= self.measure_rollouts(rollouts, scored.shards)
        self.log_step(metrics | batch.counts, len(rollouts.rollouts))

    @property
    def scorer(self) -> Scorer:
        """Return what scores completions with this module's models."""
        return Scorer(
            self.reward,
            self.students,
            self.scoring_models,
            self.run,
            self.plan_forward,
            self.device,
            self.head,
            get_stratos_data(self.trainer).student_views,
            self.recomputes,
            self.reference_model if self.policy_loss.kl_coef else None,
        )

    @property
    def scoring_models(self) -> Sequence[ReadModel]:
        """Return the model of each student."""
        return self.student_models

    @property
    def reference_model(self) -> ReadModel:
        """Return the reference; the policy without its adapter is the initial teacher."""
        return self.reference or ReadModel(partial(self.run, without_adapter))

    def score(self, rollouts: Rollouts) -> Scores:
        """Compute the reward of every rollout, the RLT reward with the student."""
        return self.scorer(rollouts.rollouts, rollouts.temperature, rollouts.group_size)

    def recomputes(self, unknown: bool) -> bool:
        """Return whether to recompute the teacher's log-probs, of which this rank's may be unknown."""
        # Ranks with sharded weights run each forward together, so they must decide alike.
        together = self.sharding.sharded
        return self.teacher_log_probs == "recompute" or (self.on_any_rank(unknown) if together else unknown)

    # Validation and prediction

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Keep the held-out reward, its terms, completion length and the fraction of closed explanations."""
        rollouts = batch.rollouts = self.require_sampler().sample_held_out(batch.problems)
        self.require_fresh(rollouts.policy_version)
        with self.phase("score"):
            rows, mismatch = self.scorer.recompute_log_probs(rollouts.rollouts, rollouts.temperature)
            scores = self.score(replace(rollouts, rollouts=rows))
        largest = {"rollout/val_mismatch_max": mismatch.largest} if mismatch.num_tokens else {}
        self.held_out.add(held_out_metrics(scores, rollouts), len(rollouts.rollouts), largest)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Row]:
        """Score completions, which may come with the data, and return a row of each; callbacks write them.

        A rank that has no batch left scores a spare one, of which it returns no row.
        """
        if batch.rollouts is None:
            batch.rollouts = self.require_sampler().sample_traces(batch.problems)
            self.check_engine(batch.rollouts)
        self.require_fresh(batch.rollouts.policy_version)
        with self.phase("score"):
            batch.scores = self.score(batch.rollouts)
        if batch.spare:
            return []
        return list(predicted_rows(batch, get_stratos_data(self.trainer), str(self.pretrained)))

    def check_engine(self, rollouts: Rollouts) -> None:
        """Compare an engine's log-probs of one completion with the teacher's, if they enter the reward.

        An engine in process samples with the teacher itself.

        Raises:
            EngineError: If they differ too much.
        """
        in_process = self.require_sampler().dispatcher.engine.in_process
        if in_process or find_kl_reward(self.reward, rollouts.temperature) is None:
            return
        _, mismatch = self.scorer.recompute_log_probs(rollouts.rollouts[:1], rollouts.temperature)
        require_agreement(mismatch, self.mismatch_limit, self.global_step)


def require_group(group_size: int) -> None:
    """Check that a group has more than one completion."""
    if group_size < 2:
        raise InputError(
            f"model.group_size must be at least 2, but got {group_size}: a group of one has no baseline, "
            "so every advantage would be zero. Raise it; the paper uses 64."
        )
