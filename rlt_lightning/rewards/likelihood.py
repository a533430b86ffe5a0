"""Reward a thought by how probable it makes the reference solution, without a checker or judge.

| class | reward of a thought z for the solution y |
|---|---|
| `LogProbReward` | sum, mean or another reduction of log p(y_t | z) |
| `RLPRReward` | mean p(y_t | z), above the same without a thought, and a bonus for the format |
| `VeriFreeReward` | p(y | z), the probability of the whole solution |
| `NOVERReward` | the thought's rank in its group by perplexity, and a bonus for shorter ones |

Each is a pure function of the solution's log-probs, the lengths of the thoughts and their groups. Who
computes the log-probs, the scorer, is `model.student` of `RLTModule`: the policy itself, its reference or a
frozen model. docs/objectives.md says where paper and released code differ; the code is followed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlt_lightning.numerics.rewards import (
    TokenReduction,
    masked_min,
    mean_of_tokens,
    reduce_tokens,
    require_option,
    require_reduction,
    require_tokens,
    student_kl_penalty,
)
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards.base import Reward, build_table
from rlt_lightning.rewards.explanations import (
    build_empty_solution_pass,
    build_kl_passes,
    build_solution_pass,
    estimate_kl,
)
from rlt_lightning.rewards.rlt import RLTReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import Group, Log, Record, Table, Term, columns_of
from rlt_lightning.rollouts.step import ScoringPass, StepBatch, pad_rows
from rlt_lightning.types import Rollout


@dataclass(frozen=True)
class SolutionScores:
    """The scorer's values of N thoughts.

    Attributes:
        log_probs: Log-probs of the solution's tokens after the thought, (N, S), nats.
        token_mask: True on solution tokens, (N, S).
        closed: False where a thought was cut off or ended without its tag, bool, (N,).
        lengths: Tokens of each thought, (N,).
        groups: A number that the thoughts of one group share, (N,).
        empty_log_probs: `log_probs` after an empty thought, (N, S); None if the reward has no baseline.
        kl: KL of the policy from the scorer at the thought's tokens, (N, K), nats; None without a KL term.
        kl_mask: True on the thought's tokens, (N, K); None without a KL term.
    """

    log_probs: Tensor
    token_mask: Tensor
    closed: Tensor
    lengths: Tensor
    groups: Tensor
    empty_log_probs: Tensor | None = None
    kl: Tensor | None = None
    kl_mask: Tensor | None = None


@dataclass(frozen=True)
class LikelihoodReward(Reward, ABC):
    """A reward of the solution's log-probs after a thought.

    A subclass writes `score_solution` and `score_format` and, where it has them, the other terms. The KL term
    comes on top: a thought that is not closed pays it too.

    Args:
        temperature: Temperature of the log-probs; None: that of sampling.
        kl_weight: Weight of r_KL, how unnatural the thought is to the scorer: the mean over its
            tokens of the KL of the policy from it, as in RLT. 0: no such term. The scorer must be another
            model.
        kl_estimator: k1 is the sampled log-ratio, k3 Schulman's estimator, exact the sum over the vocabulary.
    """

    judges = ("thoughts",)
    # Whether the solution is also read after an empty thought.
    baseline: ClassVar[Literal["none", "empty"]] = "none"
    # Whether `score_solution` is an objective that the policy may ascend itself, where it is the scorer.
    has_answer_term: ClassVar[bool] = False

    temperature: float | None = None
    kl_weight: float = field(default=0.0, kw_only=True)
    kl_estimator: Literal["k1", "k3", "exact"] = field(default="k1", kw_only=True)

    def __post_init__(self) -> None:
        holds = self.temperature is None or self.temperature > 0
        require_option("temperature", self.temperature, holds, "positive, or null for that of sampling")
        require_option(
            "kl_weight",
            self.kl_weight,
            self.kl_weight >= 0,
            "at least 0; 0 switches the term off",
        )
        self.kl_settings(temperature=1.0)  # checks the estimator

    def columns(self) -> tuple[str, ...]:
        """See `Reward.columns`."""
        columns = ("reward", "solution_reward", "format_reward")
        return (*columns, "kl_reward") if self.kl_weight else columns

    def scoring_passes(self, rollout: Rollout, student: Student) -> list[ScoringPass]:
        """Return the solution after the thought as the scorer reads it and, with a KL term, the thought."""
        view, temperature = rollout.require_view(), self.temperature
        passes = [build_solution_pass(student, view, temperature)]
        if self.kl_weight:
            passes = build_kl_passes(student, view, self.kl_settings(1.0), temperature, temperature)
        if self.baseline == "empty":
            passes.append(build_empty_solution_pass(student, view.problem, temperature))
        return passes

    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> Table:
        """Return the terms and, where thoughts are compared, the figures for `score`."""
        scores = self.build_scores(step, rows)
        table = self(scores)
        if self.compares:
            mean = mean_of_tokens(scores.log_probs, scores.token_mask)
            figures = {"mean": mean, "closed": scores.closed.to(mean), "length": scores.lengths.float()}
            table |= {Group(name): values for name, values in figures.items()}
        return table

    def build_scores(self, step: StepBatch, rows: Sequence[int]) -> SolutionScores:
        """Return the scorer's values of n thoughts; each is its own group."""
        rollouts = step.rollouts(rows)
        log_probs, token_mask = step.pad("solution", rows)
        device, kl, kl_mask = log_probs.device, None, None
        if self.kl_weight:
            kl, kl_mask = pad_rows([estimate_kl(step, row, self.kl_settings(1.0)) for row in rows])
        return SolutionScores(
            log_probs=log_probs,
            token_mask=token_mask,
            closed=upload([r.closed for r in rollouts], device),
            lengths=upload([r.require_view().num_tokens for r in rollouts], device),
            groups=torch.arange(len(rows), device=device),
            empty_log_probs=step.pad("empty", rows)[0] if self.baseline == "empty" else None,
            kl=kl,
            kl_mask=kl_mask,
        )

    def score(self, table: Table, group_size: int) -> Table:
        """See `Reward.score`; thoughts of whole groups are compared by one number of each."""
        return table | self.compare(table, group_size) if self.compares else table

    def compare(self, table: Table, group_size: int) -> Table:
        """Return the columns that depend on the whole group, (N,) each."""
        figures = columns_of(table, Group)
        mean = figures["mean"].unsqueeze(1)  # (N, 1)
        # By index, not by row: one problem may have two groups in a step.
        groups = torch.arange(len(mean), device=mean.device) // group_size
        every = torch.ones_like(mean, dtype=torch.bool)
        scores = SolutionScores(mean, every, figures["closed"] > 0, figures["length"], groups)
        terms = columns_of(table, Term) | {"solution": self.score_solution(scores)}
        efficiency = self.score_efficiency(scores)
        return build_table(terms if efficiency is None else terms | {"efficiency": efficiency})

    def find_kl(self, temperature: float) -> RLTReward | None:
        """See `Reward.find_kl`."""
        return self.kl_settings(temperature) if self.kl_weight else None

    def find_answer(self) -> LikelihoodReward | None:
        """See `Reward.find_answer`."""
        return self if self.has_answer_term else None

    def score_answers(self, log_probs: Tensor, token_mask: Tensor, closed: Tensor) -> Tensor:
        """See `AnswerScore.score_answers`; scores that compare thoughts have no answer term."""
        unused = torch.zeros_like(closed)
        return self.score_solution(SolutionScores(log_probs, token_mask, closed, unused, unused))

    def kl_settings(self, temperature: float) -> RLTReward:
        """Return the same KL as RLT's reward has it, for sampling at a temperature."""
        divisor = self.temperature or temperature or 1.0  # at temperature 0 the models' distributions count
        kind = self.kl_estimator
        return RLTReward(kl_estimator=kind, teacher_temperature=divisor, student_temperature=divisor)

    @abstractmethod
    def score_solution(self, scores: SolutionScores) -> Tensor:
        """Return the solution's term, (N,). With `has_answer_term` its gradient is the answer term."""

    @abstractmethod
    def score_format(self, scores: SolutionScores) -> Tensor:
        """Return the format's term, (N,)."""

    def score_efficiency(self, scores: SolutionScores) -> Tensor | None:
        """Return the term of efficiency, (N,); None if the reward has none."""
        return None

    def score_baseline(self, scores: SolutionScores) -> Tensor | None:
        """Return the baseline of the solution's term, (N,); None if there is none."""
        return None

    def __call__(self, scores: SolutionScores) -> Table:
        """Return the reward of N thoughts and its terms, each (N,). Means and minima are in nats.

        Raises:
            ValueError: If a row has no solution tokens.
        """
        require_tokens(scores.token_mask, "solution token")
        details = {
            "solution_log_prob_mean": mean_of_tokens(scores.log_probs, scores.token_mask),
            "solution_log_prob_min": masked_min(scores.log_probs, scores.token_mask),
        }
        terms = {"solution": self.score_solution(scores)}
        efficiency, baseline = self.score_efficiency(scores), self.score_baseline(scores)
        if efficiency is not None:
            terms["efficiency"] = efficiency
        if scores.kl is not None and scores.kl_mask is not None:
            details["kl_mean"] = student_kl_penalty(scores.kl, scores.kl_mask, max_coef=0.0)
            terms["kl"] = -self.kl_weight * details["kl_mean"]
        table = build_table(terms | {"format": self.score_format(scores)}, baseline)
        for name, values in details.items():
            table |= {Log(f"student/{name}"): values, Record(name): values}
        return table


