"""The LightningModule of `rlt test`: it asks a model, judges the responses and logs the figures.

EvaluateEvery asks and judges alike: with the same seed and weights both report the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from rlt_lightning.datamodules.evaluation import (
    EvaluationBatch,
    EvaluationDataModule,
    Response,
    get_evaluation_data,
)
from rlt_lightning.datamodules.evaluation_sets import EvaluationProblem
from rlt_lightning.judging.answers import JUDGE_VERSION
from rlt_lightning.judging.judge import Judge
from rlt_lightning.metrics import AnswerFigures
from rlt_lightning.metrics.answers import Figures, name_figures
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import Dtype, count_ids
from rlt_lightning.modules.language_model import LanguageModelModule
from rlt_lightning.rollouts.sampler import AnswerSampler
from rlt_lightning.run.console import waiting_for
from rlt_lightning.run.jsonl import JsonRow
from rlt_lightning.strategies.sharding import get_sharding
from rlt_lightning.types import InputError


class EvaluationModule(LanguageModelModule):
    """Ask a model the problems of evaluation sets and judge its responses; see docs/evaluate.md.

    Args:
        pretrained: The model: local folder, hub id, or a name such as miniature. If vLLM workers serve it,
            only its tokenizer is loaded here.
        dtype: Type of the weights; auto: as they are stored.
        attn_implementation: transformers' name; None: ours.
        trust_remote_code: Run code that comes with the model.
        judge_deadline_s: Seconds for judging one response; an answer that takes longer counts as wrong.
    """

    data_classes = (EvaluationDataModule,)
    is_evaluation = True

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        dtype: Dtype = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        judge_deadline_s: float = 10.0,
    ) -> None:
        super().__init__(pretrained, dtype, attn_implementation, trust_remote_code)
        self.judge_deadline_s = judge_deadline_s
        self.sampler: AnswerSampler | None = None
        self.judge: Judge | None = None
        self.answers: AnswerFigures | None = None
        # Once all are judged, by set: figures and pass@k.
        self.figures: dict[str, Figures] = {}
        self.pass_at: dict[str, dict[int, float]] = {}

    def attach(self, sampler: AnswerSampler) -> None:
        """Ask this sampler for responses from now on; ResponseCallback calls it before a model is loaded."""
        self.sampler = sampler

    @property
    def needs_model(self) -> bool:
        """Return whether responses are sampled with a model that is loaded here."""
        return self.sampler is not None and self.sampler.needs_model

    def configure_model(self) -> None:
        """Load the weights if they are needed, once the data are checked, as the strategy stores them."""
        left = get_evaluation_data(self.trainer).left
        if not self.needs_model or not left or self.entry is not None:
            return
        self.sharding = get_sharding(self.trainer.strategy)
        self.entry = self.load(self.pretrained, self.dtype_name)
        self.entry.requires_grad_(False)

    def setup(self, stage: str) -> None:
        """Count the token ids, and start the judge's processes, before anything is loaded and sampled."""
        data = get_evaluation_data(self.trainer)
        if self.needs_model:
            self.num_ids = count_ids(
                self.pretrained,
                data.chat_format.tokenizer,
                lambda: max(max(problem.prompt) for problem in data.problems),
                self.trust_remote_code,
            )
        self.judge = Judge(data.tags, self.judge_deadline_s)
        if data.left:
            self.judge.start()

    def on_test_start(self) -> None:
        """Begin with the records of an earlier part of the run."""
        data = get_evaluation_data(self.trainer)
        self.answers = AnswerFigures({problem.id: problem.set_name for problem in data.problems})
        self.answers.to(self.device)
        self.answers.update(data.finished if self.trainer.is_global_zero else [])

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Ask the problems of a batch, and judge the responses.

        Each rank asks its part of the batch, which may be empty; a callback writes the records of all ranks.
        """
        if self.sampler is None:
            raise InputError("An evaluation needs responses: add ResponseCallback to the trainer.")
        assert self.judge is not None
        assert self.answers is not None
        tokenizer = get_evaluation_data(self.trainer).chat_format.tokenizer
        responses = self.sampler.answer(batch.problems, tokenizer)
        batch.records = judge_responses(self.judge, batch.problems, responses)
        self.answers.update(batch.records)

    def on_test_epoch_end(self) -> None:
        """Log the figures of each set and over all sets, under eval/."""
        assert self.answers is not None
        self.figures, self.pass_at = self.answers.compute()
        self.log_dict(name_figures(self.figures))
        # Otherwise Lightning adds the epoch.
        self.log("step", 0.0)

    def teardown(self, stage: str) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()


def is_evaluation(module: object) -> TypeGuard[EvaluationModule]:
    """Return whether a module asks a sampler for answers, and judges them."""
    return getattr(module, "is_evaluation", False)


def judge_responses(
    judge: Judge, problems: Sequence[EvaluationProblem], responses: Sequence[Sequence[Response]]
) -> list[JsonRow]:
    """Judge the responses to each problem, and return one record of each response."""
    pairs = [
        (response.text, problem.reference)
        for problem, samples in zip(problems, responses, strict=True)
        for response in samples
    ]
    with waiting_for(f"the judge of {len(pairs)} responses"):
        verdicts = iter(judge.judge_all(pairs))
    records: list[JsonRow] = []
    for problem, samples in zip(problems, responses, strict=True):
        judged = [next(verdicts) for _ in samples]
        answers = judge.same_answers(judged, problem.reference["kind"])
        for number, (response, verdict, answer) in enumerate(zip(samples, judged, answers, strict=True)):
            records.append(
                {
                    "id": problem.id,
                    "set": problem.set_name,
                    "problem": problem.fingerprint,
                    "sample": number,
                    **({} if problem.private else {"response": response.text}),
                    **vars(verdict),
                    "same_answer": answer,
                    "num_tokens": response.num_tokens,
                    "finish_reason": response.finish_reason,
                    "judge": JUDGE_VERSION,
                }
            )
    return records
