"""Scoring: how likely the frozen student finds explanation and solution, as the RLT reward.

StudentScorer runs the models and calls RLTReward (numerics/rewards.py), which returns RLTRewardTerms:
reward = solution + kl + format + the extra terms of a subclass; parts() names them for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.models.packed import (
    HeadOptions,
    ModelHead,
    head_exact_kl,
    log_probs_of,
    scored_hidden_states,
    states_and_log_probs,
)
from rlt_lightning.modules.baseline import empty_rollout
from rlt_lightning.modules.meter import PhaseCost
from rlt_lightning.modules.retold import require_room, sampled_kl
from rlt_lightning.numerics.importance import Mismatch
from rlt_lightning.numerics.packing import (
    Extent,
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    to_padded,
)
from rlt_lightning.numerics.rewards import RLTReward, require_finite
from rlt_lightning.types import InputError, Problem, Rollout, Rollouts, Scores


class TokenScores(NamedTuple):
    """What models say of the tokens of N rollouts.

    Attributes:
        solution_log_probs: N of (S,), nats, of the solution under the student.
        kl: N of (K,), nats, the KL of the explanation's tokens.
        empty_log_probs: N of (S,), nats, of the solution after an empty explanation; none without a baseline.
    """

    solution_log_probs: list[Tensor]
    kl: list[Tensor]
    empty_log_probs: Sequence[Tensor] = ()


@dataclass
class StudentScorer:
    """Compute the RLT reward: one student forward for both terms, at most one teacher forward for r_KL.

    The sampled estimators of r_KL take the teacher's log-probs from the rollouts, if they have them at the
    reward's temperature.

    Args:
        policy: Calls the teacher: policy(function, *arguments) is function(teacher, *arguments).
        student: Calls the frozen student, in its own tokens.
        reward: The reward and its options.
        device: The device of both models.
        plan: Divides sequences into micro-batches, with their weights. Ranks must run equally many forwards:
            a rank with fewer repeats one with weight 0, which does not count.
        head: How log-probs are computed from hidden states.
        recompute: recompute(missing) returns whether to run the teacher again. `missing` is true if rollouts
            of this rank came without the teacher's log-probs. Ranks that wait for each other in a forward
            must get the same answer.
        cost: Counts the tokens that models compute.
        chat_format: Makes the empty explanations that a baseline needs; None without a baseline.
    """

    policy: Callable[..., Any]
    student: Callable[..., Any]
    reward: RLTReward
    device: torch.device
    plan: Callable[[list[Extent]], list[tuple[MicroBatch, float]]]
    head: HeadOptions = HeadOptions()
    recompute: Callable[[bool], bool] = bool
    cost: PhaseCost | None = None
    chat_format: ChatFormat | None = None

    def __call__(self, rollouts: Rollouts) -> Scores:
        """Score N rollouts.

        Raises:
            NonFiniteError: If a log-prob or reward is NaN or infinite, naming the rows and the term.
            InputError: If the reward's extra terms have wrong names or shapes.
        """
        return self.rewards(rollouts.rollouts, self.token_scores(rollouts))

    def token_scores(
        self,
        rollouts: Rollouts,
        known: Mapping[int, Tensor] | None = None,
        of_teacher: list[Tensor] | None = None,
    ) -> TokenScores:
        """Return the log-probs that the reward of each of N rollouts is made of.

        With a baseline, an empty explanation of each problem is read with the others, whose prompt it shares.

        Args:
            rollouts: The rollouts, of any problems, as this student reads them.
            known: What an empty explanation has given already, (S,), by the problem's row.
            of_teacher: N of (K,), nats, the teacher's log-probs of the think tokens; None: to be found.

        Raises:
            NonFiniteError: If a log-prob is NaN or infinite, naming the rows and the term.
        """
        if self.reward.baseline == "none":
            return self.read(rollouts, of_teacher)
        assert self.chat_format is not None, "a baseline needs the format of empty explanations"
        rows, found = rollouts.rollouts, dict(known or {})
        missing = {r.problem.row: r.problem for r in rows if r.problem.row not in found}
        empty = [empty_rollout(problem, self.chat_format) for problem in missing.values()]
        if of_teacher is not None:  # what the teacher says of an empty one enters nothing
            lengths = (len(think_tokens(row, self.reward.score_given)) for row in empty)
            of_teacher = [*of_teacher, *(torch.zeros(length, device=self.device) for length in lengths)]
        solution, kl, _ = self.read(replace(rollouts, rollouts=[*rows, *empty]), of_teacher)
        found |= dict(zip(missing, solution[len(rows) :], strict=True))
        return TokenScores(solution[: len(rows)], kl[: len(rows)], [found[r.problem.row] for r in rows])

    @torch.no_grad()
    def read(self, rollouts: Rollouts, of_teacher: list[Tensor] | None = None) -> TokenScores:
        """Run the models over rollouts; see `token_scores`."""
        rows = rollouts.rollouts
        think = [think_tokens(r, self.reward.score_given) for r in rows]
        # The student's tokens of the explanation, which may be others.
        num_read = [r.retold.num_think if r.retold else len(ids) for r, ids in zip(rows, think, strict=True)]
        students = [student_sequence(r, number) for r, number in zip(rows, num_read, strict=True)]
        require_room(self.student, rows, students)
        teachers = [teacher_sequence(r, len(ids)) for r, ids in zip(rows, think, strict=True)]
        given = self.sampled_log_probs(rollouts) if of_teacher is None else of_teacher
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
        for micro_batch, weight in self.plan(extents):
            packed = self.pack(students, micro_batch, weight)
            temperature = self.reward.student_temperature
            # (M, H), (M,)
            hidden, student_log_probs = self.student(states_and_log_probs, packed, temperature, self.head)
            num_think = [len(think[i]) for i in micro_batch.indices]
            splits = [
                n for i in micro_batch.indices for n in (num_read[i], len(rows[i].problem.solution_ids))
            ]
            pieces = student_log_probs.split(splits)  # think, solution, think, solution, …
            numbers = [rows[i].problem.row for i in micro_batch.indices]
            require_finite_rows(pieces[1::2], "student log-prob of the solution", numbers)
            require_finite_rows(pieces[::2], "student log-prob of the explanation", numbers)
            if self.reward.kl_estimator == "exact":
                values = self.exact_kl(
                    self.pack(teachers, micro_batch, weight), torch.cat(hidden.split(splits)[::2])
                )
            else:
                teacher_log_probs = (
                    self.teacher_log_probs(self.pack(teachers, micro_batch, weight))
                    if given is None
                    else torch.cat([given[i] for i in micro_batch.indices])
                )
                retold = [rows[i].retold for i in micro_batch.indices]
                log_probs = teacher_log_probs, torch.cat(pieces[::2])
                values = sampled_kl(self.reward.token_kl, *log_probs, retold)
            kl_rows = values.split(num_think)
            require_finite_rows(kl_rows, "KL of the explanation", numbers)
            for place, i in enumerate(micro_batch.indices):
                solution[i], kl[i] = pieces[2 * place + 1], kl_rows[place]
        return TokenScores(solution, kl)

    @torch.no_grad()
    def rewards(
        self, rows: list[Rollout], found: TokenScores, extra: dict[str, Tensor] | None = None
    ) -> Scores:
        """Return the rewards of N rollouts, whole groups, from their tokens' numbers.

        Args:
            rows: N rollouts, as this student reads them.
            found: The numbers of their tokens.
            extra: What `extra_terms` returned of them; None: to be found.

        Raises:
            NonFiniteError: If a reward is NaN or infinite, naming the rows.
            InputError: If the reward's extra terms have wrong names or shapes.
        """
        extra = self.extra_terms(rows) if extra is None else extra
        solution_log_probs, solution_mask = pad_rows(found.solution_log_probs)  # (N, S)
        kl_values, kl_mask = pad_rows(found.kl)  # (N, K)
        format_ok = torch.tensor([r.closed and not r.empty for r in rows], device=solution_mask.device)
        empty = {"empty_log_probs": pad_rows(found.empty_log_probs)[0]} if found.empty_log_probs else {}
        columns = solution_log_probs, solution_mask, kl_values, kl_mask, format_ok
        terms = self.reward(*columns, extra, **empty)
        require_finite(terms.reward, "reward", [r.problem.row for r in rows])
        think = [think_tokens(r, self.reward.score_given) for r in rows]
        return Scores(terms, found.solution_log_probs, think, found.kl)

    def extra_terms(self, rows: list[Rollout]) -> dict[str, Tensor]:
        """Return the terms that the reward adds to RLT's, each (N,), in the order of their names."""
        name, names = type(self.reward).__name__, self.reward.extra_names
        terms = self.reward.extra_terms(rows)
        if not isinstance(terms, dict) or set(terms) != set(names):
            found = list(terms) if isinstance(terms, dict) else type(terms).__name__
            raise InputError(
                f"{name}.extra_terms must return the terms of {name}.extra_names, {list(names)}, but "
                f"returned {found}. Let them agree."
            )
        for term, values in terms.items():
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            if shape != (len(rows),):
                raise InputError(
                    f"{name}.extra_terms must return tensors with one number per rollout, ({len(rows)},), "
                    f"but '{term}' is {shape}. Correct it."
                )
            require_finite(values, f"reward term '{term}'", [r.problem.row for r in rows])
        return {term: terms[term].to(self.device, torch.float32) for term in names}

    def teacher_log_probs(self, packed: PackedSequences) -> Tensor:
        """Return the teacher's log-probs of the scored tokens, (M,), nats."""
        log_probs, _ = self.policy(log_probs_of, packed, self.reward.teacher_temperature, self.head)
        return log_probs

    def exact_kl(self, packed: PackedSequences, student_hidden: Tensor) -> Tensor:
        """Return KL of teacher from student over the whole vocabulary at all think tokens, (sum of K,)."""

        def with_teacher(teacher: Any) -> Tensor:
            hidden = scored_hidden_states(teacher, packed)
            teacher_head = ModelHead(teacher, self.reward.teacher_temperature)

            def with_student(student: Any) -> Tensor:
                student_head = ModelHead(student, self.reward.student_temperature)
                return head_exact_kl(teacher_head, hidden, student_head, student_hidden, self.head)

            return self.student(with_student)

        return self.policy(with_teacher)

    def sampled_log_probs(self, rollouts: Rollouts) -> list[Tensor] | None:
        """Return the teacher's log-probs of each row's think tokens, (K,), as sampled; None if unknown."""
        rows = rollouts.rollouts
        if self.reward.kl_estimator == "exact" or rollouts.temperature != self.reward.teacher_temperature:
            return None
        if self.recompute(any(r.completion.log_probs is None for r in rows)):
            return None
        sampled = [
            torch.tensor(r.completion.log_probs[: r.num_think], device=self.device)
            for r in rows
            if r.completion.log_probs is not None
        ]
        if not self.reward.score_given:
            return sampled
        given = self.given_log_probs([r.problem for r in rows])
        return [
            torch.cat([given[r.problem.row], log_probs]) for r, log_probs in zip(rows, sampled, strict=True)
        ]

    def given_log_probs(self, problems: list[Problem]) -> dict[int, Tensor]:
        """Return the teacher's log-probs of the separator at the end of each prompt, by the problem's row.

        No engine sampled it, so each prompt that ends with one goes through the teacher once.
        """
        prompts = list({p.row: p for p in problems if p.think_prefix}.values())
        found = {p.row: torch.empty(0, device=self.device) for p in problems}
        sequences = [
            ScoredSequence([], p.teacher_prompt, scored_end(len(p.teacher_prefix), len(p.think_prefix)))
            for p in prompts
        ]
        extents = [Extent(p.row, 0, len(p.teacher_prompt)) for p in prompts]
        for micro_batch, weight in self.plan(extents):
            log_probs = self.teacher_log_probs(self.pack(sequences, micro_batch, weight))
            lengths = [len(prompts[i].think_prefix) for i in micro_batch.indices]
            for i, values in zip(micro_batch.indices, log_probs.split(lengths), strict=True):
                found[prompts[i].row] = values
        return found

    def pack(
        self, sequences: list[ScoredSequence], micro_batch: MicroBatch, weight: float
    ) -> PackedSequences:
        """Return one row with the sequences of a micro-batch, and count its cost."""
        packed = PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
        if self.cost is not None:
            self.cost.count(packed, sequences, micro_batch, weight)
        return packed


