"""A preallocated key-value cache: a slot for every row that is being sampled, and one for every prompt.

    slot of a row      the tokens it has sampled    (rows, heads, capacity, D) in each layer
    slot of a prompt   its tokens, stored once      (prompts, heads, capacity, D) in each layer

Rows and prompts fill the first slots without gaps: when one leaves, the last moves into its place. The
model's layers call `update` as they call transformers' caches; the attention then reads the slots itself
(`attend`), so that nothing is concatenated, repeated or padded on the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlt_lightning.numerics.decoding import Prompts, decode_attention

# Tokens for which a row has room at first; doubled when a row needs more, up to the longest limit.
FIRST_CAPACITY = 256


class Slots(NamedTuple):
    """Keys and values of rows or of prompts in one layer, (slots, heads, capacity, D) each."""

    keys: Tensor
    values: Tensor

    def grown(self, num_slots: int, capacity: int) -> Slots:
        """Return slots that have at least this size and the same content."""
        slots, _, tokens, _ = self.keys.shape
        if num_slots <= slots and capacity <= tokens:
            return self
        larger = empty_slots(self.keys, self.values, max(slots, num_slots), max(tokens, capacity))
        for new, old in zip(larger, self, strict=True):
            new[:slots, :, :tokens] = old
        return larger

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for states in self:
            states[target, :, :num_tokens] = states[source, :, :num_tokens]


def empty_slots(key: Tensor, value: Tensor, num_slots: int, capacity: int) -> Slots:
    """Return slots for states like these, (batch, heads, tokens, D).

    They begin as zeros: a weight of 0 does not hide a NaN that lies in memory behind a row's last token.
    """
    return Slots(*(t.new_zeros(num_slots, t.shape[1], capacity, t.shape[3]) for t in (key, value)))


@dataclass(frozen=True)
class Prefill:
    """Prompts that lie one after another in a packed row, and the slot of the first."""

    boundaries: tuple[int, ...]
    first_slot: int


@dataclass(frozen=True)
class Step:
    """One token for each of n rows.

    Args:
        lengths: Tokens of each row before this one, (n,).
        used: Tokens of the longest row, this one included.
        bias: (n, 1, 1, used): 0 on a row's tokens, -inf behind its last.
        prompts: Which rows continue which prompt.
    """

    lengths: Tensor
    used: int
    bias: Tensor
    prompts: Prompts


class SlotCache:
    """Keys and values of the rows that are being sampled and of their prompts.

    Args:
        max_rows: Rows at most.
        longest: Tokens that a row samples at most.
        device: Where the model computes.
    """

    def __init__(self, max_rows: int, longest: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.longest = longest
        self.device = device
        self.own: dict[int, Slots] = {}  # by layer
        self.shared: dict[int, Slots] = {}
        self.row_lengths: list[int] = []
        self.prompt_of: list[int] = []  # slot of each row's prompt
        self.prompt_lengths: list[int] = []
        self.work: Prefill | Step | None = None
        # What a step needs, until rows or prompts come or go.
        self.lengths: Tensor | None = None
        self.prompts: Prompts | None = None

    def add_row(self, prompt: int) -> None:
        """Begin a row that continues the prompt in this slot."""
        self.row_lengths.append(0)
        self.prompt_of.append(prompt)
        self._forget()

    def drop_row(self, row: int) -> None:
        """Remove a row; the last row moves into its place."""
        last = len(self.row_lengths) - 1
        if row < last and self.row_lengths[last]:
            for slots in self.own.values():
                slots.move(last, row, self.row_lengths[last])
        for numbers in (self.row_lengths, self.prompt_of):
            numbers[row] = numbers[last]
            numbers.pop()
        self._forget()

    def drop_prompt(self, prompt: int) -> None:
        """Remove a prompt that no row continues; the last prompt moves into its place."""
        last = len(self.prompt_lengths) - 1
        if prompt < last:
            for slots in self.shared.values():
                slots.move(last, prompt, self.prompt_lengths[last])
        self.prompt_lengths[prompt] = self.prompt_lengths[last]
        self.prompt_lengths.pop()
        self.prompt_of = [prompt if slot == last else slot for slot in self.prompt_of]
        self._forget()

    def begin_prefill(self, boundaries: tuple[int, ...]) -> None:
        """Expect the states of prompts that lie one after another between these boundaries."""
        self.work = Prefill(boundaries, len(self.prompt_lengths))
        self.prompt_lengths += [end - start for start, end in pairwise(boundaries)]
        self._forget()

    def begin_step(self) -> Tensor:
        """Expect the states of one new token of each row; return the tokens' positions, (n,)."""
        if self.lengths is None or self.prompts is None:
            self.lengths = torch.tensor(self.row_lengths, device=self.device)
            self.prompts = self._prompts()
            starts = [self.prompt_lengths[prompt] for prompt in self.prompt_of]
            self.positions = self.lengths + torch.tensor(starts, device=self.device)
        else:
            # Not in place: the work of the previous step may still use them.
            self.lengths, self.positions = self.lengths + 1, self.positions + 1
        used = max(self.row_lengths) + 1
        bias = ending_bias(self.lengths + 1, used)
        self.work = Step(self.lengths, used, bias, self.prompts)
        self.row_lengths = [length + 1 for length in self.row_lengths]
        return self.positions

    def _forget(self) -> None:
        self.lengths = self.prompts = None

    def _prompts(self) -> Prompts:
        """Give each row a place among the rows of its prompt."""
        counts = [0] * len(self.prompt_lengths)
        members = []
        for prompt in self.prompt_of:
            members.append(counts[prompt])
            counts[prompt] += 1
        most = max(counts)
        places = [p * most + m for p, m in zip(self.prompt_of, members, strict=True)]
        in_order = places == list(range(len(counts) * most))
        bias = None
        if len(set(self.prompt_lengths)) > 1:
            lengths = torch.tensor(self.prompt_lengths, device=self.device)
            bias = ending_bias(lengths, max(self.prompt_lengths))
        return Prompts(None if in_order else torch.tensor(places, device=self.device), most, bias)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, as transformers' empty caches do: positions are always given."""
        return 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new states, (batch, heads, tokens, D), in the type of the products; return them unchanged."""
        stored = computed(key), computed(value)
        if isinstance(self.work, Prefill):
            self._store_prompts(self.work, *stored, layer_idx)
        elif isinstance(self.work, Step):
            self._store_tokens(self.work, *stored, layer_idx)
        return key, value

    def _store_prompts(self, work: Prefill, key: Tensor, value: Tensor, layer: int) -> None:
        size = len(self.prompt_lengths), max(self.prompt_lengths)
        slots = self.shared.get(layer) or empty_slots(key, value, *size)
        self.shared[layer] = slots = slots.grown(*size)
        for slot, (start, end) in enumerate(pairwise(work.boundaries), work.first_slot):
            slots.keys[slot, :, : end - start] = key[0, :, start:end]
            slots.values[slot, :, : end - start] = value[0, :, start:end]

    def _store_tokens(self, work: Step, key: Tensor, value: Tensor, layer: int) -> None:
        slots = self.own.get(layer)
        if slots is None:
            capacity = min(max(FIRST_CAPACITY, work.used), self.longest)
            slots = empty_slots(key, value, self.max_rows, capacity)
        elif work.used > slots.keys.shape[2]:
            slots = slots.grown(self.max_rows, min(2 * slots.keys.shape[2], self.longest))
        self.own[layer] = slots
        rows, heads = key.shape[:2]
        lines = torch.arange(rows * heads, device=key.device).view(rows, heads) * slots.keys.shape[2]
        places = (lines + work.lengths[:, None]).flatten()
        for states, new in zip(slots, (key, value), strict=True):
            states.view(-1, states.shape[3]).index_copy_(0, places, new.reshape(rows * heads, -1))

    def attend(self, query: Tensor, layer: int, scale: float) -> Tensor:
        """Return the attention of each row's new token, (n, 1, A, D), from queries (n, A, 1, D)."""
        assert isinstance(self.work, Step)
        step, rows, prompts = self.work, len(self.row_lengths), len(self.prompt_lengths)
        longest = max(self.prompt_lengths)
        own_keys, own_values = (t[:rows, :, : step.used] for t in self.own[layer])
        keys, values = (t[:prompts, :, :longest] for t in self.shared[layer])
        query = computed(query)[:, :, 0]
        found = decode_attention(
            query, (own_keys, own_values, step.bias), (keys, values, step.prompts), scale
        )
        return found.unsqueeze(1)


def computed(states: Tensor) -> Tensor:
    """Return states in the type in which attention computes them: autocast's, where it is on."""
    device = states.device.type
    return states.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else states


def ending_bias(lengths: Tensor, width: int) -> Tensor:
    """Return (n, 1, 1, width), fp32: 0 on the first `lengths` places of each row, -inf behind them."""
    places = torch.arange(width, device=lengths.device)
    bias = torch.zeros(len(lengths), width, device=lengths.device)
    return bias.masked_fill_(places >= lengths[:, None], -torch.inf)[:, None, None]
