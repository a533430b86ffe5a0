"""What the ranks of a run ask of one engine: weights, then completions.

An engine in process: every rank has it, and samples its part of a request with its own model.

    rank 0   request ─▶ update_weights ─▶ sample ─▶ its completions ═ all completions
    rank 1   request ─▶ update_weights ─▶ sample ─▶ its completions ═ all completions

An engine outside: rank 0 talks to it for all ranks. Each ═ is a collective: all ranks wait there.

    rank 0   request ─▶ health ═ prepare_push ═ update_weights ═ verify ═ sample ─▶ chunk ═▶ ... last chunk ═▶
    rank 1   request ──────────═──────────────═ gather_weights ═────────═────────────────═▶ ...            ═▶

Why each wait ends:

    rank 0, for completions         the engine's thread puts a mark behind the last one, also after an error;
                                    the engine returns or raises within its own deadlines
    the others, for rank 0's chunk  rank 0 hands on the chunk or its EngineError; `deadline_s` bounds the rest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from lightning.pytorch import Trainer

from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.engines.base import (
    PROBE_TOKENS,
    Engine,
    EngineError,
    NamedTensor,
    push_until_current,
    require_context,
    stream_completions,
)
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.models.file_names import to_file_names
from rlt_lightning.models.lora import list_adapter_weights, merge_weights
from rlt_lightning.models.packed import sequence_log_probs
from rlt_lightning.rollouts.request import Chunk, RolloutRequest
from rlt_lightning.run.ranks import Collectives, waiting_for_ranks
from rlt_lightning.types import Completion

T = TypeVar("T")


class Policy(Protocol):
    """The module whose weights sample, a PolicyModule: what is used of it here."""

    @property
    def policy(self) -> Any:
        """Return the model; its weights are pushed."""

    @property
    def global_step(self) -> int:
        """Return the optimizer steps that the weights have taken."""

    @property
    def sharding(self) -> Any:
        """Return how the weights are stored."""

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""

    @property
    def phase(self) -> Callable[[str], AbstractContextManager[Any]]:
        """Return the timer of the step's phases."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(policy, *arguments)`."""

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""


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
        self.verify_every_n_steps = verify_every_n_steps
        self.collectives = Collectives(deadline_s, EngineError)
        # `start` sets both.
        self.trainer: Trainer | None = None
        self.module: Policy | None = None
        # The text by which workers are verified; always the same, so that earlier log-probs can be compared.
        self.probe: list[int] = []
        self.verified_at: int | None = None  # optimizer step of the last verification
        # The trainer's log-probs of the probe, by policy version: those of the last two verifications.
        self.probe_log_probs: dict[int, list[float]] = {}

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
        self.probe = self.probe or prompt[:PROBE_TOKENS]

        def start() -> None:
            tokenizer = get_stratos_data(trainer).format.tokenizer
            self.engine.start(module.policy, tokenizer, Path(trainer.default_root_dir))
            require_context(longest, self.engine.max_model_len)

        self._free_gpu_cache()
        self.call(start)
        if self.engine.in_process and module.sharding.sharded:
            self.engine.use_sharded_model(module.run, module.on_any_rank)

    def close(self) -> None:
        """Close the engine; its weights are verified again after the next push."""
        self.engine.close()
        self.probe, self.verified_at, self.probe_log_probs = [], None, {}

    def call(self, function: Callable[[], T]) -> T:
        """Call a function of the engine where the engine is.

        Returns:
            In process what this rank's call returned; else what rank 0's did, on every rank.

        Raises:
            Exception: On every rank, whichever rank 0's call raised.
        """
        if self.engine.in_process or self.trainer is None:
            return function()
        return self.collectives.on_rank_zero(self.trainer, function)

    # Completions

    def divide(self, num_problems: int) -> Sequence[int]:
        """Return which problems of a request that all ranks have alike this rank asks for.

        In process these are a block. All ranks get equally many, since sharded ranks run forwards together:
        so the last ranks may have some of the first problems too.
        """
        assert self.trainer is not None
        if not self.engine.in_process:
            return range(num_problems)
        size = -(-num_problems // self.trainer.world_size)
        first = self.trainer.global_rank * size
        return [place % num_problems for place in range(first, first + size)]

    def submit(self, request: RolloutRequest) -> None:
        """Let the engine sample what a request lacks, with the weights of this step.

        An engine outside the process samples in the background; any other has finished when this returns.
        """
        trainer, module = self._bound()
        self._free_gpu_cache()
        # Weights are pushed and verified as they are, wherever in a step this is.
        with module.phase("push"), torch.autocast(module.device.type, enabled=False):
            self._make_current()
        # Only the rank that talks to the engine knows what has come.
        if not self.call(lambda: bool(request.completions)):
            request.policy_version = module.global_step
        if self.engine.in_process:
            # In the precision that the model is trained in.
            with module.phase("generate"), trainer.precision_plugin.forward_context():
                self._sample(request)()
        elif trainer.is_global_zero:
            run_in_background(self._sample(request))

    def next_chunk(self, request: RolloutRequest, min_tokens: float) -> Chunk:
        """Return what has come of a request since the chunk before; see `RolloutRequest.next_chunk`.

        In process this is what this rank has sampled; otherwise all ranks get the same.
        """
        chunk = self.call(lambda: request.next_chunk(min_tokens))
        request.deliver(chunk)
        if chunk.complete and self.engine.takes_turns:
            # No rank trains before all workers sleep.
            self.call(self.engine.put_to_sleep)
        return chunk

    def complete(self, request: RolloutRequest) -> None:
        """Sample what a request lacks, and wait for all of it; in process, of what this rank asks for."""
        _, module = self._bound()
        while True:
            # On every rank: metrics must have the same names everywhere.
            with module.phase("generate") as stats:
                chunk = self.next_chunk(request, math.inf)
                stats.tokens += self.count_tokens(chunk)
            if chunk.complete:
                return
            self.submit(request)

    def share_completions(self, request: RolloutRequest) -> None:
        """Give all ranks what each has sampled in process, at the end of a request; otherwise all have it."""
        trainer, _ = self._bound()
        if not self.engine.in_process or trainer.world_size == 1:
            return
        packed = {number: pack_completion(one) for number, one in request.completions.items()}
        parts = self.collectives.gather(trainer, packed, "the completions of all ranks")
        request.completions = {
            number: unpack_completion(one) for part in parts for number, one in part.items()
        }

    def count_tokens(self, chunk: Chunk) -> int:
        """Return this rank's part of a chunk's tokens; the parts of all ranks add up, up to rounding."""
        trainer, _ = self._bound()
        num_tokens = sum(len(completion.token_ids) for completion in chunk.completions.values())
        return num_tokens if self.engine.in_process else num_tokens // trainer.world_size

    def _bound(self) -> tuple[Trainer, Policy]:
        assert self.trainer is not None
        assert self.module is not None
        return self.trainer, self.module

    def _sample(self, request: RolloutRequest) -> Callable[[], None]:
        """Return a function in which the engine samples what a request lacks."""
        samples, numbers = request.open()
        stream = stream_completions(self.engine, samples, request.sampling, request.stop)
        return lambda: request.receive(stream, numbers)

    # Weights

    def _make_current(self) -> None:
        """Push until all workers that can be reached, at least one, hold the weights; then verify."""
        trainer, module = self._bound()
        if self.engine.in_process:
            own = list(module.policy.named_parameters())
            push_until_current(self.engine, lambda: own, module.global_step)
            return
        step, pushed = module.global_step, False

        def needs_push() -> bool:
            self.engine.health()
            return self.engine.policy_version != step

        while self.call(needs_push):
            named_tensors = self._list_weights(module.policy)
            # The other ranks wait here, and not in a collective of the model, while workers join a group.
            self.call(self.engine.prepare_push)
            if not trainer.is_global_zero:
                self.engine.gather_weights(named_tensors)

            def push(named_tensors: list[NamedTensor] = named_tensors) -> None:
                self.engine.update_weights(named_tensors, step)

            self.call(push)
            pushed = True
        due = self.verified_at is None or 0 < self.verify_every_n_steps <= step - self.verified_at
        if pushed and (due or self.call(lambda: self.engine.unverified)):
            self._verify()

    def _list_weights(self, policy: Any) -> list[NamedTensor]:
        """Return what the engine is pushed: a LoRA's matrices, or whole weights with the LoRA merged in."""
        tensors = dict(policy.named_parameters())
        if self.engine.takes_adapters:
            return list_adapter_weights(tensors)
        return to_file_names(policy, merge_weights(policy, tensors))

    def _verify(self) -> None:
        """Let the engine compare the workers' log-probs of a text with the trainer's."""
        _, module = self._bound()
        with torch.no_grad():
            log_probs = module.run(sequence_log_probs, self.probe)
        self.verified_at = module.global_step
        latest = list(self.probe_log_probs.items())[-1:]
        self.probe_log_probs = dict(latest) | {module.global_step: log_probs.tolist()}
        self.call(lambda: self.engine.verify(self.probe, self.probe_log_probs))

    def _free_gpu_cache(self) -> None:
        """Return the GPU memory that PyTorch keeps for later, if workers share the GPUs."""
        if self.engine.takes_turns:
            trainer, _ = self._bound()
            torch.cuda.empty_cache()
            with waiting_for_ranks(trainer, "all ranks to free their GPU"):
                trainer.strategy.barrier()


def pack_completion(completion: Completion) -> Completion:
    """Store a completion's numbers in arrays, which travel faster than lists."""
    log_probs = completion.log_probs
    arrays: dict[str, Any] = {"token_ids": np.array(completion.token_ids, dtype=np.int32)}
    arrays["log_probs"] = None if log_probs is None else np.array(log_probs, dtype=np.float64)
    return replace(completion, **arrays)


def unpack_completion(completion: Completion) -> Completion:
    """Undo `pack_completion`."""
    arrays: dict[str, Any] = vars(completion)
    lists: Any = {name: array.tolist() for name, array in arrays.items() if isinstance(array, np.ndarray)}
    return replace(completion, **lists)
