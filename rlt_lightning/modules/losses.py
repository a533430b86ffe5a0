"""Terms of a loss: each declares forwards of a completion, and turns their values into a loss.

    LossTerm.scoring_passes   what is computed before the update, without gradient, mostly by other models
    LossTerm.scoring_pass     what the policy computes with gradient, packed into micro-batches
    LossTerm()                the loss of a micro-batch

A module's loss is the sum of its terms: the policy gradient, the answer term of likelihood rewards,
distillation (modules/opd.py), supervised fine-tuning (modules/sft.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.modules.credits import Credit, RewardCredit
from rlt_lightning.modules.passes import OLD, LossInputs, Micro, Values
from rlt_lightning.numerics.importance import TruncatedImportanceSampling, measure_mismatch
from rlt_lightning.numerics.losses import PolicyLoss
from rlt_lightning.numerics.packing import mask_tokens
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards.base import AnswerScore
from rlt_lightning.rewards.explanations import build_solution_pass
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY, REFERENCE, ScoringPass
from rlt_lightning.types import Rollout


@dataclass(frozen=True)
class LossOutput:
    """The loss of a micro-batch.

    Attributes:
        loss: To be minimised; its sum over micro-batches is the step's.
        metrics: Scalars without gradient, whose sums over micro-batches are the step's.
        mismatch: How far each worker and the trainer differ (`measure_mismatch`), if that is known.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    mismatch: Mapping[str, Tensor] = field(default_factory=dict)


class LossTerm(ABC):
    """A term of the loss."""

    # Whether it reads the entropies of the policy.
    with_entropy = False

    @property
    def source(self) -> object:
        """Return the object whose class an error names if the loss is not finite."""
        return self

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """Return the scoring passes of a completion before the update, without gradient."""
        return []

    @abstractmethod
    def scoring_pass(self, rollout: Any) -> ScoringPass:
        """Return the policy's scoring pass over a completion, with gradient; it has one column."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of a micro-batch."""


def list_passes(terms: Sequence[LossTerm], rollout: Rollout) -> list[ScoringPass]:
    """Return the scoring passes of a completion before the update, for all terms of a loss."""
    return [scoring for term in terms for scoring in term.scoring_passes(rollout)]


def compute_loss(term: LossTerm, micro: Micro, computed: Values, global_step: int) -> Tensor:
    """Return a micro-batch's part of the step's loss by a term, and add its figures to the step.

    It is zero if the term fails, so that all ranks run a backward. The failure is kept in the step:
    `raise_together` comes behind the last micro-batch.
    """
    inputs = LossInputs.of(micro, computed, global_step)
    try:
        output = term(inputs)
    except Exception as error:  # of a user's class: any
        micro.step.keep_failure(error)
        output = LossOutput(inputs.log_probs.sum() * 0.0, {})
    micro.step.add_loss(micro, term.source, computed.values, output)
    return micro.scale * output.loss


def build_sampled_pass(rollout: Rollout, model: str = POLICY, column: str = "sampled") -> ScoringPass:
    """Return prompt and completion; every sampled token is scored, the end tag included."""
    problem, tokens = rollout.problem, rollout.completion.token_ids
    prompt = problem.teacher_prompt
    scored = {column: (len(prompt), len(prompt) + len(tokens))}
    return ScoringPass(model, prompt, tokens, scored, problem.row)


