"""Bring the policy's weights from the ranks of a run to its engine, and verify that they arrived.

An engine with SHARED_WEIGHTS uses the model's parameters. With PER_RANK all ranks do what rank 0 does
here. To a server, rank 0 pushes for all ranks; each ═ is a collective, where all ranks wait:

    rank 0   health ═ update_weights ═ verify
    rank 1          ═ gather_weights ═

engines/push.py is what a push does with vLLM workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer

from rlt_lightning.engines.base import PROBE_TOKENS, Engine, NamedTensor, Placement
from rlt_lightning.models.file_names import to_file_names
from rlt_lightning.models.lora import merge_weights
from rlt_lightning.models.packed import sequence_log_probs


class Policy(Protocol):
    """The part of a PolicyModule that a push uses."""

    @property
    def policy(self) -> Any:
        """Return the model, whose weights are pushed; None: workers serve the weights they loaded."""

    @property
    def global_step(self) -> int:
        """Return the optimizer steps that the weights have taken."""

    @property
    def num_ids(self) -> int | None:
        """Return how many token ids may be sampled; see `Engine.num_ids`."""

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


class WeightSync:
    """Brings weights to an engine.

    Args:
        verify_every_n_steps: Optimizer steps between two verifications of workers; 0: only after the first
            push to a worker.
        call: Calls a function where the engine is; see `Dispatcher.call`.
    """

    def __init__(self, verify_every_n_steps: int, call: Callable[[Callable[[], Any]], Any]) -> None:
        self.verify_every_n_steps = verify_every_n_steps
        self.call = call
        # The text by which workers are verified; always the same, so that earlier log-probs can be compared.
        self.probe: list[int] = []
        self.verified_at: int | None = None  # optimizer step of the last verification
        # The trainer's log-probs of the probe, by policy version: those of the last two verifications.
        self.probe_log_probs: dict[int, list[float]] = {}

    def start(self, prompt: list[int]) -> None:
        """Choose the text by which weights are verified: the first prompt's first tokens."""
        self.probe = self.probe or prompt[:PROBE_TOKENS]

    def close(self) -> None:
        """Verify again after the next push."""
        self.probe, self.verified_at, self.probe_log_probs = [], None, {}

    def make_current(self, engine: Engine, trainer: Trainer, module: Policy) -> None:
        """Push until all workers hold the weights; then verify. Without a policy, only look after workers."""
        step, pushed = module.global_step, False
        is_shared = engine.placement is Placement.SHARED_WEIGHTS
        gathers = engine.placement is Placement.SERVER and not trainer.is_global_zero
        pushes_together = engine.placement is Placement.PER_RANK and module.sharding.sharded

        def agree(flag: bool) -> bool:
            """Return a flag for all ranks where they gather together and each asked its engine."""
            return module.on_any_rank(flag) if pushes_together else flag

        def needs_push() -> bool:
            engine.health()
            return module.policy is not None and engine.policy_version != step

        while agree(self.call(needs_push)):
            parameters = list(module.policy.named_parameters())
            named_tensors = parameters if is_shared else list_weights(module.policy)
            if gathers:
                engine.gather_weights(named_tensors)

            def push(named_tensors: list[NamedTensor] = named_tensors) -> None:
                engine.update_weights(named_tensors, step)

            self.call(push)
            pushed = not is_shared
        due = self.verified_at is None or 0 < self.verify_every_n_steps <= step - self.verified_at
        if pushed and (due or agree(self.call(lambda: engine.unverified))):
            self._verify(engine, module)

    def _verify(self, engine: Engine, module: Policy) -> None:
        """Let the engine compare the workers' log-probs of a text with the trainer's."""
        with torch.no_grad():
            log_probs = module.run(sequence_log_probs, self.probe)
        self.verified_at = module.global_step
        latest = list(self.probe_log_probs.items())[-1:]
        self.probe_log_probs = dict(latest) | {module.global_step: log_probs.tolist()}
        self.call(lambda: engine.verify(self.probe, self.probe_log_probs))


def list_weights(policy: Any) -> list[NamedTensor]:
    """Return the weights for an engine, with a LoRA merged in."""
    return to_file_names(policy, merge_weights(policy, dict(policy.named_parameters())))
