"""Sample in the trainer's own process: the reference that every other engine must agree with.

Batching is continuous: some completions are sampled, the others wait until a row is free.

    waiting groups ──prefill──▶ begun groups ──begin──▶ rows ──accept──▶ finished drafts
                                (prompt's slot)         (row's slot)     (the slot goes to the next)

slots.py runs the model. Tokens are drawn from its logits by inverting the cumulative distribution. The host
waits for a GPU once per token, in `draw`: what it sends is queued (numerics/transfers.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlt_lightning.engines.base import (
    Engine,
    NamedTensor,
    Placement,
    SampleRequest,
    Sampling,
)
from rlt_lightning.engines.slots import Decoder, build_decoder, choose_decoder, find_device
from rlt_lightning.models.template import find_eos_token_ids
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion, FinishReason

# Tokens of prompts that are run at once, unless a single prompt has more.
PREFILL_TOKENS = 8192


class HFEngine(Engine):
    """Sample with the teacher itself: on CPUs, for small models, and as the reference of other engines.

    A prompt's keys and values are computed once and shared by its group. A GPU idles most of the time, since
    it waits for the host once per token, so vLLM samples there.

    Every completion draws from a stream with its seed by inverting the cumulative distribution, so a
    completion does not depend on its neighbours in the batch, on the number of ranks, or on the random state
    of the process.

    Args:
        max_sequences: Completions sampled at once; when one ends, the next takes its place. Bounds the memory
            of the key-value cache.
    """

    placement = Placement.SHARED_WEIGHTS
    reports_log_probs = True

    def __init__(self, max_sequences: int = 64) -> None:
        self.max_sequences = max_sequences
        self.model: Any = None
        # How the model is run (slots.py); None: not known yet.
        self.decoder: str | None = None
        self.tokenizer: Any = None
        # Both are set by `use_sharded_model`, where weights are sharded.
        self.run: Callable[..., Any] | None = None
        self.on_any_rank: Callable[[bool], bool] | None = None

    def start(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Keep the trainer's model itself: no copy, so it always holds the current weights."""
        if model is not self.model:
            self.decoder = None
        self.model, self.tokenizer = model, tokenizer

    def use_sharded_model(self, run: Callable[..., Any], on_any_rank: Callable[[bool], bool]) -> None:
        """Call the model through `run`, on every rank as often as on the rank that samples longest."""
        self.run, self.on_any_rank = run, on_any_rank

    def update_weights(self, named_tensors: list[NamedTensor], policy_version: int) -> None:
        """Take note of the step: the weights are the model's."""
        self.policy_version = policy_version

    def verify(self, token_ids: list[int], log_probs: dict[int, list[float]]) -> None:
        """Do nothing: there is one copy of the weights."""

    def close(self) -> None:
        """Drop all references to the trainer's model."""
        self.model = self.tokenizer = self.run = self.on_any_rank = None

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        """See `Engine.sample`: all completions come at the end, as nobody can use the model before."""
        limits = [request.limit(sampling) for request in requests]
        groups = [
            Group(request.prompt, request.seed, request.num_completions, limit)
            for request, limit in zip(requests, limits, strict=True)
        ]
        watcher = StopWatcher(self.tokenizer, stop, find_eos_token_ids(self.model, self.tokenizer))
        was_training = self.model.training
        self.model.eval()  # gradient checkpointing would switch the key-value cache off
        try:
            max_rows = min(self.max_sequences, sum(request.num_completions for request in requests))
            self.decoder = self.decoder or choose_decoder(self.model, self._call)
            decoder = build_decoder(self.decoder, self.model, self._call, max_rows, max(limits, default=0))
            batch = ContinuousBatch(
                groups, decoder, sampling, max_rows, watcher.finish_reason, self._continues, self.num_ids
            )
            batch.run()
        finally:
            self.model.train(was_training)
        yield from enumerate(draft.to_completion() for group in groups for draft in group.drafts)

    def _call(self, **inputs: Any) -> Any:
        """Run the model."""
        if self.run is None:
            return self.model(**inputs)
        return self.run(lambda model: model(**inputs))

    def _continues(self, active: bool) -> bool:
        """Return whether this rank runs the model for its completions.

        With sharded weights a finished rank keeps calling the model until every rank has finished.
        """
        if self.on_any_rank is None:
            return active
        while self.on_any_rank(active):
            if active:
                return True
            self._call(input_ids=torch.zeros(1, 1, dtype=torch.long, device=find_device(self.model)))
        return False


