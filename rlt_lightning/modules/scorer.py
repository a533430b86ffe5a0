"""What models compute of a list of completions: the RLT reward's tokens, and the reference's log-probs.

    rows ─┬▶ as student 1 reads them ─▶ student 1 ─┐
          ├▶ as student 2 reads them ─▶ student 2 ─┼▶ TokenScores of each student, for each row
          ├▶ teacher, once for all students ───────┘
          └▶ reference ─▶ log-probs of the sampled tokens

    TokenScores of whole groups ─▶ rewards ─▶ Scores of each student ─▶ one reward (numerics/students.py)

A likelihood reward counts the solution's tokens only; where the policy itself is the scorer, the student
above is the policy.

A step's completions may come in chunks, in any order, on any rank: what `score_students` returns is of one
completion each. `rewards` runs no model.

With `reward.baseline: empty` a student also reads each problem's solution without an explanation: once in a
step, in one forward with the problem's explanations, since they share the prompt.

Ranks with sharded weights wait for each other in every forward, so they call the Scorer equally often, and
`plan` gives them equally many micro-batches. A rank without completions scores another's, a dummy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count
from math import isfinite
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_lightning.console import announce
from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.student_views import StudentViews
from rlt_lightning.metrics.catalogue import build_student_metrics, register
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import read_context_length
from rlt_lightning.models.packed import (
    HeadOptions,
    ModelHead,
    call_model,
    compute_log_probs,
    head_divergence,
    scored_hidden_states,
    states_and_log_probs,
)
from rlt_lightning.modules.frozen import ReadModel, RunModel
from rlt_lightning.modules.phases import PhaseStats
from rlt_lightning.modules.text_reward import TextReward, judge_texts, require_student
from rlt_lightning.numerics.divergence import Divergence
from rlt_lightning.numerics.importance import Mismatch
from rlt_lightning.numerics.likelihood import LikelihoodReward, SolutionScores, find_kl_reward
from rlt_lightning.numerics.packing import (
    MicroBatch,
    PackedSequences,
    ScoredSequence,
    SequenceLengths,
    to_padded,
)
from rlt_lightning.numerics.rewards import (
    FiniteChecks,
    Reward,
    RLTReward,
    require_finite,
)
from rlt_lightning.numerics.spans import Span, span_kl
from rlt_lightning.numerics.students import Reduction, combine_terms
from rlt_lightning.numerics.transfers import download, upload
from rlt_lightning.types import Completion, InputError, ModelView, Problem, Rollout, Scores

# Divides sequences into micro-batches, with their weights. Ranks that wait for each other in a forward get
# equally many: a rank with fewer repeats one with weight 0, which does not count.
PlanMicroBatches = Callable[[list[SequenceLengths]], list[tuple[MicroBatch, float]]]
# Names of students, with their weights or without.
StudentNames = list[str] | dict[str, float]

announce_once = cache(announce)


class TokenScores(NamedTuple):
    """What one student and the teacher compute of the tokens of one completion.

    Attributes:
        solution_log_probs: The student's log-probs of the solution, (S,), nats.
        kl: The KL of the explanation's tokens, (K,), nats; none of a likelihood reward without
            a KL term.
        empty_log_probs: The student's log-probs of the solution after an empty explanation, (S,), nats; None
            without a baseline.
    """

    solution_log_probs: Tensor
    kl: Tensor
    empty_log_probs: Tensor | None = None


@dataclass(frozen=True)
class Students:
    """Which students score, and how their rewards become one.

    Example:
        `Students.of("miniature", {"a": 1.0, "b": 0.5}, "mean")` has names ("a", "b"), weights (1.0, 0.5).

    Attributes:
        names: Their models; none if the reward asks no model.
        weights: One for each, above 0.
        reduction: The weighted mean of their rewards, or the smallest.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    reduction: Reduction = "mean"

    @classmethod
    def of(
        cls,
        student: str | None,
        students: StudentNames | None,
        reduction: Reduction = "mean",
        setting: str = "model.students",
    ) -> Students:
        """Return the students that settings name.

        Args:
            student: The only one; None if no model scores. Not read where `students` are named.
            students: Several, with weights or without.
            reduction: See `Students`.
            setting: What `students` is called.

        Raises:
            InputError: If the settings contradict each other, or a weight cannot be one.
        """
        if reduction not in ("mean", "min"):
            raise InputError(f"model.student_reduction must be mean or min, but is {reduction!r}. Set it.")
        if students is None:
            return cls((student,), (1.0,), reduction) if student is not None else cls((), (), reduction)
        if student not in (None, DEFAULT_MODEL):
            raise InputError(
                f"Either model.student or model.students names who scores, but the first is {student} and "
                f"the second {', '.join(students)}. Set one of them to null."
            )
        if not students:
            raise InputError(
                f"{setting} must name at least one model, but is empty. Name them, or leave it out."
            )
        weights = dict(students) if isinstance(students, dict) else dict.fromkeys(students, 1.0)
        for name, weight in weights.items():
            if not (isinstance(weight, (int, float)) and isfinite(weight) and weight > 0):
                raise InputError(
                    f"A weight of {setting} must be a number above 0, but that of {name} is {weight}. "
                    "Correct it, or leave the model out."
                )
        if reduction == "min" and len(set(weights.values())) > 1:
            raise InputError(
                "model.student_reduction min takes the smallest reward of any student, so weights would mean "
                f"nothing, but model.students gives {weights}. List the names without weights, or set mean."
            )
        return cls(tuple(students), tuple(float(weights[name]) for name in students), reduction)

    def ready_for(self, reward: Reward) -> Students:
        """Return the students, and add the metrics of several to the catalogue.

        Raises:
            InputError: If a reward that asks models has none, or one that asks none has some.
        """
        require_student(reward, self.first)
        if len(self.names) > 1:
            register(*(metric for label in self.labels for metric in build_student_metrics(label)))
        return self

    @property
    def first(self) -> str | None:
        """Return the first student, for whom problems and rollouts are made; None if there is none."""
        return self.names[0] if self.names else None

    @property
    def labels(self) -> list[str]:
        """Return a short name of each for metrics and columns, in letters, digits and underscores.

        It is the last part of the model's name, or as many parts as tell students apart; a student that is
        named twice gets a number.
        """
        parts = [PurePath(name).parts for name in self.names]
        longest = max(map(len, parts), default=0)
        found: list[str] = []
        for length in range(1, longest + 1):
            found = [re.sub(r"\W", "_", "_".join(part[-length:]), flags=re.ASCII) for part in parts]
            if len(set(found)) == len(set(self.names)):
                break
        labels: list[str] = []
        for label in found:
            numbered = (f"{label}_{number}" for number in count(2))
            labels.append(label if label not in labels else next(n for n in numbered if n not in labels))
        return labels

    def describe(self) -> str:
        """Return names and weights, for people."""
        if len(self.names) < 2:
            return ", ".join(self.names)
        if self.reduction == "min":
            return f"the smallest reward of {', '.join(self.names)}"
        weighed = (f"{name} ({weight:g})" for name, weight in zip(self.names, self.weights, strict=True))
        return f"the mean of {', '.join(weighed)}"


