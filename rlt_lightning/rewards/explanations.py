"""Build the token sequences that models score for r_SS and r_KL (RLT, figure 3)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rlt_lightning.datamodules.cross_tokenizer import CrossTokenizerFormat
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.numerics.spans import span_kl
from rlt_lightning.rewards.base import KLOptions, Reward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.run.console import announce
from rlt_lightning.types import Completion, InputError, ModelView, Problem

announce_once = cache(announce)


class Explanation(NamedTuple):
    """A student's sequence with a completion, and the places of its tokens.

    Attributes:
        read: The whole sequence, of which nothing is scored.
        think: Its own tokens of the explanation, first and end.
        solution: The solution's tokens, first and end.
    """

    scoring: ScoringPass
    think: tuple[int, int]
    solution: tuple[int, int]


def build_explanation_pass(student: Student, view: ModelView, num_given: int = 0) -> Explanation:
    """Return a completion in the student's context; `num_given` tokens before it count as its own."""
    problem = view.problem
    prefix = problem.student_prefix + problem.think_prefix
    rest = view.token_ids + problem.student_suffix + problem.solution_ids
    first, length = len(prefix), len(prefix) + len(rest)
    scoring = ScoringPass(student.model, prefix, rest, family=problem.row, retokenized=view.spans is not None)
    think = first - num_given, first + view.num_own
    return Explanation(scoring, think, (length - len(problem.solution_ids), length))


def build_solution_pass(student: Student, view: ModelView, temperature: float | None) -> ScoringPass:
    """Return the solution's tokens after a completion, as a student reads them."""
    explanation = build_explanation_pass(student, view)
    what = "student log-prob of the solution"
    return replace(explanation.scoring, scored=explanation.solution, temperature=temperature, what=what)


def build_empty_solution_pass(
    student: Student, problem: Problem, temperature: float | None, text: str = ""
) -> ScoringPass:
    """Return the solution's tokens after an explanation that says nothing: once for a problem's completions.

    Args:
        student: The student.
        problem: The problem.
        temperature: Temperature of its log-probs.
        text: The explanation; '' for an empty one.
    """
    latest = student.latest_empty
    if latest is None or latest[0] is not problem:  # completions of a problem come together
        latest = student.latest_empty = problem, build_empty_view(problem, student.format, text)
    scoring = build_solution_pass(student, latest[1], temperature)
    return replace(scoring, once=("empty", problem.row))


def build_kl_passes(
    student: Student,
    view: ModelView,
    options: KLOptions,
    student_temperature: float | None,
    teacher_temperature: float | None,
) -> dict[str, ScoringPass]:
    """Return the passes of r_KL: both models' log-probs of the explanation, or the divergence there."""
    given = count_given(view, options)
    whole, think, _ = build_explanation_pass(student, view, given)
    what = "student log-prob of the explanation"
    explanation = replace(whole, scored=think, temperature=student_temperature, what=what)
    prompt, end = view.problem.teacher_prompt, view.start + view.num_tokens
    first = len(prompt) + view.start
    teacher = ScoringPass(
        POLICY,
        prompt,
        view.completion.token_ids[:end],
        (first, len(prompt) + end),
        family=view.problem.row,
        temperature=teacher_temperature,
        what="teacher log-prob of the explanation",
        sampled=(view.start, end),
    )
    if options.kl_estimator == "exact":
        teacher = replace(teacher, scored=(first - given, len(prompt) + end), sampled=None)
        return {"kl": replace(explanation, compared_with=teacher, what="KL of the explanation")}
    passes = {"think": explanation, "teacher": teacher}
    if given:  # the separator at the end of the prompt, which no engine has sampled
        scored, once = (len(prompt) - given, len(prompt)), ("given", view.problem.row, given)
        passes["given"] = ScoringPass(
            POLICY, [], prompt, scored, view.problem.row, teacher_temperature, teacher.what, once
        )
    return passes


def estimate_kl(step: StepBatch, row: int, options: KLOptions) -> Tensor:
    """Return r_KL's tokens of a row, (K,), nats; on spans where the student has other tokens."""
    if options.kl_estimator == "exact":
        return step.tokens["kl"][row]
    teacher, think = (step.tokens[name][row] for name in ("teacher", "think"))
    given = step.tokens.get("given", {}).get(row)
    teacher = teacher if given is None else torch.cat([given, teacher])
    spans = step.rollout(row).require_view().spans
    if spans is None:
        return options.token_kl(teacher, think)
    return span_kl(options.token_kl, teacher, think, spans)


def count_given(view: ModelView, options: KLOptions) -> int:
    """Return how many tokens at the end of the prompt r_KL counts."""
    return len(view.problem.think_prefix) if options.score_given else 0


def list_think_tokens(view: ModelView, score_given: bool) -> list[int]:
    """Return the tokens that r_KL counts: the explanation and, with `score_given`, the separator before."""
    return (view.problem.think_prefix if score_given else []) + view.compared


def build_empty_completion(problem: Problem, chat_format: ChatFormat, text: str = "") -> Completion:
    """Return an explanation without text, closed by its tag: the student then reads its tags and no more.

    Its tokens are those of an empty trace, and an explanation of exactly these gains 0. None of them counts
    in r_KL. With a text, which says nothing about the problem, it is that text.
    """
    completion = chat_format.completion_from_trace(problem, text)
    # They enter nothing. Without them the teacher would read the step's completions again.
    return replace(completion, log_probs=[0.0] * len(completion.token_ids))


def build_empty_view(problem: Problem, chat_format: ChatFormat, text: str = "") -> ModelView:
    """Return an empty explanation, or one that says nothing, as a student reads it."""
    completion = build_empty_completion(problem, chat_format, text)
    return chat_format.build_rollout(problem, completion).require_view()


def require_scorable(reward: Reward, student: Student) -> None:
    """Check that a reward can be computed with a student; say so if it reads explanations as text.

    Raises:
        InputError: If it sums over a vocabulary that the models do not share, or compares the policy with
            itself.
    """
    kl_options = reward.find_kl(temperature=1.0)
    if kl_options is not None and student.model == POLICY and "thoughts" in reward.judges:
        raise InputError(
            "model.reward.kl_weight must be 0 where model.student is policy: the KL of a thought "
            "from itself is 0. Set it to 0, or model.student to reference or a model."
        )
    if student.name is None or not isinstance(student.format, CrossTokenizerFormat):
        return
    if kl_options is not None and kl_options.kl_estimator == "exact":
        raise InputError(
            "reward.kl_estimator exact sums over a vocabulary that teacher and student share, but the "
            f"tokenizer of the student {student.name} is not the teacher's. Set it to k1 or k3, which "
            "compare the models on spans of text; or choose models of one family."
        )
    announce_once(
        f"the student {student.name} reads every explanation as text, in tokens of its own: its tokenizer is "
        "not the teacher's"
    )


def require_student(reward: Reward, student: str | None) -> None:
    """Check that there is a student exactly if the reward asks one."""
    if reward.asks_student == (student is None):
        name = type(reward).__name__
        needed = f"a model, which {name} asks" if reward.asks_student else f"null, since {name} asks no model"
        raise InputError(f"model.student must be {needed}, but is {student or 'null'}. Set it.")
