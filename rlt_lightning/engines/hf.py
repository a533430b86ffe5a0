"""Rollouts in the trainer's own process: slow, obvious, and the reference for every other engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.engines.base import Engine, EngineDescription, EngineError, NamedTensor, Sampling
from rlt_lightning.types import Completion, FinishReason


@dataclass
class Draft:
    """A completion while it is being sampled."""

    # (limit,) in [0, 1): the row's own random numbers, one for each token.
    uniforms: Tensor
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def unfinished(self) -> bool:
        """Tell whether the completion has neither ended nor reached its limit."""
        return self.finish_reason == "length" and len(self.token_ids) < len(self.uniforms)


class HFEngine(Engine):
    """Sample with the teacher itself: a prompt's keys and values are computed once and shared by its group.

    Every completion draws from its own seeded stream by inverting the cumulative distribution, so a
    completion does not depend on its neighbours in the batch, on the number of ranks, or on the random state
    of the process.

    Args:
        max_sequences: Completions sampled at once; more than these are sampled one batch after the other.
            Bounds the memory of the key-value cache.
    """

    in_process = True
    reports_log_probs = True

    def __init__(self, max_sequences: int = 64) -> None:
        self.max_sequences = max_sequences
        self.model: Any = None
        self.tokenizer: Any = None
        # Both are set by `share`, where weights are sharded.
        self.run: Callable[..., Any] | None = None
        self.on_any_rank: Callable[[bool], bool] | None = None

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Keep the trainer's model itself: no copy, so it always holds the current weights."""
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

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        num_completions: int,
        stop: str,
        seeds: list[int],
        limits: list[int] | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        self.health()
        per_turn = max(1, self.max_sequences // num_completions)  # prompts sampled at once
        limits = limits or [sampling.max_completion_length] * len(prompts)
        was_training = self.model.training
        self.model.eval()  # gradient checkpointing would switch the key-value cache off
        groups: list[list[Completion]] = []
        try:
            for start in range(0, len(prompts), per_turn):
                turn = slice(start, start + per_turn)
                groups += self._sample_groups(
                    prompts[turn], sampling, num_completions, stop, seeds[turn], limits[turn]
                )
        finally:
            self.model.train(was_training)
        return groups

    @torch.no_grad()
    def _sample_groups(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        num_completions: int,
        stop: str,
        seeds: list[int],
        limits: list[int],
    ) -> list[list[Completion]]:
        """Sample one batch: N = len(prompts) * num_completions rows, finished rows leave the batch."""
        drafts = [
            Draft(uniforms, seed)
            for seed, limit in zip(seeds, limits, strict=True)
            for uniforms in row_uniforms(seed, num_completions, limit)
        ]
        logits, cache, history, mask = self._prefill(prompts, num_completions)
        watcher = StopWatcher(self.tokenizer, stop, eos_token_ids(self.model, self.tokenizer))
        active = list(range(len(drafts)))
        for step in itertools.count():
            uniforms = torch.stack([drafts[i].uniforms[step] for i in active])
            # Both (n,): one token for each row that is still in the batch.
            tokens, log_probs = draw(logits.float(), history, uniforms.to(logits.device), sampling)
            for i, token, log_prob in zip(active, tokens.tolist(), log_probs.tolist(), strict=True):
                drafts[i].token_ids.append(token)
                drafts[i].log_probs.append(log_prob)
                drafts[i].finish_reason = watcher.finish_reason(drafts[i].token_ids)
            keep = [j for j, i in enumerate(active) if drafts[i].unfinished]
            if not self._continues(bool(keep)):
                break
            history = torch.cat([history, tokens[:, None]], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            if len(keep) < len(active):
                rows = torch.tensor(keep, device=history.device)
                history, mask, tokens = history[rows], mask[rows], tokens[rows]
                cache.batch_select_indices(rows)
                active = [active[j] for j in keep]
            position_ids = mask.sum(dim=1, keepdim=True) - 1  # (n, 1)
            logits = self._call(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        completions = [
            Completion(draft.token_ids, draft.log_probs, draft.finish_reason, draft.seed) for draft in drafts
        ]
        return [completions[i : i + num_completions] for i in range(0, len(completions), num_completions)]

    def _call(self, **inputs: Any) -> Any:
        """Run the model."""
        if self.run is None:
            return self.model(**inputs)
        return self.run(lambda model: model(**inputs))

    def _continues(self, active: bool) -> bool:
        """Return whether this rank samples another token.

        With sharded weights a finished rank keeps calling the model until every rank has finished.
        """
        if self.on_any_rank is None:
            return active
        while self.on_any_rank(active):
            if active:
                return True
            self._call(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(self.model)))
        return False

    def _prefill(self, prompts: list[list[int]], num_completions: int) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Run every prompt once, then repeat its keys and values for each completion of its group.

        Returns:
            Logits of the first tokens (N, V), the cache, tokens (N, L) and mask (N, L).
        """
        length = max(map(len, prompts))
        device = device_of(self.model)
        # Left padding. A pad position repeats the prompt's first token: the mask hides it from attention,
        # and the repetition penalty, which looks at the tokens present, sees nothing new.
        rows = [[prompt[0]] * (length - len(prompt)) + prompt for prompt in prompts]
        history = torch.tensor(rows, device=device)  # (P, L)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        mask = (torch.arange(length, device=device) >= length - lengths[:, None]).long()  # (P, L)
        output = self._call(
            input_ids=history,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        output.past_key_values.batch_repeat_interleave(num_completions)
        logits, history, mask = (
            tensor.repeat_interleave(num_completions, dim=0)
            for tensor in (output.logits[:, -1], history, mask)
        )
        return logits, output.past_key_values, history, mask


def device_of(model: Any) -> torch.device:
    """Return the device of the model's weights."""
    device: torch.device = next(model.parameters()).device
    return device


def row_uniforms(seed: int, num_completions: int, num_tokens: int) -> Tensor:
    """Draw a group's random numbers, (num_completions, num_tokens), from its prompt's seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, history: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverse transform sampling.

    Args:
        logits: Raw model output, (n, V).
        history: Tokens present in each row, prompt included, (n, L); for the repetition penalty.
        uniforms: One number in [0, 1) per row, (n,).
        sampling: Temperature and truncation.

    Returns:
        Token ids (n,) and their log-probs (n,) under softmax(logits / temperature) of the full vocabulary,
        nats. Greedy sampling reports log-probs at temperature 1.
    """
    scaled = logits / (sampling.temperature or 1.0)
    filtered = truncate(logits, history, sampling)
    if sampling.temperature == 0:
        tokens = filtered.argmax(dim=-1)
    else:
        cumulative = filtered.double().softmax(dim=-1).cumsum(dim=-1)  # (n, V)
        targets = uniforms[:, None] * cumulative[:, -1:]
        # The first token whose sum exceeds u.
        tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)  # (n,)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, scaled.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)


def truncate(logits: Tensor, history: Tensor, sampling: Sampling) -> Tensor:
    """Apply repetition penalty, temperature, top-k, top-p and min-p, in that order, by transformers' code."""
    from transformers.generation import logits_process as processors

    if sampling.repetition_penalty != 1:
        logits = processors.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(history, logits)
    if sampling.temperature not in (0, 1):
        logits = processors.TemperatureLogitsWarper(sampling.temperature)(history, logits)
    if sampling.top_k:
        logits = processors.TopKLogitsWarper(sampling.top_k)(history, logits)
    if sampling.top_p < 1:
        logits = processors.TopPLogitsWarper(sampling.top_p)(history, logits)
    if sampling.min_p:
        logits = processors.MinPLogitsWarper(sampling.min_p)(history, logits)  # type: ignore[arg-type]
    return logits


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
