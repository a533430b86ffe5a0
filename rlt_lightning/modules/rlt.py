"""Reinforcement-Learned Teachers: GRPO of a teacher against a frozen student. Start at `training_step`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.modules.base import (
    Dtype,
    FrozenModel,
    OptimizerConfig,
    PolicyModule,
    check_packing,
    head_of,
    scored_hidden_states,
)
from rlt_lightning.numerics.advantages import AdvantageEstimator, GroupNormalisedAdvantages, zero_std_groups
from rlt_lightning.numerics.kl import head_exact_kl
from rlt_lightning.numerics.log_probs import head_log_probs
from rlt_lightning.numerics.losses import GRPOLoss, PolicyLoss
from rlt_lightning.numerics.packing import PackedSequences, pack_by_tokens, to_padded
from rlt_lightning.numerics.rewards import RewardTerms, RLTReward, require_finite
from rlt_lightning.pretrained import EMBEDDED_MODEL
from rlt_lightning.types import InputError, PromptBatch, Rollout, Rollouts, Scores


class RLTModule(PolicyModule):
    """Train a teacher to write explanations that help a frozen student (RLT, arXiv:2506.08388, section 3).

    Args:
        teacher: Model to train: embedded default, local folder or hub id.
        student: Frozen model that scores the explanations; it shares the teacher's vocabulary.
        group_size: Completions per problem, G; 64 in the paper.
        reward: The RLT reward and its options.
        advantages: How rewards of a group become advantages; None: GroupNormalisedAdvantages().
        policy_loss: GRPO or a variant of it; None: GRPOLoss().
        optimizer: AdamW, its schedule and gradient clipping.
        max_staleness: Optimizer steps by which the sampling weights may lag behind.
        micro_batch_tokens: Tokens per forward; a longer sequence goes alone.
        head_chunk_size: Scored tokens per pass through the language-model head.
        dtype: Of the trained weights.
        student_dtype: Of the student and the reference.
        gradient_checkpointing: Recompute activations in the backward pass.
        attn_implementation: transformers' name, None for its default.
        trust_remote_code: Run code that comes with a model.
        seed: Of everything random inside a step.

    Raises:
        InputError: If group_size is below 2, since a group of one has no baseline.
    """

    def __init__(
        self,
        teacher: str = EMBEDDED_MODEL,
        student: str = EMBEDDED_MODEL,
        group_size: int = 8,
        reward: RLTReward = RLTReward(),
        advantages: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6),
        max_staleness: int = 0,
        micro_batch_tokens: int = 16384,
        head_chunk_size: int = 1024,
        dtype: Dtype = "float32",
        student_dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            teacher,
            optimizer,
            micro_batch_tokens,
            head_chunk_size,
            dtype,
            gradient_checkpointing,
            attn_implementation,
            trust_remote_code,
            seed,
        )
        if group_size < 2:
            raise InputError(
                f"model.group_size must be at least 2, but got {group_size}: a group of one has no baseline, "
                "so every advantage would be zero. Raise it; the paper uses 64."
            )
        self.student_name = student
        self.group_size = group_size
        self.reward = reward
        self.advantages = advantages or GroupNormalisedAdvantages()
        self.policy_loss = policy_loss or GRPOLoss()
        self.max_staleness = max_staleness
        self.student_dtype: Dtype = student_dtype
        self.student: FrozenModel | None = None
        self.reference: FrozenModel | None = None  # the initial teacher, moved by ReferenceSync

    # Setting up

    def configure_model(self) -> None:
        """Load teacher, student and, where the loss has a KL penalty, the reference."""
        if self.policy is not None:
            return
        super().configure_model()
        self.student = FrozenModel(self.load(self.student_name, self.student_dtype))
        check_packing(self.student.model, self.student_name)
        if self.trainer.training and self.policy_loss.kl_coef:
            self.reference = FrozenModel(copy.deepcopy(self.policy))

    def place_frozen_models(self) -> None:
        """Move student and reference next to the policy; Lightning moves only what it trains."""
        for frozen in (self.student, self.reference):
            if frozen is not None:
                frozen.model.to(self.device)

    on_fit_start = on_validation_start = on_predict_start = place_frozen_models

    # Training

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """One RLT iteration: score with the student, compare within groups, step the teacher."""
        rollouts = self.require_rollouts(batch)  # sampled by RolloutCallback, group_size per problem
        with self.phase("score"):
            batch.scores = self.score(rollouts)
        rewards = batch.scores.terms.reward  # (N,)
        with self.phase("train"):
            advantages = self.advantages(rewards, self.group_size)  # (N,)
            metrics = self.update_policy(rollouts, advantages)
        metrics |= reward_metrics(batch.scores.terms, self.group_size) | rollout_metrics(rollouts)
        metrics["rollout/staleness"] = float(self.global_step - 1 - rollouts.policy_version)
        self.log_step(metrics | self.speed_metrics(rollouts), len(rollouts.rollouts))

    def require_rollouts(self, batch: PromptBatch) -> Rollouts:
        """Return the batch's rollouts, or say which callback should have brought them."""
        rollouts = batch.rollouts
        if rollouts is None:
            raise InputError(
                "Every batch needs rollouts, but this one has none. "
                "Add rlt_lightning.callbacks.RolloutCallback to trainer.callbacks."
            )
        staleness = self.global_step - rollouts.policy_version
        if not 0 <= staleness <= self.max_staleness:
            raise RuntimeError(
                f"Rollouts may be at most model.max_staleness={self.max_staleness} optimizer steps old, but "
                f"RolloutCallback brought some of version {rollouts.policy_version} at step "
                f"{self.global_step}."
            )
        return rollouts

    def update_policy(self, rollouts: Rollouts, advantages: Tensor) -> dict[str, Any]:
        """Accumulate the policy loss over packed micro-batches and take one optimizer step."""
        rows = rollouts.rollouts
        strategy = self.trainer.strategy
        counts = torch.tensor([len(rows), sum(len(r.completion.token_ids) for r in rows)], device=self.device)
        num_sequences, num_tokens = strategy.reduce(
            counts.double(), reduce_op="sum"
        ).tolist()  # over all ranks
        on_policy = rollouts.policy_version == self.global_step
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        metrics: dict[str, Any] = {"policy/loss": 0.0, "policy/entropy": 0.0}
        for indices, packed in self.policy_micro_batches(rows):
            lengths = [len(rows[i].completion.token_ids) for i in indices]
            ref_log_probs = None
            if self.reference is not None:
                with torch.no_grad():
                    hidden = scored_hidden_states(self.reference.model, packed)
                    head = head_of(self.reference.model)
                    flat, _ = head_log_probs(
                        hidden, head, packed.targets, rollouts.temperature, self.head_chunk_size
                    )
                ref_log_probs, _ = to_padded(flat, lengths)
            flat, entropy = strategy.model(packed, rollouts.temperature)  # type: ignore[misc]
            log_probs, token_mask = to_padded(flat, lengths)  # (n, T), the only term with gradient
            require_finite(
                log_probs.masked_fill(~token_mask, 0.0),
                "policy log-prob",
                [rows[i].problem.row for i in indices],
            )
            loss, step_metrics = self.policy_loss(
                log_probs=log_probs,
                old_log_probs=None if on_policy else sampled_log_probs([rows[i] for i in indices], log_probs),
                ref_log_probs=ref_log_probs,
                advantages=advantages[torch.tensor(indices, device=self.device)],
                token_mask=token_mask,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
            )
            self.manual_backward(loss * self.trainer.world_size)  # the strategy averages gradients over ranks
            metrics["policy/loss"] += loss.detach()
            metrics["policy/entropy"] += entropy.sum() / num_tokens
            for name, value in step_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return metrics | self.optimizer_step_now()

    def policy_micro_batches(self, rows: list[Rollout]) -> Iterator[tuple[list[int], PackedSequences]]:
        """Pack teacher prompts with their completions; the sampled tokens are the scored ones."""
        sequences = [sampled_sequence(row) for row in rows]
        for indices in pack_by_tokens(
            [len(token_ids) for token_ids, _ in sequences], self.micro_batch_tokens
        ):
            yield indices, self.pack([sequences[i] for i in indices])

    def pack(self, sequences: list[ScoredTokens]) -> PackedSequences:
        """Lay sequences out in one row on this rank's device."""
        token_ids, score_masks = zip(*sequences, strict=True)
        return PackedSequences.from_lists(list(token_ids), list(score_masks), self.device)

    # Scoring

    @torch.no_grad()
    def score(self, rollouts: Rollouts) -> Scores:
        """Compute every rollout's reward: one student forward for both terms, one teacher forward for r_KL.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite, naming the rows and the term.
        """
        rows = rollouts.rollouts
        solution: list[Tensor] = [torch.empty(0)] * len(rows)
        kl: list[Tensor] = [torch.empty(0)] * len(rows)
        student_rows, teacher_rows = [student_sequence(r) for r in rows], [teacher_sequence(r) for r in rows]
        lengths = [max(len(s), len(t)) for (s, _), (t, _) in zip(student_rows, teacher_rows, strict=True)]
        for indices in pack_by_tokens(lengths, self.micro_batch_tokens):
            chosen = [rows[i] for i in indices]
            student_log_probs, kl_values = self.score_micro_batch(
                [student_rows[i] for i in indices], [teacher_rows[i] for i in indices], chosen
            )
            for i, log_probs, values in zip(indices, student_log_probs, kl_values, strict=True):
                solution[i], kl[i] = log_probs, values
        return self.reward_of(rows, solution, kl)

    def score_micro_batch(
        self, student_rows: list[ScoredTokens], teacher_rows: list[ScoredTokens], rows: list[Rollout]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return per row the solution log-probs (S,) and the KL of the think tokens (K,)."""
        assert self.student is not None
        student, teacher = self.pack(student_rows), self.pack(teacher_rows)
        student_hidden = scored_hidden_states(self.student.model, student)  # (sum of K + S, H)
        teacher_hidden = scored_hidden_states(self.policy, teacher)  # (sum of K, H)
        student_head, teacher_head = head_of(self.student.model), head_of(self.policy)
        student_temperature, teacher_temperature = (
            self.reward.student_temperature,
            self.reward.teacher_temperature,
        )
        student_log_probs, _ = head_log_probs(
            student_hidden, student_head, student.targets, student_temperature, self.head_chunk_size
        )
        num_thinks = [len(r.problem.think_prefix) + r.num_think for r in rows]
        splits = [n for k, r in zip(num_thinks, rows, strict=True) for n in (k, len(r.problem.solution_ids))]
        pieces = student_log_probs.split(splits)  # think, solution, think, solution, …
        row_numbers = [r.problem.row for r in rows]
        require_finite_rows(pieces[1::2], "student log-prob of the solution", row_numbers)
        if self.reward.kl_estimator == "exact":
            think_hidden = torch.cat(student_hidden.split(splits)[::2])
            kl = head_exact_kl(
                teacher_hidden,
                teacher_head,
                think_hidden,
                student_head,
                teacher_temperature,
                student_temperature,
                self.head_chunk_size,
            )
        else:
            log_probs, _ = head_log_probs(
                teacher_hidden, teacher_head, teacher.targets, teacher_temperature, self.head_chunk_size
            )
            require_finite_rows(
                log_probs.split(num_thinks), "teacher log-prob of the explanation", row_numbers
            )
            require_finite_rows(pieces[::2], "student log-prob of the explanation", row_numbers)
            kl = self.reward.token_kl(log_probs, torch.cat(pieces[::2]))
        kl_rows = list(kl.split(num_thinks))
        require_finite_rows(kl_rows, "KL of the explanation", row_numbers)
        return list(pieces[1::2]), kl_rows

    def reward_of(self, rows: list[Rollout], solution: list[Tensor], kl: list[Tensor]) -> Scores:
        """Reduce per-token scores to the reward and its terms."""
        solution_log_probs, solution_mask = pad_rows(solution)  # (N, S)
        kl_values, kl_mask = pad_rows(kl)  # (N, K)
        format_ok = torch.tensor([r.closed and not r.empty for r in rows], device=self.device)
        terms = self.reward(solution_log_probs, solution_mask, kl_values, kl_mask, format_ok)
        require_finite(terms.reward, "reward", [r.problem.row for r in rows])
        return Scores(terms, solution, kl)

    # Validation and prediction

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Held-out reward, its terms, completion length and the fraction of closed explanations."""
        rollouts = self.require_rollouts(batch)
        terms = self.score(rollouts).terms
        metrics: dict[str, Any] = {
            "reward/val_mean": terms.reward.mean(),
            "reward/val_solution": terms.solution_log_prob_reward.mean(),
            "reward/val_kl": terms.kl_reward.mean(),
            "reward/val_format": terms.format_reward.mean(),
        }
        lengths = rollout_metrics(rollouts)
        metrics["rollout/val_length_mean"] = lengths["rollout/length_mean"]
        metrics["rollout/val_closed_frac"] = lengths["rollout/closed_frac"]
        self.log_validation(metrics, len(rollouts.rollouts))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Score rollouts, the given ones where the rows carry them; a callback writes the batch's scores."""
        batch.scores = self.score(self.require_rollouts(batch))

    def speed_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Seconds per phase of this iteration, and sampled tokens per second of it."""
        seconds = self.phase.lap()
        tokens = sum(len(r.completion.token_ids) for r in rollouts.rollouts)
        speed = {f"perf/{phase}_s": value for phase, value in seconds.items()}
        return speed | {"perf/tokens_per_s": tokens / sum(seconds.values())}


ScoredTokens = tuple[list[int], list[bool]]  # token ids of one row, and which of them are scored


def student_sequence(rollout: Rollout) -> ScoredTokens:
    """Splice the explanation into the student's context; score think and solution tokens (RLT, figure 3)."""
    problem = rollout.problem
    head = problem.student_prefix + problem.think_prefix
    token_ids = head + rollout.body + problem.student_suffix + problem.solution_ids
    num_think = len(problem.think_prefix) + rollout.num_think
    scored = [False] * len(problem.student_prefix) + [True] * num_think
    scored += [False] * (len(token_ids) - len(scored) - len(problem.solution_ids))
    return token_ids, scored + [True] * len(problem.solution_ids)


def teacher_sequence(rollout: Rollout) -> ScoredTokens:
    """The explanation in the teacher's own context; score the same think tokens."""
    problem = rollout.problem
    token_ids = problem.teacher_prompt + rollout.body[: rollout.num_think]
    return token_ids, [False] * len(problem.teacher_prefix) + [True] * (
        len(token_ids) - len(problem.teacher_prefix)
    )


def sampled_sequence(rollout: Rollout) -> ScoredTokens:
    """The completion after its prompt; score every token that was sampled, the end tag included."""
    prompt, completion = rollout.problem.teacher_prompt, rollout.completion.token_ids
    return prompt + completion, [False] * len(prompt) + [True] * len(completion)


def sampled_log_probs(rows: list[Rollout], log_probs: Tensor) -> Tensor:
    """Return the engine's log-probs of the sampled tokens, padded like `log_probs`, (n, T)."""
    old = torch.zeros_like(log_probs, requires_grad=False)
    for i, row in enumerate(rows):
        values = row.completion.log_probs
        if values is None:
            raise RuntimeError(
                "Stale rollouts need the log-probs of the policy that sampled them, but the engine sent "
                "none. "
                "Let it return log-probs, or set model.max_staleness to 0."
            )
        old[i, : len(values)] = torch.tensor(values, device=log_probs.device)
    return old


def require_finite_rows(rows: Sequence[Tensor], term: str, row_numbers: list[int]) -> None:
    """Check that every value of every row is finite, naming the rows where one is not."""
    values, _ = pad_rows(rows)
    require_finite(values, term, row_numbers)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths: values (N, T) with zeros behind, and their token_mask."""
    return to_padded(torch.cat(list(rows)), [len(row) for row in rows])


def reward_metrics(terms: RewardTerms, group_size: int) -> dict[str, Any]:
    """Means over the step's completions of the reward and its terms, before and after processing."""
    groups = terms.reward.view(-1, group_size)  # (P, G)
    return {
        "reward/mean": terms.reward.mean(),
        "reward/std": terms.reward.std(),
        "reward/group_std": groups.std(dim=1).mean(),
        "reward/zero_std_groups": zero_std_groups(terms.reward, group_size).float().sum(),
        "reward/solution": terms.solution_log_prob_reward.mean(),
        "reward/kl": terms.kl_reward.mean(),
        "reward/format": terms.format_reward.mean(),
        "reward/solution_log_prob_mean": terms.solution_log_prob_mean.mean(),
        "reward/solution_log_prob_min": terms.solution_log_prob_min.mean(),
        "reward/kl_mean": terms.kl_mean.mean(),
        "reward/kl_max": terms.kl_max.mean(),
        "student/solution_log_prob_mean": terms.raw_solution_log_prob_mean.mean(),
        "student/solution_log_prob_min": terms.raw_solution_log_prob_min.mean(),
        "student/kl_mean": terms.raw_kl_mean.mean(),
        "student/kl_max": terms.raw_kl_max.mean(),
    }


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Lengths and endings of the sampled completions."""
    rows = rollouts.rollouts
    lengths = [len(r.completion.token_ids) for r in rows]
    return {
        "rollout/length_mean": sum(lengths) / len(rows),
        "rollout/length_max": float(max(lengths)),
        "rollout/closed_frac": sum(r.closed for r in rows) / len(rows),
        "rollout/truncated_frac": sum(r.completion.finish_reason == "length" for r in rows) / len(rows),
        "rollout/empty_frac": sum(r.empty for r in rows) / len(rows),
    }
