"""Reinforcement-Learned Teachers: GRPO of a teacher against a frozen student. Start at `training_step`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.models.embedded import EMBEDDED_MODEL
from rlt_lightning.models.layouts import verified_layout
from rlt_lightning.models.lora import LoRA, without_adapter
from rlt_lightning.models.packed import HeadOptions, log_probs_of
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.modules.frozen import FrozenModel
from rlt_lightning.modules.logged import reward_metrics, rollout_metrics
from rlt_lightning.modules.meter import PhaseCost, forward_flops
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.modules.scoring import StudentScorer, scored_end
from rlt_lightning.modules.text_reward import TextReward
from rlt_lightning.numerics.advantages import AdvantageEstimator, GroupNormalisedAdvantages
from rlt_lightning.numerics.importance import Mismatch, TruncatedImportanceSampling
from rlt_lightning.numerics.losses import GRPOLoss, PolicyLoss
from rlt_lightning.numerics.packing import Extent, Layout, PackedSequences, ScoredSequence, to_padded
from rlt_lightning.numerics.rewards import Reward, RLTReward, require_finite
from rlt_lightning.pretrained import Dtype
from rlt_lightning.types import InputError, PromptBatch, Rollout, Rollouts, Scores


class RLTModule(PolicyModule):
    """Train a teacher to write explanations that help a frozen student (RLT, arXiv:2506.08388, section 3).

    Args:
        teacher: Model to train: embedded default, local folder or hub id.
        student: Frozen model that scores the explanations; it shares the teacher's vocabulary. None for a
            reward that needs none.
        group_size: Completions per problem, G; 64 in the paper.
        reward: The RLT reward and its options, or a subclass with further terms; or a TextReward:
            CorrectnessReward makes this traditional RL.
        advantages: How rewards of a group become advantages; None: GroupNormalisedAdvantages().
        policy_loss: GRPO or a variant of it; None: GRPOLoss().
        optimizer: AdamW, its schedule and gradient clipping.
        importance_sampling: Weights for the difference between the engine that sampled and the trainer, and,
            with stale rollouts, between then and now; None: no weights. Stale rollouts are then clipped by
            their ratio.
        mismatch_alarm: Mean |trainer - engine| in nats per token above which a step warns; None: never.
        max_staleness: Optimizer steps by which the sampling weights may lag behind.
        micro_batch_tokens: Tokens per forward; a longer sequence goes alone.
        layout: How sequences share a forward: "shared_prefix" computes a group's prompt once, "packed" for
            each completion, "auto" chooses by a cost model, "single" runs one sequence at a time.
        head: How log-probs are computed from hidden states.
        teacher_log_probs: Where r_KL takes the teacher's log-probs from: "rollout", as they were sampled,
            where the engine sent them at the reward's temperature; "recompute", a forward of its own.
        offload_frozen: Keep student and reference in pinned host memory while they are not used.
        dtype: Of the trained weights and the reference's.
        student_dtype: Of the student's weights.
        gradient_checkpointing: Recompute activations in the backward pass.
        attn_implementation: transformers' name; None: ours, which shares prefixes.
        trust_remote_code: Run code that comes with a model.
        seed: Of everything random inside a step.
        lora: Train low-rank adapters, in fp32, and freeze the weights; None: train all.

    Raises:
        InputError: If group_size is below 2, since a group of one has no baseline.
    """

    def __init__(
        self,
        teacher: str = EMBEDDED_MODEL,
        student: str | None = EMBEDDED_MODEL,
        group_size: int = 8,
        reward: Reward = RLTReward(),
        advantages: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),
        importance_sampling: TruncatedImportanceSampling | None = None,
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
    ) -> None:
        super().__init__(
            teacher,
            optimizer,
            micro_batch_tokens,
            layout,
            head,
            dtype,
            gradient_checkpointing,
            attn_implementation,
            trust_remote_code,
            seed,
            lora,
        )
        if group_size < 2:
            raise InputError(
                f"model.group_size must be at least 2, but got {group_size}: a group of one has no baseline, "
                "so every advantage would be zero. Raise it; the paper uses 64."
            )
        if isinstance(reward, TextReward) != (student is None):
            name = type(reward).__name__
            needed = f"null, since {name} asks no model" if student else f"a model, which {name} asks"
            raise InputError(f"model.student must be {needed}, but is {student or 'null'}. Set it.")
        self.student_name = student
        self.group_size = group_size
        self.reward = reward
        self.advantages = advantages or GroupNormalisedAdvantages()
        self.policy_loss = policy_loss or GRPOLoss()
        self.importance_sampling = importance_sampling
        self.mismatch_alarm = mismatch_alarm
        self.max_staleness = max_staleness
        self.student_dtype: Dtype = student_dtype
        self.teacher_log_probs = teacher_log_probs
        self.offload_frozen = offload_frozen
        self.student: FrozenModel | None = None
        self.reference: FrozenModel | None = None  # the initial teacher, moved by ReferenceSync
        self.reference_moves = False  # whether it will be; ReferenceSync says so

    # Setting up

    def setup(self, stage: str) -> None:
        """Check, before any model is loaded, that the reward can judge what the rows are made into."""
        super().setup(stage)
        data = stratos_of(self.trainer)
        if stage == "predict" and data.task == "student_rl":
            raise InputError(
                "`rlt predict` writes and scores explanations, but data.task is student_rl. Use `rlt "
                "validate` for the reward of held-out answers, or `rlt test` to evaluate a model."
            )
        if data.task not in self.reward.tasks:
            raise InputError(
                f"data.task must be {' or '.join(self.reward.tasks)} for {type(self.reward).__name__}, but "
                f"is {data.task}. Set it, or another model.reward."
            )
        if isinstance(self.reward, TextReward):
            self.reward.check(data.problems)

    def configure_model(self) -> None:
        """Load teacher, student and, where the loss has a KL penalty, the reference."""
        if self.entry is not None:
            return
        super().configure_model()
        if self.offload_frozen and self.sharding.sharded:
            raise InputError(
                "model.offload_frozen is for whole models, but this strategy shards them. Set it to false; "
                "configs/overlays/cpu_offload.yaml keeps shards in main memory."
            )
        if self.student_name is not None:
            self.student = FrozenModel(self.load(self.student_name, self.student_dtype), self.offload_frozen)
        is_base = self.lora is not None and not self.reference_moves  # the policy without its adapter
        if self.trainer.training and self.policy_loss.kl_coef and not is_base:
            self.reference = FrozenModel(self.load(self.pretrained, self.dtype_name), self.offload_frozen)

    @torch.no_grad()
    def get_ready(self) -> None:
        """Place student and reference too; Lightning moves only what it trains."""
        super().get_ready()
        for frozen in (self.student, self.reference):
            if frozen is not None:
                frozen.place(self.device, self.sharding)
        if self.student is None:
            return
        assert self.student_name is not None
        with self.student.on(self.device) as student:
            chosen = self.attn_implementation is not None
            self.layout = verified_layout(student, self.student_name, self.layout, chosen)

    def facts(self) -> dict[str, Any]:
        """See `PolicyModule.facts`."""
        facts = super().facts()
        facts["training"] |= {"reward": type(self.reward).__name__, "group size": self.group_size}
        if self.student_name is not None:
            facts["training"]["frozen student"] = self.student_name
        return facts

    def recipe(self) -> dict[str, Any]:
        """What prediction is made with, for a data card."""
        options = {name: v for name, v in vars(self.reward).items() if isinstance(v, (int, float, str))}
        reward = ", ".join([type(self.reward).__name__, *(f"{name} {v}" for name, v in options.items())])
        return {"teacher": self.pretrained, "student": self.student_name, "reward": reward}

    def teardown(self, stage: str) -> None:
        """Free what the reward holds; after an exception RolloutCallback does."""
        self.reward.close()

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """One RLT iteration: score with the student, compare within groups, step the teacher."""
        rollouts = self.require_rollouts(batch)  # sampled by RolloutCallback, group_size per problem
        with self.phase("score") as cost:
            batch.scores = self.score(rollouts, cost)
        rewards = batch.scores.terms.reward  # (N,)
        with self.phase("train") as cost:
            advantages = self.advantages(rewards, self.group_size)  # (N,)
            metrics = self.update_policy(rollouts, advantages, cost)
        metrics |= reward_metrics(batch.scores.terms, self.group_size) | rollout_metrics(rollouts)
        metrics["rollout/staleness"] = float(self.global_step - 1 - rollouts.policy_version)
        metrics |= self.speed_metrics(sum(len(r.completion.token_ids) for r in rollouts.rollouts))
        self.log_step(metrics, len(rollouts.rollouts))

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

    def update_policy(self, rollouts: Rollouts, advantages: Tensor, cost: PhaseCost) -> dict[str, Any]:
        """Accumulate the policy loss over packed micro-batches and take one optimizer step."""
        rows = rollouts.rollouts
        world_size = self.trainer.world_size
        num_sequences, num_tokens = self.sum_over_ranks(
            len(rows), sum(len(r.completion.token_ids) for r in rows)
        )
        clip_by_ratio = rollouts.policy_version < self.global_step and self.importance_sampling is None
        mismatch = Mismatch()
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        metrics: dict[str, Any] = {}
        sequences = [sampled_sequence(row) for row in rows]
        plan = self.plan(sampled_extents(rows), meeting=True)
        packed_rows = [
            PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
            for micro_batch, _ in plan
        ]
        reference = self.reference_log_probs(packed_rows, rollouts.temperature)
        for number, ((micro_batch, weight), packed, ref_flat) in enumerate(
            zip(plan, packed_rows, reference, strict=True), 1
        ):
            num_forwards = self.forwards_per_step + (ref_flat is not None)
            cost.count(
                packed, sequences, micro_batch, weight, num_forwards * forward_flops(self.policy, packed)
            )
            chosen = [rows[i] for i in micro_batch.indices]
            lengths = [len(r.completion.token_ids) for r in chosen]
            with self.sharding.micro_batch(last=number == len(plan)):
                flat, entropy = self.run(log_probs_of, packed, rollouts.temperature, self.head, True)
                log_probs, token_mask = to_padded(flat, lengths)  # (n, T), the only term with gradient
                require_finite(log_probs, "policy log-prob", [r.problem.row for r in chosen])
                engine_log_probs = self.engine_log_probs(chosen, log_probs, needed=clip_by_ratio)  # (n, T)
                if engine_log_probs is not None and weight:
                    mismatch += Mismatch.between(log_probs, engine_log_probs, token_mask)
                weights = None
                if self.importance_sampling is not None:
                    assert engine_log_probs is not None
                    weights = self.importance_sampling(log_probs, engine_log_probs, token_mask)
                loss, loss_metrics = self.policy_loss(
                    log_probs=log_probs,
                    old_log_probs=engine_log_probs if clip_by_ratio else None,
                    ref_log_probs=None if ref_flat is None else to_padded(ref_flat, lengths)[0],
                    importance_weights=weights,
                    advantages=advantages[torch.tensor(micro_batch.indices, device=self.device)],
                    token_mask=token_mask,
                    num_tokens=num_tokens,
                    num_sequences=num_sequences,
                )
                # The strategy averages gradients over ranks, so a rank's share counts world_size times.
                self.manual_backward(weight * world_size * loss)
            entropy_share = entropy.detach().sum() / num_tokens
            loss_metrics |= {"policy/loss": loss.detach(), "policy/entropy": entropy_share}
            for name, value in loss_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + weight * world_size * value
        return metrics | self.optimizer_step_now() | self.mismatch_metrics(mismatch)

    def engine_log_probs(self, rows: list[Rollout], log_probs: Tensor, needed: bool) -> Tensor | None:
        """The engine's log-probs of the sampled tokens, padded like `log_probs`, (n, T); None without any."""
        values = [row.completion.log_probs for row in rows]
        if any(row is None for row in values):
            if needed or self.importance_sampling is not None:
                raise RuntimeError(
                    "Stale rollouts and importance sampling need the log-probs of the policy that sampled, "
                    "but the engine sent none. Let it report them, or set model.max_staleness to 0 and drop "
                    "model.importance_sampling."
                )
            return None
        padded = [torch.tensor(row, dtype=log_probs.dtype, device=log_probs.device) for row in values]
        return pad_sequence(padded, batch_first=True)

    def mismatch_metrics(self, mismatch: Mismatch) -> dict[str, float]:
        """The step's mismatch over all ranks, and a warning where it is large."""
        own_largest = torch.tensor(mismatch.largest, device=self.device)
        largest = float(self.trainer.strategy.reduce(own_largest, reduce_op="max"))
        mismatch = Mismatch(largest, *self.sum_over_ranks(*mismatch.sums()))
        if not mismatch.num_tokens:
            return {}
        if self.mismatch_alarm is not None and mismatch.mean > self.mismatch_alarm:
            rank_zero_warn(
                f"Step {self.global_step}: engine and trainer differ by {mismatch.mean:.3g} nats per token, "
                f"more than model.mismatch_alarm {self.mismatch_alarm:g}. Look at the engine's data type and "
                "settings, or set model.importance_sampling."
            )
        return {
            "rollout/mismatch_mean": mismatch.mean,
            "rollout/mismatch_max": mismatch.largest,
            "rollout/mismatch_kl": mismatch.mean_kl,
            "rollout/effective_sample_frac": mismatch.effective_sample_frac,
        }

    @torch.no_grad()
    def reference_log_probs(
        self, packed_rows: list[PackedSequences], temperature: float
    ) -> list[Tensor] | list[None]:
        """Log-probs of the sampled tokens under the reference, (M,) per row; None without a KL penalty.

        All rows before the first update: an offloaded reference is then gone while the policy is trained.
        """
        if not self.policy_loss.kl_coef:
            return [None] * len(packed_rows)
        base = nullcontext(partial(self.run, without_adapter))
        with base if self.reference is None else self.reference.on(self.device) as run:
            return [run(log_probs_of, packed, temperature, self.head)[0] for packed in packed_rows]

    def score(self, rollouts: Rollouts, cost: PhaseCost | None = None) -> Scores:
        """Compute the reward of every rollout, the RLT reward with the student."""
        if isinstance(self.reward, TextReward):
            terms = self.reward(rollouts.rollouts, stratos_of(self.trainer).format.tags)
            require_finite(terms.reward, "reward", [r.problem.row for r in rollouts.rollouts])
            return Scores(terms.to(self.device), [], [], [])
        assert isinstance(self.reward, RLTReward)
        assert self.student is not None
        with self.student.on(self.device) as student:
            scorer = StudentScorer(
                self.run,
                student,
                self.reward,
                self.device,
                self.plan_forward,
                self.head,
                recompute=self.recomputes,
                cost=cost,
            )
            return scorer(rollouts)

    def recomputes(self, unknown: bool) -> bool:
        """Whether the teacher runs for its own log-probs, given whether this rank's rollouts lack them."""
        together = self.sharding.sharded  # ranks meet in a forward, and have equally many batches
        return self.teacher_log_probs == "recompute" or (self.on_any_rank(unknown) if together else unknown)

    # Validation and prediction

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Held-out reward, its terms, completion length and the fraction of closed explanations."""
        rollouts = self.require_rollouts(batch)
        terms = self.score(rollouts).terms
        metrics: dict[str, Any] = {"reward/val_mean": terms.reward.mean()}
        metrics |= {f"reward/val_{name}": values.mean() for name, values in terms.parts().items()}
        lengths = rollout_metrics(rollouts)
        metrics["rollout/val_length_mean"] = lengths["rollout/length_mean"]
        metrics["rollout/val_closed_frac"] = lengths["rollout/closed_frac"]
        mismatch = self.mismatch(rollouts)
        largest = {"rollout/val_mismatch_max": mismatch.largest} if mismatch.num_tokens else {}
        self.log_validation(metrics, len(rollouts.rollouts), largest)

    @torch.no_grad()
    def mismatch(self, rollouts: Rollouts) -> Mismatch:
        """Compare the engine's log-probs of all rollouts with those of the current weights."""
        mismatch, rows = Mismatch(), rollouts.rollouts
        sequences = [sampled_sequence(row) for row in rows]
        for micro_batch, weight in self.plan_forward(sampled_extents(rows)):
            packed = PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
            chosen = [rows[i] for i in micro_batch.indices]
            # The engine's log-probs of greedy completions are at temperature 1.
            flat, _ = self.run(log_probs_of, packed, rollouts.temperature or 1.0, self.head)
            log_probs, token_mask = to_padded(flat, [len(r.completion.token_ids) for r in chosen])  # (n, T)
            engine_log_probs = self.engine_log_probs(chosen, log_probs, needed=False)
            if engine_log_probs is not None and weight:
                mismatch += Mismatch.between(log_probs, engine_log_probs, token_mask)
        return mismatch

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Score rollouts, the given ones where the rows carry them; a callback writes the batch's scores."""
        batch.scores = self.score(self.require_rollouts(batch))


def sampled_sequence(rollout: Rollout) -> ScoredSequence:
    """The completion after its prompt; score every token that was sampled, the end tag included."""
    prompt, completion = rollout.problem.teacher_prompt, rollout.completion.token_ids
    return ScoredSequence(prompt, completion, scored_end(len(prompt), len(completion)))


def sampled_extents(rows: list[Rollout]) -> list[Extent]:
    """Lengths of prompts and completions; those of one problem share the prompt."""
    return [Extent(r.problem.row, len(r.problem.teacher_prompt), len(r.completion.token_ids)) for r in rows]
