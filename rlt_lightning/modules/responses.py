"""Ask a model the problems of evaluation sets, and judge its responses.

    problems ─ sample_responses ─▶ responses ─ judge_responses ─▶ records ─▶ figures (metrics/answers.py)

`rlt test` (callbacks/evaluation.py, modules/evaluation.py) asks and judges with these functions.
EvaluateEvery judges with them, but samples with the engine of its run, through the run's dispatcher. With the
same seed and weights both report the same figures.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlt_lightning.datamodules.evaluation import Response
from rlt_lightning.datamodules.evaluation_sets import EvaluationProblem
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.engines.base import Engine, SampleRequest, Sampling, build_requests, sample_all
from rlt_lightning.judging.answers import JUDGE_VERSION
from rlt_lightning.judging.judge import Judge
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.run.console import waiting_for
from rlt_lightning.run.jsonl import Row
from rlt_lightning.tags import decode, escape_half_pairs
from rlt_lightning.types import Completion, FinishReason, InputError

# Returns the responses to each problem, equally many for each.
Sample = Callable[[list[EvaluationProblem]], list[list[Response]]]


# Asking


def sample_responses(
    engine: Engine,
    problems: list[EvaluationProblem],
    chat_format: ChatFormat,
    sampling: Sampling,
    num_samples: int,
    seed: int,
    limits: list[int] | None = None,
    recover: Callable[[], None] | None = None,
) -> list[list[Response]]:
    """Sample `num_samples` responses to each problem.

    Args:
        engine: Started, with the weights that are to sample.
        problems: The problems, with their prompts.
        chat_format: The format of the prompts.
        sampling: Temperature, and the limit of thought and answer together.
        num_samples: Responses to each problem.
        seed: A response depends only on (seed, problem, number of the sample).
        limits: Tokens of a response to each problem; None: sampling.max_completion_length for all.
        recover: Brings lost workers back with their weights; see `sample_all`.

    Raises:
        WorkersLost: If workers came back without the current weights, and nothing brings these.
    """
    if not problems:
        return []
    tokenizer = chat_format.tokenizer
    requests = build_response_requests(problems, num_samples, seed, limits)
    groups = sample_all(engine, requests, sampling, "", recover)
    return [[build_response(tokenizer, c.token_ids, c.finish_reason) for c in group] for group in groups]


class CalledTogether:
    """An engine whose model is in shards: all ranks call it equally often, whatever each has to sample.

        rank 0   ═ answers ═ answers ═
        rank 1   ═ answers ═ nothing ═          ═: each rank tells whether it has more

    Args:
        engine: The engine.
        on_any_rank: on_any_rank(flag) tells every rank whether the flag is set on one of them.
    """

    def __init__(self, engine: Engine, on_any_rank: Callable[[bool], bool]) -> None:
        self.engine, self.num_ids = engine, engine.num_ids
        self.on_any_rank = on_any_rank

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`."""
        self.on_any_rank(True)
        return self.engine.sample(requests, sampling, stop)

    def finish(self, sampling: Sampling) -> None:
        """Take part in the other ranks' calls, without requests, until no rank samples any more."""
        while self.on_any_rank(False):
            list(self.engine.sample([], sampling, stop=""))


def build_response_requests(
    problems: Sequence[EvaluationProblem], num_samples: int, seed: int, limits: list[int] | None = None
) -> list[SampleRequest]:
    """Build one request for each problem; see `sample_responses`."""
    prompts = [problem.prompt for problem in problems]
    return build_requests(prompts, [response_seed(seed, p) for p in problems], num_samples, limits)


def response_seed(seed: int, problem: EvaluationProblem) -> int:
    """Return the seed of the responses to a problem, which depends on nothing else."""
    return mix_seed(seed, zlib.crc32(escape_half_pairs(problem.id).encode()))


def build_response(tokenizer: Any, token_ids: list[int], finish_reason: FinishReason) -> Response:
    """Build the response that consists of these sampled tokens."""
    turn = token_ids[:-1] if finish_reason == "eos" else token_ids
    text = decode(tokenizer, turn)
    return Response(text, len(token_ids), finish_reason)


def require_responses_fit(
    problems: list[EvaluationProblem], sampling: Sampling, context: int, advice: str
) -> None:
    """Check that each question and a response of full length fit into a context, in tokens.

    Args:
        problems: The problems.
        sampling: Limits the response.
        context: The model's context.
        advice: The remedy if they do not fit.

    Raises:
        InputError: Naming the longest question, the lengths and the advice.
    """
    longest = max(problems, key=lambda problem: len(problem.prompt))
    if len(longest.prompt) + sampling.max_completion_length > context:
        raise InputError(
            f"Question and response must fit into the model's context of {context} tokens, but "
            f"{longest.id} needs {len(longest.prompt)} + max_completion_length "
            f"{sampling.max_completion_length}. {advice}"
        )


# Judging


def judge_responses(
    judge: Judge, problems: Sequence[EvaluationProblem], responses: Sequence[Sequence[Response]]
) -> list[Row]:
    """Judge the responses to each problem, and return one record of each response."""
    pairs = [
        (response.text, problem.reference)
        for problem, samples in zip(problems, responses, strict=True)
        for response in samples
    ]
    with waiting_for(f"the judge of {len(pairs)} responses"):
        verdicts = iter(judge.judge_all(pairs))
    records: list[Row] = []
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
