"""The frozen students of a run: one, or several whose rewards become one reward.

    rollouts ─▶ as each student reads them ─▶ student 1 ─▶ TokenScores ─▶ Scores ┐
                                          ├─▶ student 2 ─▶ TokenScores ─▶ Scores ┴▶ combined Scores
    teacher's log-probs, computed once ───┘                             (numerics/students.py)

With offload_frozen one student at a time is on the device (`FrozenModel.on`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import isfinite
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.modules.frozen import FrozenModel
from rlt_lightning.modules.scoring import StudentScorer, TokenScores, teacher_sequence, think_tokens
from rlt_lightning.modules.text_reward import require_student
from rlt_lightning.numerics.packing import Extent
from rlt_lightning.numerics.rewards import Reward, RLTRewardTerms
from rlt_lightning.numerics.students import Reduction, combined_terms
from rlt_lightning.run.metrics import build_student_metrics, register
from rlt_lightning.types import InputError, Rollout, Rollouts, Scores

# Names of students, with their weights or without.
Named = list[str] | dict[str, float]


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
    def of(cls, student: str | None, students: Named | None, reduction: Reduction = "mean") -> Students:
        """Return the students that settings name.

        Args:
            student: The only one; None if no model scores. Not read where `students` are named.
            students: Several, with weights or without.
            reduction: See `Students`.

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
                "model.students must name at least one student, but is empty. Name them, or set it to null."
            )
        weights = dict(students) if isinstance(students, dict) else dict.fromkeys(students, 1.0)
        for name, weight in weights.items():
            if not (isinstance(weight, (int, float)) and isfinite(weight) and weight > 0):
                raise InputError(
                    f"A weight of model.students must be a number above 0, but that of {name} is {weight}. "
                    "Correct it, or leave the student out."
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

    def in_words(self) -> str:
        """Return names and weights, for people."""
        if len(self.names) < 2:
            return ", ".join(self.names)
        if self.reduction == "min":
            return f"the smallest reward of {', '.join(self.names)}"
        weighed = (f"{name} ({weight:g})" for name, weight in zip(self.names, self.weights, strict=True))
        return f"the mean of {', '.join(weighed)}"

    def rewards(self, scorer: StudentScorer, rows: list[Rollout], found: Sequence[TokenScores]) -> Scores:
        """Return the rewards of N rollouts, whole groups, from what each student said of their tokens.

        Args:
            scorer: Computes the reward; no model is run.
            rows: The rollouts.
            found: What each student said.

        Raises:
            NonFiniteError: If a reward is NaN or infinite, naming the rows.
            InputError: If the reward's extra terms have wrong names or shapes.
        """
        if len(found) == 1:
            return scorer.rewards(rows, found[0])
        extra = scorer.extra_terms(rows)
        scores = [
            scorer.rewards([row.read_by(number) for row in rows], one, extra)
            for number, one in enumerate(found)
        ]
        terms = [one.terms for one in scores if isinstance(one.terms, RLTRewardTerms)]
        combined = combined_terms(terms, self.weights, self.reduction)
        return replace(scores[0], terms=combined, by_student=dict(zip(self.labels, scores, strict=True)))


def one_or_several(student: str | Named | None) -> tuple[str | None, Named | None]:
    """Return `model.student` and `model.students` of an argument that may be either."""
    return (student, None) if student is None or isinstance(student, str) else (None, student)


def ask_students(
    students: Sequence[FrozenModel],
    scorer_of: Callable[[Callable[..., Any], int], StudentScorer],
    rollouts: Rollouts,
    device: torch.device,
    known: Sequence[Mapping[int, Tensor]] | None = None,
) -> list[TokenScores]:
    """Let each student read rollouts, one after the other; the teacher is asked once.

    Args:
        students: The students; none if the reward asks no model.
        scorer_of: Returns the scorer that calls a student through its `run`; it also gets its number.
        rollouts: N rollouts.
        device: The device on which they read.
        known: What each student has said of empty explanations already, (S,), by the problem's row.

    Returns:
        What each student said.
    """
    if not students:
        return []
    views = [
        replace(rollouts, rollouts=[row.read_by(number) for row in rollouts.rollouts])
        for number in range(len(students))
    ]
    several = len(students) > 1
    of_teacher = teacher_log_probs(scorer_of(students[0].run, 0), views) if several else [None]
    found = []
    for number, student in enumerate(students):
        empty = known[number] if known else None
        with student.on(device) as run:
            scorer = scorer_of(run, number)
            found.append(scorer.token_scores(views[number], empty, of_teacher[number]))
    return found


@torch.no_grad()
def teacher_log_probs(scorer: StudentScorer, views: list[Rollouts]) -> Sequence[list[Tensor] | None]:
    """Return the teacher's log-probs of the think tokens of each view, N of (K,), with one forward at most.

    The views of a rollout count the same tokens of the teacher, but for a few at either end. So the longest
    is computed, and each view gets its part.

    Args:
        scorer: Calls the teacher; its student is not called.
        views: The rollouts, as each student reads them.

    Returns:
        None for each view with kl_estimator exact, which compares hidden states: the teacher runs with each
        student.
    """
    if scorer.reward.kl_estimator == "exact":
        return [None] * len(views)
    rows = [longest_view(row) for row in zip(*(view.rollouts for view in views), strict=True)]
    whole = scorer.sampled_log_probs(replace(views[0], rollouts=rows))
    if whole is None:
        whole = teacher_forward(scorer, rows)
    score_given = scorer.reward.score_given
    parts = []
    for view in views:
        of_view = []
        for row, longest, values in zip(view.rollouts, rows, whole, strict=True):
            num_given = len(longest.problem.think_prefix) if score_given else 0
            first = num_given - (len(row.problem.think_prefix) if score_given else 0)
            of_view.append(values[first : num_given + row.num_think])
        parts.append(of_view)
    return parts


def longest_view(views: Sequence[Rollout]) -> Rollout:
    """Return a rollout with all tokens that any of its views counts, at its start and at its end."""
    longest = max(views, key=lambda row: row.num_think)
    given = max((row.problem for row in views), key=lambda problem: len(problem.think_prefix))
    return replace(longest, problem=given, retold=None)


def teacher_forward(scorer: StudentScorer, rows: list[Rollout]) -> list[Tensor]:
    """Run the teacher, and return its log-probs of the think tokens, N of (K,)."""
    lengths = [len(think_tokens(row, scorer.reward.score_given)) for row in rows]
    sequences = [teacher_sequence(row, length) for row, length in zip(rows, lengths, strict=True)]
    extents = [
        Extent(row.problem.row, len(one.prefix), len(one.rest))
        for row, one in zip(rows, sequences, strict=True)
    ]
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for micro_batch, weight in scorer.plan(extents):
        values = scorer.teacher_log_probs(scorer.pack(sequences, micro_batch, weight))
        of_rows = values.split([lengths[i] for i in micro_batch.indices])
        for i, one in zip(micro_batch.indices, of_rows, strict=True):
            found[i] = one
    return found
