"""The LightningModule of `rlt test`: a model, the judge of its responses, and the figures of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from rlt_lightning.datamodules.evaluation import (
    EvaluationBatch,
    EvaluationDataModule,
    get_evaluation_data,
)
from rlt_lightning.engines import EngineError
from rlt_lightning.judging.judge import Judge
from rlt_lightning.metrics import AnswerFigures
from rlt_lightning.metrics.answers import Figures, add_overall, name_figures
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.kernels import announce_slow_bfloat16
from rlt_lightning.models.load import Dtype, load_model
from rlt_lightning.modules.responses import Sample, evaluate
from rlt_lightning.run.jsonl import Row
from rlt_lightning.run.ranks import EndTogether, gather_from_ranks
from rlt_lightning.strategies.sharding import get_sharding
from rlt_lightning.types import InputError


class EvaluationModule(LightningModule):
    """Ask a model the problems of evaluation sets and judge its responses; see docs/evaluation.md.

    Args:
        pretrained: The model: local folder, hub id, or a name such as miniature. If vLLM workers serve it,
            only its tokenizer is loaded here.
        dtype: Type of the weights; auto: as they are stored.
        attn_implementation: transformers' name; None: ours.
        trust_remote_code: Run code that comes with the model.
        judge_deadline_s: Seconds for judging one response; an answer that takes longer counts as wrong.
    """

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        dtype: Dtype = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        judge_deadline_s: float = 10.0,
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.dtype_name: Dtype = dtype
        self.attn_implementation = attn_implementation
        self.trust_remote_code = trust_remote_code
        self.judge_deadline_s = judge_deadline_s
        # ResponseCallback sets both, the second if it samples with the model.
        self.sample: Sample | None = None
        self.needs_model = False
        self.policy: Any = None
        self.judge: Judge | None = None
        # By set, and once all are judged what they come to: figures and pass@k.
        self.answers: dict[str, AnswerFigures] = {}
        self.results: dict[str, tuple[Figures, dict[int, float]]] = {}

    def configure_callbacks(self) -> list[Callback]:
        """Let all ranks end with the first that fails."""
        return [EndTogether(self.trainer, EngineError)] if self.trainer.world_size > 1 else []

    def setup(self, stage: str) -> None:
        """Check that the model is whole."""
        if get_sharding(self.trainer.strategy).sharded:
            raise InputError(
                "`rlt test` must have the model whole, but trainer.strategy shards it. Leave the strategy "
                "out; for a model that fits no GPU use a vLLM worker (docs/evaluation.md)."
            )

    def require_data(self, data: Any) -> None:
        """Refuse data of a training stage, which ask before they read anything."""
        if not isinstance(data, EvaluationDataModule):
            raise InputError(
                f"The data of {type(self).__name__} must be EvaluationDataModule, but are "
                f"{type(data).__name__}. Choose another class for data, or another module."
            )

    def configure_model(self) -> None:
        """Load the weights if they are needed, after the data have been checked."""
        if self.needs_model and self.policy is None:
            types = {"trainer.precision": str(self.trainer.precision), "model.dtype": self.dtype_name}
            announce_slow_bfloat16(self.trainer.strategy.root_device, types)
            options = (self.dtype_name, self.attn_implementation, self.trust_remote_code)
            self.policy = load_model(self.pretrained, *options).requires_grad_(False)

    def on_test_start(self) -> None:
        """Begin with the records of an earlier part of the run."""
        data = get_evaluation_data(self.trainer)
        self.judge = Judge(data.tags, self.judge_deadline_s)
        self.answers = {name: AnswerFigures().to(self.device) for name in data.sets}
        self.number_of = {problem.id: number for number, problem in enumerate(data.problems)}
        if self.trainer.is_global_zero:
            self.add_records(data.finished)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Ask the problems of a batch, unless their responses are given, and judge the responses.

        Each rank asks its part of the batch; then all ranks have the records of all parts.
        """
        given = batch.responses
        sample = self.sample if given is None else lambda problems: given
        if sample is None:
            raise InputError(
                "An evaluation needs responses, but the batch has none. Add ResponseCallback to the trainer, "
                "or give data.responses."
            )
        assert self.judge is not None
        records = evaluate(sample, batch.problems, self.judge) if batch.problems else []
        parts = gather_from_ranks(self.trainer, records, "the judged responses of all ranks")
        batch.records = [record for part in parts for record in part]
        self.add_records(records)

    def on_test_epoch_end(self) -> None:
        """Log what docs/metrics.md lists under eval/."""
        self.results = {name: metric.compute() for name, metric in self.answers.items()}
        self.log_dict(name_figures(self.figures()))
        # Otherwise Lightning adds the epoch.
        self.log("step", 0.0)

    def figures(self) -> dict[str, Figures]:
        """Return the logged figures by set, and those of all sets as the paper has them."""
        return add_overall({name: figures for name, (figures, _) in self.results.items()})

    def add_records(self, records: list[Row]) -> None:
        """Count judged responses of this rank."""
        for record in records:
            self.answers[record["set"]].update(self.number_of[record["id"]], record)

    def teardown(self, stage: str) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Keep batches as they are: they hold text and lists of token ids."""
        return batch
