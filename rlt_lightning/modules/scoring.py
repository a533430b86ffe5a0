"""Scoring: what the frozen student makes of explanations, token by token and as the RLT reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.modules.meter import PhaseCost
from rlt_lightning.modules.packed import (
    HeadOptions,
    head_exact_kl,
    head_log_probs,
    log_probs_of,
    scored_hidden_states,
)
from rlt_lightning.numerics.packing import (
    Extent,
    Layout,
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    micro_batches,
    to_padded,
)
from rlt_lightning.numerics.rewards import RLTReward, require_finite
from rlt_lightning.types import Problem, Rollout, Rollouts, Scores


@dataclass
class StudentScorer:
    """Compute the RLT reward: one student forward for both terms, at most one teacher forward for r_KL.

    The sampled estimators of r_KL take the teacher's log-probs from the rollouts where these have them at the
    reward's temperature.

    Args:
        policy: The teacher.
        student: The frozen student; it shares the teacher's vocabulary.
        reward: The reward and its options.
        micro_batch_tokens: Tokens per forward.
        layout: How sequences share a forward.
        head: How log-probs are computed from hidden states.
        recompute: Run the teacher even where the rollouts have its log-probs.
        cost: Where the tokens that models compute are counted.
    """

    policy: Any
    student: Any
    reward: RLTReward
    micro_batch_tokens: int = 16384
    layout: Layout = "auto"
    head: HeadOptions = HeadOptions()
    recompute: bool = False
    cost: PhaseCost | None = None

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Scores:
        """Score N rollouts.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite, naming the rows and the term.
        """
        rows = rollouts.rollouts
        students = [student_sequence(r) for r in rows]
        teachers = [teacher_sequence(r) for r in rows]
        given = self.sampled_log_probs(rollouts)
        needs_teacher = [] if given is not None else teachers
        extents = [
            Extent(
                r.problem.row,
                max(len(s.prefix) for s in sequences),
                max(len(s.rest) for s in sequences),
            )
            for r, *sequences in zip(rows, students, needs_teacher or students, strict=True)
        ]
        solution: list[Tensor] = [torch.empty(0)] * len(rows)
        kl: list[Tensor] = [torch.empty(0)] * len(rows)
        for micro_batch in micro_batches(extents, self.micro_batch_tokens, self.layout):
            hidden, student_log_probs = self.student_forward(students, micro_batch)  # (M, H), (M,)
            num_think = [think_length(rows[i]) for i in micro_batch.indices]
            num_solution = [len(rows[i].problem.solution_ids) for i in micro_batch.indices]
            splits = [n for pair in zip(num_think, num_solution, strict=True) for n in pair]
            pieces = student_log_probs.split(splits)  # think, solution, think, solution, …
            numbers = [rows[i].problem.row for i in micro_batch.indices]
            require_finite_rows(pieces[1::2], "student log-prob of the solution", numbers)
            require_finite_rows(pieces[::2], "student log-prob of the explanation", numbers)
            if self.reward.kl_estimator == "exact":
                values = self.exact_kl(teachers, micro_batch, torch.cat(hidden.split(splits)[::2]))
            else:
                teacher_log_probs = (
                    self.teacher_log_probs(teachers, micro_batch)
                    if given is None
                    else torch.cat([given[i] for i in micro_batch.indices])
                )
                values = self.reward.token_kl(teacher_log_probs, torch.cat(pieces[::2]))
            kl_rows = values.split(num_think)
            require_finite_rows(kl_rows, "KL of the explanation", numbers)
            for place, i in enumerate(micro_batch.indices):
                solution[i], kl[i] = pieces[2 * place + 1], kl_rows[place]
        solution_log_probs, solution_mask = pad_rows(solution)  # (N, S)
        kl_values, kl_mask = pad_rows(kl)  # (N, K)
        format_ok = torch.tensor([r.closed and not r.empty for r in rows], device=solution_mask.device)
        terms = self.reward(solution_log_probs, solution_mask, kl_values, kl_mask, format_ok)
        require_finite(terms.reward, "reward", [r.problem.row for r in rows])
        return Scores(terms, solution, kl)

    def student_forward(
        self, sequences: list[ScoredSequence], micro_batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """The student's hidden states (M, H) and log-probs (M,) at think and solution tokens."""
        packed = self.pack(self.student, sequences, micro_batch)
        hidden = scored_hidden_states(self.student, packed)
        temperature = self.reward.student_temperature
        log_probs, _ = head_log_probs(self.student, hidden, packed.targets, temperature, self.head)
        return hidden, log_probs

    def teacher_log_probs(self, sequences: list[ScoredSequence], micro_batch: MicroBatch) -> Tensor:
        """The teacher's log-probs of all think tokens, (sum of K,), nats."""
        packed = self.pack(self.policy, sequences, micro_batch)
        return log_probs_of(self.policy, packed, self.reward.teacher_temperature, self.head)[0]

    def exact_kl(
        self, sequences: list[ScoredSequence], micro_batch: MicroBatch, student_hidden: Tensor
    ) -> Tensor:
        """KL of teacher from student over the whole vocabulary at all think tokens, (sum of K,), nats."""
        hidden = scored_hidden_states(self.policy, self.pack(self.policy, sequences, micro_batch))
        teacher = self.policy, hidden, self.reward.teacher_temperature
        student = self.student, student_hidden, self.reward.student_temperature
        return head_exact_kl(*teacher, *student, self.head)

    def sampled_log_probs(self, rollouts: Rollouts) -> list[Tensor] | None:
        """The teacher's log-probs of each row's think tokens, (K,), as they were sampled; None if unknown."""
        rows = rollouts.rollouts
        if self.recompute or self.reward.kl_estimator == "exact":
            return None
        if rollouts.temperature != self.reward.teacher_temperature:
            return None
        sampled = [r.completion.log_probs for r in rows]
        if any(log_probs is None for log_probs in sampled):
            return None
        given = self.separator_log_probs(rows)
        return [
            torch.cat([given[r.problem.row], given[r.problem.row].new_tensor(log_probs[: r.num_think])])
            for r, log_probs in zip(rows, sampled, strict=True)
            if log_probs is not None
        ]

    def separator_log_probs(self, rows: list[Rollout]) -> dict[int, Tensor]:
        """The teacher's log-probs of the separator before the explanation, by number of the problem.

        It was given rather than sampled: where the engine did not send log-probs of the prompt's end, one
        pass over each prompt finds them.
        """
        found: dict[int, Tensor] = {}
        unknown: list[Problem] = []
        for row in {r.problem.row: r for r in rows}.values():
            num_given = len(row.problem.think_prefix)
            sent = row.completion.prompt_log_probs or []
            if len(sent) < num_given:
                unknown.append(row.problem)
            else:
                end = torch.tensor(sent[len(sent) - num_given :], device=device_of(self.policy))
                found[row.problem.row] = end
        sequences = [
            ScoredSequence([], p.teacher_prompt, scored_end(len(p.teacher_prefix), len(p.think_prefix)))
            for p in unknown
        ]
        extents = [Extent(p.row, 0, len(p.teacher_prompt)) for p in unknown]
        for micro_batch in micro_batches(extents, self.micro_batch_tokens, self.layout):
            log_probs = self.teacher_log_probs(sequences, micro_batch)
            lengths = [len(unknown[i].think_prefix) for i in micro_batch.indices]
            for i, values in zip(micro_batch.indices, log_probs.split(lengths), strict=True):
                found[unknown[i].row] = values
        return found

    def pack(self, model: Any, sequences: list[ScoredSequence], micro_batch: MicroBatch) -> PackedSequences:
        """Lay a row's sequences out, and count them."""
        packed = PackedSequences.from_sequences(sequences, micro_batch.families, device_of(model))
        if self.cost is not None:
            self.cost.count(packed, sequences, micro_batch)
        return packed