def split_student_setting(student: str | StudentNames | None) -> tuple[str | None, StudentNames | None]:
    """Return `model.student` and `model.students` of an argument that may be either."""
    return (student, None) if student is None or isinstance(student, str) else (None, student)


@dataclass
class Scorer:
    """Scores completions: one student forward for both terms of the RLT reward, at most one teacher forward.

    The sampled estimators of r_KL take the teacher's log-probs from the completions, if they have them at the
    reward's temperature.

    Args:
        reward: The reward and its options.
        students: Which students score; none if the reward asks no model.
        models: Their models.
        teacher: Calls the teacher: teacher(function, *arguments) is function(model, *arguments).
        plan: Divides sequences into micro-batches.
        device: The device on which models compute.
        head: How log-probs are computed from hidden states.
        student_views: How each student reads; None: no baseline and no text is asked for.
        recompute: recompute(missing) returns whether to run the teacher again. `missing` is true if some of
            this rank's completions came without the teacher's log-probs. Ranks that wait for each other in a
            forward must get the same answer.
        reference: The reference; None without a KL penalty.
    """

    reward: Reward
    students: Students
    models: Sequence[ReadModel]
    teacher: RunModel
    plan: PlanMicroBatches
    device: torch.device
    head: HeadOptions = HeadOptions()
    student_views: StudentViews | None = None
    recompute: Callable[[bool], bool] = bool
    reference: ReadModel | None = None

    def __call__(self, rows: list[Rollout], temperature: float, group_size: int = 1) -> Scores:
        """Return the rewards of whole groups of completions; see `score_students` and `rewards`."""
        return self.rewards(rows, bring_to_host(self.score_students(rows, temperature)), group_size)

    @torch.no_grad()
    def score_students(
        self,
        rows: list[Rollout],
        temperature: float,
        known: Mapping[int, Sequence[Tensor]] | None = None,
        stats: PhaseStats | None = None,
    ) -> list[tuple[TokenScores, ...]]:
        """Let each student read N completions, of any problems; the teacher is asked once for all students.

        Args:
            rows: The completions.
            temperature: The temperature at which they were sampled.
            known: What each student has computed of empty explanations already, by the problem's row; see
                `collect_empty_scores`.
            stats: Counts the tokens that models compute.

        Returns:
            For each completion what each student computed; nothing if the reward asks no model.

        Raises:
            NonFiniteError: If a log-prob is NaN or infinite, naming the rows and the term.
        """
        if not self.models:
            return [()] * len(rows)
        views = [[row.views[number] for row in rows] for number in range(len(self.models))]
        of_kl = self._find_kl_scorer(temperature) if len(views) > 1 else None
        unknown = [None] * len(views)
        teacher_log_probs = of_kl._score_longest_views(views, temperature, stats) if of_kl else unknown
        by_student = []
        for number, model in enumerate(self.models):
            empty = {row: values[number] for row, values in (known or {}).items()}
            with model.loaded_on(self.device) as student:
                one = student, number, views[number], temperature, empty, teacher_log_probs[number], stats
                by_student.append(self._score_with_baseline(*one))
        return list(zip(*by_student, strict=True))

    @torch.no_grad()
    def reference_log_probs(
        self, rows: list[Rollout], temperature: float, stats: PhaseStats | None = None
    ) -> list[Tensor]:
        """Return the reference's log-probs of sampled tokens, N of (T,); [] without a KL penalty."""
        if self.reference is None:
            return []
        sequences = [build_sampled_sequence(row) for row in rows]
        with self.reference.loaded_on(self.device) as reference:
            return self._log_probs(reference, sequences, measure_sampled_rows(rows), temperature, stats)

    @torch.no_grad()
    def rewards(
        self, rows: list[Rollout], found: Sequence[tuple[TokenScores, ...]], group_size: int = 1
    ) -> Scores:
        """Return the rewards of N completions, whole groups, from what models computed of each.

        Args:
            rows: The completions.
            found: What `score_students` returned of each, in main memory. No model is run.
            group_size: Completions of a group, in adjacent rows; only a reward that compares them needs it.

        Raises:
            NonFiniteError: If a reward is NaN or infinite, naming the rows.
            InputError: If the reward's extra terms have wrong names or shapes.
        """
        if isinstance(self.reward, TextReward):
            assert self.student_views is not None, "a reward of texts needs their tags"
            terms = judge_texts(self.reward, rows, self.student_views.formats[0].tags)
            return Scores(terms.to(self.device), [], [], [])
        found_by_student = [[one[number] for one in found] for number in range(len(self.students.names))]
        if isinstance(self.reward, LikelihoodReward):
            sizes = rows, group_size
            by_student = [self._likelihood_rewards(self.reward, *sizes, own) for own in found_by_student]
        else:
            extra = self.extra_terms(rows)
            by_student = [
                self._student_rewards(rows, number, own, extra) for number, own in enumerate(found_by_student)
            ]
        if len(by_student) == 1:
            return by_student[0]
        each = [scores.terms for scores in by_student]
        combined = combine_terms(each, self.students.weights, self.students.reduction)
        labels = self.students.labels
        return replace(by_student[0], terms=combined, by_student=dict(zip(labels, by_student, strict=True)))

    def score_empty(self, problem: Problem, temperature: float) -> Scores:
        """Return the scores, N = 1, of an empty explanation, with which others are compared."""
        assert self.student_views is not None, "an empty explanation needs a format"
        completion = build_empty_completion(problem, self.student_views.formats[0])
        return self([self.student_views.build_rollout(problem, completion)], temperature)

    @torch.no_grad()
    def recompute_log_probs(self, rows: list[Rollout], temperature: float) -> tuple[list[Rollout], Mismatch]:
        """Return N completions with the log-probs of the teacher's current weights in place of the engine's.

        Returns:
            The completions, and how far the engine's log-probs were from these, if it sent them.
        """
        sequences = [build_sampled_sequence(row) for row in rows]
        # The engine's log-probs of greedy completions are at temperature 1.
        found = self._log_probs(self.teacher, sequences, measure_sampled_rows(rows), temperature or 1.0)
        log_probs, token_mask = pad_rows(found)  # (N, T)
        engine_log_probs = pad_engine_log_probs(rows, log_probs, needed=False)
        recomputed = [replace_log_probs(row, one) for row, one in zip(rows, download(found), strict=True)]
        if engine_log_probs is None:
            return recomputed, Mismatch()
        return recomputed, Mismatch.between(log_probs, engine_log_probs, token_mask)

    def extra_terms(self, rows: list[Rollout]) -> dict[str, Tensor]:
        """Return the terms that the reward adds to RLT's, each (N,), in the order of their names."""
        reward = self.rlt_reward
        name, names = type(reward).__name__, reward.extra_names
        terms = reward.extra_terms(rows)
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

    @property
    def rlt_reward(self) -> RLTReward:
        """Return the reward, where it is one that asks models."""
        assert isinstance(self.reward, RLTReward)
        return self.reward

    def _find_kl_scorer(self, temperature: float) -> Scorer | None:
        """Return a scorer whose reward is RLT's, with the same KL; None if the reward has no KL term."""
        reward = find_kl_reward(self.reward, temperature)
        return None if reward is None else replace(self, reward=reward)

    # One student

    def _score_with_baseline(
        self,
        student: RunModel,
        number: int,
        views: list[ModelView],
        temperature: float,
        known: Mapping[int, Tensor],
        teacher_log_probs: list[Tensor] | None,
        stats: PhaseStats | None,
    ) -> list[TokenScores]:
        """Let a student read N completions, and with a baseline an empty one of each problem.

        Args:
            student: Calls the student.
            number: Its number, from 0.
            views: The completions as it reads them.
            temperature: The temperature at which they were sampled.
            known: What it has computed of empty explanations already, (S,), by the problem's row.
            teacher_log_probs: N of (K,), nats, of the think tokens; None: to be found.
            stats: Counts the tokens that models compute.
        """
        reward = self.reward
        assert isinstance(reward, (RLTReward, LikelihoodReward))

        def score(views: list[ModelView]) -> list[TokenScores]:
            if of_kl := self._find_kl_scorer(temperature):
                return of_kl._score_student(student, views, temperature, teacher_log_probs, stats)
            assert isinstance(reward, LikelihoodReward)
            own = reward.kl_settings(temperature).student_temperature
            return self._score_solutions(student, views, own, stats)

        if reward.baseline == "none":
            return score(views)
        assert self.student_views is not None, "a baseline needs the format of empty explanations"
        missing = {v.problem.row: v.problem for v in views if v.problem.row not in known}
        empty = [
            build_empty_view(problem, self.student_views.formats[number]) for problem in missing.values()
        ]
        if teacher_log_probs is not None:  # what the teacher says of an empty one enters nothing
            given = isinstance(reward, RLTReward) and reward.score_given
            lengths = (len(list_think_tokens(view, given)) for view in empty)
            zeros = (torch.zeros(length, device=self.device) for length in lengths)
            teacher_log_probs = [*teacher_log_probs, *zeros]
        found = score([*views, *empty])
        of_empty = [one.solution_log_probs for one in found[len(views) :]]
        by_row = {**known, **dict(zip(missing, of_empty, strict=True))}
        return [
            one._replace(empty_log_probs=by_row[view.problem.row])
            for view, one in zip(views, found[: len(views)], strict=True)
        ]

    def _score_student(
        self,
        student: RunModel,
        views: list[ModelView],
        temperature: float,
        teacher_log_probs: list[Tensor] | None,
        stats: PhaseStats | None,
    ) -> list[TokenScores]:
        """Run student and teacher over N completions; see `_score_with_baseline`."""
        reward, given = self.rlt_reward, self.rlt_reward.score_given
        students = [student_sequence(view, given) for view in views]
        teachers = [teacher_sequence(view, given) for view in views]
        require_room(student, views, students)
        if teacher_log_probs is None:
            teacher_log_probs = self._sampled_log_probs(views, temperature, stats)
        needs_teacher = [] if teacher_log_probs is not None else teachers
        lengths = [
            SequenceLengths(
                view.problem.row,
                max(len(s.prefix) for s in sequences),
                max(len(s.rest) for s in sequences),
            )
            for view, *sequences in zip(views, students, needs_teacher or students, strict=True)
        ]
        num_think = [len(list_think_tokens(view, given)) for view in views]
        num_solution = [len(view.problem.solution_ids) for view in views]
        found = [TokenScores(torch.empty(0), torch.empty(0))] * len(views)
        checks = FiniteChecks()
        for micro_batch, weight in self.plan(lengths):
            packed = self._pack(students, micro_batch, weight, stats)
            # (M, H), (M,)
            hidden, log_probs = student(states_and_log_probs, packed, reward.student_temperature, self.head)
            splits = [
                n
                for i in micro_batch.indices
                for n in (sum(students[i].scored) - num_solution[i], num_solution[i])
            ]
            pieces = log_probs.split(splits)  # think, solution, think, solution, …
            numbers = [views[i].problem.row for i in micro_batch.indices]
            of_think, of_solution = torch.cat(pieces[::2]), torch.cat(pieces[1::2])
            checks.add(of_solution, splits[1::2], "student log-prob of the solution", numbers)
            checks.add(of_think, splits[::2], "student log-prob of the explanation", numbers)
            if reward.kl_estimator == "exact":
                teachers_packed = self._pack(teachers, micro_batch, weight, stats)
                values = self._exact_kl(student, teachers_packed, torch.cat(hidden.split(splits)[::2]))
            else:
                if teacher_log_probs is None:
                    teachers_packed = self._pack(teachers, micro_batch, weight, stats)
                    settings = reward.teacher_temperature, self.head
                    teacher_values, _ = self.teacher(compute_log_probs, teachers_packed, *settings)
                else:
                    teacher_values = torch.cat([teacher_log_probs[i] for i in micro_batch.indices])
                spans = [views[i].spans for i in micro_batch.indices]
                values = estimate_kl(reward.token_kl, teacher_values, of_think, spans)
            counts = [num_think[i] for i in micro_batch.indices]
            checks.add(values, counts, "KL of the explanation", numbers)
            for place, (i, kl) in enumerate(zip(micro_batch.indices, values.split(counts), strict=True)):
                found[i] = TokenScores(pieces[2 * place + 1], kl)
        checks.require()
        return found

    def _score_solutions(
        self, student: RunModel, views: list[ModelView], temperature: float, stats: PhaseStats | None
    ) -> list[TokenScores]:
        """Run a scorer over the solutions after N thoughts."""
        sequences = [build_solution_sequence(view) for view in views]
        require_room(student, views, sequences)
        lengths = measure_sequences(views, sequences)
        log_probs = self._log_probs(student, sequences, lengths, temperature, stats)
        if log_probs:
            rows = [view.problem.row for view in views]
            require_finite(pad_rows(log_probs)[0], "log-prob of the solution", rows)
        return [TokenScores(values, values[:0]) for values in log_probs]

    def _exact_kl(self, student: RunModel, packed: PackedSequences, student_hidden: Tensor) -> Tensor:
        """Return KL of teacher from student over the whole vocabulary at all think tokens, (sum of K,)."""
        reward = self.rlt_reward

        def with_teacher(teacher: Any) -> Tensor:
            hidden = scored_hidden_states(teacher, packed)
            teacher_head = ModelHead(teacher, reward.teacher_temperature)

            def with_student(model: Any) -> Tensor:
                student_head = ModelHead(model, reward.student_temperature)
                sides = student_head, student_hidden, teacher_head, hidden
                return head_divergence(*sides, Divergence("forward"), None, self.head)

            return student(with_student)

        return self.teacher(with_teacher)

    def _student_rewards(
        self, rows: list[Rollout], number: int, found: list[TokenScores], extra: dict[str, Tensor]
    ) -> Scores:
        """Return the rewards of N completions by the student of this number."""
        solution_log_probs = [one.solution_log_probs for one in found]
        kl = [one.kl for one in found]
        padded, solution_mask = pad_rows(solution_log_probs)  # (N, S)
        kl_values, kl_mask = pad_rows(kl)  # (N, K)
        format_ok = torch.tensor([r.closed and not r.empty for r in rows], device="cpu")
        of_empty = [one.empty_log_probs for one in found if one.empty_log_probs is not None]
        empty = {"empty_log_probs": upload(pad_rows(of_empty)[0], self.device)} if of_empty else {}
        entered = padded, solution_mask, kl_values, kl_mask, format_ok
        solution, solution_mask, kl_of, kl_mask, closed = (upload(one, self.device) for one in entered)
        terms = self.rlt_reward(solution, solution_mask, kl_of, kl_mask, closed, extra, **empty)
        require_finite(terms.reward, "reward", [r.problem.row for r in rows])
        think = [list_think_tokens(r.views[number], self.rlt_reward.score_given) for r in rows]
        return Scores(terms, solution_log_probs, think, kl)

    def _likelihood_rewards(
        self, reward: LikelihoodReward, rows: list[Rollout], group_size: int, found: list[TokenScores]
    ) -> Scores:
        """Return the likelihood rewards of N thoughts by one scorer."""
        assert group_size > 1 or not reward.compares, "thoughts can be compared in groups only"
        log_probs = [one.solution_log_probs for one in found]
        of_empty = [one.empty_log_probs for one in found if one.empty_log_probs is not None]
        padded, token_mask = pad_rows(log_probs)
        numbers = [r.problem.row for r in rows]
        kl = [one.kl for one in found] if reward.kl_weight else []
        kl_values, kl_mask = (upload(one, self.device) for one in pad_rows(kl)) if kl else (None, None)
        scores = SolutionScores(
            log_probs=upload(padded, self.device),
            token_mask=upload(token_mask, self.device),
            closed=upload([r.closed for r in rows], self.device),
            lengths=upload([r.views[0].num_tokens for r in rows], self.device),
            # By place, not by row: one problem may have two groups in a step.
            groups=torch.arange(len(rows), device=self.device) // group_size,
            empty_log_probs=upload(pad_rows(of_empty)[0], self.device) if of_empty else None,
            kl=kl_values,
            kl_mask=kl_mask,
        )
        terms = reward(scores)
        require_finite(terms.reward, "reward", numbers)
        return Scores(terms, log_probs, [], [])

    # The teacher

    def _sampled_log_probs(
        self, views: list[ModelView], temperature: float, stats: PhaseStats | None
    ) -> list[Tensor] | None:
        """Return the teacher's log-probs of each view's think tokens, (K,), as sampled; None if unknown."""
        reward = self.rlt_reward
        if reward.kl_estimator == "exact" or temperature != reward.teacher_temperature:
            return None
        if self.recompute(any(view.completion.log_probs is None for view in views)):
            return None
        values = [
            view.completion.log_probs[: view.num_tokens]
            for view in views
            if view.completion.log_probs is not None
        ]
        flat = upload(list(chain.from_iterable(values)), self.device, torch.float32)
        sampled = list(flat.split([len(one) for one in values]))
        if not reward.score_given:
            return sampled
        given = self._given_log_probs([view.problem for view in views], stats)
        return [
            torch.cat([given[view.problem.row], log_probs])
            for view, log_probs in zip(views, sampled, strict=True)
        ]

    def _given_log_probs(self, problems: list[Problem], stats: PhaseStats | None) -> dict[int, Tensor]:
        """Return the teacher's log-probs of the separator at the end of each prompt, by the problem's row.

        No engine sampled it, so each prompt that ends with one goes through the teacher once.
        """
        prompts = list({p.row: p for p in problems if p.think_prefix}.values())
        found = {p.row: torch.empty(0, device=self.device) for p in problems}
        sequences = [
            ScoredSequence([], p.teacher_prompt, mask_scored(len(p.teacher_prefix), len(p.think_prefix)))
            for p in prompts
        ]
        lengths = [SequenceLengths(p.row, 0, len(p.teacher_prompt)) for p in prompts]
        own = self.rlt_reward.teacher_temperature
        of_prompts = self._log_probs(self.teacher, sequences, lengths, own, stats)
        return found | {p.row: values for p, values in zip(prompts, of_prompts, strict=True)}

    def _score_longest_views(
        self, views: list[list[ModelView]], temperature: float, stats: PhaseStats | None
    ) -> Sequence[list[Tensor] | None]:
        """Return the teacher's log-probs of each view's think tokens, N of (K,), with one forward at most.

        The views of a completion count the same tokens of the teacher, but for a few at either end. So the
        longest is computed, and each view gets its part.

        Args:
            views: The N completions, as each student reads them.
            temperature: The temperature at which they were sampled.
            stats: Counts the tokens that the teacher computes.

        Returns:
            None for each student with kl_estimator exact, which compares hidden states: the teacher runs with
            each student.
        """
        reward, score_given = self.rlt_reward, self.rlt_reward.score_given
        if reward.kl_estimator == "exact":
            return [None] * len(views)
        longest = [merge_views(of_completion) for of_completion in zip(*views, strict=True)]
        whole = self._sampled_log_probs(longest, temperature, stats)
        if whole is None:
            sequences = [teacher_sequence(view, score_given) for view in longest]
            lengths = measure_sequences(longest, sequences)
            whole = self._log_probs(self.teacher, sequences, lengths, reward.teacher_temperature, stats)
        parts = []
        for of_student in views:
            part = []
            for view, merged, values in zip(of_student, longest, whole, strict=True):
                num_given = len(merged.problem.think_prefix) if score_given else 0
                first = num_given - (len(view.problem.think_prefix) if score_given else 0)
                part.append(values[first : num_given + view.num_tokens])
            parts.append(part)
        return parts

    # Any model

    def _log_probs(
        self,
        model: RunModel,
        sequences: list[ScoredSequence],
        lengths: list[SequenceLengths],
        temperature: float,
        stats: PhaseStats | None = None,
    ) -> list[Tensor]:
        """Run a model over N sequences of these lengths; return the log-probs of scored tokens, nats."""
        found: list[Tensor] = [torch.empty(0)] * len(sequences)
        for micro_batch, weight in self.plan(lengths):
            packed = self._pack(sequences, micro_batch, weight, stats)
            flat, _ = model(compute_log_probs, packed, temperature, self.head)
            of_rows = flat.split([sum(sequences[i].scored) for i in micro_batch.indices])
            for i, values in zip(micro_batch.indices, of_rows, strict=True):
                found[i] = values
        return found

    def _pack(
        self,
        sequences: list[ScoredSequence],
        micro_batch: MicroBatch,
        weight: float,
        stats: PhaseStats | None = None,
    ) -> PackedSequences:
        """Return one row with the sequences of a micro-batch, and count its cost."""
        packed = PackedSequences.from_sequences(sequences, micro_batch.families, self.device)
        if stats is not None:
            stats.count(packed, sequences, micro_batch, weight)
        return packed