@dataclass(frozen=True)
class LogProbReward(LikelihoodReward):
    """The log-probability of the solution (Likelihood-Based Reward Designs, arXiv:2602.03979).

    r(z) = reduce_t log p(y_t | z) + format          (sum: log p(y | z); mean: that of a token)

    Args:
        temperature: Temperature of the log-probs; None: that of sampling.
        reduction: sum, mean, or another reduction of the released RLT code.
        format_penalty: Added to the reward of a thought that is not closed.
    """

    has_answer_term = True

    reduction: TokenReduction = "sum"
    format_penalty: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_reduction("reduction", self.reduction)
        holds = self.format_penalty <= 0
        require_option("format_penalty", self.format_penalty, holds, "at most 0; 0 switches the term off")

    def score_solution(self, scores: SolutionScores) -> Tensor:
        """Reduce the log-probs."""
        return reduce_tokens(scores.log_probs, scores.token_mask, self.reduction)

    def score_format(self, scores: SolutionScores) -> Tensor:
        """Return 0, or the penalty of a thought that is not closed."""
        return torch.zeros_like(scores.log_probs[:, 0]).masked_fill(~scores.closed, self.format_penalty)


@dataclass(frozen=True)
class RLPRReward(LikelihoodReward):
    """How much more probable the solution's tokens are after the thought than without one (arXiv:2506.18254).

    r(z) = (1 - c) * max(0, B(z) - A) + c * closed(z),   B(z) = mean_t p(y_t | z),   A = B(empty thought)

    B of a thought that is not closed is 0 (OpenBMB/RLPR 8490fca, verl/workers/reward_manager/prob.py).

    Args:
        temperature: Temperature of the log-probs; None: that of sampling.
        format_coef: c, the weight of the format; 0.1 in the code.
    """

    baseline = "empty"

    format_coef: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_option("format_coef", self.format_coef, 0 <= self.format_coef <= 1, "between 0 and 1")

    def score_solution(self, scores: SolutionScores) -> Tensor:
        """Return the gain over an empty thought, not below 0."""
        after = self.mean_prob(scores.log_probs, scores.token_mask).masked_fill(~scores.closed, 0.0)
        gain = after - self.score_baseline(scores)
        return (1 - self.format_coef) * gain.clamp(min=0)

    def score_baseline(self, scores: SolutionScores) -> Tensor:
        """Return A, (N,)."""
        assert scores.empty_log_probs is not None, "RLPR needs the log-probs after an empty thought"
        return self.mean_prob(scores.empty_log_probs, scores.token_mask)

    def mean_prob(self, log_probs: Tensor, token_mask: Tensor) -> Tensor:
        """Return the mean probability of the solution's tokens, (N,)."""
        return mean_of_tokens(log_probs.exp(), token_mask)

    def score_format(self, scores: SolutionScores) -> Tensor:
        """Return c for a closed thought, else 0."""
        return self.format_coef * scores.closed.to(scores.log_probs.dtype)