def think_tokens(rollout: Rollout, score_given: bool) -> list[int]:
    """Return the tokens that r_KL counts: the explanation and, with `score_given`, the separator before."""
    given = rollout.problem.think_prefix if score_given else []
    return given + rollout.body[: rollout.num_think]


def sampled_sequence(rollout: Rollout) -> ScoredSequence:
    """Return prompt and completion; every sampled token is scored, the end tag included."""
    prompt, completion = rollout.problem.teacher_prompt, rollout.completion.token_ids
    return ScoredSequence(prompt, completion, scored_end(len(prompt), len(completion)))


def sampled_extents(rows: list[Rollout]) -> list[Extent]:
    """Return the lengths of prompts and completions; completions of one problem share the prompt."""
    return [Extent(r.problem.row, len(r.problem.teacher_prompt), len(r.completion.token_ids)) for r in rows]


def sampled_log_probs(rows: Sequence[Rollout], like: Tensor, needed: bool) -> Tensor | None:
    """Return the engine's log-probs of the sampled tokens, (n, T), padded with 0 like `like`.

    Returns:
        None if the engine did not send all of them.

    Raises:
        RuntimeError: If it did not, but they are needed.
    """
    values = [row.completion.log_probs for row in rows]
    if any(value is None for value in values):
        if needed:
            raise RuntimeError(
                "Stale rollouts and importance sampling need the log-probs of the policy that sampled, but "
                "the engine sent none. Let it report them, or set model.max_staleness to 0 and "
                "model.importance_sampling to null."
            )
        return None
    tensors = [torch.tensor(value, dtype=like.dtype, device=like.device) for value in values]
    return pad_sequence(tensors, batch_first=True)


