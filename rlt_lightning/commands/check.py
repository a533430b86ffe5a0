"""`rlt check`: find out before a run starts whether it can teach anything (docs/task.md).

    rows    ─▶ rows, lengths, steps                   nothing is loaded
    model   ─▶ closed, spread, stage0                 of a few completions that it samples
    student ─▶ begin                                  of these, and of a few answers of its own

The figures come from the code that a run uses: the datamodule's reports, and `score_problems`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, pstdev
from typing import Any, Literal, TypeGuard

from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.datamodules.rows import TRACE_COLUMN, require_judgeable
from rlt_lightning.datamodules.stages import StudentRLData
from rlt_lightning.datamodules.stratos import StratosDataModule, find_models
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.modules.checks import count_steps
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.rewards import CorrectnessReward, RLTReward
from rlt_lightning.rewards.base import Reward
from rlt_lightning.rollouts.columns import Level
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.run.console import announce
from rlt_lightning.teacher import score_problems
from rlt_lightning.types import BadRowError, BadRowReason, InputError, Problem

Status = Literal["pass", "warn", "fail", "cannot"]
TOO_LONG = {BadRowReason.PROMPT_TOO_LONG, BadRowReason.TOO_LONG}
# Limits: (below this it fails, below this it warns). Of lengths it is above.
CLOSED, SPREAD = (1e-9, 0.9), (1e-9, 0.5)
GROUP_STD_BELOW = 1e-3  # nats: the completions of a problem all earn the same
STAGE_0 = (0.1, 0.5)  # part of the problems that the untrained model explains
LEFT_OUT = (0.01, 0.1)
# Optimizer steps below which a run hardly changes a model: the shortest shipped run that is meant to has 24.
MIN_STEPS = 20
TOGETHER = 4  # problems that are sampled at once
# Where to begin (docs/task.md has the settings that these come from).
FILLER = "Let us read the question carefully. We think about it step by step and so we find the solution."
# A useful explanation gains so many nats over filler, as stage 0 asks, and that part of what filler lacks to
# 0, the best reward: a sure student, no KL. A leap costs KL; after an explanation that breaks off
# a student guesses.
MARGIN, PART = 0.2, 0.6
GROUP = 8  # answers of the student to a problem
# The first way whose least shares of right own answers and of useful explanations are reached.
WAYS = (
    (0.2, 0.0, "GRPO or its own right answers need no teacher"),
    (0.0, 0.07, "expert iteration by the threshold; else the best quarter by the reward, or RLT"),
    (0.0, 0.02, "expert iteration by the threshold, then RLT"),
    (0.0, 1e-9, "expert iteration by the threshold, or a warm-up on the best traces; RLT failed at so few"),
    (0.0, 0.0, "none is useful: a warm-up first, or a longer one"),
)


@dataclass(frozen=True)
class CheckOptions:
    """How much `rlt check` computes.

    Args:
        rows: Problems that completions are sampled of.
        completions: Completions of each problem.
    """

    rows: int = 16
    completions: int = 4

    def __post_init__(self) -> None:
        if self.rows < 2 or self.completions < 2:
            raise InputError(
                f"check.rows and check.completions must be at least 2, but are {self.rows} and "
                f"{self.completions}. Raise them."
            )


@dataclass(frozen=True)
class Check:
    """One line of `rlt check`.

    Example: `Check("steps", "fail", "9 optimizer steps", "at least 20", "Add rows")`.

    Attributes:
        name: What is checked.
        status: pass; warn: the run may teach little; fail: it cannot teach; cannot: it cannot be said.
        figure: What was found, or why nothing can be.
        limit: What should be; '' if there is nothing to say.
        remedy: What to do unless it passes.
    """

    name: str
    status: Status
    figure: str
    limit: str = ""
    remedy: str = ""

    def line(self) -> str:
        """Return the check as a line."""
        limit = f" ({self.limit})" if self.limit and self.status != "cannot" else ""
        remedy = f". {self.remedy}" if self.remedy and self.status != "pass" else ""
        return f"{self.status:6} {self.name:8} {self.figure}{limit}{remedy}"


def grade(name: str, part: float, limits: tuple[float, float], figure: str, remedy: str) -> Check:
    """Return the check of a part that should be high: it fails and warns below the limits."""
    status: Status = "fail" if part < limits[0] else "warn" if part < limits[1] else "pass"
    return Check(name, status, figure, f"at least {100 * limits[1]:g} %", remedy)


def check_run(
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    options: CheckOptions,
    length: dict[str, Any],
    **trainer: Any,
) -> Iterator[Check]:
    """Yield the checks of a run as they are made.

    Args:
        module: The run's module.
        data: Its rows.
        rollouts: How it samples.
        options: How much is computed.
        length: The trainer's max_steps, max_epochs and limit_train_batches.
        trainer: Arguments of Lightning's Trainer, such as accelerator and precision.

    Raises:
        InputError: If the rows cannot be read, or a model cannot be loaded.
    """
    # Rows that are left out are a figure here, not an error.
    limit, data.max_bad_frac = data.max_bad_frac, 1.0
    data.setup("fit")
    yield check_rows(data, limit)
    yield check_lengths(data)
    yield check_steps(data, length)
    if module.reward is None or "thoughts" in module.reward.judges:
        yield Check("closed", "cannot", "only completions that a reward judges are sampled: see `rlt test`")
        return
    problems = draw_problems(data, options.rows)
    asked = data.with_rows([problem.columns for problem in problems])
    asked.reader_name = find_models(module)[1]
    asked.val_batch_size = TOGETHER
    scorer = deepcopy(module)  # nothing is loaded yet, and the run's reward stays
    if has_baseline(module.reward):
        scorer.reward = measure_gain(module.reward, data)
    rollouts.num_traces, rollouts.max_resamples = options.completions, 0
    announce(f"sampling {options.completions} completions of each of {len(problems)} problems")
    scored = score_problems(scorer, asked, rollouts, **trainer)
    yield check_closed(scored, rollouts.sampling.max_completion_length)
    yield check_spread(scored, options.completions)
    if asked.samples != "explanations":
        return
    sampled = [rollout for step in scored for rollout in step.rollouts(step.shard)]
    fits = [asked.fits_student(rollout) for rollout in sampled]
    if not any(row.get(TRACE_COLUMN) or row.get("conversations") for row in (p.columns for p in problems)):
        yield check_stage_0(fits, options.completions)
    if has_baseline(scorer.reward):
        useful = [good and fit for good, fit in zip(find_useful(scorer.reward, scored), fits, strict=True)]
        yield advise(judge_own_answers(module, data, problems, rollouts, **trainer), useful)


# The rows


def check_rows(data: StratosDataModule, most: float) -> Check:
    """Check that rows can be used, whatever their lengths."""
    total = sum(report.num_rows for report in data.reports)
    bad = [error.reason for report in data.reports for _, error in report.bad if error.reason not in TOO_LONG]
    status: Status = "pass" if len(bad) <= most * total else "fail"
    reasons = ", ".join(sorted(set(map(str, bad))))
    figure = f"{len(bad)} of {total} rows cannot be used" + (f" ({reasons})" if bad else "")
    return Check("rows", status, figure, f"at most {100 * most:g} %", "See docs/formats.md")


def check_lengths(data: StratosDataModule) -> Check:
    """Check that limits leave out or cut few rows."""
    total = sum(report.num_rows for report in data.reports)
    long = sum(error.reason in TOO_LONG for report in data.reports for _, error in report.bad)
    cut = sum(len(report.truncated) for report in data.reports)
    part = (long + cut) / max(1, total)
    status: Status = "fail" if part > LEFT_OUT[1] else "warn" if part > LEFT_OUT[0] else "pass"
    return Check(
        "lengths",
        status,
        f"{long} of {total} rows are too long and left out, {cut} are cut",
        f"together at most {100 * LEFT_OUT[0]:g} %",
        "Raise data.max_prompt_length or max_length",
    )


def check_steps(data: StratosDataModule, length: dict[str, Any]) -> Check:
    """Check that the run takes enough optimizer steps."""
    per_epoch = len(data.step_loader())
    steps = count_steps(per_epoch, **length)
    return Check(
        "steps",
        "pass" if steps >= MIN_STEPS else "fail",
        f"{steps} optimizer steps, {per_epoch} in an epoch of {len(data.items)} items",
        f"at least {MIN_STEPS}",
        "Add rows, raise trainer.max_epochs or max_steps, or lower data.prompts_per_step",
    )


def draw_problems(data: StratosDataModule, number: int) -> list[Problem]:
    """Return usable rows, drawn by the seed of the data."""
    indices = Random(data.seed).sample(range(len(data.items)), min(number, len(data.items)))
    return [data.problems[index] for index in indices]


# Completions


def check_closed(scored: Sequence[StepBatch], limit: int) -> Check:
    """Check that completions close the format, and propose a limit of length by the longest that ends."""
    rollouts = [rollout for step in scored for rollout in step.rollouts(step.shard)]
    closed = fmean(rollout.closed for rollout in rollouts)
    ended = [len(r.completion.token_ids) for r in rollouts if r.completion.finish_reason != "length"]
    cut = 1 - len(ended) / len(rollouts)
    proposal = "none ends, so nothing says how long they would be"
    if ended:
        least = "at least " * (cut > LEFT_OUT[0])
        proposal = f"1.5 times the longest that ends is {least}{math.ceil(1.5 * max(ended))}"
    return grade(
        "closed",
        closed,
        CLOSED,
        f"{show_part(closed, len(rollouts))} of {len(rollouts)} completions close the format; "
        f"{100 * cut:.0f} % reach the limit of {limit} tokens; {proposal}",
        "Warm up longer, or raise rollouts.sampling.max_completion_length",
    )


def check_spread(scored: Sequence[StepBatch], size: int) -> Check:
    """Check that the completions of a problem earn different rewards."""
    rewards = [float(value) for step in scored for value in step.rewards]
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    part = fmean(pstdev(group) > GROUP_STD_BELOW for group in groups)
    return grade(
        "spread",
        part,
        SPREAD,
        f"in {show_part(part, len(groups))} of {len(groups)} groups the rewards differ",
        "Raise rollouts.sampling.temperature or model.group_size, or take other problems",
    )


def check_stage_0(usable: Sequence[bool], completions: int) -> Check:
    """Check that this teacher explains most problems at least once: its explanations can warm it up."""
    part = fmean(any(usable[i : i + completions]) for i in range(0, len(usable), completions))
    return grade(
        "stage0",
        part,
        STAGE_0,
        f"rows without traces: of {completions} explanations one is closed and without tags for "
        f"{show_part(part, len(usable) // completions)} of the problems; stage 0 keeps those that earn more "
        "than filler (docs/data.md)",
        "Show an example in data.teacher_system_prompt, as laptop/smollm2_explain does, or raise "
        "rollouts.num_traces there",
    )


# Where to begin


def has_baseline(reward: Reward | None) -> TypeGuard[RLTReward]:
    """Return whether a reward can be a gain over filler."""
    return reward is not None and reward.has_baseline


def measure_gain(reward: RLTReward, data: StratosDataModule) -> RLTReward:
    """Return the reward of stage 0: the gain over filler, with the exact KL, by which filler never gains."""
    if reward.baseline == "none":
        reward = replace(reward, baseline=FILLER)
    return reward if data.format.student else replace(reward, kl_estimator="exact")


def find_useful(reward: RLTReward, scored: Sequence[StepBatch]) -> list[bool]:
    """Return which explanations are useful; the rewards are gains over filler."""
    gains = [float(value) for step in scored for value in step.rewards]
    filler = [
        float(value) * reward.solution_weight for step in scored for value in step.table[Level("baseline")]
    ]
    return [gain >= max(MARGIN, -PART * value) for gain, value in zip(gains, filler, strict=True)]


def judge_own_answers(
    module: PolicyModule,
    data: StratosDataModule,
    problems: Sequence[Problem],
    rollouts: RolloutCallback,
    **trainer: Any,
) -> list[list[bool]]:
    """Let the student answer without an explanation; return which of the answers to each problem are right.

    Problems without an answer that can be judged are left out. The student is sampled in this process: the
    run's engine has the teacher.
    """
    judged = [problem for problem in problems if has_answer(problem)]
    if not judged:
        return []
    limit = rollouts.sampling.max_completion_length + max(
        len(problem.student_suffix) + len(problem.solution_ids) for problem in judged
    )
    options = {
        name: value for name, value in vars(data.format_options).items() if name != "teacher_system_prompt"
    }
    answers = StudentRLData(
        [problem.columns for problem in judged],
        prompts_per_step=TOGETHER,
        max_prompt_length=data.max_prompt_length,
        trust_remote_code=data.trust_remote_code,
        **options,
    )
    student = RLTModule(
        str(find_models(module)[1]),
        None,
        reward=CorrectnessReward(),
        dtype=module.frozen_dtype,
        trust_remote_code=module.trust_remote_code,
    )
    sampling = replace(rollouts.sampling, max_completion_length=limit)
    callback = RolloutCallback(HFEngine(), sampling=sampling, num_traces=GROUP, seed=rollouts.seed)
    announce(f"sampling {GROUP} answers of the student to each of {len(judged)} problems")
    scored = score_problems(student, answers, callback, **trainer)
    right = [bool(value > 0) for step in scored for value in step.table[Level("correct")]]
    return [right[i : i + GROUP] for i in range(0, len(right), GROUP)]


def has_answer(problem: Problem) -> bool:
    """Return whether an answer to a problem can be judged."""
    with suppress(BadRowError):
        require_judgeable(problem.reference)
        return True
    return False


def advise(right: Sequence[Sequence[bool]], useful: Sequence[bool]) -> Check:
    """Say which way to try first.

    Args:
        right: Of each problem, which of the student's answers are right; empty if none can be judged.
        useful: Which explanations of the teacher are useful.
    """
    answers, share = [answer for group in right for answer in group], fmean(useful)
    if answers:
        frac, never = fmean(answers), sum(not any(group) for group in right)
        figure = (
            f"the student is right in {show_part(frac, len(answers))} of its own samples, in {never} of "
            f"{len(right)} groups of {GROUP} not once"
        )
    else:
        frac = 0.0
        figure = "these rows have no answer that can be judged: nothing says how often the student is right"
    way = next(way for least, useful_least, way in WAYS if frac >= least and share >= useful_least)
    figure += (
        f"; {show_part(share, len(useful))} of {len(useful)} explanations bring the student {100 * PART:g} % "
        "of the way from filler to the solution"
    )
    return Check("begin", "pass", f"{figure}: {way}")


def show_part(part: float, number: int) -> str:
    """Return a fraction of so many in percent, with its standard error."""
    return f"{100 * part:.0f} ± {100 * math.sqrt(part * (1 - part) / number):.0f} %"
