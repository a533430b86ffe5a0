"""Request completions from an engine and deliver them to a module, which knows only its Sampler.

    Sampler        requests the completions of a step, of a validation or of a prediction; for a module
    └ Dispatcher   talks to the engine on behalf of all ranks; EvaluateEvery has one too
      └ WeightSync      pushes the weights before each request (weight_sync.py)
    RolloutRequest a request, with the completions that have arrived; those of group g have the numbers
                   g * num_completions and following

A step of training, as `RLTModule.training_step` calls it:

    request          the request of this step, or the one that was submitted a step ahead
    stream           its completions in chunks, alike on every rank, until all are there
    request_others   dynamic sampling: other problems in place of some
    submit_next      asynchronous: the next step's request, so that the engine samples while this step trains

        engine      sample 0 │ sample 1 │ sample 2 │ ...
        module               │ train 0  │ train 1  │ ...

Where each rank has an engine (SHARED_WEIGHTS, PER_RANK), it samples the rank's part of a request. Each ═ is a
collective: all ranks wait there.

    rank 0   update_weights ─▶ sample ─▶ its completions ═ all completions ─▶ score ─▶ update
    rank 1   update_weights ─▶ sample ─▶ its completions ═ all completions ─▶ score ─▶ update

A server: rank 0 talks to it for all ranks. On GPUs of its own it leaves the trainer's idle while it
samples. So its completions come in several chunks, and each is scored at once.

    engine   ─── sample ─────────────────────────────────────────────┐
    rank 0       chunk 1 ═▶ score ═ chunk 2 ═▶ score ═ ...  last chunk ═▶ score ─▶ update
    rank 1               ═▶ score ═         ═▶ score ═ ...             ═▶ score ─▶ update

No weight moves before the last chunk is scored, so the rewards equal those of scoring all at the end, up to
rounding, since micro-batches differ. Why each wait ends:

    rank 0, for completions         the engine's thread puts a mark behind the last one, also after an error;
                                    the engine returns or raises within its own deadlines
    the others, for rank 0's chunk  rank 0 hands on the chunk or its exception; `deadline_s` bounds the rest

On the rank that talks to the engine a completion goes from one thread to the other:

    engine's thread     receive ─▶ arrivals ──┐
    trainer's thread                      next_chunk ─▶ completions ─▶ a chunk, which all ranks get

What an engine lost with its workers is submitted again in `Dispatcher.stream`, group by group. A completion
that has already arrived stays as it is: its second version is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from lightning.pytorch import Trainer

from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.engines.base import (
    Engine,
    Placement,
    SampleRequest,
    Sampling,
    WorkersLost,
    require_context,
    stream_completions,
)
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.numerics.seeds import mix_seed
from rlt_lightning.rollouts.dynamic_sampling import DynamicSampling
from rlt_lightning.rollouts.weight_sync import Policy, WeightSync
from rlt_lightning.run.console import waiting_for
from rlt_lightning.run.ranks import Collectives, gather_from_ranks
from rlt_lightning.types import Completion, Problem, Rollout, Rollouts

T = TypeVar("T")

# In seeds these stand in place of the optimizer step.
VALIDATION, PREDICTION = -1, -2
# Sampled tokens of a chunk, in full forwards of each rank: a smaller chunk would fill no forward, a larger
# one would leave more to score after the last completion: research/speed.md.
CHUNK_FORWARDS = 1


class Chunk(NamedTuple):
    """Completions that have come since the chunk before.

    Attributes:
        completions: The completions by number.
        complete: Whether nothing of the request is missing any more.
        sampling: Whether the engine still samples. If it does not and some are missing, submit the request.
    """

    completions: dict[int, Completion]
    complete: bool
    sampling: bool


@dataclass
class RolloutRequest:
    """The completions that all ranks of one step are waiting for.

    Example:
        Two problems with three completions each have the numbers 0 to 5; `missing` names problems, 0 and 1.

    Attributes:
        rows: Row numbers of the problems, of all ranks in rank order.
        prompts: Their prompts, token ids.
        seeds: One for each.
        policy_version: Optimizer steps of the weights that sample; of the oldest, if weights differ.
        sampling: Temperature and limits.
        num_completions: Completions per problem.
        stop: The end tag.
        completions: The completions that have arrived, by number.
        step: The training step that they are for, from 0; None: validation or prediction.
        problems: The problems themselves; a checkpoint holds none.
        places: Which of the step's problems each one is, or replaces.
        logged: Those that this rank logs and records: the problems that the loader gave it.
        asked: The problems that this rank asks the engine for; None: all.
        build: Attaches a completion to its problem.
    """

    rows: list[int]
    prompts: list[list[int]]
    seeds: list[int]
    policy_version: int
    sampling: Sampling
    num_completions: int
    stop: str
    completions: dict[int, Completion] = field(default_factory=dict)
    step: int | None = None
    problems: list[Problem] = field(default_factory=list, compare=False)
    places: Sequence[int] = field(default=(), compare=False)
    logged: Sequence[int] = field(default=(), compare=False)
    asked: Sequence[int] | None = field(default=None, compare=False)
    build: Callable[[Problem, Completion], Rollout] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.delivered: set[int] = set()  # numbers that were in a chunk
        self.rollouts: dict[int, Rollout] = {}  # built by `build_rollout`
        # On the rank that talks to the engine: its completions, then None or its error.
        self.arrivals: SimpleQueue[tuple[int, Completion] | BaseException | None] = SimpleQueue()
        self.sampling_now = False

    # Completions

    @property
    def missing(self) -> list[int]:
        """Return the problems of which this rank still awaits completions."""
        size = self.num_completions
        asked = range(len(self.prompts)) if self.asked is None else self.asked
        return [i for i in asked if any(i * size + j not in self.completions for j in range(size))]

    @property
    def logged_numbers(self) -> list[int]:
        """Return the numbers of the completions of the problems that this rank logs."""
        size = self.num_completions
        return [i * size + j for i in self.logged for j in range(size)]

    def build_rollout(self, number: int) -> Rollout:
        """Return a completion attached to its problem; a rank builds only what it needs."""
        if number not in self.rollouts:
            assert self.build is not None
            problem = self.problems[number // self.num_completions]
            self.rollouts[number] = self.build(problem, self.completions[number])
        return self.rollouts[number]

    def build_rollouts(self, numbers: Iterable[int]) -> Rollouts:
        """Return completions attached to their problems, as a module reads them."""
        rollouts = [self.build_rollout(number) for number in numbers]
        return Rollouts(rollouts, self.num_completions, self.policy_version, self.sampling.temperature)

    def count_tokens(self, number: int) -> tuple[int, int]:
        """Return the tokens of a completion's prompt, and its own."""
        prompt = self.prompts[number // self.num_completions]
        return len(prompt), len(self.completions[number].token_ids)

    def sum_tokens(self, numbers: Iterable[int]) -> int:
        """Return how many tokens these completions have."""
        return sum(len(self.completions[number].token_ids) for number in numbers)

    # From the engine

    def open(self) -> tuple[list[SampleRequest], list[int]]:
        """Note that the engine now samples the missing completions.

        Returns:
            The requests to the engine, and the numbers of their completions.
        """
        self.arrivals, self.sampling_now = SimpleQueue(), True
        missing, size = self.missing, self.num_completions
        numbers = [i * size + j for i in missing for j in range(size)]
        requests = [
            SampleRequest(self.prompts[i], self.seeds[i], size, step=self.step, row=self.rows[i])
            for i in missing
        ]
        return requests, numbers

    def receive(self, samples: Iterable[tuple[int, Completion]], numbers: Sequence[int]) -> None:
        """Take an engine's completions until it ends; in a thread, unless the engine is in this process.

        Args:
            samples: Completions with their index in `numbers`.
            numbers: The numbers that `open` returned.
        """
        arrivals, end = self.arrivals, None
        try:
            for index, completion in samples:
                arrivals.put((numbers[index], completion))
        except BaseException as error:
            end = error
        arrivals.put(end)

    def collect(self) -> None:
        """Wait for the completions that the engine samples, and keep them.

        Completions that were lost with workers stay missing. Any other error is raised once:
        afterwards the engine may be asked again.
        """
        self._take(math.inf)

    def next_chunk(self, min_tokens: float) -> Chunk:
        """Wait for completions of `min_tokens` or the engine's last one; infinity: for all.

        Returns:
            The completions of no earlier chunk. With infinity none if workers were lost before all came.
        """
        self._take(min_tokens)
        complete = not self.missing
        fresh = sorted(self.completions.keys() - self.delivered)
        if not complete and min_tokens == math.inf:
            fresh = []
        chunk = {number: self.completions[number] for number in fresh}
        return Chunk(chunk, complete and not self.sampling_now, self.sampling_now)

    def deliver(self, chunk: Chunk) -> None:
        """Keep a chunk, which all ranks get alike."""
        self.completions |= chunk.completions
        self.delivered |= chunk.completions.keys()

    def _take(self, min_tokens: float) -> None:
        """Move arrivals to `completions` until those in no chunk have `min_tokens`, or no more come."""
        num_tokens = self.sum_tokens(self.completions.keys() - self.delivered)
        with waiting_for("the engine's completions"):
            while self.sampling_now:
                try:
                    arrival = self.arrivals.get(block=num_tokens < min_tokens)
                except Empty:
                    return
                if isinstance(arrival, tuple):
                    number, completion = arrival
                    if number not in self.completions:
                        self.completions[number] = completion
                        num_tokens += len(completion.token_ids)
                    continue
                self.sampling_now = False
                if arrival is not None and not isinstance(arrival, WorkersLost):
                    raise arrival

    # In a checkpoint

    def to_plain(self) -> dict[str, Any]:
        """Return it as tensors and plain values, such as a checkpoint may hold: whole groups only."""
        size = self.num_completions
        missing = set(self.missing)
        groups = {
            i: [
                {
                    **vars(completion),
                    "token_ids": torch.tensor(completion.token_ids, dtype=torch.int32),
                    "log_probs": completion.log_probs and torch.tensor(completion.log_probs),
                }
                for completion in (self.completions[i * size + j] for j in range(size))
            ]
            for i in range(len(self.prompts))
            if i not in missing
        }
        settings = {"rows": self.rows, "prompts": self.prompts, "seeds": self.seeds, "stop": self.stop}
        settings |= {"policy_version": self.policy_version, "num_completions": size, "step": self.step}
        return settings | {"sampling": vars(self.sampling), "finished": groups}

    @classmethod
    def from_plain(cls, state: dict[str, Any]) -> Self:
        """Return the request whose `to_plain` returned this."""

        def build_completion(entry: dict[str, Any]) -> Completion:
            lists = {name: v.tolist() for name, v in entry.items() if isinstance(v, torch.Tensor)}
            return Completion(**entry | lists)

        settings = {name: value for name, value in state.items() if name not in ("sampling", "finished")}
        completions = {
            position * state["num_completions"] + number: build_completion(entry)
            for position, group in state["finished"].items()
            for number, entry in enumerate(group)
        }
        return cls(**settings, sampling=Sampling(**state["sampling"]), completions=completions)


class Dispatcher:
    """Asks an engine on behalf of all ranks.

    Args:
        engine: The engine.
        verify_every_n_steps: Optimizer steps between two verifications of workers; 0: only after the first
            push to a worker.
        deadline_s: How long the other ranks wait for rank 0.
    """

    def __init__(self, engine: Engine, verify_every_n_steps: int, deadline_s: float) -> None:
        self.engine = engine
        self.is_server = engine.placement is Placement.SERVER
        self.weights = WeightSync(engine, verify_every_n_steps, self.call)
        self.collectives = Collectives(deadline_s)
        # `start` sets both.
        self.trainer: Trainer | None = None
        self.module: Policy | None = None

    # The engine's life

    def start(self, trainer: Trainer, module: Policy, prompt: list[int], longest: int) -> None:
        """Start the engine once the weights are where they are trained, a restored checkpoint included.

        A callback that shares another one's engine calls this too, so that its prompts are checked.

        Args:
            trainer: The trainer.
            module: The module whose policy samples.
            prompt: The first prompt.
            longest: The longest prompt with the longest completion, tokens.
        """
        self.trainer, self.module = trainer, module
        self.weights.start(prompt)

        def start() -> None:
            self.engine.num_ids = module.num_ids
            tokenizer = get_stratos_data(trainer).format.tokenizer
            self.engine.start(module.policy, tokenizer, Path(trainer.default_root_dir))
            require_context(longest, self.engine.max_model_len)

        self._free_gpu_cache()
        self.call(start)
        if self.engine.placement is Placement.SHARED_WEIGHTS and module.sharding.sharded:
            self.engine.use_sharded_model(module.run, module.on_any_rank)

    def close(self) -> None:
        """Close the engine; its weights are verified again after the next push."""
        self.engine.close()
        self.weights.close()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the ranks that own the engine.

        Returns:
            The result of rank 0's call on every rank for a server; else that of this rank's call.

        Raises:
            Exception: Whichever that call raised.
        """
        if not self.is_server or self.trainer is None:
            return function()
        return self.collectives.on_rank_zero(self.trainer, function)

    # Completions

    def list_asked(self, num_problems: int) -> Sequence[int]:
        """Return which problems of a request that all ranks have alike this rank asks for.

        Of a server all. Else these are a block. All ranks get equally many, since sharded ranks run forwards
        together: so the last ranks may have some of the first problems too.
        """
        assert self.trainer is not None
        if self.is_server:
            return range(num_problems)
        size = -(-num_problems // self.trainer.world_size)
        first = self.trainer.global_rank * size
        return [place % num_problems for place in range(first, first + size)]

    def submit(self, request: RolloutRequest) -> None:
        """Let the engine sample a request's missing completions, with the weights of this step.

        A server samples in the background; any other engine has finished when this returns.
        """
        trainer, module = self._bound()
        self._free_gpu_cache()
        # Weights are pushed and verified as they are, wherever in a step this is.
        with module.phase("push"), torch.autocast(module.device.type, enabled=False):
            self.weights.make_current(trainer, module)
        # Only the rank that talks to the engine knows its completions.
        if not self.call(lambda: bool(request.completions)):
            request.policy_version = module.global_step
        if not self.is_server:
            # In the precision that the model is trained in.
            with module.phase("generate"), trainer.precision_plugin.forward_context():
                self._sample(request)()
        elif trainer.is_global_zero:
            run_in_background(self._sample(request))

    def stream(self, request: RolloutRequest, min_tokens: float = math.inf) -> Iterator[Chunk]:
        """Yield a request's completions, chunk by chunk, until none is missing.

        Missing completions, lost ones too, are submitted. All ranks get the same chunks; but of
        a request of its own (`RolloutRequest.asked` is None) a rank with its own engine gets that.

        Args:
            request: The request.
            min_tokens: Tokens that a chunk waits for; infinity: all there are.
        """
        _, module = self._bound()
        while True:
            # On every rank: metrics must have the same names everywhere.
            with module.phase("generate") as stats:
                chunk = self._next_chunk(request, min_tokens)
                stats.tokens += self._count_tokens(chunk)
                if chunk.complete and request.asked is not None:
                    chunk = self._share(request, chunk)
            yield chunk
            if chunk.complete:
                return
            if not chunk.sampling:
                self.submit(request)

    def complete(self, request: RolloutRequest) -> None:
        """Wait for all completions of a request at once; see `stream`."""
        for _ in self.stream(request):
            pass

    def _next_chunk(self, request: RolloutRequest, min_tokens: float) -> Chunk:
        """Return the completions since the chunk before, of a server alike on every rank."""
        chunk = self.call(lambda: request.next_chunk(min_tokens))
        request.deliver(chunk)
        if chunk.complete and self.engine.takes_turns:
            # No rank trains before all workers sleep.
            self.call(self.engine.put_to_sleep)
        return chunk

    def _share(self, request: RolloutRequest, chunk: Chunk) -> Chunk:
        """Give all ranks the completions of each, at the end of a request; a server gave them to all."""
        trainer, _ = self._bound()
        if self.is_server or trainer.world_size == 1:
            return chunk
        parts = self.collectives.gather(trainer, request.completions)
        request.completions = {number: completion for part in parts for number, completion in part.items()}
        return chunk._replace(completions=request.completions)

    def _count_tokens(self, chunk: Chunk) -> int:
        """Return this rank's part of a chunk's tokens; the parts of all ranks add up, up to rounding."""
        trainer, _ = self._bound()
        num_tokens = sum(len(completion.token_ids) for completion in chunk.completions.values())
        return num_tokens // trainer.world_size if self.is_server else num_tokens

    def _bound(self) -> tuple[Trainer, Policy]:
        assert self.trainer is not None
        assert self.module is not None
        return self.trainer, self.module

    def _sample(self, request: RolloutRequest) -> Callable[[], None]:
        """Return a function in which the engine samples a request's missing completions."""
        samples, numbers = request.open()
        stream = stream_completions(self.engine, samples, request.sampling, request.stop)
        return lambda: request.receive(stream, numbers)

    def _free_gpu_cache(self) -> None:
        """Return the GPU memory that PyTorch keeps for later, if workers share the GPUs."""
        if self.engine.takes_turns:
            trainer, _ = self._bound()
            torch.cuda.empty_cache()
            trainer.strategy.barrier()


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

    @property
    def max_rounds(self) -> int:
        """Return how often a step may replace groups of equal rewards; 0 without dynamic sampling."""
        dynamic = self.settings.dynamic_sampling
        return 0 if dynamic is None else dynamic.max_rounds

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

    def request_others(self, places: Sequence[int]) -> RolloutRequest | None:
        """Return a request for other problems, the next of the training order, in these places of the step.

        Problems may be fewer than places. None: there are no places, or no problems.
        """
        loader: Any = self.trainer.train_dataloader
        problems: list[Problem] = loader.take_more(len(places)) if places else []
        if not problems:
            return None
        request = self._build_training(problems, self.module.global_step, 0)
        request.places = list(places[: len(problems)])
        rank = self.trainer.global_rank
        request.logged = [
            i for i, place in enumerate(request.places) if place // self.problems_per_rank == rank
        ]
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
        request = self._build_held_out(
            problems, seeds, VALIDATION, settings.val_sampling, settings.val_completions
        )
        return self._finish(request)

    def sample_traces(self, problems: list[Problem]) -> Rollouts:
        """Sample the traces of a prediction; they depend only on seed and row, however rows are batched."""
        seeds, settings = self._list_seeds(problems, PREDICTION), self.settings
        request = self._build_held_out(problems, seeds, PREDICTION, settings.sampling, settings.num_traces)
        traces = self._finish(request)
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
            request = self._build_held_out(again, seeds, PREDICTION, settings.sampling, 1)
            resampled = self._finish(request).rollouts
            for i, rollout in zip(misfits, resampled, strict=False):
                rollouts[i] = rollout
        return traces

    def _finish(self, request: RolloutRequest) -> Rollouts:
        """Wait for a request of `_build_held_out`, and return the completions of this rank's problems."""
        self.dispatcher.complete(request)
        return request.build_rollouts(request.logged_numbers)

    def wait(self) -> None:
        """Wait until nothing is sampled any more, since an engine does one thing at a time."""
        if self.pending is not None:
            self.dispatcher.call(self.pending.collect)

    # Requests

    def _build_step(self, problems: list[Problem], step: int) -> RolloutRequest:
        """Return the request of a step, of whose problems each rank has its own; nothing is sampled yet."""
        return self._build_training(self._gather(problems), step, len(problems))

    def _build_training(self, problems: list[Problem], step: int, problems_per_rank: int) -> RolloutRequest:
        """Return a request for problems that all ranks have alike."""
        request = self._build(
            problems, step, self.settings.sampling, self.module.group_size, problems_per_rank
        )
        request.asked = self.dispatcher.list_asked(len(problems))
        return request

    def _build_held_out(
        self,
        problems: list[Problem],
        seeds: list[int],
        step: int,
        sampling: Sampling,
        num_completions: int,
    ) -> RolloutRequest:
        """Return a request outside of training, to which ranks may bring different numbers of problems.

        Without a server each rank has a request of its own.
        """
        parts, rank = [(problems, seeds)], 0
        if self.dispatcher.is_server:
            parts = gather_from_ranks(self.trainer, parts[0])
            rank = self.trainer.global_rank
        together = [problem for part, _ in parts for problem in part]
        request = self._build(together, step, sampling, num_completions, 0)
        request.seeds = [seed for _, part in parts for seed in part]
        first = sum(len(part) for part, _ in parts[:rank])
        request.logged = range(first, first + len(problems))
        return request

    def _build(
        self,
        problems: list[Problem],
        step: int,
        sampling: Sampling,
        num_completions: int,
        problems_per_rank: int,
    ) -> RolloutRequest:
        request = RolloutRequest(
            rows=[problem.row for problem in problems],
            prompts=[problem.teacher_prompt for problem in problems],
            seeds=self._list_seeds(problems, step),
            policy_version=self.module.global_step,
            sampling=sampling,
            num_completions=num_completions,
            stop=get_stratos_data(self.trainer).stop,
            step=step if step >= 0 else None,
        )
        self._attach(request, problems, problems_per_rank)
        return request

    def _attach(self, request: RolloutRequest, problems: list[Problem], problems_per_rank: int) -> None:
        """Give a request its problems: those of all ranks in rank order, `problems_per_rank` of each."""
        first = self.trainer.global_rank * problems_per_rank
        request.problems, request.places = problems, range(len(problems))
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