@dataclass(frozen=True)
class VeriFreeReward(LikelihoodReward):
    """The probability of the whole solution (VeriFree, arXiv:2505.21493; sail-sg/VeriFree 718b363).

    r(z) = p(y | z) = exp(sum_t log p(y_t | z)),   0 for a thought that is not closed

    The released run has leave-one-out advantages and the answer term, whose gradient r(z) * grad log p(y | z)
    is the reward-weighted one of the paper.
    """

    has_answer_term = True

    def score_solution(self, scores: SolutionScores) -> Tensor:
        """Return the probability."""
        total = reduce_tokens(scores.log_probs, scores.token_mask, "sum")
        return total.exp().masked_fill(~scores.closed, 0.0)

    def score_format(self, scores: SolutionScores) -> Tensor:
        """Return 0: the format has no term."""
        return torch.zeros_like(scores.log_probs[:, 0])


@dataclass(frozen=True)
class NOVERReward(LikelihoodReward):
    """The rank of the thought in its group by the solution's perplexity (NOVER, arXiv:2505.16022).

    PPL(z) = exp(-mean_t log p(y_t | z) / N(z)),   N(z) = max(1, 1 + log10 |z|),   |z| tokens of the thought
    r(z) = w_r * (n - rank(z)) / n + w_e * E(z) + w_f,   0 for a thought that is not closed

    n are the group's closed thoughts, rank counts those of lower perplexity from 0, and E is the part of the
    other n - 1 that are both longer and of higher perplexity, 0 if there is none (thinkwee/NOVER cb1a4ef,
    reward_functions.py and utils.py).

    Args:
        temperature: Temperature of the log-probs; None: that of sampling.
        rank_weight: w_r.
        efficiency_weight: w_e.
        format_weight: w_f.
    """

    compares = True

    rank_weight: float = 1.0
    efficiency_weight: float = 1.0
    format_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank_weight", "efficiency_weight", "format_weight"):
            value = getattr(self, name)
            require_option(name, value, value >= 0, "at least 0; 0 switches the term off")

    def columns(self) -> tuple[str, ...]:
        """See `Reward.columns`."""
        return (*super().columns(), "efficiency_reward")

    def nats(self, scores: SolutionScores) -> Tensor:
        """Return log PPL of each thought, (N,), nats."""
        lengths = scores.lengths.to(scores.log_probs.dtype).clamp(min=1)
        return -mean_of_tokens(scores.log_probs, scores.token_mask) / (1 + lengths.log10())

    def comparable(self, scores: SolutionScores) -> Tensor:
        """Return whether both of two thoughts are closed and of one group, (N, N)."""
        same = scores.groups.unsqueeze(1) == scores.groups.unsqueeze(0)
        return same & scores.closed.unsqueeze(1) & scores.closed.unsqueeze(0)

    def score_solution(self, scores: SolutionScores) -> Tensor:
        """Return the rank's term."""
        nats, comparable = self.nats(scores), self.comparable(scores)
        lower = nats.unsqueeze(0) < nats.unsqueeze(1)  # (N, N), whether j is better than i
        equal = nats.unsqueeze(0) == nats.unsqueeze(1)
        earlier = torch.ones_like(equal).tril(-1)  # of equal ones the first is better, as the code sorts
        rank = ((lower | (equal & earlier)) & comparable).sum(dim=1)
        number = comparable.sum(dim=1).clamp(min=1)
        return (self.rank_weight * (number - rank) / number).masked_fill(~scores.closed, 0.0)

    def score_efficiency(self, scores: SolutionScores) -> Tensor:
        """Return the term of efficiency."""
        nats, lengths, comparable = self.nats(scores), scores.lengths, self.comparable(scores)
        beaten = (nats.unsqueeze(1) < nats.unsqueeze(0)) & (lengths.unsqueeze(1) < lengths.unsqueeze(0))
        num_others = (comparable.sum(dim=1) - 1).clamp(min=1)
        return self.efficiency_weight * (beaten & comparable).sum(dim=1).to(nats.dtype) / num_others

    def score_format(self, scores: SolutionScores) -> Tensor:
        """Return the weight of the format for a closed thought, else 0."""
        return self.format_weight * scores.closed.to(scores.log_probs.dtype)
