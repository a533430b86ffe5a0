"""The two links between the rollout callback and its engine.

InProcessLink: every rank has the engine, and samples its own problems with its own model.

    rank 0   order ─▶ update_weights ─▶ sample ─▶ rollouts
    rank 1   order ─▶ update_weights ─▶ sample ─▶ rollouts

RankZeroLink: rank 0 talks to the engine for all ranks. Each ═ is a collective: all ranks wait there.

    rank 0   problems ═▶ one order ─▶ health ═ update_weights ═ verify ═ sample ─▶ completions ═▶ rollouts
    rank 1   problems ═▶ one order ──────────═ gather_weights ═────────═───────────────────────═▶ rollouts

In training, a RankZeroLink hands on the completions in waves: see waves.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

from rlt_lightning.callbacks.order import Order
from rlt_lightning.callbacks.together import Together, waiting_for_ranks
from rlt_lightning.datamodules.stratos import stratos_of
from rlt_lightning.engines.base import (
    PROBE_TOKENS,
    Engine,
    NamedTensor,
    build_requests,
    push_until_current,
    require_context,
    stream_completions,
)
from rlt_lightning.engines.threads import in_background
from rlt_lightning.models.lora import adapter_weights, merged_weights
from rlt_lightning.models.packed import sequence_log_probs
from rlt_lightning.modules.base import PolicyModule
from rlt_lightning.types import Completion, InputError, Problem, Rollout

T = TypeVar("T")
# A rollout job: row of the problem, prompt and seed.
Job = tuple[int, list[int], int]


class EngineLink(ABC):
    """What callbacks ask of an engine, on all ranks together."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # The text by which workers are verified; always the same, so that earlier log-probs can be compared.
        self.probe: list[int] = []

    def start(self, trainer: Trainer, module: PolicyModule, prompt: list[int], longest: int) -> None:
        """Start the engine once the weights are where they are trained, a restored checkpoint included.

        A callback that shares another one's engine calls this too, so that its prompts are checked.

        Args:
            trainer: The trainer.
            module: The module whose policy samples.
            prompt: The first prompt.
            longest: The longest prompt with the longest completion, tokens.
        """
        self.probe = self.probe or prompt[:PROBE_TOKENS]

        def start() -> None:
            tokenizer = stratos_of(trainer).format.tokenizer
            self.engine.start(module.policy, tokenizer, Path(trainer.default_root_dir))
            require_context(longest, self.engine.max_model_len)

        self._free_gpu_cache(trainer)
        self.call(trainer, start)

    def rollouts_of(
        self, trainer: Trainer, module: PolicyModule, problems: list[Problem], order: Order
    ) -> list[Rollout]:
        """Sample what an order misses, wait for it, and return this rank's part.

        Args:
            trainer: The trainer.
            module: The module whose policy samples.
            problems: Those of this rank.
            order: Holds the problems of this rank, or of all ranks.
        """
        own = self.own_positions(trainer, problems, order)
        self._finish(trainer, module, order)
        order.finished = self.call(trainer, lambda: order.finished)
        data = stratos_of(trainer)
        rollouts = [
            data.rollout(problem, completion)
            for i, problem in zip(own, problems, strict=True)
            for completion in order.finished[i]
        ]
        module.phase.phases["generate"].tokens += sum(len(r.completion.token_ids) for r in rollouts)
        return rollouts

    def own_positions(self, trainer: Trainer, problems: list[Problem], order: Order) -> range:
        """Return the positions in an order of this rank's problems."""
        first = self._first_position(trainer, len(problems))
        own = range(first, first + len(problems))
        if [order.rows[i] for i in own if i < len(order.rows)] != [p.row for p in problems]:
            raise RuntimeError(
                f"Completions were sampled for rows {order.rows}, but this batch has rows "
                f"{[p.row for p in problems]}. The loader did not bring what it had announced."
            )
        return own

    def completions_of(
        self, trainer: Trainer, module: PolicyModule, order: Order
    ) -> dict[int, list[Completion]]:
        """Sample an order that all ranks have alike, and return what came to this rank, by `order.rows`.

        The ranks' parts together are the whole. Ranks that sample in process may share some prompts.
        """
        part = self._part_of(trainer, order)
        self._finish(trainer, module, part)
        return {part.rows[position]: group for position, group in part.finished.items()}

    def begin(self, trainer: Trainer, module: PolicyModule, order: Order) -> None:
        """Let the engine sample what an order misses, with the weights of this step."""
        self._free_gpu_cache(trainer)
        with module.phase("push"):
            self._make_current(trainer, module)
        # Only rank 0 knows what has come.
        if not self.call(trainer, lambda: bool(order.finished or order.handed)):
            order.policy_version = module.global_step
        asked = order.expect()

        prompts, seeds = [order.prompts[i] for i in asked], [order.seeds[i] for i in asked]
        requests = build_requests(prompts, seeds, order.num_completions)

        def sample() -> None:
            for index, completion in stream_completions(self.engine, requests, order.sampling, order.stop):
                position, number = divmod(index, order.num_completions)
                order.arrive(position, number, completion)

        self._sample(trainer, module, order, sample)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
        self.probe = []

    @abstractmethod
    def call(self, trainer: Trainer, function: Callable[[], T]) -> T:
        """Call a function of the engine where the engine is; return its result on every rank.

        Raises:
            EngineError: On every rank, if the function raised it; InputError likewise.
        """

    @abstractmethod
    def jobs_of_all(self, trainer: Trainer, jobs: list[Job]) -> list[Job]:
        """Return the jobs that one order holds: those of this rank, or of all ranks."""

    @abstractmethod
    def require_even(self, trainer: Trainer) -> None:
        """Raise InputError if validation cannot be split evenly over the ranks."""

    @abstractmethod
    def _first_position(self, trainer: Trainer, num_problems: int) -> int:
        """Return the position in an order of this rank's first problem."""

    @abstractmethod
    def _part_of(self, trainer: Trainer, order: Order) -> Order:
        """Return this rank's part of an order that all ranks have alike."""

    @abstractmethod
    def _make_current(self, trainer: Trainer, module: PolicyModule) -> None:
        """Push the weights until the engine samples with those of this step."""

    @abstractmethod
    def _sample(
        self,
        trainer: Trainer,
        module: PolicyModule,
        order: Order,
        sample: Callable[[], None],
    ) -> None:
        """Call `sample`, now or in the background; `order.future` tells when it is done."""

    def _finish(self, trainer: Trainer, module: PolicyModule, order: Order) -> None:
        """Sample what an order misses, and wait for it."""
        while not self._collect(trainer, module, order):
            self.begin(trainer, module, order)
        if self.engine.takes_turns:
            with module.phase("generate"):
                # No rank trains before all workers sleep.
                self.call(trainer, self.engine.put_to_sleep)

    def _collect(self, trainer: Trainer, module: PolicyModule, order: Order) -> bool:
        # On every rank: metrics must have the same names everywhere.
        with module.phase("generate"):
            return self.call(trainer, order.collect)

    def _free_gpu_cache(self, trainer: Trainer) -> None:
        """Return the GPU memory that PyTorch keeps for later, if workers share the GPUs."""
        if self.engine.takes_turns:
            torch.cuda.empty_cache()
            with waiting_for_ranks(trainer, "all ranks to free their GPU"):
                trainer.strategy.barrier()