def bring_to_host(found: Sequence[tuple[TokenScores, ...]]) -> list[tuple[TokenScores, ...]]:
    """Return what models computed of each completion in main memory; see `download`."""
    tensors = (tensor for students in found for one in students for tensor in one)
    copies = iter(download([tensor for tensor in tensors if tensor is not None]))
    return [
        tuple(TokenScores(*(None if t is None else next(copies) for t in one)) for one in students)  # type: ignore[arg-type]
        for students in found
    ]


def collect_empty_scores(
    rows: Sequence[Rollout], found: Sequence[tuple[TokenScores, ...]]
) -> dict[int, tuple[Tensor, ...]]:
    """Return what each student computed of empty explanations, by the problem's row; {} without a baseline.

    Args:
        rows: Completions that were scored earlier in the step.
        found: What each student computed of them.
    """
    known: dict[int, tuple[Tensor, ...]] = {}
    for row, students in zip(rows, found, strict=True):
        values = [one.empty_log_probs for one in students]
        if values and values[0] is not None:
            known[row.problem.row] = tuple(v for v in values if v is not None)
    return known


def list_think_tokens(view: ModelView, score_given: bool) -> list[int]:
    """Return the tokens that r_KL counts: the explanation and, with `score_given`, the separator before."""
    return (view.problem.think_prefix if score_given else []) + view.compared


