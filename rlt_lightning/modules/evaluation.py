"""Evaluation: judge responses, and count them into accuracies per set and overall."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from rlt_lightning.datamodules.evaluation import evaluation_of
from rlt_lightning.judging.judge import Judge
from rlt_lightning.judging.questions import EvaluationBatch
from rlt_lightning.models.announce import announce_slow_bfloat16
from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.modules.accuracy import MajorityAtK, PassAt1, PassAtK, reported_k
from rlt_lightning.pretrained import Dtype, load_model
from rlt_lightning.run.jsonl import Row
from rlt_lightning.strategies.sharding import sharding_of
from rlt_lightning.types import InputError


class EvaluationModule(LightningModule):
    """Judge a model's responses to evaluation sets; see docs/evaluation.md.

    Args:
        pretrained: The model: local folder, hub id, miniature or smollm2-135m. If vLLM workers serve it,
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
        # ResponseCallback sets it if it samples with the model.
        self.needs_model = False
        self.policy: Any = None
        # The SetMetrics of each set, by name.
        self.sets = nn.ModuleDict()
        self.judge: Judge | None = None

    def setup(self, stage: str) -> None:
        """Check that the model is whole, in one process."""
        if sharding_of(self.trainer.strategy).sharded:
            raise InputError(
                "`rlt test` must have the model whole, but trainer.strategy shards it. Leave the strategy "
                "out; for a model that fits no GPU use a vLLM worker (docs/evaluation.md)."
            )
        if self.trainer.world_size > 1:
            raise InputError(
                f"`rlt test` must run in one process, but got {self.trainer.world_size}. Set "
                "--trainer.devices 1; several GPUs are used by vLLM workers (docs/evaluation.md)."
            )

    def configure_model(self) -> None:
        """Load the weights if they are needed, after the data have been checked."""
        if self.needs_model and self.policy is None:
            types = {"trainer.precision": str(self.trainer.precision), "model.dtype": self.dtype_name}
            announce_slow_bfloat16(self.trainer.strategy.root_device, types)
            options = (self.dtype_name, self.attn_implementation, self.trust_remote_code)
            self.policy = load_model(self.pretrained, *options).requires_grad_(False)

    def on_test_start(self) -> None:
        """Start counting, with the records of an earlier part of the run."""
        data = evaluation_of(self.trainer)
        self.judge = Judge(data.tags, self.judge_deadline_s)
        self.sets = nn.ModuleDict({name: SetMetrics(data.num_samples) for name in data.sets})
        by_problem: dict[str, list[Row]] = {}
        for record in data.finished:
            by_problem.setdefault(record["id"], []).append(record)
        for records in by_problem.values():
            self.count(records)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Judge the responses of a batch and count them."""
        if batch.responses is None and batch.problems:
            raise InputError(
                "An evaluation needs responses, but the batch has none. Add ResponseCallback to the trainer, "
                "or give data.responses."
            )
        assert self.judge is not None
        for records in judged_records(self.judge, batch):
            self.count(records)
            batch.records += records

    def count(self, records: list[Row]) -> None:
        """Count the records of one problem."""
        self.sets[records[0]["set"]].update(records)  # type: ignore[operator]

    def on_test_epoch_end(self) -> None:
        """Log what docs/metrics.md lists under eval/."""
        self.log_dict(metrics_of(self.figures()))
        # Otherwise Lightning adds the epoch.
        self.log("step", 0.0)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the logged figures by set; see `figures_of`."""
        sets: Any = self.sets
        return figures_of(dict(sets.items()))

    def teardown(self, stage: str) -> None:
        """End the judge's processes."""
        if self.judge is not None:
            self.judge.close()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Keep batches as they are: they hold text and lists of token ids."""
        return batch


class SetMetrics(nn.Module):
    """The accuracies of one set, and what its responses are like.

    Args:
        num_samples: Responses to each problem, k.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.pass_at_1 = PassAt1()
        self.pass_at = nn.ModuleDict({str(k): PassAtK(k) for k in reported_k(num_samples)})
        self.majority = MajorityAtK()
        self.means = nn.ModuleDict(
            {
                name: MeanMetric(nan_strategy="error", sync_on_compute=False)
                for name in ("formatted", "timed_out", "truncated", "tokens")
            }
        )

    def update(self, records: list[Row]) -> None:
        """Count one problem's records."""
        correct = [bool(record["correct"]) for record in records]
        counts = sum(correct), len(correct)
        self.pass_at_1.update(*counts)
        for metric in self.pass_at.values():
            metric.update(*counts)  # type: ignore[operator]
        self.majority.update([record["same_answer"] for record in records], correct)
        for record in records:
            self.means["formatted"].update(float(record["formatted"]))  # type: ignore[operator]
            self.means["timed_out"].update(float(record["timed_out"]))  # type: ignore[operator]
            if record["num_tokens"] is not None:
                self.means["truncated"].update(float(record["finish_reason"] == "length"))  # type: ignore[operator]
                self.means["tokens"].update(float(record["num_tokens"]))  # type: ignore[operator]

    def figures(self) -> dict[str, float]:
        """Return the logged figures by the last part of their names."""
        accuracy, error = self.pass_at_1.compute()
        figures = {
            "num_problems": int(self.pass_at_1.count),
            "pass_at_1": float(accuracy),
            "standard_error": float(error),
            "pass_at_k": self.pass_at_k()[self.num_samples],
            "maj_at_k": float(self.majority.compute()),
            "formatted_frac": float(self.means["formatted"].compute()),  # type: ignore[operator]
            "timed_out_frac": float(self.means["timed_out"].compute()),  # type: ignore[operator]
        }
        if self.means["tokens"].update_called:
            figures["truncated_frac"] = float(self.means["truncated"].compute())  # type: ignore[operator]
            figures["tokens_mean"] = float(self.means["tokens"].compute())  # type: ignore[operator]
        return figures

    def pass_at_k(self) -> dict[int, float]:
        """Return pass@k by k."""
        return {int(k): float(metric.compute()) for k, metric in self.pass_at.items()}  # type: ignore[operator]