@torch.no_grad()
def engine_mismatch(module: Any, rollouts: Rollouts) -> Mismatch:
    """Compare the engine's log-probs of rollouts with those of an RLTModule's current weights."""
    mismatch, rows = Mismatch(), rollouts.rollouts
    sequences = [sampled_sequence(row) for row in rows]
    for micro_batch, weight in module.plan_forward(sampled_extents(rows)):
        packed = module.packed(sequences, micro_batch)
        chosen = [rows[i] for i in micro_batch.indices]
        # The engine's log-probs of greedy completions are at temperature 1.
        flat, _ = module.run(log_probs_of, packed, rollouts.temperature or 1.0, module.head)
        log_probs, token_mask = to_padded(flat, [len(r.completion.token_ids) for r in chosen])  # (n, T)
        engine_log_probs = sampled_log_probs(chosen, log_probs, needed=False)
        if engine_log_probs is not None and weight:
            mismatch += Mismatch.between(log_probs, engine_log_probs, token_mask)
    return mismatch


def student_sequence(rollout: Rollout, num_think: int) -> ScoredSequence:
    """Return the explanation in the student's context; score think and solution tokens (RLT, figure 3)."""
    problem, retold = rollout.problem, rollout.retold
    body, num_body_think = rollout.body, rollout.num_think
    if retold is not None:
        body, num_body_think = retold.token_ids, retold.num_think
    prefix = problem.student_prefix + problem.think_prefix
    rest = body + problem.student_suffix + problem.solution_ids
    num_between = len(body) - num_body_think + len(problem.student_suffix)
    scored = scored_end(len(prefix) + num_body_think - num_think, num_think)
    scored += scored_end(num_between, len(problem.solution_ids))
    return ScoredSequence(prefix, rest, scored)


def teacher_sequence(rollout: Rollout, num_think: int) -> ScoredSequence:
    """Return the explanation in the teacher's context; the same think tokens are scored."""
    prompt, explanation = rollout.problem.teacher_prompt, rollout.body[: rollout.num_think]
    scored = scored_end(len(prompt) + len(explanation) - num_think, num_think)
    return ScoredSequence(prompt, explanation, scored)


def scored_end(num_given: int, num_scored: int) -> list[bool]:
    """Return a mask of tokens that are given, followed by tokens that are scored."""
    return [False] * num_given + [True] * num_scored


def require_finite_rows(rows: Sequence[Tensor], term: str, row_numbers: list[int]) -> None:
    """Check that every value of every row is finite, naming the rows where one is not."""
    values, _ = pad_rows(rows)
    require_finite(values, term, row_numbers)


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths; return values (N, T), padded with 0, and their token_mask."""
    return to_padded(torch.cat(list(rows)), [len(row) for row in rows])
