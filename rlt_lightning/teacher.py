"""Use a teacher: let it explain solutions, or score what explanations are worth to a student.

Teacher(teacher, student)   loads the models at its first use and keeps them
  .explain, .score          rows ─▶ score_problems, as `rlt predict` does ─▶ Score: reward, terms, tokens
explain                     the same for `rlt explain`, as text
score_problems              rows ─▶ their completions, or sampled ones ─▶ scored steps; also for `rlt check`
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from typing_extensions import override

from rlt_lightning.callbacks.predictions import warn_of_foreign_traces
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.datamodules.rows import TRACE_COLUMN
from rlt_lightning.datamodules.stages import ScoringData, TeacherRLData
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.engines.base import Sampling
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.models.load import Dtype, context_length
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.modules.rlt import RLTModule
from rlt_lightning.rewards import RLTReward, TextReward
from rlt_lightning.rewards.student import Student
from rlt_lightning.rollouts.columns import REWARD, Column, Level, Record, Term, columns_of
from rlt_lightning.rollouts.step import StepBatch
from rlt_lightning.run.console import make_printable
from rlt_lightning.tags import TagStyle, decode_each
from rlt_lightning.trainer import TRAINER_DEFAULTS, quiet_third_parties
from rlt_lightning.types import FinishReason, InputError, PromptBatch, Rollout

# For any text, whoever wrote it: the sampled estimators hold only for what the teacher itself sampled.
EXACT = RLTReward(kl_estimator="exact")
ROWS_AT_ONCE = 8  # as configs/recipe_7b/rank.yaml


class NoReward(TextReward):
    """The reward that `Teacher` uses if it has no student; its zeros are not shown."""

    def __call__(self, rollouts: list[Rollout], tags: TagStyle) -> dict[Column, Any]:
        """See `TextReward`."""
        return {REWARD: torch.zeros(len(rollouts))}


@dataclass(frozen=True)
class Score:
    """The worth of an explanation to a student: RLT's reward, in total and by token.

    reward = solution_weight * r_ss - kl_weight * r_kl + format          (RLT, arXiv:2506.08388, section 3.3)

    Attributes:
        reward: The sum of `terms`.
        r_ss: How probable the student finds the solution after the explanation, nats, without its weight;
            with `baseline="empty"` how much more probable than after an empty one.
        r_kl: How unnatural the explanation is to the student, nats, without its weight.
        terms: What adds up to the reward, by name, weights and signs included.
        token_ids: The K tokens of the explanation that r_kl counts.
        tokens: Their texts.
        kl: Their KL of teacher from student, nats, before clipping and normalisation.
        solution_ids: The S tokens of the solution, which r_ss counts.
        solution_tokens: Their texts.
        solution_log_probs: The student's log-probs of them, nats, likewise.
    """

    reward: float
    r_ss: float
    r_kl: float
    terms: dict[str, float]
    token_ids: list[int] = field(repr=False)
    tokens: list[str] = field(repr=False)
    kl: list[float] = field(repr=False)
    solution_ids: list[int] = field(repr=False)
    solution_tokens: list[str] = field(repr=False)
    solution_log_probs: list[float] = field(repr=False)

    @classmethod
    def of(cls, step: StepBatch, row: int, reward: RLTReward, student: Student) -> Score:
        """Return the score of one rollout of a step.

        Args:
            step: The step.
            row: Its row there.
            reward: What scored it.
            student: Who read it.
        """
        table, read = step.choose([row]), reward.list_tokens(step, row)
        columns = {name: float(values) for name, values in columns_of(table, Record).items()}
        solution = columns["solution_log_prob_mean"] + reward.min_coef * columns["solution_log_prob_min"]
        return cls(
            reward=float(table[REWARD]),
            r_ss=solution - float(table.get(Level("baseline"), 0.0)),
            r_kl=columns["kl_mean"] + reward.max_coef * columns["kl_max"],
            terms={name: float(values) for name, values in columns_of(table, Term).items()},
            token_ids=read.explanation,
            tokens=decode_each(student.format.tokenizer, read.explanation),
            kl=read.kl,
            solution_ids=read.solution,
            solution_tokens=decode_each(student.format.student_tokenizer, read.solution),
            solution_log_probs=read.solution_log_probs,
        )


@dataclass(frozen=True)
class Explanation:
    """What a teacher wrote about one problem.

    Attributes:
        question: The question.
        solution: Its solution, which the teacher saw.
        text: The explanation.
        token_ids: All sampled tokens, the end tag included.
        finish_reason: Why sampling ended; "stop" if the explanation is complete.
        score: What it is worth to the student; None without a student.
    """

    question: str
    solution: str
    text: str
    token_ids: list[int] = field(repr=False)
    finish_reason: FinishReason
    score: Score | None


class Teacher:
    """A teacher and, for the rewards, its student; both are loaded at the first use and kept.

    Models that record their format, as those of this package do, are asked in it.

    Args:
        teacher: Run, or local folder, hub id, or a name such as miniature.
        student: The frozen student; None: explain without a reward. With another tokenizer than the
            teacher's it needs a `reward` with kl_estimator k1 or k3.
        reward: The reward and its options.
        sampling: Temperature and limits of explanations, which also end with the models' contexts.
        tags: "stratos", "r1" or a TagStyle; None: as the models were trained, else stratos.
        teacher_system_prompt: None: as the teacher was trained, else ours; '' for none.
        student_system_prompt: None: as the student was trained, else ours; '' for none.
        force_format: Use these settings although a model records that it was trained in others.
        dtype: Type of both models' weights.
        accelerator: Lightning's: auto takes a GPU if there is one.
        trust_remote_code: Run code that comes with a model.
    """

    def __init__(
        self,
        teacher: str | Path,
        student: str | None = None,
        *,
        reward: RLTReward = EXACT,
        sampling: Sampling = Sampling(),
        tags: str | TagStyle | None = None,
        teacher_system_prompt: str | None = None,
        student_system_prompt: str | None = None,
        force_format: bool = False,
        dtype: Dtype = "float32",
        accelerator: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        self.reward = reward
        self.sampling = sampling
        self.accelerator = accelerator
        self.data_options: dict[str, Any] = {
            "tags": tags,
            "teacher_system_prompt": teacher_system_prompt,
            "student_system_prompt": student_system_prompt,
            "force_format": force_format,
            "trust_remote_code": trust_remote_code,
        }
        of_run = Path(teacher).expanduser() / "model"
        self.module = RLTModule(
            str(of_run if of_run.is_dir() else teacher),
            student,
            reward=NoReward() if student is None else reward,
            dtype=dtype,
            student_dtype=dtype,
            trust_remote_code=trust_remote_code,
        )

    def explain(self, question: str, solution: str, seed: int = 0) -> Explanation:
        """Return the teacher's explanation of a solution; another seed samples another one.

        Raises:
            InputError: If question and solution are not usable or leave no room in the models' contexts.
        """
        rows = [{"question": question, "solution": solution}]
        data = TeacherRLData(rows, max_bad_frac=0.0, **self.data_options)
        [(rollout, score)] = self._ask(data, seed)
        completion = rollout.completion
        ids, reason = completion.token_ids, completion.finish_reason
        return Explanation(question, solution, rollout.text, ids, reason, score)

    def score(self, rows: Iterable[dict[str, Any]], trace_column: str = TRACE_COLUMN) -> list[Score]:
        """Return a score for each row: what its explanation is worth to the student.

        Args:
            rows: Rows with question, solution and a trace, or Bespoke-Stratos rows; a `completion`, raw
                generated text, replaces `reasoning_trace`.
            trace_column: The column of the explanation.

        Raises:
            InputError: If there is no student, or a row cannot be used.
        """
        if self.module.student.name is None:
            raise InputError(
                "A score needs a student, but this Teacher has none. Name it as second argument."
            )
        data = ScoringData(
            list(rows) if isinstance(rows, Iterator) else rows,
            trace_columns=[trace_column],
            prompts_per_step=ROWS_AT_ONCE,
            max_bad_frac=0.0,
            **self.data_options,
        )
        scored = self._ask(data, seed=0)
        warn_of_foreign_traces(data.items, self.module)
        return [score for _, score in scored if score is not None]

    def _ask(self, data: StratosDataModule, seed: int) -> list[tuple[Rollout, Score | None]]:
        """Let the models score rows as in `rlt predict`, and return their completions with their scores."""
        quiet_third_parties()
        rollouts = RolloutCallback(HFEngine(), sampling=self.sampling, seed=seed)
        settings = TRAINER_DEFAULTS | {"accelerator": self.accelerator}
        steps = score_problems(self.module, data, rollouts, **settings)
        student = self.module.student
        return [
            (rollout, None if student.name is None else Score.of(step, row, self.reward, student))
            for step in steps
            for row, rollout in enumerate(step.rollouts(step.shard))
        ]


def explain(
    teacher: str,
    question: str,
    solution: str,
    student: str | None = None,
    explanation: str = "",
    reward: RLTReward = EXACT,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    student_system_prompt: str | None = None,
) -> None:
    """Print an explanation and what it is worth to a student, by term and by token.

    Args:
        teacher: Run, or local folder, hub id, or a name such as miniature.
        question: The question.
        solution: Its solution, which the teacher sees.
        student: The frozen student; without one nothing is scored.
        explanation: The explanation; without one the teacher writes it.
        reward: The reward and its options.
        sampling: How the teacher writes.
        seed: Another seed samples another explanation.
        student_system_prompt: None: as the student was trained, else ours; '' for none.

    Raises:
        InputError: If the texts are not usable, or an explanation is given without a student.
    """
    models = Teacher(
        teacher, student, reward=reward, sampling=sampling, student_system_prompt=student_system_prompt
    )
    score: Score | None
    if explanation:
        text = explanation
        [score] = models.score([{"question": question, "solution": solution, TRACE_COLUMN: explanation}])
    else:
        written = models.explain(question, solution, seed)
        text, score = written.text, written.score
    lines = [f"Question: {question}", f"Solution: {solution}", "", *text.strip().split("\n")]
    print("\n".join(map(make_printable, lines)))
    if score is not None:
        print("\n" + "\n".join(describe_score(score)))


def describe_score(score: Score) -> Iterator[str]:
    """Yield lines: the reward, its terms, and the value of each token."""
    yield f"reward        {score.reward:+.4f}"
    yield from (f"  {name:<12}{value:+.4f}" for name, value in score.terms.items())
    tables = {
        "Explanation: KL of teacher from student, nats": (score.tokens, score.kl),
        "Solution: the student's log-prob, nats": (score.solution_tokens, score.solution_log_probs),
    }
    for title, (tokens, values) in tables.items():
        yield from ("", title)
        for token, value in zip(tokens, values, strict=True):
            yield f"{value:>10.4f}  {make_printable(json.dumps(token, ensure_ascii=False))}"


# Score rows


def score_problems(
    module: PolicyModule,
    data: StratosDataModule,
    rollouts: RolloutCallback,
    **trainer: Any,
) -> list[StepBatch]:
    """Score completions of rows as `rlt predict` does, in one process, and leave no files.

    Args:
        module: The teacher, its student and the reward.
        data: The rows; those of ScoringData bring their completions. Of a TeacherRLData with one row
            completions end where the models' contexts do.
        rollouts: How completions are sampled, if the rows bring none.
        trainer: Further arguments of Lightning's Trainer, such as accelerator and precision.

    Raises:
        InputError: If a row cannot be used, or the models' contexts leave no room for an explanation.
    """
    collector = ScoreCollector()
    with TemporaryDirectory(prefix="rlt-") as folder:
        settings = trainer | {
            # The collector first: RolloutCallback checks in its setup whether completions fit.
            "callbacks": [collector, rollouts],
            "default_root_dir": folder,
            "devices": 1,
            "num_nodes": 1,
            "strategy": "auto",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        LightningTrainer(**settings).predict(module, datamodule=data, return_predictions=False)
    return collector.scored


class ScoreCollector(Callback):
    """Keep the scored batches of a prediction, and fit completions into the models' contexts."""

    def __init__(self) -> None:
        self.scored: list[StepBatch] = []

    @override
    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        data = get_stratos_data(trainer)
        is_asked = data.samples == "explanations" and not data.brings_completions
        if is_asked and len(data.items) == 1:
            fit_context(trainer, cast(RLTModule, pl_module))

    @override
    def on_predict_batch_end(
        self,
        trainer: LightningTrainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.scored.append(batch.step)


def fit_context(trainer: LightningTrainer, module: RLTModule) -> None:
    """Limit completions to the room that the only problem leaves in the models' contexts.

    Args:
        trainer: The trainer, whose RolloutCallback is changed.
        module: The RLTModule.

    Raises:
        InputError: If there is no room for an explanation.
    """
    items = get_stratos_data(trainer).all_items
    room = min(
        context_length(name, module.trust_remote_code) - int(items.sum_columns(*columns)[0])
        for _, name, columns in module.list_readers()
    )
    if room < 1:
        raise InputError(
            "Question and solution must leave room for an explanation, but with their prompts they are "
            f"{1 - room} tokens too long for the models' contexts. Shorten them."
        )
    rollouts = RolloutCallback.of(trainer)
    if room < rollouts.sampling.max_completion_length:
        rollouts.sampling = replace(rollouts.sampling, max_completion_length=room)
    rollouts.val_sampling = rollouts.sampling