# `rlt test` and EvaluateEvery judge and count with these.


def judged_records(judge: Judge, batch: EvaluationBatch) -> list[list[Row]]:
    """Judge the responses of a batch, and return the records of each problem."""
    pairs = [
        (response.text, problem.reference)
        for problem, responses in zip(batch.problems, batch.responses or [], strict=True)
        for response in responses
    ]
    with waiting_for(f"the judge of {len(pairs)} responses"):
        verdicts = iter(judge.judge_all(pairs))
    found: list[list[Row]] = []
    for problem, responses in zip(batch.problems, batch.responses or [], strict=True):
        own = [next(verdicts) for _ in responses]
        answers = judge.same_answers(own, problem.reference["kind"])
        found.append(
            [
                {
                    "id": problem.id,
                    "set": problem.set_name,
                    "sample": number,
                    **({} if problem.private else {"response": response.text}),
                    **vars(verdict),
                    "same_answer": same,
                    "num_tokens": response.num_tokens,
                    "num_thinking_tokens": response.num_thinking_tokens,
                    "finish_reason": response.finish_reason,
                }
                for number, (response, verdict, same) in enumerate(zip(responses, own, answers, strict=True))
            ]
        )
    return found


def figures_of(sets: dict[str, SetMetrics]) -> dict[str, dict[str, float]]:
    """Return the figures by set; several sets get "overall", the plain mean, as in the paper."""
    found = {name: metrics.figures() for name, metrics in sets.items()}
    if len(found) > 1:
        parts = list(found.values())
        overall = {
            name: sum(part[name] for part in parts) / len(parts)
            for name in ("pass_at_1", "pass_at_k", "maj_at_k")
        }
        squares = sum(part["standard_error"] ** 2 for part in parts)
        found["overall"] = overall | {"standard_error": math.sqrt(squares) / len(parts)}
    return found


def metrics_of(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the figures by the names under which they are logged."""
    return {f"eval/{name}/{figure}": value for name, own in figures.items() for figure, value in own.items()}