def student_sequence(view: ModelView, score_given: bool) -> ScoredSequence:
    """Return the explanation in the student's context; score think and solution tokens (RLT, figure 3)."""
    problem = view.problem
    prefix = problem.student_prefix + problem.think_prefix
    rest = view.token_ids + problem.student_suffix + problem.solution_ids
    num_given = len(problem.think_prefix) if score_given else 0
    num_between = len(view.token_ids) - view.num_own + len(problem.student_suffix)
    scored = mask_scored(len(prefix) - num_given, num_given + view.num_own)
    scored += mask_scored(num_between, len(problem.solution_ids))
    return ScoredSequence(prefix, rest, scored)


def build_solution_sequence(view: ModelView) -> ScoredSequence:
    """Return the thought in the scorer's context; only the solution's tokens are scored."""
    whole, num_solution = student_sequence(view, score_given=False), len(view.problem.solution_ids)
    num_given = len(whole.prefix) + len(whole.rest) - num_solution
    return whole._replace(scored=mask_scored(num_given, num_solution))


def measure_sequences(
    views: Sequence[ModelView], sequences: Sequence[ScoredSequence]
) -> list[SequenceLengths]:
    """Return the lengths of what a model reads of completions; those of one problem share the prefix."""
    return [
        SequenceLengths(view.problem.row, len(one.prefix), len(one.rest))
        for view, one in zip(views, sequences, strict=True)
    ]


