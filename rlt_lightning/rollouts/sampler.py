"""Bring completions to a module, which knows only its sampler; for training, evaluation and commands alike.

    Sampler          the completions of a step, of a validation or of a prediction
    AnswerSampler    answers to the questions of evaluation sets
    └ Dispatcher     talks to the engine on behalf of all ranks (dispatcher.py)
      └ WeightSync   pushes the weights before each request (weight_sync.py)
    RolloutRequest   a request, with the completions that have arrived (request.py)

A step of training, as `RLTModule.training_step` calls it:

    request          the request of this step, or the one that was submitted a step ahead
    stream           its completions in chunks, alike on every rank, until all are there
    request_others   dynamic sampling: other problems in place of some
    submit_next      asynchronous: the next step's request, so that the engine samples while this step trains

        engine      sample 0 │ sample 1 │ sample 2 │ ...
        module               │ train 0  │ train 1  │ ...
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from lightning.pytorch import Trainer

from rlt_lightning.datamodules.evaluation import Response
from rlt_lightning.datamodules.evaluation_sets import EvaluationProblem
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.engines.base import Placement, Sampling
from rlt_lightning.numerics.importance import TruncatedImportanceSampling
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.rollouts.dispatcher import Dispatcher
from rlt_lightning.rollouts.dynamic_sampling import DynamicSampling
from rlt_lightning.rollouts.request import RolloutRequest
from rlt_lightning.rollouts.weight_sync import Policy
from rlt_lightning.run.ranks import gather_from_ranks
from rlt_lightning.tags import decode, escape_half_pairs
from rlt_lightning.types import Completion, Problem, Rollouts

# In seeds these stand in place of the optimizer step.
VALIDATION, PREDICTION = -1, -2
# Sampled tokens of a chunk, in full forwards of each rank: a smaller chunk would fill no forward, a larger
# one would leave more to score after the last completion: research/speed.md.
CHUNK_FORWARDS = 1


class SampledPolicy(Policy, Protocol):
    """The part of an OnPolicyModule that the sampler uses."""

    group_size: int
    micro_batch_tokens: int

    def total_steps(self) -> int:
        """Return the optimizer steps of the whole run."""


class Settings(Protocol):
    """The settings of RolloutCallback, which documents them."""

    sampling: Sampling
    val_sampling: Sampling
    val_completions: int
    num_traces: int
    max_resamples: int
    asynchronous: bool
    score_early: bool
    dynamic_sampling: DynamicSampling | None
    seed: int


class Sampler:
    """Brings completions to a module.

    Args:
        dispatcher: Asks the engine.
        settings: How completions are sampled.
    """

    # `bind` sets both.
    trainer: Trainer
    module: SampledPolicy

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self.dispatcher = dispatcher
        self.settings = settings
        # A checkpoint keeps the request of this step or, once it was submitted, of the next.
        self.pending: RolloutRequest | None = None
        self.problems_per_rank = 0  # that the loader gave this rank, as any other, in this step

    def bind(self, trainer: Trainer, module: SampledPolicy) -> None:
        """Bring completions to this module from now on; a request that an earlier run left is dropped."""
        self.trainer, self.module, self.pending = trainer, module, None
        self.dispatcher.bind(trainer, module)

    @property
    def max_rounds(self) -> int:
        """Return how often a step may replace groups of equal rewards; 0 without dynamic sampling."""
        dynamic = self.settings.dynamic_sampling
        return 0 if dynamic is None else dynamic.max_rounds

    @property
    def knows_log_probs(self) -> bool:
        """Return whether completions of training bring the policy's log-probs, as the engine computes."""
        return self.dispatcher.engine.reports_log_probs and not self.settings.sampling.truncates

    @property
    def importance_weights(self) -> TruncatedImportanceSampling | None:
        """Return the weights pi_trainer / pi_engine that suit the engine.

        the trainer's weights               none: the model that trains samples, in the same precision
        a copy, rollouts asynchronous       none: the loss clips the ratio to the engine's log-probs instead
        a copy, log-probs not known         none
        a copy                              of tokens, cap 2: other kernels, often another data type
        """
        is_copy = self.dispatcher.engine.placement is not Placement.SHARED_WEIGHTS
        if is_copy and self.knows_log_probs and not self.settings.asynchronous:
            return TruncatedImportanceSampling("token", cap=2.0)
        return None

    # Training

    def request(self, problems: list[Problem]) -> RolloutRequest:
        """Return this step's request: G completions of each problem of all ranks.

        It may have been submitted already, and some of it may have come.

        Args:
            problems: Those of this rank.
        """
        step, group_size = self.module.global_step, self.module.group_size
        request, expected = self.pending, (group_size, self.settings.sampling)
        # A request from a checkpoint may be of other settings.
        if request is None or (request.num_completions, request.sampling) != expected:
            request = self._build_step(problems, step)
        elif not request.problems:
            self._attach(request, self._gather(problems), len(problems))
        self._require_rows(request, problems)
        self.pending, self.problems_per_rank = request, len(problems)
        return request

    def stream(self, request: RolloutRequest) -> Iterator[list[int]]:
        """Yield the numbers of completions that have come, chunk by chunk, until all of a request are there.

        All ranks get the same chunks.
        """
        min_tokens: float = math.inf
        if self.settings.score_early:
            min_tokens = CHUNK_FORWARDS * self.module.micro_batch_tokens * self.trainer.world_size
        for chunk in self.dispatcher.stream(request, min_tokens):
            if chunk.completions:
                yield sorted(chunk.completions)

    def request_others(self, slots: Sequence[int]) -> RolloutRequest | None:
        """Return a request for other problems, the next of the training order, in these slots of the step.

        Problems may be fewer than slots. None: there are no slots, or no problems.
        """
        loader: Any = self.trainer.train_dataloader
        problems: list[Problem] = loader.take_more(len(slots)) if slots else []
        if not problems:
            return None
        request = self._build_training(problems, self.module.global_step, 0)
        request.slots = list(slots[: len(problems)])
        rank = self.trainer.global_rank
        request.logged = [i for i, slot in enumerate(request.slots) if slot // self.problems_per_rank == rank]
        return request

    def submit_next(self) -> None:
        """Submit the request of the next step, if rollouts are asynchronous and there is a next step."""
        following, step = None, self.module.global_step + 1
        # Every step logs the same metrics, also the last of an asynchronous run, which pushes nothing.
        with self.module.phase("push"):
            pass
        if self.settings.asynchronous and step < self.module.total_steps():
            loader: Any = self.trainer.train_dataloader
            following = self._build_step(loader.peek().problems, step)
            # Before self.pending changes: if this fails, a checkpoint must find this step's request.
            self.dispatcher.submit(following)
        self.pending = following

    def complete(self, request: RolloutRequest) -> None:
        """Wait for all completions of a request at once; all ranks get all of them."""
        self.dispatcher.complete(request)

    # Validation and prediction

    def sample_held_out(self, problems: list[Problem]) -> Rollouts:
        """Sample completions of this rank's held-out problems, the same in every validation."""
        self.wait()
        seeds, settings = self._list_seeds(problems, VALIDATION), self.settings
        return self._sample(problems, seeds, settings.val_sampling, settings.val_completions)

    def sample_traces(self, problems: list[Problem]) -> Rollouts:
        """Sample the traces of a prediction; they depend only on seed and row, however rows are batched."""
        seeds, settings = self._list_seeds(problems, PREDICTION), self.settings
        traces = self._sample(problems, seeds, settings.sampling, settings.num_traces)
        data, rollouts = get_stratos_data(self.trainer), traces.rollouts
        for attempt in range(1, settings.max_resamples + 1):
            misfits = [i for i, rollout in enumerate(rollouts) if not data.fits_student(rollout)]
            if not self.module.on_any_rank(bool(misfits)):
                break
            # Ranks may meet in a request, so one without misfits has its first trace sampled for nothing.
            asked = misfits or [0]
            again = [rollouts[i].problem for i in asked]
            seeds = [
                mix_seed(seed, attempt, i % settings.num_traces)
                for seed, i in zip(self._list_seeds(again, PREDICTION), asked, strict=True)
            ]
            resampled = self._sample(again, seeds, settings.sampling, 1).rollouts
            for i, rollout in zip(misfits, resampled, strict=False):
                rollouts[i] = rollout
        return traces

    def _sample(
        self, problems: list[Problem], seeds: list[int], sampling: Sampling, num_completions: int
    ) -> Rollouts:
        """Sample completions of this rank's problems, of which ranks may have different numbers.

        Without a server each rank has a request to itself.
        """
        parts, rank = [(problems, seeds)], 0
        if self.dispatcher.is_server:
            parts, rank = gather_from_ranks(self.trainer, parts[0]), self.trainer.global_rank
        together = [problem for part, _ in parts for problem in part]
        all_seeds = [seed for _, part in parts for seed in part]
        request = self._build(together, all_seeds, None, sampling, num_completions, 0)
        first = sum(len(part) for part, _ in parts[:rank])
        request.logged = range(first, first + len(problems))
        self.dispatcher.complete(request)
        return request.build_rollouts(request.logged_numbers)

    def wait(self) -> None:
        """Wait until nothing is sampled any more, since an engine does one thing at a time."""
        if self.pending is not None:
            self.dispatcher.call(self.pending.collect)

    # Requests

    def _build_step(self, problems: list[Problem], step: int) -> RolloutRequest:
        """Return the request of a step, to which each rank brings its problems; nothing is sampled yet."""
        return self._build_training(self._gather(problems), step, len(problems))

    def _build_training(self, problems: list[Problem], step: int, problems_per_rank: int) -> RolloutRequest:
        """Return a request for problems that all ranks have alike."""
        sampling, seeds = self.settings.sampling, self._list_seeds(problems, step)
        request = self._build(problems, seeds, step, sampling, self.module.group_size, problems_per_rank)
        request.asked = self.dispatcher.list_asked(len(problems))
        return request

    def _build(
        self,
        problems: list[Problem],
        seeds: list[int],
        step: int | None,
        sampling: Sampling,
        num_completions: int,
        problems_per_rank: int,
    ) -> RolloutRequest:
        request = RolloutRequest(
            rows=[problem.row for problem in problems],
            prompts=[problem.teacher_prompt for problem in problems],
            seeds=seeds,
            policy_version=self.module.global_step,
            sampling=sampling,
            num_completions=num_completions,
            stop=get_stratos_data(self.trainer).stop,
            step=step,
        )
        self._attach(request, problems, problems_per_rank)
        return request

    def _attach(self, request: RolloutRequest, problems: list[Problem], problems_per_rank: int) -> None:
        """Give a request its problems: those of all ranks in rank order, `problems_per_rank` of each."""
        first = self.trainer.global_rank * problems_per_rank
        request.problems, request.slots = problems, range(len(problems))
        request.logged = range(first, first + problems_per_rank)
        request.build = get_stratos_data(self.trainer).build_rollout

    def _list_seeds(self, problems: list[Problem], step: int) -> list[int]:
        """Return a seed for each problem."""
        return [mix_seed(self.settings.seed, step, problem.row) for problem in problems]

    def _gather(self, problems: list[Problem]) -> list[Problem]:
        """Return the problems of all ranks, in rank order."""
        parts = gather_from_ranks(self.trainer, problems)
        return [problem for part in parts for problem in part]

    def _require_rows(self, request: RolloutRequest, problems: list[Problem]) -> None:
        first, rows = self.trainer.global_rank * len(problems), [problem.row for problem in problems]
        if request.rows[first : first + len(rows)] != rows:
            raise RuntimeError(
                f"Completions were sampled for rows {request.rows}, but this batch has rows {rows}. The "
                "loader did not bring what it had announced."
            )


class AnswerSettings(Protocol):
    """The settings of ResponseCallback and EvaluateEvery, which document them."""

    sampling: Sampling
    num_samples: int
    seed: int


class AnswerSampler:
    """Brings answers to the questions of evaluation sets.

    Args:
        dispatcher: Asks the engine.
        settings: How answers are sampled.
    """

    def __init__(self, dispatcher: Dispatcher, settings: AnswerSettings) -> None:
        self.dispatcher = dispatcher
        self.settings = settings
        self.needs_model = True  # False: the engine loads the model itself, and this process none
        self.context = sys.maxsize  # tokens of question and answer, to which answers are cut

    def answer(self, problems: Sequence[EvaluationProblem], tokenizer: Any) -> list[list[Response]]:
        """Sample `num_samples` answers to each of this rank's problems, of which there may be none.

        They depend on seed, problem and number of the sample alone. All ranks call this together.
        """
        trainer, settings = self.dispatcher.trainer, self.settings
        parts = gather_from_ranks(trainer, list(problems))
        together, size = [problem for part in parts for problem in part], settings.num_samples
        if not together:
            return []
        request = RolloutRequest(
            rows=list(range(len(together))),
            prompts=[problem.prompt for problem in together],
            seeds=[choose_seed(settings.seed, problem) for problem in together],
            policy_version=self.dispatcher.module.global_step,
            sampling=settings.sampling,
            num_completions=size,
            stop="",
            limits=[self.limit(problem) for problem in together],
            asked=self.dispatcher.list_asked(len(together)),
        )
        self.dispatcher.complete(request)
        first = sum(map(len, parts[: trainer.global_rank]))
        return [
            [build_response(tokenizer, request.completions[i * size + j]) for j in range(size)]
            for i in range(first, first + len(problems))
        ]

    def limit(self, problem: EvaluationProblem) -> int:
        """Return the tokens that an answer to a problem may have."""
        return min(self.settings.sampling.max_completion_length, self.context - len(problem.prompt))


def choose_seed(seed: int, problem: EvaluationProblem) -> int:
    """Return the seed of the answers to a problem, which depends on nothing else."""
    return mix_seed(seed, zlib.crc32(escape_half_pairs(problem.id).encode()))


def build_response(tokenizer: Any, completion: Completion) -> Response:
    """Build the response that consists of these sampled tokens."""
    tokens = completion.token_ids
    turn = tokens[:-1] if completion.finish_reason == "eos" else tokens
    return Response(decode(tokenizer, turn), len(tokens), completion.finish_reason)
