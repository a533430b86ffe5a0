"""Measure accuracy during training: what `rlt test` would report, every n optimizer steps.

An evaluation runs after the optimizer step and before the step's checkpoint:

    EvaluateEvery (every rank)           engine of the run                     rank 0
      one request for all problems, prompts and seeds as in `rlt test`
      wait for completions in flight
      weights, if they changed ────────▶ load them; they are verified
      prompts, seeds ──────────────────▶ sample
      completions of all ranks ──────────────────────────────────────────────▶ judge, count
      eval/SET/pass_at_1, … ◀─────────────────────────────────────────────────┘
      callback_metrics ─▶ Checkpoint (which comes after this callback)
      metrics.csv and the other loggers

It asks as `rlt test` does: `AnswerSampler` of rollouts/sampler.py, with the dispatcher of RolloutCallback.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from tqdm import tqdm
from typing_extensions import override

from rlt_lightning.callbacks.evaluation_results import format_accuracy
from rlt_lightning.callbacks.rollout import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import require_gathering, require_responses_fit
from rlt_lightning.datamodules.evaluation import EvaluationDataModule, Response
from rlt_lightning.datamodules.evaluation_sets import SetSettings
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.stratos import StratosDataModule, get_stratos_data
from rlt_lightning.engines.base import Sampling
from rlt_lightning.judging.judge import Judge
from rlt_lightning.metrics import AnswerFigures
from rlt_lightning.metrics.answers import name_figures
from rlt_lightning.models.load import context_length
from rlt_lightning.modules.evaluation import judge_responses
from rlt_lightning.modules.policy import PolicyModule
from rlt_lightning.rollouts.sampler import AnswerSampler
from rlt_lightning.run.ranks import Collectives
from rlt_lightning.types import InputError

SECONDS = "perf/evaluate_s"


class EvaluateEvery(Callback):
    """Log the trained student's accuracy on evaluation sets, as `rlt test` would report it for its export.

    Only for students, whose data are StudentSFTData, StudentRLData and the like. It leaves training as it is.
    The engine of RolloutCallback samples.

    Args:
        every_n_steps: Optimizer steps between evaluations.
        sets: The sets, as `data.sets` of `rlt test` names them.
        sampling: Temperature and limits of the answers.
        num_samples: Answers to each problem, k.
        seed: Decides the sampling, and the rows of embedded sets: `--seed` of `rlt test`.
        max_rows: Most problems of each set, from its start.
        at_start: Whether to evaluate the model before the first step too.
        judge_deadline_s: Seconds for judging one answer; an answer that takes longer counts as wrong.
        deadline_s: How long ranks wait for rank 0 to judge.
    """

    def __init__(
        self,
        every_n_steps: int,
        sets: dict[str, SetSettings],
        sampling: Sampling = Sampling(),
        num_samples: int = 1,
        seed: int = 0,
        max_rows: int | None = None,
        at_start: bool = True,
        judge_deadline_s: float = 10.0,
        deadline_s: float = 14400.0,
    ) -> None:
        if every_n_steps < 1:
            raise InputError(f"EvaluateEvery's every_n_steps must be at least 1, not {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self.sets = sets
        self.sampling = sampling
        self.num_samples = num_samples
        self.seed = seed
        self.max_rows = max_rows
        self.at_start = at_start
        self.judge_deadline_s = judge_deadline_s
        self.deadline_s = deadline_s
        self.collectives = Collectives(deadline_s)
        # Each fit sets both.
        self.questions = self._build_questions()
        self.judge: Judge | None = None
        self.is_started = False  # whether the engine knows these prompts

    # Lightning's hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the sets and check, before any model is loaded, that answers fit."""
        if stage != "fit":
            return
        data, module = get_stratos_data(trainer), cast(PolicyModule, pl_module)
        require_student(data)
        self.questions = self._build_questions(data)
        context = context_length(module.pretrained, module.trust_remote_code)
        advice = "Lower EvaluateEvery's sampling.max_completion_length."
        require_responses_fit(self.questions.problems, self.sampling, context, advice)
        if trainer.is_global_zero:
            self.judge = Judge(self.questions.tags, self.judge_deadline_s)
            self.judge.start()
        rollouts, self.is_started = RolloutCallback.of(trainer), False
        require_gathering(rollouts.engine, trainer)
        rollouts.dispatcher.bind(trainer, module)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate the model that training starts with; by now all engines have started."""
        if trainer.global_step == 0 and self.at_start:
            self._log(trainer, self.evaluate(trainer, pl_module))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate, and let the checkpoint of this step see the figures."""
        if trainer.global_step % self.every_n_steps:
            return
        figures = self.evaluate(trainer, pl_module)
        pl_module.log_dict(figures, logger=False, on_step=True, on_epoch=False, batch_size=1)
        self._log(trainer, figures)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.judge is not None:
            self.judge.close()
        self.judge = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    # Evaluation

    def evaluate(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Return the figures of the current weights by name, the same on all ranks; all ranks call this."""
        begin = time.monotonic()
        with isolate_rng():
            responses = self._sample_responses(trainer)
            figures = self.collectives.on_rank_zero(
                trainer,
                lambda: self._judge_responses(responses) | {SECONDS: time.monotonic() - begin},
            )
        # What this took is no part of the next step's phases.
        module.phase.lap()
        return figures

    def _sample_responses(self, trainer: Trainer) -> list[list[Response]]:
        """Sample the answers to each problem; every rank gets all of them."""
        rollouts, problems = RolloutCallback.of(trainer), self.questions.problems
        rollouts.sampler.wait()
        tokenizer = self.questions.chat_format.tokenizer
        if not self.is_started:
            prompts = [problem.prompt for problem in problems]
            longest = max(map(len, prompts)) + self.sampling.max_completion_length
            rollouts.dispatcher.start(tokenizer, prompts[0], longest)
            self.is_started = True
        # No rank gets all of the hardest set.
        rank, size = trainer.global_rank, trainer.world_size
        answers = AnswerSampler(rollouts.dispatcher, self).answer(problems[rank::size], tokenizer)
        parts = self.collectives.gather(trainer, answers)
        return [parts[number % size][number // size] for number in range(len(problems))]

    def _judge_responses(self, responses: list[list[Response]]) -> dict[str, float]:
        """Judge all answers and return their figures by name, except figures that are not finite."""
        assert self.judge is not None
        problems = self.questions.problems
        set_of = {problem.id: problem.set_name for problem in problems}
        answers = AnswerFigures(set_of, sync_on_compute=False)  # rank 0 has all records
        answers.update(judge_responses(self.judge, problems, responses))
        figures, _ = answers.compute()
        return {name: value for name, value in name_figures(figures).items() if math.isfinite(value)}

    def _log(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """Write the figures to all loggers and to the terminal."""
        step = trainer.global_step
        for logger in trainer.loggers:
            # Not with the step's other metrics, which Lightning may log less often.
            logger.log_metrics(figures, step=step)
            logger.save()
        if trainer.is_global_zero:
            parts = []
            for name in [name.split("/")[1] for name in figures if name.endswith("/pass_at_1")]:
                accuracy = {f: figures.get(f"eval/{name}/{f}") for f in ("pass_at_1", "standard_error")}
                parts.append(f"{name} {format_accuracy(accuracy)} %")
            text = f"accuracy after iteration {step}: {', '.join(parts)} ({figures[SECONDS]:.1f} s)"
            tqdm.write(text, file=sys.stderr)

    def _build_questions(self, data: StratosDataModule | None = None) -> EvaluationDataModule:
        """Return the problems, as a run with these data asks them; without data, only check the settings."""
        try:
            questions = EvaluationDataModule(
                self.sets, max_rows=self.max_rows, seed=self.seed, num_samples=self.num_samples
            )
            if data is not None:
                questions.format = build_asked_format(data)
                questions.setup("test")
        except InputError as error:
            raise InputError(f"EvaluateEvery takes its settings as `rlt test` does: {error}") from error
        return questions


def build_asked_format(data: StratosDataModule) -> ChatFormat:
    """Return the format in which `rlt test` would ask this run's exported model: the format it trains."""
    trained = data.trained_format()
    tokenizer = data.format.tokenizer
    prompt = trained.system_prompt
    return ChatFormat(tokenizer, trained.tags, student_system_prompt=prompt, fills=False)


def require_student(data: StratosDataModule) -> None:
    """Check that the trained model answers questions.

    Raises:
        InputError: If it is a teacher.
    """
    if data.role != "student":
        raise InputError(
            f"EvaluateEvery asks a student, but {type(data).__name__} is for a teacher, which explains "
            "given solutions and answers no question. Remove it from trainer.callbacks, and watch a teacher "
            "by held-out rows: data.val_rows and trainer.val_check_interval."
        )
