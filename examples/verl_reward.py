"""RLT's reward for verl's hook `custom_reward_function`, which receives texts.

    agent loop ── one completion, as text ──▶ compute_score ─┐
    agent loop ── another ──────────────────▶ compute_score ─┴─ all that wait are scored together

Written for verl 0.9.1, whose reward manager `naive` (`verl.experimental.reward_loop`) awaits `compute_score`
with the keywords below, as does that of 0.7.1. Up to 0.7.0 the manager `batch` calls `compute_scores` with
lists. verl itself is not imported.

The reward is approximate, since the hook gets neither token ids nor the model that is trained:

- The text is tokenised again. If that gives other tokens than were sampled, these other tokens are scored, as
  in `rlt predict`.
- r_KL compares the student with a frozen copy of the teacher, not with the weights that sampled. For text
  that another model wrote, only the estimator "exact" gives a KL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from explanation_scorer import ExplanationScorer  # beside this file

from rlt_lightning.models.load import load_model
from rlt_lightning.rollouts.columns import Term, columns_of
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.types import InputError

# verl's actor_rollout_ref.model.custom_chat_template: `dataset` has rendered the prompt.
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"
Scores = asyncio.Task[list[dict[str, float]]]


@dataclass
class Batch:
    """Rows with their completions that wait to be scored together."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: Scores | None = None


class RLTRewardFunction(ExplanationScorer):
    """The RLT reward of verl's completions, from their texts and a frozen copy of the teacher.

    Every reward worker of verl (`reward.num_workers`) loads student and teacher with its first completion,
    on a GPU if it sees one.

    Example:
        A file with `compute_score = RLTRewardFunction(student, teacher).compute_score`, which
        `reward.custom_reward_function.path` names.
    """

    teacher: ModelEntry | None = None
    # The batch that still takes completions, and the scoring that began last.
    waiting: Batch | None = None
    last: Scores | None = None

    def dataset(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows for verl's Parquet files, to be used with CHAT_TEMPLATE.

        Args:
            rows: Rows with question and solution, or Bespoke-Stratos rows.

        Raises:
            InputError: If a row cannot be used; it names the number, from 1, and the reason.
        """
        made: list[dict[str, Any]] = []
        for number, row in enumerate(rows, start=1):
            problem = self.build_problem(number, row)
            made.append(
                {
                    "data_source": "rlt",
                    "prompt": [{"role": "user", "content": self.build_prompt(problem)}],
                    "reward_model": {"style": "rule", "ground_truth": problem.solution},
                    "extra_info": {**problem.columns, "question": problem.question, "index": number},
                }
            )
        return made

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Return the reward of one completion as `score`, and its terms; verl awaits this.

        Completions that come while others are scored wait, and are then read together.

        Args:
            data_source: Not read.
            solution_str: The completion's text, without special tokens.
            ground_truth: The solution.
            extra_info: The other columns of the row: `question`.
            kwargs: What verl adds for its own reward models; not read.

        Raises:
            InputError: If the row cannot be used.
        """
        batch = self.waiting
        if batch is None or (batch.scores is not None and batch.scores.done()):
            batch = self.waiting = Batch()
            batch.scores = self.last = asyncio.create_task(self._score_in_turn(batch, self.last))
        batch.rows.append({"solution": ground_truth, **(extra_info or {})})
        batch.texts.append(solution_str)
        place = len(batch.texts) - 1
        # A caller that is cancelled must not take the others' scores with it.
        return (await asyncio.shield(batch.scores))[place]

    def compute_scores(
        self,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[str],
        extra_infos: Sequence[dict[str, Any] | None],
        **kwargs: Any,
    ) -> list[dict[str, float]]:
        """Return what `compute_score` returns, for N completions; verl's manager `batch` calls this."""
        rows = [
            {"solution": solution, **(info or {})}
            for solution, info in zip(ground_truths, extra_infos, strict=True)
        ]
        return self._score(rows, list(solution_strs))

    async def _score_in_turn(self, batch: Batch, before: Scores | None) -> list[dict[str, float]]:
        """Score a batch when the one before is done; until then it takes more completions."""
        if before is not None and not before.done():
            await asyncio.wait([before])
        self.waiting = None
        return await asyncio.to_thread(self._score, batch.rows, batch.texts)

    def _score(self, rows: list[dict[str, Any]], texts: list[str]) -> list[dict[str, float]]:
        """Score N completions at once."""
        teacher, device = self._ready_teacher()
        rollouts = [
            self.build_rollout(problem, self.format.completion_from_text(problem, text))
            for problem, text in zip(self.build_problems(rows), texts, strict=True)
        ]
        step = self.score(rollouts, teacher, device)
        columns = {
            name: v.tolist() for name, v in {"score": step.rewards, **columns_of(step.table, Term)}.items()
        }
        return [{name: values[i] for name, values in columns.items()} for i in range(len(texts))]

    def _ready_teacher(self) -> tuple[ModelEntry, torch.device]:
        """Return the frozen copy of the teacher and its device; the first time, load it."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.teacher is None:
            tag = self.format.end_tag
            ids = self.tokenizer(tag, add_special_tokens=False)["input_ids"]
            if set(ids) & set(self.tokenizer.all_special_ids):
                raise InputError(
                    f"The tag {tag} must not be a special token of {self.teacher_name}, since verl leaves "
                    "those out of the texts, but it is. Set tags to others."
                )
            options = None, self.trust_remote_code, "the frozen copy of the teacher"
            model = load_model(self.teacher_name, self.student_dtype, *options).requires_grad_(False)
            self.teacher = ModelEntry(model).to(device)
        return self.teacher, device
