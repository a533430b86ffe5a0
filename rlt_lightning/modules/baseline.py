"""What the student makes of a solution without an explanation.

    problem ─▶ empty_rollout ─▶ read with the problem's explanations (scoring.py) ─▶ reward.baseline: empty
                     └────────▶ scores_of_nothing ─▶ what `rlt explain` and `rlt teach` compare with

The student is frozen, so one reading of a problem serves all its explanations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.readers import Readers
from rlt_lightning.types import Problem, Rollout, Rollouts, Scores


def empty_rollout(problem: Problem, chat_format: ChatFormat) -> Rollout:
    """Return an explanation without text, closed by its tag: the student then reads its tags and no more.

    Its tokens are those of an empty trace, and an explanation of exactly these gains 0. None of them counts
    in r_KL.
    """
    completion = chat_format.completion_from_trace(problem, "")
    # They enter nothing. Without them the teacher would read the step's completions again.
    return chat_format.rollout(problem, replace(completion, log_probs=[0.0] * len(completion.token_ids)))


def scores_of_nothing(module: Any, rollouts: Rollouts, readers: Readers) -> Scores:
    """Return the scores, N = 1, of an empty explanation of the problem that rollouts begin with.

    Args:
        module: The RLTModule with the students.
        rollouts: The rollouts that are compared with it.
        readers: How each student reads.
    """
    empty = readers.with_views(empty_rollout(rollouts.rollouts[0].problem, readers.formats[0]))
    scores: Scores = module.score(replace(rollouts, rollouts=[empty], group_size=1))
    return scores
