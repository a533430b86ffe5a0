"""Continuous batching: some completions are sampled, the others wait until a row is free.

waiting groups ──prefill──▶ begun groups ──begin──▶ rows ──accept──▶ finished drafts
                            (prompt's slot)         (row's slot)     (the slot goes to the next)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.engines.base import Sampling
from rlt_lightning.engines.decoders import Decoder
from rlt_lightning.engines.drawing import draw, row_uniforms
from rlt_lightning.types import Completion, FinishReason

# Tokens of prompts that are run at once, unless a single prompt has more.
PREFILL_TOKENS = 8192


class Group:
    """A prompt and its completions."""

    def __init__(self, prompt: list[int], seed: int, num_completions: int, limit: int) -> None:
        self.prompt = prompt
        self.drafts = [
            Draft(self, uniforms, seed) for uniforms in row_uniforms(seed, num_completions, limit).numpy()
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
    uniforms: Sequence[float]  # in [0, 1): the row's own random numbers, one for each token
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    @property
    def unfinished(self) -> bool:
        """Tell whether the completion has neither ended nor reached its limit."""
        return self.finish_reason == "length" and len(self.token_ids) < len(self.uniforms)

    def completion(self) -> Completion:
        """Return the finished completion."""
        return Completion(self.token_ids, self.log_probs, self.finish_reason, self.seed)


class Batch:
    """Samples groups to their end.

    Args:
        groups: What to sample, in this order.
        decoder: Runs the model.
        sampling: How tokens are drawn.
        max_rows: Completions sampled at once.
        finish_reason: Returns how a token sequence ended; length while it has not.
        continues: Called before each run of the model with whether it has work; returns whether to run it.
    """

    def __init__(
        self,
        groups: list[Group],
        decoder: Decoder,
        sampling: Sampling,
        max_rows: int,
        finish_reason: Callable[[list[int]], FinishReason],
        continues: Callable[[bool], bool],
    ) -> None:
        self.waiting = deque(groups)
        self.decoder = decoder
        self.sampling = sampling
        self.max_rows = max_rows
        self.finish_reason = finish_reason
        self.continues = continues
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
        while room := self._room():
            ready = sum(len(group.waiting) for group in self.begun)
            if self.waiting and ready < room:
                self._prefill(room - ready)
            fresh = [(slot, draft) for slot, group in enumerate(self.begun) for draft in group.waiting]
            if not fresh:
                return
            self._begin(fresh[:room])

    def _room(self) -> int:
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
            if chosen and (turn_is_full or num_tokens > PREFILL_TOKENS):
                break
            chosen.append(self.waiting.popleft())
        self.continues(True)
        logits = self.decoder.prefill([group.prompt for group in chosen])
        for group, own in zip(chosen, logits, strict=True):
            group.logits = own
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
        tokens = tokens[torch.tensor(kept, device=tokens.device, dtype=torch.long)]
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens])
        self._count([draft for draft in drafts if not draft.unfinished])

    def _accept(self, logits: Tensor, drafts: list[Draft]) -> Tensor:
        """Draw and append one token per draft; return the tokens, (n,)."""
        uniforms = torch.tensor(
            [draft.uniforms[len(draft.token_ids)] for draft in drafts],
            device=logits.device,
            dtype=torch.float64,
        )
        history = self._history(drafts, logits.device)
        tokens, log_probs = draw(logits.float(), history, uniforms, self.sampling)
        for draft, token, log_prob in zip(drafts, tokens.tolist(), log_probs.tolist(), strict=True):
            draft.token_ids.append(token)
            draft.log_probs.append(log_prob)
            draft.finish_reason = self.finish_reason(draft.token_ids)
        return tokens

    def _history(self, drafts: list[Draft], device: torch.device) -> Tensor:
        """Return the tokens present in each row, (n, L); empty without a repetition penalty."""
        if self.sampling.repetition_penalty == 1:
            return torch.empty(len(drafts), 0, dtype=torch.long, device=device)
        # The penalty counts each token once, so repeating the first one pads a row without effect.
        rows = [list({*draft.group.prompt, *draft.token_ids}) for draft in drafts]
        length = max(map(len, rows))
        return torch.tensor([row + row[:1] * (length - len(row)) for row in rows], device=device)

    def _drop(self, finished: list[int]) -> None:
        """Remove rows; the last row moves into each place."""
        drafts = [self.rows[row] for row in finished]
        order = list(range(len(self.rows)))
        for row in reversed(finished):
            self.decoder.drop_row(row)
            order[row] = order[-1]
            order.pop()
        self.rows = [self.rows[row] for row in order]
        self.tokens = self.tokens[torch.tensor(order, device=self.tokens.device, dtype=torch.long)]
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
