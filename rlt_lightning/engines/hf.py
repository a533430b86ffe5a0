"""Rollouts in the trainer's own process: the reference for every other engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from rlt_lightning.engines.base import (
    Engine,
    EngineDescription,
    EngineError,
    NamedTensor,
    SampleRequest,
    Sampling,
)
from rlt_lightning.engines.batch import Batch, Group
from rlt_lightning.engines.decoders import Decoder, OwnCacheDecoder, SlotDecoder, device_of, slot_fault
from rlt_lightning.models.cpu_linear import packed_weights, packing_pays
from rlt_lightning.types import Completion, FinishReason


class HFEngine(Engine):
    """Sample with the teacher itself: a prompt's keys and values are computed once and shared by its group.

    Every completion draws from its own seeded stream by inverting the cumulative distribution, so a
    completion does not depend on its neighbours in the batch, on the number of ranks, or on the random state
    of the process.

    Args:
        max_sequences: Completions sampled at once; when one ends, the next takes its place. Bounds the memory
            of the key-value cache.
    """

    in_process = True
    reports_log_probs = True

    def __init__(self, max_sequences: int = 64) -> None:
        self.max_sequences = max_sequences
        self.model: Any = None
        self.own_cache: bool | None = None  # whether the model needs transformers' cache; None: not known yet
        self.tokenizer: Any = None
        # Both are set by `share`, where weights are sharded.
        self.run: Callable[..., Any] | None = None
        self.on_any_rank: Callable[[bool], bool] | None = None

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Keep the trainer's model itself: no copy, so it always holds the current weights."""
        if model is not self.model:
            self.own_cache = None
        self.model, self.tokenizer = model, tokenizer

    def describe(self) -> EngineDescription:
        """Return how many completions are sampled at once beside the model that trains."""
        return EngineDescription(sequences_in_process=self.max_sequences)

    def share(self, run: Callable[..., Any], on_any_rank: Callable[[bool], bool]) -> None:
        """Call the model through `run`, on every rank as often as on the rank that samples longest."""
        self.run, self.on_any_rank = run, on_any_rank

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Copy the tensors that are not the model's own."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in own:
                    raise EngineError(
                        f"HFEngine has no weight named '{name}'. Push the weights of the model it was "
                        "started with."
                    )
                if own[name] is not tensor:
                    own[name].copy_(tensor)
        self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Do nothing: there is one copy of the weights."""

    def health(self) -> None:
        """Raise if `start` has not been called."""
        if self.model is None:
            raise EngineError(
                "HFEngine must be started with a model before it can serve: call start(model, tokenizer, "
                "folder)."
            )

    def close(self) -> None:
        """Drop all references to the trainer's model."""
        self.model = self.tokenizer = self.run = self.on_any_rank = None

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`: all completions come at the end, as nobody can use the model before."""
        self.health()
        limits = [request.limit(sampling) for request in requests]
        groups = [
            Group(request.prompt, request.seed, request.num_completions, limit)
            for request, limit in zip(requests, limits, strict=True)
        ]
        watcher = StopWatcher(self.tokenizer, stop, eos_token_ids(self.model, self.tokenizer))
        was_training = self.model.training
        self.model.eval()  # gradient checkpointing would switch the key-value cache off
        try:
            max_rows = min(self.max_sequences, sum(request.num_completions for request in requests))
            decoder = self._decoder(max_rows, max(limits, default=0))
            batch = Batch(groups, decoder, sampling, max_rows, watcher.finish_reason, self._continues)
            with self._packed(max_rows, max(limits, default=0)):
                batch.run()
        finally:
            self.model.train(was_training)
        yield from enumerate(draft.completion() for group in groups for draft in group.drafts)

    def _decoder(self, max_rows: int, longest: int) -> Decoder:
        """Return a decoder with our cache where the model can use it, else with transformers'."""
        device = device_of(self.model)
        if self.own_cache is None:
            fault = slot_fault(self.model, self._call)
            self.own_cache = fault is not None
            if fault:
                rank_zero_info(
                    f"HFEngine samples {type(self.model).__name__} with transformers' key-value cache, which "
                    f"is slower than its own: {fault}."
                )
        if self.own_cache:
            return OwnCacheDecoder(self._call, device)
        return SlotDecoder(self._call, device, max_rows, longest)

    def _packed(self, max_rows: int, longest: int) -> AbstractContextManager[Any]:
        """Return a context in which weights are laid out for a CPU's kernels, if that saves time."""
        exact = not torch.is_autocast_enabled(device_of(self.model).type)
        if self.run is None and exact and packing_pays(max_rows, longest):
            return packed_weights(self.model)
        return nullcontext()

    def _call(self, **inputs: Any) -> Any:
        """Run the model."""
        if self.run is None:
            return self.model(**inputs)
        return self.run(lambda model: model(**inputs))

    def _continues(self, active: bool) -> bool:
        """Return whether this rank runs the model for its own completions.

        With sharded weights a finished rank keeps calling the model until every rank has finished.
        """
        if self.on_any_rank is None:
            return active
        while self.on_any_rank(active):
            if active:
                return True
            self._call(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(self.model)))
        return False


class StopWatcher:
    """Tell whether a token sequence has just ended, by its end tag or by an end-of-sequence token."""

    def __init__(self, tokenizer: Any, stop: str, eos_token_ids: set[int]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.eos_token_ids = eos_token_ids
        # Each token of the tag carries at least one byte of it, so it fits into this many tokens.
        self.window = len(stop.encode()) + 1
        # Token id -> whether the tag's last character may be in its text.
        self.may_end: dict[int, bool] = {}

    def finish_reason(self, token_ids: list[int]) -> FinishReason:
        """Return "stop" or "eos" when the last token ends the sequence, else "length"."""
        last = token_ids[-1]
        if last in self.eos_token_ids:
            return "eos"
        if last not in self.may_end:
            text = self._text([last])
            # The token may hold only a part of a character, which decodes to U+FFFD.
            self.may_end[last] = bool(self.stop) and (self.stop[-1] in text or "\ufffd" in text)
        if self.may_end[last] and self.stop in self._text(token_ids[-self.window :]):
            return "stop"
        return "length"

    def _text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def eos_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Collect the tokens that end a turn, from the generation config and the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}
