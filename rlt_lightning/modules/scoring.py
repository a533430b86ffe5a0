"""Scoring: what the frozen student makes of explanations, token by token and as the RLT reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.modules.base import ScoredTokens, head_of, log_probs_of, pack, scored_hidden_states
from rlt_lightning.numerics.kl import head_exact_kl
from rlt_lightning.numerics.log_probs import head_log_probs
from rlt_lightning.numerics.packing import pack_by_tokens, to_padded
from rlt_lightning.numerics.rewards import RLTReward, require_finite
from rlt_lightning.types import Rollout, Scores


class StudentScorer:
    """Compute the RLT reward: one student forward for both terms, one teacher forward for r_KL.

    Args:
        policy: The teacher.
        student: The frozen student; it shares the teacher's vocabulary.
        reward: The reward and its options.
        micro_batch_tokens: Tokens per forward.
        head_chunk_size: Scored tokens per pass through a language-model head.
    """

    def __init__(
        self, policy: Any, student: Any, reward: RLTReward, micro_batch_tokens: int, head_chunk_size: int
    ) -> None:
        self.policy = policy
        self.student = student
        self.reward = reward
        self.micro_batch_tokens = micro_batch_tokens
        self.head_chunk_size = head_chunk_size

    @torch.no_grad()
    def __call__(self, rows: list[Rollout]) -> Scores:
        """Score N rollouts.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite, naming the rows and the term.
        """
        solution: list[Tensor] = [torch.empty(0)] * len(rows)
        kl: list[Tensor] = [torch.empty(0)] * len(rows)
        lengths = [max(len(student_sequence(r)[0]), len(teacher_sequence(r)[0])) for r in rows]
        for indices in pack_by_tokens(lengths, self.micro_batch_tokens):
            scored = self.score_micro_batch([rows[i] for i in indices])
            for i, log_probs, values in zip(indices, *scored, strict=True):
                solution[i], kl[i] = log_probs, values
        solution_log_probs, solution_mask = pad_rows(solution)  # (N, S)
        kl_values, kl_mask = pad_rows(kl)  # (N, K)
        format_ok = torch.tensor([r.closed and not r.empty for r in rows], device=solution_mask.device)
        terms = self.reward(solution_log_probs, solution_mask, kl_values, kl_mask, format_ok)
        require_finite(terms.reward, "reward", [r.problem.row for r in rows])
        return Scores(terms, solution, kl)

    def score_micro_batch(self, rows: list[Rollout]) -> tuple[list[Tensor], list[Tensor]]:
        """Return per row the student's log-probs of the solution, (S,), and KL of the think tokens, (K,)."""
        device = next(self.student.parameters()).device
        student = pack([student_sequence(r) for r in rows], device)
        hidden = scored_hidden_states(self.student, student)  # (sum of K + S, H)
        log_probs, _ = head_log_probs(
            hidden,
            head_of(self.student),
            student.targets,
            self.reward.student_temperature,
            self.head_chunk_size,
        )
        num_think = [len(r.problem.think_prefix) + r.num_think for r in rows]
        splits = [n for k, r in zip(num_think, rows, strict=True) for n in (k, len(r.problem.solution_ids))]
        pieces = log_probs.split(splits)  # think, solution, think, solution, …
        numbers = [r.problem.row for r in rows]
        require_finite_rows(pieces[1::2], "student log-prob of the solution", numbers)
        require_finite_rows(pieces[::2], "student log-prob of the explanation", numbers)
        think_hidden = torch.cat(hidden.split(splits)[::2])  # (sum of K, H)
        kl = self.think_kl(rows, torch.cat(pieces[::2]), think_hidden).split(num_think)
        require_finite_rows(kl, "KL of the explanation", numbers)
        return list(pieces[1::2]), list(kl)

    def think_kl(self, rows: list[Rollout], student_log_probs: Tensor, student_hidden: Tensor) -> Tensor:
        """KL of teacher from student at every think token of all rows, (sum of K,), nats."""
        reward, chunk_size = self.reward, self.head_chunk_size
        teacher = pack([teacher_sequence(r) for r in rows], student_hidden.device)
        if reward.kl_estimator != "exact":
            log_probs, _ = log_probs_of(self.policy, teacher, reward.teacher_temperature, chunk_size)
            return reward.token_kl(log_probs, student_log_probs)
        return head_exact_kl(
            scored_hidden_states(self.policy, teacher),
            head_of(self.policy),
            student_hidden,
            head_of(self.student),
            reward.teacher_temperature,
            reward.student_temperature,
            chunk_size,
        )


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


def require_finite_rows(rows: Sequence[Tensor], term: str, row_numbers: list[int]) -> None:
    """Check that every value of every row is finite, naming the rows where one is not."""
    values, _ = pad_rows(rows)
    require_finite(values, term, row_numbers)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths: values (N, T) with zeros behind, and their token_mask."""
    return to_padded(torch.cat(list(rows)), [len(row) for row in rows])