class InProcessLink(EngineLink):
    """An engine in every process: each rank samples its own problems with the model that it trains."""

    def start(self, trainer: Trainer, module: PolicyModule, prompt: list[int], longest: int) -> None:
        """Start the engine; if weights are sharded, let all ranks call the model together."""
        super().start(trainer, module, prompt, longest)
        if module.sharding.sharded:
            self.engine.share(module.run, module.on_any_rank)

    def call(self, trainer: Trainer, function: Callable[[], T]) -> T:
        """Call a function on every rank, each for itself."""
        return function()

    def jobs_of_all(self, trainer: Trainer, jobs: list[Job]) -> list[Job]:
        """Return this rank's jobs."""
        return jobs

    def require_even(self, trainer: Trainer) -> None:
        """Accept any size: ranks do not share an order."""

    def _first_position(self, trainer: Trainer, num_problems: int) -> int:
        return 0

    def _part_of(self, trainer: Trainer, order: Order) -> Order:
        """Return every `world_size`-th prompt. All ranks get equally many, since sharded ranks meet."""
        size, number = trainer.world_size, len(order.rows)
        own = [(trainer.global_rank + i * size) % number for i in range(-(-number // size))]
        return replace(
            order,
            rows=[order.rows[i] for i in own],
            prompts=[order.prompts[i] for i in own],
            seeds=[order.seeds[i] for i in own],
            finished={},
        )

    def _make_current(self, trainer: Trainer, module: PolicyModule) -> None:
        push_until_current(self.engine, lambda: list(module.policy.named_parameters()), module.global_step)

    def _sample(
        self,
        trainer: Trainer,
        module: PolicyModule,
        order: Order,
        sample: Callable[[], None],
    ) -> None:
        order.future = Future()
        # In the precision that the model is trained in.
        with module.phase("generate"), trainer.precision_plugin.forward_context():
            sample()
            order.future.set_result(None)


class RankZeroLink(EngineLink):
    """An engine outside the trainer's processes: rank 0 talks to it for all ranks.

    Args:
        engine: The engine.
        verify_every_n_steps: Optimizer steps between two verifications; 0: only after the first push to a
            worker.
        deadline_s: How long the other ranks wait for rank 0.
    """

    def __init__(self, engine: Engine, verify_every_n_steps: int, deadline_s: float) -> None:
        super().__init__(engine)
        self.verify_every_n_steps = verify_every_n_steps
        self.together = Together(deadline_s)
        self.verified_at: int | None = None  # optimizer step of the last verification
        # The trainer's log-probs of the probe, by policy version: those of the last two verifications.
        self.probe_log_probs: dict[int, list[float]] = {}

    def close(self) -> None:
        """Close the engine; its weights are verified again after the next push."""
        super().close()
        self.verified_at, self.probe_log_probs = None, {}

    def call(self, trainer: Trainer, function: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on all ranks, or raise its error there."""
        return self.together.on_rank_zero(trainer, function)

    def jobs_of_all(self, trainer: Trainer, jobs: list[Job]) -> list[Job]:
        """Gather the jobs of all ranks, in rank order."""
        if trainer.world_size == 1:
            return jobs
        parts: list[Any] = [None] * trainer.world_size
        with waiting_for_ranks(trainer, "all ranks to announce their problems"):
            torch.distributed.all_gather_object(parts, jobs)
        return [job for part in parts for job in part]

    def require_even(self, trainer: Trainer) -> None:
        """Require equally many held-out rows on every rank, in every batch."""
        data = stratos_of(trainer)
        sizes = (len(data.val_items), data.val_batch_size)
        if any(size % trainer.world_size for size in sizes):
            raise InputError(
                f"With one engine for {trainer.world_size} processes, the held-out rows and val_batch_size "
                f"must be multiples of that, but are {sizes[0]} and {sizes[1]}. Change data.val_rows or "
                "data.val_batch_size."
            )

    def _first_position(self, trainer: Trainer, num_problems: int) -> int:
        return trainer.global_rank * num_problems

    def _part_of(self, trainer: Trainer, order: Order) -> Order:
        """Return the whole order: rank 0 asks for all of it, and gets all."""
        return order

    def _make_current(self, trainer: Trainer, module: PolicyModule) -> None:
        """Push until all workers that can be reached, at least one, hold the weights; then verify."""
        step, pushed = module.global_step, False

        def needs_push() -> bool:
            self.engine.health()
            return self.engine.policy_version != step

        while self.call(trainer, needs_push):
            named_tensors = self._weights(module.policy)
            if not trainer.is_global_zero:
                self.engine.gather_weights(named_tensors)

            def push(named_tensors: list[NamedTensor] = named_tensors) -> None:
                self.engine.update_weights(named_tensors, step)

            self.call(trainer, push)
            pushed = True
        due = self.verified_at is None or 0 < self.verify_every_n_steps <= step - self.verified_at
        if pushed and (due or self.call(trainer, lambda: self.engine.unverified)):
            self._verify(trainer, module)

    def _weights(self, policy: Any) -> list[NamedTensor]:
        """Return what the engine is pushed: a LoRA's matrices, or whole weights with the LoRA merged in."""
        tensors = dict(policy.named_parameters())
        return adapter_weights(tensors) if self.engine.takes_adapters else merged_weights(policy, tensors)

    def _verify(self, trainer: Trainer, module: PolicyModule) -> None:
        """Let the engine compare the workers' log-probs of a text with the trainer's."""
        log_probs = module.run(sequence_log_probs, self.probe)
        self.verified_at = module.global_step
        latest = list(self.probe_log_probs.items())[-1:]
        self.probe_log_probs = dict(latest) | {module.global_step: log_probs.tolist()}
        self.call(trainer, lambda: self.engine.verify(self.probe, self.probe_log_probs))

    def _sample(
        self,
        trainer: Trainer,
        module: PolicyModule,
        order: Order,
        sample: Callable[[], None],
    ) -> None:
        if trainer.is_global_zero:
            order.follow(in_background(sample))


def make_link(engine: Engine, verify_every_n_steps: int, deadline_s: float) -> EngineLink:
    """Return the link that an engine needs; see `RankZeroLink` for the other arguments."""
    if engine.in_process:
        return InProcessLink(engine)
    return RankZeroLink(engine, verify_every_n_steps, deadline_s)