@dataclass(eq=False)
class PolicyGradient(LossTerm):
    """The policy loss on the sampled tokens.

    Args:
        policy_loss: The loss.
        importance: Weights pi_trainer / pi_engine; None: no weights.
        is_repeated: Whether an iteration updates the policy several times: the ratio is then to the policy
            at its start.
        credit: What each token gains.
        build_pass: Returns the sampled tokens that it learns from.
    """

    with_entropy = True

    policy_loss: PolicyLoss
    importance: TruncatedImportanceSampling | None
    is_repeated: bool = False
    credit: Credit = field(default_factory=RewardCredit)
    build_pass: Callable[[Rollout], ScoringPass] = build_sampled_pass

    @property
    def source(self) -> object:
        """See `LossTerm.source`."""
        return self.policy_loss

    def scoring_passes(self, rollout: Rollout) -> list[ScoringPass]:
        """Return passes of the reference, if there is a KL penalty, of the old policy and of the credit."""
        passes = [build_sampled_pass(rollout, REFERENCE, "reference")] if self.policy_loss.kl_coef else []
        passes += [build_sampled_pass(rollout, POLICY, OLD)] if self.is_repeated else []
        return passes + self.credit.scoring_passes(rollout)

    def scoring_pass(self, rollout: Rollout) -> ScoringPass:
        """Return the sampled tokens."""
        return self.build_pass(rollout)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """See `PolicyLoss`."""
        micro, log_probs, num_scored = inputs.micro, inputs.log_probs, inputs.num_scored
        old_log_probs, weights, mismatch = compare_with_engine(inputs, self.importance)
        loss, metrics = self.policy_loss(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            ref_log_probs=inputs.pad_column("reference") if self.policy_loss.kl_coef else None,
            importance_weights=weights,
            advantages=self.credit(inputs),
            token_mask=inputs.token_mask,
            num_tokens=num_scored,
            num_sequences=micro.num_sequences,
        )
        assert inputs.computed.entropy is not None
        entropy = inputs.computed.entropy.detach().sum() / num_scored
        metrics |= {"policy/loss": loss.detach(), "policy/entropy": entropy}
        return LossOutput(loss, metrics, mismatch)


@dataclass(eq=False)
class AnswerTerm(LossTerm):
    """The policy ascends the solution's score itself, where it is the student of a likelihood reward.

        grad E r(z) = E [ r(z) grad log pi(z) ]  +  E [ grad r(z) ]
                        `PolicyGradient`              `AnswerTerm`

    A completion's term has the weight that the policy loss gives to each of its sampled tokens.

    Args:
        score: The reward's score of a solution.
        policy_loss: The loss of the sampled tokens.
        student: The policy as a student.
        weight: Weight of the term.
    """

    score: AnswerScore
    policy_loss: PolicyLoss
    student: Student
    weight: float

    def scoring_pass(self, rollout: Rollout) -> ScoringPass:
        """Return the solution after the thought."""
        scoring = build_solution_pass(self.student, rollout.require_view(), self.score.temperature)
        return replace(scoring, scored={"answer": scoring.scored["solution"]})

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return minus the weighted scores."""
        rollouts, micro, device = inputs.rollouts, inputs.micro, inputs.log_probs.device
        closed = upload([row.closed for row in rollouts], device, torch.bool)
        scores = self.score.score_answers(inputs.log_probs, inputs.token_mask, closed)  # (n,)
        mask = upload(
            mask_tokens([len(row.completion.token_ids) for row in rollouts]).float(), device
        )  # (n, T)
        mean_weights = self.policy_loss.mean_weights(mask, micro.num_tokens, micro.num_sequences)
        weights = self.policy_loss.loss_weights(mask, mean_weights)[:, 0].to(scores)
        loss = -self.weight * (weights * scores).sum()
        return LossOutput(loss, {"policy/answer_loss": loss.detach()})


def compare_with_engine(
    inputs: LossInputs, importance: TruncatedImportanceSampling | None
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Choose the log-probs that a loss's ratio refers to, and measure how far workers and trainer differ.

    Returns:
        The log-probs to which the policy's have their ratio, (n, T): those of the engine if older weights
        sampled and no weights correct for that, else the policy's at the start of the iteration; importance
        weights, (n, T), if they are used; and how far each worker and the trainer differ
        (`measure_mismatch`), if that is known.

    Raises:
        RuntimeError: If the engine's log-probs are needed, but unknown.
    """
    old_log_probs, engine_log_probs = inputs.old_log_probs, inputs.engine_log_probs
    if engine_log_probs is None:
        if inputs.stale or importance is not None:
            raise RuntimeError(
                "Stale rollouts and importance sampling need the log-probs of the policy that sampled, but "
                "the engine sent none. Let it report them, or set model.max_staleness to 0 and "
                "model.importance_sampling to null."
            )
        return old_log_probs, None, {}
    weights = None if importance is None else importance(old_log_probs, engine_log_probs, inputs.token_mask)
    workers = [rollout.completion.worker or "" for rollout in inputs.rollouts]
    mismatch = {}
    for worker in dict.fromkeys(workers):
        sampled_here = upload([name == worker for name in workers], old_log_probs.device, torch.bool)[:, None]
        mask = inputs.token_mask & sampled_here
        mismatch[worker] = measure_mismatch(old_log_probs, engine_log_probs, mask, weights)
    return engine_log_probs if inputs.stale and weights is None else old_log_probs, weights, mismatch