class Group:
    """A prompt and its completions."""

    def __init__(self, prompt: list[int], seed: int, num_completions: int, limit: int) -> None:
        self.prompt = prompt
        self.drafts = [
            Draft(self, uniforms, seed) for uniforms in draw_uniforms(seed, num_completions, limit).numpy()
        ]
        self.num_begun = 0
        self.num_finished = 0
        self.logits: Any = None  # of the first token, (V,), while completions wait

    @property
    def waiting(self) -> list[Draft]:
        """Return the completions that have not begun."""
        return self.drafts[self.num_begun :]


@dataclass(eq=False)
class Draft:
    """A completion while it is being sampled."""

    group: Group
    uniforms: Sequence[float]  # in [0, 1): the row's random numbers, one for each token
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def unfinished(self) -> bool:
        """Tell whether the completion has neither ended nor reached its limit."""
        return self.finish_reason == "length" and len(self.token_ids) < len(self.uniforms)

    def to_completion(self) -> Completion:
        """Return the finished completion."""
        return Completion(self.token_ids, self.log_probs, self.finish_reason, self.seed)


class ContinuousBatch:
    """Samples groups to their end.

    Args:
        groups: What to sample, in this order.
        decoder: Runs the model.
        sampling: How tokens are drawn.
        max_rows: Completions sampled at once.
        finish_reason: Returns how a token sequence ended; length while it has not.
        continues: Called before each run of the model with whether it has work; returns whether to run it.
        num_ids: The first token ids, which may be drawn; None: all.
    """

    def __init__(
        self,
        groups: list[Group],
        decoder: Decoder,
        sampling: Sampling,
        max_rows: int,
        finish_reason: Callable[[list[int]], FinishReason],
        continues: Callable[[bool], bool],
        num_ids: int | None = None,
    ) -> None:
        self.waiting = deque(groups)
        self.decoder = decoder
        self.sampling = sampling
        self.max_rows = max_rows
        self.finish_reason = finish_reason
        self.continues = continues
        self.num_ids = num_ids
        self.begun: list[Group] = []  # by slot
        self.rows: list[Draft] = []  # by slot
        self.tokens: Any = None  # the rows' last tokens, (n,)

    @torch.no_grad()
    def run(self) -> None:
        """Sample until every group is finished."""
        while True:
            self._admit()
            if not self.continues(bool(self.rows)):
                return
            self.tokens = self._accept(self.decoder.step(self.tokens), self.rows)
            finished = [row for row, draft in enumerate(self.rows) if not draft.unfinished]
            if finished:
                self._drop(finished)

    def _admit(self) -> None:
        """Begin completions while there is room."""
        while room := self._count_room():
            ready = sum(len(group.waiting) for group in self.begun)
            if self.waiting and ready < room:
                self._prefill(room - ready)
            fresh = [(slot, draft) for slot, group in enumerate(self.begun) for draft in group.waiting]
            if not fresh:
                return
            self._begin(fresh[:room])

    def _count_room(self) -> int:
        """Return how many more completions may begin."""
        if not self.decoder.in_turns:
            return self.max_rows - len(self.rows)
        if self.rows:
            return 0
        size = len((self.begun or self.waiting)[0].drafts) if self.begun or self.waiting else 0
        return max(size, self.max_rows)

    def _prefill(self, room: int) -> None:
        """Run waiting prompts that have this many completions together, or fewer if a pass is full."""
        chosen: list[Group] = []
        num_rows = num_tokens = 0
        while self.waiting and num_rows < room:
            group = self.waiting[0]
            num_rows += len(group.drafts)
            num_tokens += len(group.prompt)
            turn_is_full = self.decoder.in_turns and num_rows > room
            fits = self.decoder.mixes_lengths or len(group.prompt) == len((chosen or [group])[0].prompt)
            if chosen and (turn_is_full or not fits or num_tokens > PREFILL_TOKENS):
                break
            chosen.append(self.waiting.popleft())
        self.continues(True)
        logits = self.decoder.prefill([group.prompt for group in chosen])
        for group, group_logits in zip(chosen, logits, strict=True):
            group.logits = group_logits
        self.begun += chosen

    def _begin(self, fresh: list[tuple[int, Draft]]) -> None:
        """Draw the first token of each completion; a completion with more to come becomes a row."""
        drafts = [draft for _, draft in fresh]
        for draft in drafts:
            draft.group.num_begun += 1
        tokens = self._accept(torch.stack([draft.group.logits for draft in drafts]), drafts)
        kept = [i for i, draft in enumerate(drafts) if draft.unfinished]
        for i in kept:
            self.decoder.add_row(fresh[i][0])
            self.rows.append(drafts[i])
        tokens = tokens[upload(kept, tokens.device, torch.long)]
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens])
        self._count([draft for draft in drafts if not draft.unfinished])

    def _accept(self, logits: Tensor, drafts: list[Draft]) -> Tensor:
        """Draw and append one token per draft; return the tokens, (n,)."""
        numbers = [draft.uniforms[len(draft.token_ids)] for draft in drafts]
        uniforms = upload(numbers, logits.device, torch.float64)
        history = self._collect_history(drafts, logits.device)
        drawn = draw(logits.float(), history, uniforms, self.sampling, self.num_ids)
        for draft, token, log_prob in zip(drafts, drawn.token_ids, drawn.log_probs, strict=True):
            draft.token_ids.append(token)
            draft.log_probs.append(log_prob)
            draft.finish_reason = self.finish_reason(draft.token_ids)
        return drawn.tokens

    def _collect_history(self, drafts: list[Draft], device: torch.device) -> Tensor:
        """Return the tokens present in each row, (n, L); empty without a repetition penalty."""
        if self.sampling.repetition_penalty == 1:
            return torch.empty(len(drafts), 0, dtype=torch.long, device=device)
        # The penalty counts each token once, so repeating the first one pads a row without effect.
        rows = [list({*draft.group.prompt, *draft.token_ids}) for draft in drafts]
        length = max(map(len, rows))
        return upload([row + row[:1] * (length - len(row)) for row in rows], device)

    def _drop(self, finished: list[int]) -> None:
        """Remove rows; the last row moves into each place."""
        drafts = [self.rows[row] for row in finished]
        order = list(range(len(self.rows)))
        for row in reversed(finished):
            self.decoder.drop_row(row)
            order[row] = order[-1]
            order.pop()
        self.rows = [self.rows[row] for row in order]
        self.tokens = self.tokens[upload(order, self.tokens.device, torch.long)]
        self._count(drafts)

    def _count(self, finished: list[Draft]) -> None:
        """Count finished completions, and free the slots of prompts whose completions are all finished."""
        for draft in finished:
            draft.group.num_finished += 1
        for slot in reversed(range(len(self.begun))):
            group = self.begun[slot]
            if group.num_finished == len(group.drafts):
                self.decoder.drop_prompt(slot)
                self.begun[slot] = self.begun[-1]
                self.begun.pop()
                group.logits = None


