"""Ask an engine for completions on behalf of all ranks, with the policy's weights (weight_sync.py).

Where each rank has an engine (SHARED_WEIGHTS, PER_RANK), it samples the rank's part of a request. Each ═ is a
collective: all ranks wait there.

    rank 0   update_weights ─▶ sample ─▶ its completions ═ all completions ─▶ score ─▶ update
    rank 1   update_weights ─▶ sample ─▶ its completions ═ all completions ─▶ score ─▶ update

A server: rank 0 talks to it for all ranks. On other GPUs it leaves the trainer's idle while it
samples. So its completions come in several chunks, and each is scored at once.

    engine   ─── sample ─────────────────────────────────────────────┐
    rank 0       chunk 1 ═▶ score ═ chunk 2 ═▶ score ═ ...  last chunk ═▶ score ─▶ update
    rank 1               ═▶ score ═         ═▶ score ═ ...             ═▶ score ─▶ update

No weight moves before the last chunk is scored, so the rewards equal those of scoring all at the end, up to
rounding, since micro-batches differ. Why each wait ends:

    rank 0, for completions         the engine's thread puts a mark behind the last one, also after an error;
                                    the engine returns or raises within its deadlines
    the others, for rank 0's chunk  rank 0 hands on the chunk or its exception; `deadline_s` bounds the rest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

from rlt_lightning.engines.base import Engine, Placement, require_context, stream_completions
from rlt_lightning.engines.choice import choose_engine
from rlt_lightning.engines.hf import HFEngine
from rlt_lightning.engines.threads import run_in_background
from rlt_lightning.rollouts.request import Chunk, RolloutRequest
from rlt_lightning.rollouts.weight_sync import Policy, WeightSync
from rlt_lightning.run.ranks import Collectives

T = TypeVar("T")


class Dispatcher:
    """Asks an engine on behalf of all ranks.

    Args:
        engine: The engine; None: HFEngine(), until `choose_engine` finds a better one.
        verify_every_n_steps: Optimizer steps between two verifications of workers; 0: only after the first
            push to a worker.
        deadline_s: How long the other ranks wait for rank 0.
    """

    # `bind` sets both.
    trainer: Trainer
    module: Policy

    def __init__(
        self, engine: Engine | None, verify_every_n_steps: int = 1, deadline_s: float = 14400.0
    ) -> None:
        self.is_engine_set = engine is not None
        self.engine: Engine = HFEngine() if engine is None else engine
        self.weights = WeightSync(verify_every_n_steps, self.call)
        self.collectives = Collectives(deadline_s)

    @property
    def is_server(self) -> bool:
        """Return whether one engine samples for all ranks."""
        return self.engine.placement is Placement.SERVER

    # The engine's life

    def choose_engine(
        self, gpus: Sequence[int], model: str, pushes: bool, installed: bool | None = None
    ) -> str | None:
        """Take the engine that suits the machine if none is set; return why, if that is worth a line.

        See `rlt_lightning.engines.choice.choose_engine`.
        """
        if self.is_engine_set:
            return None
        self.is_engine_set = True
        self.engine, reason = choose_engine(gpus, model, pushes, installed)
        return reason

    def bind(self, trainer: Trainer, module: Policy) -> None:
        """Sample with this module's policy from now on."""
        self.trainer, self.module = trainer, module

    def start(self, tokenizer: Any, prompt: list[int], longest: int) -> None:
        """Start the engine once the weights are where they are trained, a restored checkpoint included.

        A callback that shares another one's engine calls this too, so that its prompts are checked.

        Args:
            tokenizer: Of the policy.
            prompt: The first prompt.
            longest: The longest prompt with the longest completion, tokens.
        """
        module = self.module
        self.weights.start(prompt)

        def start() -> None:
            self.engine.num_ids = module.num_ids
            self.engine.start(module.policy, tokenizer, Path(self.trainer.default_root_dir))
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
        if not self.is_server:
            return function()
        return self.collectives.on_rank_zero(self.trainer, function)

    # Completions

    def list_asked(self, num_problems: int) -> Sequence[int]:
        """Return which problems of a request that all ranks have alike this rank asks for.

        Of a server all. Else these are a block. All ranks get equally many, since sharded ranks run forwards
        together: so the last ranks may have some of the first problems too.
        """
        if self.is_server:
            return range(num_problems)
        size = -(-num_problems // self.trainer.world_size)
        first = self.trainer.global_rank * size
        return [i % num_problems for i in range(first, first + size)]

    def submit(self, request: RolloutRequest) -> None:
        """Let the engine sample a request's missing completions, with the weights of this step.

        A server samples in the background; any other engine has finished when this returns.
        """
        trainer, module = self.trainer, self.module
        self._free_gpu_cache()
        # Weights are pushed and verified as they are, wherever in a step this is.
        with module.phase("push"), torch.autocast(module.device.type, enabled=False):
            self.weights.make_current(self.engine, trainer, module)
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

        What nobody samples is submitted: all of it, or what was lost with workers. All ranks get the same
        chunks; but of a request of its own (`RolloutRequest.asked` is None) a rank with its own engine gets
        that.

        Args:
            request: The request.
            min_tokens: Tokens that a chunk waits for; infinity: all there are.
        """
        while True:
            if self.call(lambda: request.needs_sampling):
                self.submit(request)
            # On every rank: metrics must have the same names everywhere.
            with self.module.phase("generate") as stats:
                chunk = self._next_chunk(request, min_tokens)
                stats.tokens += self._count_tokens(chunk)
                if chunk.complete and request.asked is not None:
                    chunk = self._share(request, chunk)
            yield chunk
            if chunk.complete:
                return

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
        trainer = self.trainer
        if self.is_server or trainer.world_size == 1:
            return chunk
        parts = self.collectives.gather(trainer, request.completions)
        request.completions = {number: completion for part in parts for number, completion in part.items()}
        return chunk._replace(completions=request.completions)

    def _count_tokens(self, chunk: Chunk) -> int:
        """Return this rank's part of a chunk's tokens; the parts of all ranks add up, up to rounding."""
        num_tokens = sum(len(completion.token_ids) for completion in chunk.completions.values())
        return num_tokens // self.trainer.world_size if self.is_server else num_tokens

    def _sample(self, request: RolloutRequest) -> Callable[[], None]:
        """Return a function in which the engine samples a request's missing completions."""
        samples, numbers = request.open()
        stream = stream_completions(self.engine, samples, request.sampling, request.stop)
        return lambda: request.receive(stream, numbers)

    def _free_gpu_cache(self) -> None:
        """Return the GPU memory that PyTorch keeps for later, if workers share the GPUs."""
        if self.engine.takes_turns:
            torch.cuda.empty_cache()
            self.trainer.strategy.barrier()