def teacher_sequence(view: ModelView, score_given: bool) -> ScoredSequence:
    """Return the explanation in the teacher's context; the same think tokens are scored."""
    prompt, explanation = view.problem.teacher_prompt, view.compared
    num_given = len(view.problem.think_prefix) if score_given else 0
    scored = mask_scored(len(prompt) - num_given, num_given + len(explanation))
    return ScoredSequence(prompt, explanation, scored)


def build_sampled_sequence(rollout: Rollout) -> ScoredSequence:
    """Return prompt and completion; every sampled token is scored, the end tag included."""
    prompt, completion = rollout.problem.teacher_prompt, rollout.completion.token_ids
    return ScoredSequence(prompt, completion, mask_scored(len(prompt), len(completion)))


def measure_sampled_rows(rows: list[Rollout]) -> list[SequenceLengths]:
    """Return the lengths of prompts and completions; completions of one problem share the prompt."""
    return [
        SequenceLengths(r.problem.row, len(r.problem.teacher_prompt), len(r.completion.token_ids))
        for r in rows
    ]


def pad_engine_log_probs(rows: Sequence[Rollout], like: Tensor, needed: bool) -> Tensor | None:
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
    tensors = [torch.tensor(value, dtype=like.dtype, device="cpu") for value in values]
    return upload(pad_sequence(tensors, batch_first=True), like.device)


