"""The callback of `rlt test` that brings the responses."""

from __future__ import annotations

import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.callbacks.engine_link import push_until_current
from rlt_lightning.datamodules.evaluation import evaluation_of
from rlt_lightning.engines.base import (
    PROBE_TOKENS,
    Engine,
    Sampling,
    WorkersLost,
    build_requests,
    require_context,
    sample_all,
)
from rlt_lightning.engines.budget import BudgetForcing, generate_with_budget
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.judging.questions import EvaluationBatch, EvaluationProblem, Response
from rlt_lightning.models.announce import announce
from rlt_lightning.models.lora import merged_weights
from rlt_lightning.models.packed import sequence_log_probs
from rlt_lightning.models.waiting import waiting_for
from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.pretrained import context_length
from rlt_lightning.tags import decode
from rlt_lightning.types import FinishReason, InputError


class ResponseCallback(Callback):
    """Sample responses to the questions of a batch; idle where data.responses gives them.

    Args:
        engine: Where responses come from; None: HFEngine(), in process. VLLMEngine with NoPush: workers that
            serve the model, which is then not loaded here.
        sampling: Temperature and limits. `max_completion_length` counts thought and answer.
        num_samples: Responses to each problem, k.
        budget: Least and most tokens of a thought; None: the model decides.
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
        budget: BudgetForcing | None = None,
        seed: int = 0,
        fit_context: bool = False,
    ) -> None:
        if num_samples < 1:
            raise InputError(f"rollouts.num_samples must be at least 1, but is {num_samples}. Raise it.")
        self.engine: Engine = HFEngine() if engine is None else engine
        self.sampling = sampling
        self.num_samples = num_samples
        self.budget = budget
        self.seed = seed
        self.fit_context = fit_context
        self.context = sys.maxsize  # tokens of prompt and response, as far as they are known

    def settings(self) -> dict[str, Any]:
        """Return everything that a response depends on beside the model and the question."""
        return {
            "sampling": asdict(self.sampling),
            "num_samples": self.num_samples,
            "budget": self.budget and asdict(self.budget),
            "seed": self.seed,
            "fit_context": self.fit_context,
            "engine": type(self.engine).__name__,
        }

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any model is loaded, that responses fit; say whether one must be loaded."""
        data = evaluation_of(trainer)
        self.context = sys.maxsize
        if stage != "test" or not isinstance(pl_module, EvaluationModule) or data.format is None:
            return
        if self.budget is not None:
            self.budget.require_room(self.sampling, len(data.format.answer_opening))
        if self.engine.load_own_model(pl_module.pretrained):
            return
        pl_module.needs_model = bool(data.left)
        context = context_length(pl_module.pretrained, pl_module.trust_remote_code)
        if self.fit_context:
            self._fit(trainer, context)
            return
        advice = "Lower rollouts.sampling.max_completion_length, or set rollouts.fit_context."
        require_responses_fit(data.problems, self._num_opening(trainer), self.sampling, context, advice)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = evaluation_of(trainer)
        if not isinstance(pl_module, EvaluationModule) or data.format is None or not data.left:
            return
        self.engine.start(pl_module.policy, data.format.tokenizer, Path(trainer.default_root_dir))
        if self.fit_context:
            self._fit(trainer, self.engine.max_model_len)
            self._announce_limits(trainer)
        else:
            longest = max(len(problem.prompt) for problem in data.problems) + self._num_opening(trainer)
            require_context(longest + self.sampling.max_completion_length, self.engine.max_model_len)
        self._push(trainer, pl_module)

    @override
    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: EvaluationBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(pl_module, EvaluationModule) or batch.responses is not None or not batch.problems:
            return
        while batch.responses is None:
            try:
                what = f"responses to {len(batch.problems)} questions"
                with waiting_for(what), trainer.precision_plugin.forward_context():
                    batch.responses = self._sample(trainer, batch.problems)
            except WorkersLost:
                self._push(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.engine.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.engine.close()

    def _num_opening(self, trainer: Trainer) -> int:
        """Return the number of tokens that a budget adds to the prompt: the opened thought."""
        return len(evaluation_of(trainer).chat_format.thought_opening) if self.budget else 0

    def _fit(self, trainer: Trainer, context: int) -> None:
        """Take over a context, in tokens, of the model or its workers.

        Raises:
            InputError: If it leaves no response behind the longest question, or less than a budget needs.
        """
        data = evaluation_of(trainer)
        self.context = min(self.context, context)
        shortest = min(self._limits(trainer, data.problems))
        if shortest < 1:
            longest = max(data.problems, key=lambda problem: len(problem.prompt))
            raise InputError(
                f"Every question must leave room for a response in the context of {self.context} tokens, but "
                f"{longest.id} takes {len(longest.prompt) + self._num_opening(trainer)}. Leave it out, or "
                "use a model or workers with a longer context."
            )
        if self.budget is not None:
            within = replace(self.sampling, max_completion_length=shortest)
            self.budget.require_room(within, len(data.chat_format.answer_opening))

    def _limits(self, trainer: Trainer, problems: list[EvaluationProblem]) -> list[int]:
        """Return the tokens that a response to each problem may have."""
        longest = self.sampling.max_completion_length
        if not self.fit_context:
            return [longest] * len(problems)
        room = self.context - self._num_opening(trainer)
        return [min(longest, room - len(problem.prompt)) for problem in problems]

    def _announce_limits(self, trainer: Trainer) -> None:
        """Say how many responses the context makes shorter."""
        limits = self._limits(trainer, evaluation_of(trainer).problems)
        shorter = [limit for limit in limits if limit < self.sampling.max_completion_length]
        if shorter:
            announce(
                f"rollouts.fit_context: a context of {self.context} tokens leaves responses to "
                f"{len(shorter)} of {len(limits)} questions fewer than {self.sampling.max_completion_length} "
                f"tokens, at least {min(shorter)}."
            )

    def _push(self, trainer: Trainer, module: EvaluationModule) -> None:
        """Push the weights to workers, unless they serve their own or the engine is in process."""
        if self.engine.in_process or module.policy is None:
            self.engine.health()
            return
        tensors = dict(module.policy.named_parameters())
        push_until_current(self.engine, lambda: merged_weights(module.policy, tensors), 0)
        text = evaluation_of(trainer).problems[0].prompt[:PROBE_TOKENS]
        self.engine.verify(text, {0: sequence_log_probs(module.policy, text).tolist()})

    def _sample(self, trainer: Trainer, problems: list[EvaluationProblem]) -> list[list[Response]]:
        """Sample `num_samples` responses to each problem."""
        chat_format = evaluation_of(trainer).chat_format
        tokenizer = chat_format.tokenizer
        prompts = [problem.prompt for problem in problems]
        seeds = [response_seed(self.seed, problem) for problem in problems]
        limits = self._limits(trainer, problems)
        if self.budget is None:
            requests = build_requests(prompts, seeds, self.num_samples, limits)
            groups = sample_all(self.engine, requests, self.sampling, stop="")
            return [
                [sampled_response(tokenizer, c.token_ids, c.finish_reason) for c in group] for group in groups
            ]
        opening = chat_format.thought_opening
        budgeted = generate_with_budget(
            self.engine,
            tokenizer,
            [prompt + opening for prompt in prompts],
            self.sampling,
            self.num_samples,
            seeds,
            self.budget,
            chat_format.student_tags.thought_close,
            chat_format.answer_opening,
            limits,
        )
        return [
            [
                Response(
                    turn(tokenizer, opening + c.token_ids, c.finish_reason),
                    len(c.token_ids),
                    c.finish_reason,
                    c.num_thinking_tokens,
                )
                for c in group
            ]
            for group in budgeted
        ]


def response_seed(seed: int, problem: EvaluationProblem) -> int:
    """Return what decides the responses to a problem, whatever else is asked."""
    return mix_seed(seed, zlib.crc32(problem.id.encode()))


def sampled_response(tokenizer: Any, token_ids: list[int], finish_reason: FinishReason) -> Response:
    """Return the response that consists of these tokens."""
    return Response(turn(tokenizer, token_ids, finish_reason), len(token_ids), finish_reason)


def require_responses_fit(
    problems: list[EvaluationProblem], num_opening: int, sampling: Sampling, context: int, advice: str
) -> None:
    """Check that each question and a response of full length fit into a context, in tokens.

    Args:
        problems: The questions.
        num_opening: Tokens that are put between question and response.
        sampling: Limits the response.
        context: The model's context.
        advice: What to do if they do not fit.

    Raises:
        InputError: Naming the longest question, the lengths and the advice.
    """
    longest = max(problems, key=lambda problem: len(problem.prompt))
    if len(longest.prompt) + num_opening + sampling.max_completion_length > context:
        raise InputError(
            f"Question and response must fit into the model's context of {context} tokens, but "
            f"{longest.id} needs {len(longest.prompt)} + max_completion_length "
            f"{sampling.max_completion_length}. {advice}"
        )


def turn(tokenizer: Any, token_ids: list[int], finish_reason: str) -> str:
    """Return the text of a turn, without the token that ended it."""
    return decode(tokenizer, token_ids[:-1] if finish_reason == "eos" else token_ids)