def device_of(model: Any) -> torch.device:
    """Where the model's weights lie."""
    device: torch.device = next(model.parameters()).device
    return device


def think_length(rollout: Rollout) -> int:
    """Think tokens of a rollout, the given separator included."""
    return len(rollout.problem.think_prefix) + rollout.num_think


def student_sequence(rollout: Rollout) -> ScoredSequence:
    """Splice the explanation into the student's context; score think and solution tokens (RLT, figure 3)."""
    problem = rollout.problem
    prefix = problem.student_prefix + problem.think_prefix
    rest = rollout.body + problem.student_suffix + problem.solution_ids
    num_between = len(rollout.body) - rollout.num_think + len(problem.student_suffix)
    scored = scored_end(len(problem.student_prefix), think_length(rollout))
    scored += scored_end(num_between, len(problem.solution_ids))
    return ScoredSequence(prefix, rest, scored)


def teacher_sequence(rollout: Rollout) -> ScoredSequence:
    """The explanation in the teacher's own context; score the same think tokens."""
    scored = scored_end(len(rollout.problem.teacher_prefix), think_length(rollout))
    return ScoredSequence(rollout.problem.teacher_prompt, rollout.body[: rollout.num_think], scored)


def scored_end(num_given: int, num_scored: int) -> list[bool]:
    """A mask of tokens that are given, followed by tokens that are scored."""
    return [False] * num_given + [True] * num_scored


def require_finite_rows(rows: Sequence[Tensor], term: str, row_numbers: list[int]) -> None:
    """Check that every value of every row is finite, naming the rows where one is not."""
    values, _ = pad_rows(rows)
    require_finite(values, term, row_numbers)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths: values (N, T) with zeros behind, and their token_mask."""
    return to_padded(torch.cat(list(rows)), [len(row) for row in rows])