def replace_log_probs(rollout: Rollout, log_probs: Tensor) -> Rollout:
    """Return a rollout whose completion has these log-probs, (T,)."""
    completion = replace(rollout.completion, log_probs=log_probs.tolist())
    views = tuple(replace(view, completion=completion) for view in rollout.views)
    return replace(rollout, completion=completion, views=views)


def merge_views(views: Sequence[ModelView]) -> ModelView:
    """Return what the teacher computes of a completion: all tokens that any of its views counts."""
    longest = max(views, key=lambda view: view.num_tokens)
    given = max((view.problem for view in views), key=lambda problem: len(problem.think_prefix))
    return replace(longest, problem=given)


def build_empty_completion(problem: Problem, chat_format: ChatFormat) -> Completion:
    """Return an explanation without text, closed by its tag: the student then reads its tags and no more.

    Its tokens are those of an empty trace, and an explanation of exactly these gains 0. None of them counts
    in r_KL.
    """
    completion = chat_format.completion_from_trace(problem, "")
    # They enter nothing. Without them the teacher would read the step's completions again.
    return replace(completion, log_probs=[0.0] * len(completion.token_ids))


def build_empty_view(problem: Problem, chat_format: ChatFormat) -> ModelView:
    """Return an empty explanation as a student reads it."""
    [view] = chat_format.build_rollout(problem, build_empty_completion(problem, chat_format)).views
    return view


