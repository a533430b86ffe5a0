"""Build the token sequences that models score for r_SS and r_KL (RLT, figure 3)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.numerics.spans import span_kl
from rlt_lightning.rewards.base import KLOptions, Reward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.step import POLICY, ScoringPass, StepBatch
from rlt_lightning.run.console import announce
from rlt_lightning.types import InputError, ModelView, Problem

announce_once = cache(announce)


def build_solution_pass(student: Student, view: ModelView, temperature: float | None) -> ScoringPass:
    """Return a completion and the solution after it, as a student reads them; the solution is scored."""
    problem = view.problem
    prefix = problem.student_prefix + problem.think_prefix
    rest = view.token_ids + problem.student_suffix + problem.solution_ids
    end = len(prefix) + len(rest)
    return ScoringPass(
        student.model,
        prefix,
        rest,
        {"solution": (end - len(problem.solution_ids), end)},
        problem.row,
        temperature,
        retokenized=view.spans is not None,
    )


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
    return replace(scoring, scored={"empty": scoring.scored["solution"]}, once=("empty", problem.row))


def build_kl_passes(
    student: Student,
    view: ModelView,
    options: KLOptions,
    student_temperature: float | None,
    teacher_temperature: float | None,
) -> list[ScoringPass]:
    """Return the passes of r_SS and r_KL: the student's, with the explanation scored too, and the policy's.

    With the exact estimator the student is compared with the policy at the explanation.
    """
    student_pass = build_solution_pass(student, view, student_temperature)
    start, given = len(student_pass.prefix), len(view.problem.think_prefix) if options.score_given else 0
    explanation = start - given, start + view.num_own
    row, prompt, num_read = view.problem.row, view.problem.teacher_prompt, view.start + view.num_tokens
    first, end = len(prompt) + view.start, len(prompt) + num_read
    teacher_pass = ScoringPass(
        POLICY,
        prompt,
        view.completion.token_ids[:num_read],
        {"teacher": (first, end)},
        row,
        teacher_temperature,
        asks_engine=True,
    )
    if options.kl_estimator == "exact":
        compared_with = replace(teacher_pass, scored={"kl": (first - given, end)}, asks_engine=False)
        scored = {**student_pass.scored, "kl": explanation}
        return [replace(student_pass, scored=scored, compared_with=compared_with)]
    passes = [replace(student_pass, scored={**student_pass.scored, "explanation": explanation}), teacher_pass]
    if given:  # the separator at the end of the prompt, which no engine has sampled
        scored = {"given": (len(prompt) - given, len(prompt))}
        once = ("given", row, given)
        passes.append(ScoringPass(POLICY, prompt, [], scored, row, teacher_temperature, once))
    return passes


def estimate_kl(step: StepBatch, row: int, options: KLOptions) -> Tensor:
    """Return r_KL's tokens of a row, (K,), nats; on spans where the student has other tokens."""
    if options.kl_estimator == "exact":
        return step.tokens["kl"][row]
    teacher, student = (step.tokens[name][row] for name in ("teacher", "explanation"))
    given = step.tokens.get("given", {}).get(row)
    teacher = teacher if given is None else torch.cat([given, teacher])
    spans = step.rollout(row).require_view().spans
    if spans is None:
        return options.token_kl(teacher, student)
    return span_kl(options.token_kl, teacher, student, spans)


def build_empty_view(problem: Problem, chat_format: ChatFormat, text: str = "") -> ModelView:
    """Return an explanation without text, closed by its tag, as a student reads it: its tags and no more.

    Its tokens are those of an empty trace, and an explanation of exactly these gains 0. None of them counts
    in r_KL. With a text, which says nothing about the problem, it is that text.
    """
    completion = chat_format.completion_from_trace(problem, text)
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
    if student.name is None or student.format.student is None:
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
