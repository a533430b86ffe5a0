"""Explanations of one problem, what their student makes of them, and the text that shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.modules.scorer import Students
from rlt_lightning.modules.text_reward import TextReward
from rlt_lightning.numerics.rewards import Reward, RLTReward
from rlt_lightning.report.heat import (
    CONTROLS,
    Terminal,
    caveats,
    folded,
    format_of,
    hanging,
    legend,
    shaded,
    solution_heat,
    students_in_words,
    table_of_kl,
    term_lines,
    terms_in_words,
)
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.metrics import COLUMNS
from rlt_lightning.run.rows import rollout_rows, row_of_student, score_rows, token_columns
from rlt_lightning.tags import TagStyle
from rlt_lightning.types import PromptBatch, RewardTerms, Rollout, Scores


class NoReward(TextReward):
    """What `rlt teach` puts in place of the reward where no student scores; its zeros are not shown."""

    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> RewardTerms:
        """See `TextReward`."""
        return RewardTerms(torch.zeros(len(rollouts)))


@dataclass(frozen=True)
class Taught:
    """Explanations of one problem, and what their student makes of them.

    Attributes:
        rows: A row of rollouts.jsonl for each, with its tokens and the student's view where a student scores.
        empty: The same for an empty explanation; None without a student.
        parts: For each explanation, the terms that add up to its reward, by name.
        reward: The reward that scored them.
        teacher: The teacher's name.
        students: The students; their columns of the rows are NAME/LABEL if there are several.
        parts_of: The same as `parts` by each of several students.
    """

    rows: list[Row]
    empty: Row | None
    parts: list[dict[str, float]]
    reward: Reward
    teacher: str
    students: Students
    parts_of: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Any, batch: PromptBatch, data: StratosDataModule) -> Taught:
        """Collect what a scored batch of one problem has, and let the student score an empty explanation."""
        assert batch.rollouts is not None
        assert batch.scores is not None
        rollouts, scores = batch.rollouts.rollouts, batch.scores
        rows, empty = list(rollout_rows(batch)), None
        parts_of = {label: parts_in(one) for label, one in scores.by_student.items()}
        if isinstance(module.reward, RLTReward):
            before = module.scorer.score_empty(rollouts[0].problem, batch.rollouts.temperature)
            empty = score_rows(before)[0] | token_columns(rollouts[0], before, 0, data.readers.formats)
            for i, rollout in enumerate(rollouts):
                rows[i] |= token_columns(rollout, scores, i, data.readers.formats)
                rows[i] |= students_view(before, scores, i)
        if isinstance(module.reward, NoReward):
            rows = [{name: value for name, value in row.items() if name != "reward"} for row in rows]
        models = module.pretrained, module.students
        return cls(rows, empty, parts_in(scores), module.reward, *models, parts_of)

    @property
    def best(self) -> int:
        """Return the number of the explanation with the largest reward, from 0."""
        return max(range(len(self.rows)), key=lambda i: self.rows[i].get("reward", 0.0))

    def json_rows(self, traces: Iterable[Row]) -> list[Row]:
        """Return the rows of traces.jsonl with the tokens and the student's view, as far as there are any."""
        names = [column.name for column in (*COLUMNS["taught"], *COLUMNS["tokens"])]
        found = []
        for trace, row in zip(traces, self.rows, strict=True):
            own = (name for base in names for name in row if base_of(name) == base)
            found.append(trace | {name: row[name] for name in own})
            if "reward" not in row:
                del found[-1]["reward"]
        return found


def base_of(column: str) -> str:
    """Return the name of a column without the label of a student."""
    return column.partition("/")[0]


def parts_in(scores: Scores) -> list[dict[str, float]]:
    """Return, for each completion, the terms that add up to its reward, by name."""
    parts = scores.terms.parts()
    return [{name: float(v[i]) for name, v in parts.items()} for i in range(len(scores.terms.reward))]


def students_view(before: Scores, scores: Scores, place: int) -> Row:
    """Return the student's probability of the solution, before and after an explanation.

    Args:
        before: The scores of an empty explanation.
        scores: The scores of explanations.
        place: Which of them is meant.

    Returns:
        See `probabilities`: of the first student and, as NAME/LABEL, of further ones.
    """
    found = probabilities(before.solution_log_probs[0], scores.solution_log_probs[place])
    for label, one in [*scores.by_student.items()][1:]:
        own = probabilities(before.by_student[label].solution_log_probs[0], one.solution_log_probs[place])
        found |= {f"{name}/{label}": value for name, value in own.items()}
    return found


def probabilities(before: Tensor, after: Tensor) -> Row:
    """Return a student's probability of the solution, before and after an explanation.

    Args:
        before: Log-probs of the solution's tokens after an empty explanation, (S,), nats.
        after: The same after the explanation.

    Returns:
        student_prob_*: exp(mean log-prob), the geometric mean of the tokens' probabilities.
        student_log_prob_*: The sum of the log-probs, nats.
    """
    pairs = {"before": before.double(), "after": after.double()}
    probs = {f"student_prob_{name}": float(values.mean().exp()) for name, values in pairs.items()}
    return probs | {f"student_log_prob_{name}": float(values.sum()) for name, values in pairs.items()}