def draw_uniforms(seed: int, num_completions: int, num_tokens: int) -> Tensor:
    """Draw a group's random numbers, (num_completions, num_tokens), from its prompt's seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64)


class Drawn(NamedTuple):
    """One token for each of n rows.

    Attributes:
        tokens: On the device, (n,).
        token_ids: The same in main memory.
        log_probs: Under softmax(logits / temperature) of the full vocabulary, nats. Greedy sampling reports
            log-probs at temperature 1.
    """

    tokens: Tensor
    token_ids: list[int]
    log_probs: list[float]


def draw(
    logits: Tensor, history: Tensor, uniforms: Tensor, sampling: Sampling, num_ids: int | None = None
) -> Drawn:
    """Draw one token per row by inverse transform sampling.

    Args:
        logits: Model output in fp32, (n, V).
        history: Tokens present in each row, prompt included, (n, L); read for the repetition penalty only.
        uniforms: One number in [0, 1) per row, (n,).
        sampling: Temperature and truncation.
        num_ids: The first words, which may be drawn; None: all.
    """
    scaled = logits if sampling.temperature in (0, 1) else logits / sampling.temperature
    words = logits[:, :num_ids]
    filtered = truncate(words, history, sampling) if sampling.truncates else scaled[:, :num_ids]
    tokens = filtered.argmax(dim=-1) if sampling.temperature == 0 else invert(filtered, uniforms)
    log_probs = scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(dim=-1)
    # Float64 holds tokens and fp32 exactly, so one copy brings both.
    token_ids, log_probs = torch.stack([tokens.double(), log_probs.double()]).tolist()
    return Drawn(tokens, [int(token) for token in token_ids], log_probs)


def invert(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Find the first token of each row at which the cumulative softmax exceeds the uniform number, (n,)."""
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()  # (n, V)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


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