def estimate_kl(
    estimate: Callable[[Tensor, Tensor], Tensor],
    teacher_log_probs: Tensor,
    student_log_probs: Tensor,
    spans: Sequence[Sequence[Span] | None],
) -> Tensor:
    """Estimate the KL of the teacher's think tokens, on spans where the student's tokens are others.

    Args:
        estimate: Estimates it from log-probs, such as `RLTReward.token_kl`.
        teacher_log_probs: Of n explanations, one after the other, (sum of K,), nats.
        student_log_probs: The same of the student, in its own tokens.
        spans: Tokens of teacher and student in the spans of each, n; None for each: the same tokens.

    Returns:
        (sum of K,), nats.
    """
    if None in spans:
        return estimate(teacher_log_probs, student_log_probs)
    joined = [span for of_one in spans if of_one is not None for span in of_one]
    return span_kl(estimate, teacher_log_probs, student_log_probs, joined)


def mask_scored(num_given: int, num_scored: int) -> list[bool]:
    """Return a mask of tokens that are given, followed by tokens that are scored."""
    return [False] * num_given + [True] * num_scored


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack rows of different lengths; return values (N, T), padded with 0, and their token_mask."""
    return to_padded(torch.cat(list(rows)), [len(row) for row in rows])


def require_scorable(reward: Reward, formats: Sequence[ChatFormat], students: Sequence[str]) -> None:
    """Check that a reward can be computed with students, and name each that reads explanations as text.

    Args:
        reward: The reward.
        formats: The format of each student; one also without a student.
        students: Their names.

    Raises:
        InputError: If it sums over a vocabulary that the models do not share.
    """
    of_others = [
        s for s, own in zip(students, formats, strict=False) if isinstance(own, CrossTokenizerFormat)
    ]
    of_kl = find_kl_reward(reward, temperature=1.0)
    for student in of_others:
        if of_kl is not None and of_kl.kl_estimator == "exact":
            raise InputError(
                "reward.kl_estimator exact sums over a vocabulary that teacher and student share, but the "
                f"tokenizer of the student {student} is not the teacher's. Set it to k1 or k3, which compare "
                "the models on spans of text; or choose models of one family."
            )
        announce_once(
            f"the student {student} reads every explanation as text, in tokens of its own: its tokenizer is "
            "not the teacher's"
        )


def require_room(student: RunModel, views: list[ModelView], sequences: list[ScoredSequence]) -> None:
    """Check that retokenized explanations fit into the student's context.

    Explanations that teacher and student read in the same tokens were checked before the run.

    Args:
        student: Calls the student.
        views: N completions as the student reads them.
        sequences: What it reads of each.

    Raises:
        InputError: If one does not; it names the row.
    """
    if all(view.spans is None for view in views):
        return
    context: int = call_model(student, lambda model: read_context_length(model.config))
    for view, sequence in zip(views, sequences, strict=True):
        if len(sequence.scored) > context:
            raise InputError(
                f"What the student reads must fit into its context of {context} tokens, but row "
                f"{view.problem.row}, with a completion of {len(view.completion.token_ids)} tokens of the "
                f"teacher, has {len(sequence.scored)} tokens of the student. Lower "
                "rollouts.sampling.max_completion_length or, for given traces, data.max_length."
            )