def lesson(taught: Taught, top: int, terminal: Terminal) -> list[str]:
    """Return the lines that a terminal shows: the problem, the explanations, and what the best is worth.

    Args:
        taught: The explanations of one problem.
        top: Number of the explanation's tokens in the table; 0 for all.
        terminal: What the lines are for.
    """
    rows, best = taught.rows, taught.best
    several = len(taught.students.names) > 1
    student = f", student{'s' if several else ''} {', '.join(taught.students.names)}"
    student = student if taught.students.names else ""
    lines = [*hanging("", f"teacher {taught.teacher}{student}", terminal), ""]
    for name in ("question", "solution"):
        lines += plain(f"{name.capitalize()}: {rows[0][name].strip()}", terminal)
    for number, row in enumerate(rows):
        lines += ["", *hanging("", heading(row, number, len(rows), number == best), terminal)]
        if taught.empty is None:
            lines += plain(row["explanation"], terminal)
        else:
            lines.append(shaded(row["thought_tokens"], row["thought_kl"], terminal))
    if isinstance(taught.reward, NoReward):
        return [
            *lines,
            "",
            *hanging("", "Without a student (model.student null) there is no reward.", terminal),
        ]
    if taught.empty is not None:
        whose = taught.students.labels[0] if several else "student"
        lines += legend(f"KL of teacher from {whose}", terminal)
    if len(rows) > 1:
        lines += ["", f"The best, {best + 1} of {len(rows)}:"]
    row, parts = rows[best], taught.parts[best]
    if taught.empty is None or not isinstance(taught.reward, RLTReward):
        return [*lines, "", *term_lines(row["reward"], parts, {}, terminal)]
    if several:
        lines += ["", *students_in_words(row, taught.students, terminal)]
    for label in taught.students.labels:
        own, empty = (row_of_student(one, label) for one in (row, taught.empty))
        terms = taught.parts_of[label][best] if several else parts
        lines += ["", f"{label}:"] if several else []
        lines += worth(own, empty, terms, taught.reward, top, terminal)
    return [*lines, *caveats(taught.reward, terminal)]


def worth(
    row: Row, empty: Row, parts: dict[str, float], reward: RLTReward, top: int, terminal: Terminal
) -> list[str]:
    """Return the lines that say what an explanation is worth to one student; arguments as `explained`."""
    return [
        "",
        *view_lines(row, reward, terminal),
        "",
        *terms_in_words(row, empty, parts, reward, terminal),
        "",
        *hanging("", f"KL of teacher from student ({reward.kl_estimator}) by token, nats", terminal),
        *table_of_kl(row, top),
        "",
        *solution_heat(row, empty, terminal),
    ]


def heading(row: Row, number: int, num_rows: int, best: bool) -> str:
    """Return the line above an explanation."""
    size = f"{row['num_tokens']} tokens, {format_of(row)}"
    if num_rows == 1:
        return f"Explanation ({size}):"
    if "reward" not in row:
        return f"Explanation {number + 1} of {num_rows} ({size}):"
    figures = [f"reward {row['reward']:+.4f}"]
    # Of several students each has its own, below.
    if "student_prob_after" in row and not any(name.startswith("student_prob_after/") for name in row):
        before, after = (probability(row[f"student_prob_{name}"]) for name in ("before", "after"))
        figures.append(f"student's probability {before} -> {after}")
    figures += [] if row["finish_reason"] == "stop" else [format_of(row)]
    return f"Explanation {number + 1} of {num_rows}{', the best' if best else ''} ({', '.join(figures)}):"


def probability(value: float) -> str:
    """Return a probability in four digits after the point, or as a power of ten if it is small."""
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"


def view_lines(row: Row, reward: RLTReward, terminal: Terminal) -> list[str]:
    """Return the student's probability of the solution before and after the explanation, and what that is."""
    lines = ["The student's probability of the solution, per token:"]
    for name in ("before", "after"):
        log_prob = row[f"student_log_prob_{name}"]
        lines.append(f"  {name:<8}{probability(row[f'student_prob_{name}']):<9} log-prob {log_prob:.4f}")
    count = len(row["solution_tokens"])
    words = (
        f"Before: with an empty explanation. Per token: exp of the mean log-prob of the {count} "
        f"token{'s' if count > 1 else ''}. log-prob: their sum, nats. At temperature "
        f"{reward.student_temperature:g}."
    )
    return [*lines, *hanging("  ", words, terminal)]


def plain(text: str, terminal: Terminal) -> list[str]:
    """Return a text without characters that control a terminal, folded at its width."""
    return folded([text.translate(CONTROLS)], terminal)
