"""The reward of Reinforcement-Learned Teachers (arXiv:2506.08388): does the student understand it?

To add a term without changing this file, write a subclass of `RLTReward`: name the term in `extra_names` and
return its values from `extra_terms` (docs/extend.md has an example).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlt_lightning.numerics.divergence import log_ratio_kl, schulman_kl
from rlt_lightning.numerics.rewards import (
    TokenReduction,
    masked_max,
    masked_min,
    mean_of_tokens,
    require_option,
    require_reduction,
    student_kl_penalty,
    student_solution_reward,
    with_zero_for_empty_rows,
)
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.rewards.base import CountedTokens, Reward, build_table
from rlt_lightning.rewards.explanations import (
    build_empty_solution_pass,
    build_kl_passes,
    estimate_kl,
)
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import Log, Record, Table
from rlt_lightning.rollouts.step import ScoringPass, StepBatch, pad_rows
from rlt_lightning.types import InputError, Rollout

TERMS = ("solution", "kl", "format")


@dataclass(frozen=True)
class RLTReward(Reward):
    """The reward of an explanation; its defaults are the released recipe's.

    r = solution_weight * r_SS - kl_weight * r_KL + format          (RLT, arXiv:2506.08388, section 3.3)

    A subclass may add terms: it names them in `extra_names` and returns them from `extra_terms`.

    Args:
        solution_weight: Weight of r_SS, `student_solution_reward`.
        min_coef: Weight of the hardest solution token inside r_SS, alpha in the paper.
        kl_weight: Weight of r_KL, `student_kl_penalty`, lambda in the paper.
        max_coef: Weight of the least natural explanation token inside r_KL, alpha in the paper.
        format_penalty: Added to the reward of a badly formed completion.
        kl_estimator: k1 is the sampled log-ratio, k3 Schulman's estimator, exact the sum over the vocabulary.
        score_given: Let r_KL count the separator that the prompt ends with, as the released code does. The
            teacher did not sample it, so k1 of it estimates no KL and can pay for being short.
        teacher_temperature: Temperature of the teacher's log-probs in the KL.
        student_temperature: Temperature of the student's log-probs, in the KL and on the solution.
        normalise_log_probs: exp turns the solution's log-probs into probabilities.
        normalise_kl: one_minus_exp turns each token's KL into 1 - exp(-KL), below 1.
        clip_log_probs: Lower bound on a solution token's log-prob, nats, applied before normalisation.
        clip_kl: Bound on |KL| of an explanation token, nats: clipped to -clip_kl ... clip_kl, before it is
            normalised.
        baseline: empty: r_SS is the gain over saying nothing, r_SS(explanation) - r_SS(empty explanation).
            Any other text is an explanation that says nothing, filler, and stands in place of the empty one.
            All completions of a problem lose the same, so advantages and gradients stay.
        reduction: The reduction in place of the mean in r_SS, one of the released code's.
        kl_reduction: The same in r_KL.

    Raises:
        ValueError: If an option is out of range.
    """

    judges = ("explanations",)
    has_tokens = True
    has_baseline = True
    # The names of the terms that a subclass adds, in lower case.
    extra_names: ClassVar[tuple[str, ...]] = ()

    solution_weight: float = 1.0
    min_coef: float = 0.01
    kl_weight: float = 3.0
    max_coef: float = 0.01
    format_penalty: float = -1.0
    kl_estimator: Literal["k1", "k3", "exact"] = "k1"
    score_given: bool = False
    teacher_temperature: float = 0.7
    student_temperature: float = 0.7
    normalise_log_probs: Literal["none", "exp"] = "none"
    normalise_kl: Literal["none", "one_minus_exp"] = "none"
    clip_log_probs: float | None = None
    clip_kl: float | None = None
    baseline: str = "none"
    reduction: TokenReduction = "mean"
    kl_reduction: TokenReduction = "mean"

    def __post_init__(self) -> None:
        for name in ("solution_weight", "min_coef", "kl_weight", "max_coef"):
            self.require(name, getattr(self, name) >= 0, "at least 0; 0 switches the term off")
        self.require("format_penalty", self.format_penalty <= 0, "at most 0; 0 switches the term off")
        for name in ("teacher_temperature", "student_temperature"):
            self.require(name, getattr(self, name) > 0, "positive; 1.0 is the model's own distribution")
        self.require("kl_estimator", self.kl_estimator in ("k1", "k3", "exact"), "k1, k3 or exact")
        self.require("normalise_log_probs", self.normalise_log_probs in ("none", "exp"), "none or exp")
        self.require("normalise_kl", self.normalise_kl in ("none", "one_minus_exp"), "none or one_minus_exp")
        self.require("baseline", bool(self.baseline.strip()), "none, empty or a text that says nothing")
        for name in ("reduction", "kl_reduction"):
            require_reduction(name, getattr(self, name))
        bound = self.clip_log_probs
        self.require("clip_log_probs", bound is None or bound < 0, "negative nats, or null for no bound")
        bound = self.clip_kl
        self.require("clip_kl", bound is None or bound > 0, "positive nats, or null for no bound")
        for name in self.extra_names:
            if name in TERMS or name.startswith("val_") or not name.isidentifier():
                raise ValueError(
                    f"A term of a reward needs a new name, such as 'length', but "
                    f"{type(self).__name__}.extra_names has {name!r}, which is taken or no name. "
                    "Choose another."
                )

    def scoring_passes(self, rollout: Rollout, student: Student) -> list[ScoringPass]:
        """Return the solution and the explanation as the student reads them, and as the teacher does."""
        view, temperature = rollout.require_view(), self.student_temperature
        passes = build_kl_passes(student, view, self, temperature, self.teacher_temperature)
        if self.baseline != "none":
            text = "" if self.baseline == "empty" else self.baseline
            passes.append(build_empty_solution_pass(student, view.problem, temperature, text))
        return passes

    def measure(self, step: StepBatch, rows: Sequence[int], student: Student) -> Table:
        """Return the reward with its terms."""
        rollouts = step.rollouts(rows)
        solution, solution_mask = step.pad("solution", rows)  # (n, S)
        kl = [estimate_kl(step, row, self) for row in rows]
        step.tokens.setdefault("kl", {}).update(zip(rows, kl, strict=True))
        kl_values, kl_mask = pad_rows(kl)  # (n, K)
        closed = upload([r.closed and not r.empty for r in rollouts], solution.device)
        extra = self.check_extra_terms(self.extra_terms(step, rows), closed)
        empty = step.pad("empty", rows)[0] if self.baseline != "none" else None
        return self(solution, solution_mask, kl_values, kl_mask, closed, extra, empty)

    def list_tokens(self, step: StepBatch, row: int) -> CountedTokens:
        """See `Reward.list_tokens`."""
        view = step.rollout(row).require_view()
        return CountedTokens(
            # With the separator before the explanation, if it counts.
            (view.problem.think_prefix if self.score_given else []) + view.compared,
            step.tokens["kl"][row].tolist(),
            view.problem.solution_ids,
            step.tokens["solution"][row].tolist(),
        )

    def find_kl(self, temperature: float) -> RLTReward:
        """See `Reward.find_kl`."""
        return self

    def columns(self) -> tuple[str, ...]:
        """See `Reward.columns`."""
        return ("reward", *(f"{name}_reward" for name in (*TERMS, *self.extra_names)))

    def extra_terms(self, step: StepBatch, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return terms that are added to the reward, with their weight and sign; a subclass has some.

        A term is logged as reward/NAME and reward/val_NAME, and recorded as NAME_reward.
        `step.rollouts(rows)` are the completions with their `text` and `problem`;
        `step.pad("solution", rows)` the student's log-probs of the solution and their mask, (n, S). Of the
        explanation, "explanation" and "teacher" are the log-probs of student and teacher, unless the KL is
        exact, and "kl" is the KL. A subclass may declare further columns in `scoring_passes`.

        Args:
            step: The step, with the token columns of these rows.
            rows: n rows that this rank has read.

        Returns:
            One for each of `extra_names`, (n,), on any device.
        """
        return {}

    def check_extra_terms(self, terms: dict[str, Tensor], closed: Tensor) -> dict[str, Tensor]:
        """Return the terms of `extra_terms` in the order of the names, on the device of `closed`, (n,).

        Raises:
            InputError: If the terms have wrong names or shapes.
        """
        shapes = {name: tuple(values.shape) for name, values in terms.items()}
        if shapes != dict.fromkeys(self.extra_names, (len(closed),)):
            raise InputError(
                f"{type(self).__name__}.extra_terms must return a tensor ({len(closed)},) for each of "
                f"extra_names, {list(self.extra_names)}, but returned {shapes}. Correct it."
            )
        return {name: terms[name].to(closed.device, torch.float32) for name in self.extra_names}

    def require(self, name: str, holds: bool, expected: str) -> None:
        """Raise a ValueError that names an option unless it holds."""
        require_option(name, getattr(self, name), holds, expected)

    def __call__(
        self,
        solution_log_probs: Tensor,
        solution_mask: Tensor,
        kl: Tensor,
        kl_mask: Tensor,
        format_ok: Tensor,
        extra: dict[str, Tensor] | None = None,
        empty_log_probs: Tensor | None = None,
    ) -> Table:
        """Return the reward of each completion and its terms.

        The reward is the sum of w_SS * r_SS, -lambda * r_KL, 0 or the format penalty, and `extra`. Means,
        minima and maxima over tokens are after clipping and normalisation; those logged under student/ are
        before them, nats.

        Args:
            solution_log_probs: Student log-probabilities of the solution tokens, (N, S), nats.
            solution_mask: True on solution tokens, (N, S).
            kl: KL of teacher from student at each explanation token, raw, (N, K), nats.
            kl_mask: True on explanation tokens, (N, K). A row may have none.
            format_ok: False where the completion is badly formed, bool, (N,).
            extra: The terms of `extra_terms`, on the device of the others.
            empty_log_probs: With a baseline, `solution_log_probs` after the explanation that says nothing,
                (N, S), nats.

        Returns:
            The table of the completions, each column (N,).

        Raises:
            ValueError: If a row has no solution tokens.
        """
        kl, kl_mask = with_zero_for_empty_rows(kl, kl_mask)
        log_probs = self.process_log_probs(solution_log_probs, solution_mask)
        processed_kl = self.process_kl(kl, kl_mask)

        solution = self.reduce_solution(log_probs, solution_mask)  # (N,)
        baseline = self.compute_baseline(empty_log_probs, solution_mask)
        solution = self.solution_weight * (solution if baseline is None else solution - baseline)
        kl_penalty = student_kl_penalty(processed_kl, kl_mask, self.max_coef, self.kl_reduction)
        penalty = -self.kl_weight * kl_penalty
        format_reward = torch.zeros_like(solution).masked_fill(~format_ok, self.format_penalty)
        terms = dict(zip(TERMS, (solution, penalty, format_reward), strict=True)) | (extra or {})
        processed = list_statistics(log_probs, solution_mask, processed_kl, kl_mask)
        raw = list_statistics(solution_log_probs, solution_mask, kl, kl_mask)
        table = build_table(terms, baseline)
        for name, values in processed.items():
            table |= {Log(f"reward/{name}"): values, Record(name): values, Log(f"student/{name}"): raw[name]}
        return table

    def compute_baseline(self, empty_log_probs: Tensor | None, solution_mask: Tensor) -> Tensor | None:
        """Return r_SS of an empty explanation, (N,), from its log-probs, (N, S); None without a baseline."""
        if self.baseline == "none":
            return None
        assert empty_log_probs is not None, "reward.baseline needs the log-probs after an empty explanation"
        processed = self.process_log_probs(empty_log_probs, solution_mask)
        return self.reduce_solution(processed, solution_mask)

    def reduce_solution(self, processed: Tensor, solution_mask: Tensor) -> Tensor:
        """Return r_SS, (N,), of the solution's log-probs after `process_log_probs`, (N, S)."""
        return student_solution_reward(processed, solution_mask, self.min_coef, self.reduction)

    def token_kl(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Estimate the KL of teacher from student at each explanation token, by the estimator of the options.

        Args:
            log_p: The teacher's log-probabilities of the explanation tokens, any shape, nats.
            log_q: The student's, same shape, nats.

        Returns:
            Same shape, nats.

        Raises:
            ValueError: If the estimator is `exact`, which needs the logits of both.
        """
        if self.kl_estimator == "exact":
            raise ValueError(
                "token_kl estimates from log-probs of sampled tokens, but reward.kl_estimator is 'exact'. "
                "Call linear_divergence on both models' hidden states, or choose k1 or k3."
            )
        return log_ratio_kl(log_p, log_q) if self.kl_estimator == "k1" else schulman_kl(log_p, log_q)

    def process_log_probs(self, log_probs: Tensor, token_mask: Tensor) -> Tensor:
        """Clip and normalise the solution's log-probs, (N, S); padding becomes harmless."""
        log_probs = log_probs.masked_fill(~token_mask, 0.0)
        if self.clip_log_probs is not None:
            log_probs = log_probs.clamp(min=self.clip_log_probs)
        return log_probs.exp() if self.normalise_log_probs == "exp" else log_probs

    def process_kl(self, kl: Tensor, token_mask: Tensor) -> Tensor:
        """Clip and normalise the explanation tokens' KL, (N, K); padding becomes harmless."""
        kl = kl.masked_fill(~token_mask, 0.0)
        if self.clip_kl is not None:
            kl = kl.clamp(-self.clip_kl, self.clip_kl)
        return -torch.expm1(-kl) if self.normalise_kl == "one_minus_exp" else kl


def list_statistics(
    log_probs: Tensor, solution_mask: Tensor, kl: Tensor, kl_mask: Tensor
) -> dict[str, Tensor]:
    """Return the statistics of each completion's tokens, by name, (N,) each."""
    return {
        "solution_log_prob_mean": mean_of_tokens(log_probs, solution_mask),
        "solution_log_prob_min": masked_min(log_probs, solution_mask),
        "kl_mean": mean_of_tokens(kl, kl_mask),
        "kl_max": masked_max(kl, kl_mask),
    }
