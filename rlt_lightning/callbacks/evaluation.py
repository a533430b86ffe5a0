"""The callbacks of `rlt test`: one samples responses, the other writes judged responses and results."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.callbacks.evaluation_results import render
from rlt_lightning.callbacks.rollout_checks import require_responses_fit
from rlt_lightning.datamodules.evaluation import (
    EvaluationBatch,
    EvaluationDataModule,
    get_evaluation_data,
)
from rlt_lightning.engines.base import Engine, Sampling
from rlt_lightning.engines.choice import find_gpus
from rlt_lightning.judging.answers import JUDGE_VERSION
from rlt_lightning.metrics.answers import OVERALL
from rlt_lightning.models.load import context_length
from rlt_lightning.modules.evaluation import EvaluationModule, is_evaluation
from rlt_lightning.rollouts.dispatcher import Dispatcher
from rlt_lightning.rollouts.sampler import AnswerSampler
from rlt_lightning.run.console import announce
from rlt_lightning.run.jsonl import keep_rows, rewrite
from rlt_lightning.run.ranks import append_from_ranks, ask_callbacks
from rlt_lightning.types import InputError

RESPONSES = "responses.jsonl"


class ResponseCallback(Callback):
    """Sample responses when the module asks for them.

    Args:
        engine: Where responses come from. VLLMEngine with NoPush: workers that serve the model, which is then
            not loaded here. None: this on one NVIDIA GPU with vllm; else HFEngine(), in process.
        sampling: Temperature and limits. `max_completion_length` counts thought and answer.
        num_samples: Responses to each problem, k.
        fit_context: Cut max_completion_length for each question to what the context leaves behind the prompt,
            as vLLM does in process. Otherwise a run whose longest question does not leave so many is refused.
        seed: Decides all sampling. A response depends only on (seed, problem, number of the sample), so a
            resumed run repeats nothing and changes nothing.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        sampling: Sampling = Sampling(),
        num_samples: int = 1,
        seed: int = 0,
        fit_context: bool = False,
    ) -> None:
        if num_samples < 1:
            raise InputError(f"rollouts.num_samples must be at least 1, not {num_samples}.")
        self.dispatcher = Dispatcher(engine)
        self.sampler = AnswerSampler(self.dispatcher, self)
        self.sampling = sampling
        self.num_samples = num_samples
        self.seed = seed
        self.fit_context = fit_context

    def describe_responses(self) -> dict[str, Any]:
        """Return everything that a response depends on besides the model and the question."""
        return {
            "sampling": asdict(self.sampling),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "fit_context": self.fit_context,
            "engine": type(self.dispatcher.engine).__name__,
        }

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any model is loaded, that responses fit, and whether a model is needed."""
        if stage != "test" or not is_evaluation(pl_module):
            return
        data = get_evaluation_data(trainer)
        gpus = find_gpus(trainer) * trainer.num_nodes  # of all processes
        reason = self.dispatcher.choose_engine(gpus, pl_module.pretrained, pushes=False)
        if reason and trainer.is_global_zero:
            announce(reason)
        if trainer.world_size > 1 and self.dispatcher.is_server:
            raise InputError(
                f"vLLM workers answer one process, but trainer.devices makes {trainer.world_size}. Set "
                "trainer.devices to 1: the workers use the GPUs (docs/evaluate.md)."
            )
        self.dispatcher.bind(trainer, pl_module)
        self.sampler.context = sys.maxsize
        self.sampler.needs_model = not self.dispatcher.engine.load_own_model(pl_module.pretrained)
        pl_module.attach(self.sampler)
        if not self.sampler.needs_model:
            return
        context = context_length(pl_module.pretrained, pl_module.trust_remote_code)
        if self.fit_context:
            self._fit_context(data, context)
            return
        advice = "Lower rollouts.sampling.max_completion_length, or set rollouts.fit_context."
        require_responses_fit(data.problems, self.sampling, context, advice)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_evaluation(pl_module) or not (data := get_evaluation_data(trainer)).left:
            return
        longest = max(len(problem.prompt) for problem in data.problems) + self.sampling.max_completion_length
        prompt = data.problems[0].prompt
        self.dispatcher.start(data.chat_format.tokenizer, prompt, 0 if self.fit_context else longest)
        if self.fit_context:
            self._fit_context(data, self.dispatcher.engine.max_model_len)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dispatcher.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.dispatcher.close()

    def _fit_context(self, data: EvaluationDataModule, context: int) -> None:
        """Cut responses to a context, in tokens, of the model or its workers.

        Raises:
            InputError: If it leaves no response behind the longest question.
        """
        self.sampler.context = min(self.sampler.context, context)
        longest = max(data.problems, key=lambda problem: len(problem.prompt))
        if self.sampler.limit(longest) < 1:
            raise InputError(
                f"Every question must leave room for a response in the context of {self.sampler.context} "
                f"tokens, but {longest.id} takes {len(longest.prompt)}. Leave it out, or use a model or "
                "workers with a longer context."
            )


class EvaluationWriter(Callback):
    """Append judged responses to `responses.jsonl`; at the end write `evaluation.json` and `.md`."""

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the problems that a killed run left unfinished: they are sampled again."""
        if is_evaluation(pl_module) and trainer.is_global_zero:
            done = {record["id"] for record in get_evaluation_data(trainer).finished}
            keep_rows(Path(trainer.default_root_dir) / RESPONSES, lambda record: record["id"] in done)

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: EvaluationBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if is_evaluation(pl_module):
            append_from_ranks(trainer, Path(trainer.default_root_dir) / RESPONSES, batch.records)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_evaluation(pl_module) or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        sampling = ask_callbacks(trainer, "describe_responses")()
        summary = summarise(pl_module, get_evaluation_data(trainer), sampling)
        page = render(summary)
        rewrite(folder / "evaluation.md", [page])
        # This file is the last and appears in one step: it says that the stage is done.
        rewrite(folder / "evaluation.json", [json.dumps(summary, indent=1, ensure_ascii=False) + "\n"])
        print(f"\n{page}\n{folder / 'evaluation.json'}: these figures, with all settings")
        print(f"{folder / RESPONSES}: every response, judged")


def summarise(
    module: EvaluationModule, data: EvaluationDataModule, sampling: dict[str, Any]
) -> dict[str, Any]:
    """Return the results of a run with all settings that they depend on, as plain data.

    Args:
        module: The module, with the records of all problems.
        data: The problems.
        sampling: How responses were sampled.
    """
    figures = module.figures
    sets: dict[str, Any] = {}
    for name, spec in data.specs.items():
        first = next(problem for problem in data.problems if problem.set_name == name)
        sets[name] = {
            **asdict(spec),
            "num_samples": data.num_samples,
            **figures[name],
            "pass_at": module.pass_at[name],
            # As the model sees it.
            "prompt": (
                None
                if first.private
                else data.chat_format.tokenizer.decode(first.prompt, skip_special_tokens=False)
            ),
        }
    summary = {
        "model": module.pretrained,
        "judge": JUDGE_VERSION,
        "dtype": module.dtype_name,
        "data_seed": data.seed,
        "max_rows": data.max_rows,
        "rollouts": sampling,
        "sets": sets,
        "overall": figures.get(OVERALL),
    }
    return replace_nan(summary)


def replace_nan(value: Any) -> Any:
    """Return plain data with None in place of NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {name: replace_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
