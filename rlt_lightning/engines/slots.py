"""Run a model over prompts and then token by token, with our key-value cache or that of transformers.

Our cache, `SlotCache`, is allocated once: a slot for every row that is being sampled, and one for every
prompt.

    slot of a row      the tokens it has sampled    (rows, heads, capacity, D) in each layer
    slot of a prompt   its tokens, stored once      (prompts, heads, capacity, D) in each layer

Rows and prompts fill the first slots without gaps: when one leaves, the last moves into its place. The
model's layers call `update` as they call transformers' caches; the attention then reads the slots itself
(`attend`), so that nothing is concatenated, repeated or padded on the left.

`choose_decoder` compares each way with the model's forward, the fastest first:

    slots      our cache
    padded     transformers' cache; prompts of different lengths together, padded on the left
    unpadded   transformers' cache; only prompts of one length together
    uncached   no cache: every token runs its whole row

A new token attends to the tokens of its row and to the prompt. The queries of all rows that continue a prompt
read it together, as rows of one product; the result is merged with the attention to the tokens of each row by
their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from rlt_lightning.models.attention import SEGMENT_ATTENTION, PackedRow, get_attention, set_attention
from rlt_lightning.models.packed import (
    FORWARD_ERRORS,
    find_longest_reach,
    find_position_fault,
    has_longrope,
    known_fault,
    list_own_attentions,
    require_fixed_positions,
)
from rlt_lightning.numerics.attention import Segments, merge_
from rlt_lightning.numerics.transfers import upload
from rlt_lightning.types import InputError, first_line

# Runs the model with these keyword arguments.
Call = Callable[..., Any]
# Tokens for which a row has room at first; doubled when a row needs more, up to the longest limit.
FIRST_CAPACITY = 256


class Decoder(Protocol):
    """Runs prompts, then one token at a time of every row."""

    # Whether prompts can be added only while there are no rows.
    in_turns: bool
    # Whether prompts of different lengths can be run together.
    mixes_lengths: bool

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Run prompts, which take the next slots; return the logits of their next tokens, (P, V)."""

    def add_row(self, prompt: int) -> None:
        """Begin a row that continues the prompt in this slot."""

    def drop_row(self, row: int) -> None:
        """Remove a row."""

    def drop_prompt(self, prompt: int) -> None:
        """Remove a prompt that no row continues."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to every row, (n,); return the logits of the next tokens, (n, V)."""


class SlotDecoder:
    """Uses our cache: a prompt's keys and values are stored once, and rows come and go at any time."""

    in_turns = False
    mixes_lengths = True

    def __init__(self, call: Call, device: torch.device, max_rows: int, longest: int) -> None:
        self.call = call
        self.cache = SlotCache(max_rows, longest, device)
        self.add_row = self.cache.add_row
        self.drop_row = self.cache.drop_row
        self.drop_prompt = self.cache.drop_prompt
        # transformers passes on a mask of four dimensions as it is; our attention does not read it.
        self.no_mask = torch.empty(1, 1, 1, 0, device=device)

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """See `Decoder`: the prompts are segments of one row, without padding."""
        boundaries = tuple(accumulate(map(len, prompts), initial=0))
        self.cache.begin_prefill(boundaries)
        device = self.cache.device
        output = self._run(
            input_ids=upload([list(chain.from_iterable(prompts))], device),
            position_ids=upload([[i for prompt in prompts for i in range(len(prompt))]], device),
            packed_row=PackedRow(Segments(boundaries)),
            logits_to_keep=upload(boundaries[1:], device) - 1,
        )
        return output.logits[0]

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        positions = self.cache.begin_step()
        output = self._run(input_ids=tokens[:, None], position_ids=positions[:, None], slots=self.cache)
        return output.logits[:, -1]

    def _run(self, **inputs: Any) -> Any:
        return self.call(**inputs, attention_mask=self.no_mask, past_key_values=self.cache, use_cache=True)


class TransformersDecoder:
    """Runs the model as transformers' `generate` does; a prompt's states are copied for each of its rows.

    Args:
        model: Prepares its inputs, for instance drops a cache that has become wrong.
        call: Runs the model.
        mixes_lengths: Whether prompts of different lengths are run together, padded on the left.
        cached: Whether to use a cache.
    """

    in_turns = True

    def __init__(self, model: Any, call: Call, mixes_lengths: bool = True, cached: bool = True) -> None:
        self.model = model
        self.call = call
        self.mixes_lengths = mixes_lengths
        self.cached = cached
        self.device = find_device(model)
        self.ids = torch.empty(0)  # (rows in the cache, tokens)
        self.inputs: dict[str, Any] = {}  # beside the ids: positions, mask, cache
        self.order: list[int] = []  # which row of the cache each row is

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """See `Decoder`."""
        from transformers.generation import GenerationConfig, GenerationMode

        length = max(map(len, prompts))
        self.ids = upload([[prompt[0]] * (length - len(prompt)) + prompt for prompt in prompts], self.device)
        lengths = upload([len(prompt) for prompt in prompts], self.device)
        mask = (torch.arange(length, device=self.device) >= length - lengths[:, None]).long()  # (P, L)
        self.inputs = {
            "attention_mask": mask if len(set(map(len, prompts))) > 1 else None,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
            "use_cache": self.cached,
        }
        if self.model._supports_logits_to_keep():
            self.inputs["logits_to_keep"] = 1
        config = GenerationConfig(use_cache=self.cached)
        self.model._prepare_cache_for_generation(
            config, self.inputs, GenerationMode.SAMPLE, len(prompts), length
        )
        return self._run(num_new=None)

    def add_row(self, prompt: int) -> None:
        """See `Decoder`."""
        self.order.append(prompt)

    def drop_row(self, row: int) -> None:
        """See `Decoder`."""
        self.order[row] = self.order[-1]
        self.order.pop()

    def drop_prompt(self, prompt: int) -> None:
        """Do nothing: the next `prefill` replaces the whole cache."""

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        if self.order != list(range(len(self.ids))):
            order = upload(self.order, self.device)
            self.ids = self.ids[order]
            for name, value in self.inputs.items():
                if isinstance(value, Tensor):
                    self.inputs[name] = value[order]
                elif hasattr(value, "reorder_cache"):
                    value.reorder_cache(order)
            self.order = list(range(len(order)))
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        return self._run(num_new=1 if self.cached else None)

    def _run(self, num_new: int | None) -> Tensor:
        """Run the last tokens of every row, or all; return the logits of the next tokens, (n, V)."""
        inputs = self.model.prepare_inputs_for_generation(
            self.ids, next_sequence_length=num_new, is_first_iteration=num_new is None, **self.inputs
        )
        output = self.call(**inputs)
        self.inputs = self.model._update_model_kwargs_for_generation(output, self.inputs)
        return output.logits[:, -1]


# Ways of sampling, from fastest to slowest.
DECODERS = ("slots", "padded", "unpadded", "uncached")


def build_decoder(name: str, model: Any, call: Call, max_rows: int, longest: int) -> Decoder:
    """Return the decoder with this name in `DECODERS`, for rows that sample `longest` tokens at most."""
    if name == "slots":
        return SlotDecoder(call, find_device(model), max_rows, longest)
    return TransformersDecoder(model, call, mixes_lengths=name == "padded", cached=name != "uncached")


@torch.no_grad()
def choose_decoder(model: Any, call: Call) -> str:
    """Return the name of the fastest decoder whose log-probs equal those of the model's forward.

    Prompts of uneven lengths are continued with given tokens, one of them across the length that the
    configuration names as what a layer sees.

    Raises:
        InputError: If none is right, or see `require_fixed_positions`.
    """
    require_fixed_positions(model)
    device = find_device(model)
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    reach = find_longest_reach(config)
    lengths = [5, max(8, reach - 2), 9 + reach, 5, 5, 5]
    num_words = min(1000, config.vocab_size)
    texts = [torch.randint(num_words, (n,), generator=generator).tolist() for n in lengths]
    prompts, rests = texts[:3], texts[3:]

    def compute_logits(token_ids: list[int]) -> Tensor:
        return call(input_ids=upload([token_ids], device), use_cache=False).logits[0, -1]

    if get_attention(model) == SEGMENT_ATTENTION:
        try:
            compute_logits(prompts[0])
        except FORWARD_ERRORS:
            # An evaluation scores nothing, so no check of a layout has changed the attention.
            set_attention(model, list_own_attentions(model)[0])
    wholes = [prompt + rest for prompt, rest in zip(prompts, rests, strict=True)]
    expected = torch.stack([compute_logits(text) for text in prompts + wholes]).float().log_softmax(-1)
    fault: str | None = None
    for name in DECODERS:
        slower = fault
        build = partial(build_decoder, name, model, call, max_rows=6, longest=5)
        fault = find_known_fault(name, model) or find_decoder_fault(build, prompts, rests, expected)
        if fault is None:
            if slower is not None:
                rank_zero_info(f"HFEngine samples {type(model).__name__} slowly ({name}), since {slower}.")
            return name
    raise InputError(
        f"HFEngine must sample with the log-probs of the model's forward, but {type(model).__name__} does "
        f"not: even without a cache {fault}. Use another model, or a vLLM worker."
    )


def find_known_fault(name: str, model: Any) -> str | None:
    """Return a known fault of a decoder that no short text shows, or None."""
    if name == "slots":
        return find_architecture_fault(model)
    if name != "uncached" and getattr(model.config.get_text_config(), "index_topk", None):
        return "its indexer would choose among other tokens than without a cache"
    if name != "uncached" and has_longrope(model.config.get_text_config()):
        return "a long text would turn positions otherwise than those in the cache"
    return find_position_fault(model) if name == "padded" else None


def find_decoder_fault(
    build: Callable[[], Decoder], prompts: list[list[int]], rests: list[list[int]], expected: Tensor
) -> str | None:
    """Compare a decoder with the log-probs behind each prompt and each rest, (2P, V); return the fault."""
    try:
        decoder = build()
        if decoder.mixes_lengths:
            logits = force_tokens(decoder, prompts, rests)
        else:
            pairs = [force_tokens(build(), [p], [r]) for p, r in zip(prompts, rests, strict=True)]
            logits = torch.cat(pairs, dim=1)
    except FORWARD_ERRORS as error:
        return f"its forward fails ({first_line(error)})"
    difference = (logits.flatten(0, 1).float().log_softmax(-1) - expected).abs()
    exact = logits.dtype in (torch.float32, torch.float64)
    # In bf16 30 layers differ by 0.05 nats by rounding, in the mean.
    size, bound = (difference.max().item(), 1e-3) if exact else (difference.mean().item(), 0.1)
    return None if size <= bound else f"log-probs differ by {size:.2g} nats"  # NaN is a fault too


def force_tokens(decoder: Decoder, prompts: list[list[int]], rests: list[list[int]]) -> Tensor:
    """Return the logits behind each prompt and behind each of its rests, (2, P, V).

    A second row of each prompt, with other tokens, leaves after two steps: the last row takes its place.
    """
    behind_prompts = decoder.prefill(prompts)
    rows = []
    for slot, rest in enumerate(rests):
        for tokens in (rest[::-1], rest):
            decoder.add_row(slot)
            rows.append(tokens)
    logits = behind_prompts
    for step in range(len(rests[0])):
        if step == 2:
            for row in reversed(range(0, len(rows), 2)):
                decoder.drop_row(row)
                rows[row] = rows[-1]
                rows.pop()
        logits = decoder.step(upload([tokens[step] for tokens in rows], behind_prompts.device))
    return torch.stack([behind_prompts, logits[[rows.index(rest) for rest in rests]]])


def find_architecture_fault(model: Any) -> str | None:
    """Return why a model's configuration rules out our cache, or None."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if fault := known_fault(model, "shared_prefix"):
        return fault
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer}
    if kinds:
        return f"it needs layers of another kind ({', '.join(sorted(kind.__name__ for kind in kinds))})"
    return None


def find_device(model: Any) -> torch.device:
    """Return the device of the model's weights."""
    device: torch.device = next(model.parameters()).device
    return device


class Slots(NamedTuple):
    """Keys and values of rows or of prompts in one layer, (slots, heads, capacity, D) each."""

    keys: Tensor
    values: Tensor

    def grow(self, num_slots: int, capacity: int) -> Slots:
        """Return slots that have at least this size and the same content."""
        slots, _, tokens, _ = self.keys.shape
        if num_slots <= slots and capacity <= tokens:
            return self
        larger = allocate_slots(self.keys, self.values, max(slots, num_slots), max(tokens, capacity))
        for new, old in zip(larger, self, strict=True):
            new[:slots, :, :tokens] = old
        return larger

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for states in self:
            states[target, :, :num_tokens] = states[source, :, :num_tokens]


def allocate_slots(key: Tensor, value: Tensor, num_slots: int, capacity: int) -> Slots:
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
        self.row_slots: dict[int, Slots] = {}  # by layer
        self.prompt_slots: dict[int, Slots] = {}
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
            for slots in self.row_slots.values():
                slots.move(last, row, self.row_lengths[last])
        for numbers in (self.row_lengths, self.prompt_of):
            numbers[row] = numbers[last]
            numbers.pop()
        self._forget()

    def drop_prompt(self, prompt: int) -> None:
        """Remove a prompt that no row continues; the last prompt moves into its place."""
        last = len(self.prompt_lengths) - 1
        if prompt < last:
            for slots in self.prompt_slots.values():
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
            self.lengths = upload(self.row_lengths, self.device)
            self.prompts = self._build_prompts()
            starts = [self.prompt_lengths[prompt] for prompt in self.prompt_of]
            self.positions = self.lengths + upload(starts, self.device)
        else:
            # Not in place: the work of the previous step may still use them.
            self.lengths, self.positions = self.lengths + 1, self.positions + 1
        used = max(self.row_lengths) + 1
        bias = build_ending_bias(self.lengths + 1, used)
        self.work = Step(self.lengths, used, bias, self.prompts)
        self.row_lengths = [length + 1 for length in self.row_lengths]
        return self.positions

    def _forget(self) -> None:
        self.lengths = self.prompts = None

    def _build_prompts(self) -> Prompts:
        """Number each row among the rows of its prompt."""
        counts = [0] * len(self.prompt_lengths)
        members = []
        for prompt in self.prompt_of:
            members.append(counts[prompt])
            counts[prompt] += 1
        most = max(counts)
        indices = [p * most + m for p, m in zip(self.prompt_of, members, strict=True)]
        bias = None
        if len(set(self.prompt_lengths)) > 1:
            lengths = upload(self.prompt_lengths, self.device)
            bias = build_ending_bias(lengths, max(self.prompt_lengths))
        return Prompts(upload(indices, self.device), most, bias)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, as transformers' empty caches do: positions are always given."""
        return 0

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new states, (batch, heads, tokens, D), in the type of the products; return them unchanged."""
        stored = cast_to_autocast(key), cast_to_autocast(value)
        if isinstance(self.work, Prefill):
            self._store_prompts(self.work, *stored, layer_idx)
        elif isinstance(self.work, Step):
            self._store_tokens(self.work, *stored, layer_idx)
        return key, value

    def _store_prompts(self, work: Prefill, key: Tensor, value: Tensor, layer: int) -> None:
        size = len(self.prompt_lengths), max(self.prompt_lengths)
        slots = self.prompt_slots.get(layer) or allocate_slots(key, value, *size)
        self.prompt_slots[layer] = slots = slots.grow(*size)
        for slot, (start, end) in enumerate(pairwise(work.boundaries), work.first_slot):
            slots.keys[slot, :, : end - start] = key[0, :, start:end]
            slots.values[slot, :, : end - start] = value[0, :, start:end]

    def _store_tokens(self, work: Step, key: Tensor, value: Tensor, layer: int) -> None:
        slots = self.row_slots.get(layer)
        if slots is None:
            capacity = min(max(FIRST_CAPACITY, work.used), self.longest)
            slots = allocate_slots(key, value, self.max_rows, capacity)
        elif work.used > slots.keys.shape[2]:
            slots = slots.grow(self.max_rows, min(2 * slots.keys.shape[2], self.longest))
        self.row_slots[layer] = slots
        rows, heads = key.shape[:2]
        lines = torch.arange(rows * heads, device=key.device).view(rows, heads) * slots.keys.shape[2]
        indices = (lines + work.lengths[:, None]).flatten()
        for states, new in zip(slots, (key, value), strict=True):
            states.view(-1, states.shape[3]).index_copy_(0, indices, new.reshape(rows * heads, -1))

    def attend(self, query: Tensor, layer: int, scale: float) -> Tensor:
        """Return the attention of each row's new token, (n, 1, A, D), from queries (n, A, 1, D)."""
        assert isinstance(self.work, Step)
        step, rows, prompts = self.work, len(self.row_lengths), len(self.prompt_lengths)
        longest = max(self.prompt_lengths)
        row_keys, row_values = (t[:rows, :, : step.used] for t in self.row_slots[layer])
        keys, values = (t[:prompts, :, :longest] for t in self.prompt_slots[layer])
        query = cast_to_autocast(query)[:, :, 0]
        attended = decode_attention(
            query, (row_keys, row_values, step.bias), (keys, values, step.prompts), scale
        )
        return attended.unsqueeze(1)


def cast_to_autocast(states: Tensor) -> Tensor:
    """Return states in the type in which attention computes them: autocast's, where it is on."""
    device = states.device.type
    return states.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else states


def build_ending_bias(lengths: Tensor, width: int) -> Tensor:
    """Return (n, 1, 1, width), fp32: 0 on the first `lengths` columns of each row, -inf behind them."""
    columns = torch.arange(width, device=lengths.device)
    bias = torch.zeros(len(lengths), width, device=lengths.device)
    return bias.masked_fill_(columns >= lengths[:, None], -torch.inf)[:, None, None]


@dataclass(frozen=True)
class Prompts:
    """The prompts that the rows continue.

    Args:
        indices: (n,): prompt * members + member of each row.
        members: Rows of the prompt that has most.
        bias: (P, 1, 1, L): 0 on a prompt's tokens, -inf behind its end; None: all have L tokens.
    """

    indices: Tensor
    members: int
    bias: Tensor | None


def decode_attention(
    query: Tensor,
    of_rows: tuple[Tensor, Tensor, Tensor],
    of_prompts: tuple[Tensor, Tensor, Prompts],
    scale: float,
) -> Tensor:
    """Return the attention of every row's new token.

    Args:
        query: (n, A, D): A heads of each row.
        of_rows: Keys and values of each row, new token included, (n, B, T, D), where A is a multiple of B,
            and their bias, (n, 1, 1, T): 0 on tokens, -inf behind the last.
        of_prompts: Keys and values of each prompt, (P, B, L, D), and which rows continue it.
        scale: Multiplies the products of queries and keys.

    Returns:
        (n, A, D of the values).
    """
    keys, values, bias = of_rows
    rows, heads = keys.shape[:2]
    query = query.reshape(rows, heads, -1, query.shape[-1])  # (n, B, A / B, D)
    output, lse = attend(query, keys, values, bias, scale)
    keys, values, prompts = of_prompts
    asked = group_by_prompt(query, prompts, len(keys))  # (P, B, members * A / B, D)
    attended, attended_lse = attend(asked, keys, values, prompts.bias, scale)
    merge_(
        output,
        lse,
        split_by_row(attended, prompts),
        split_by_row(attended_lse.unsqueeze(-1), prompts)[..., 0],
    )
    return output.reshape(rows, -1, output.shape[-1])


def group_by_prompt(query: Tensor, prompts: Prompts, num_prompts: int) -> Tensor:
    """Gather the queries of each prompt's rows: (n, B, r, D) -> (P, B, members * r, D)."""
    room = query.new_zeros(num_prompts * prompts.members, *query.shape[1:])
    grouped = room.index_copy_(0, prompts.indices, query).unflatten(0, (num_prompts, prompts.members))
    return grouped.transpose(1, 2).flatten(2, 3)


def split_by_row(attended: Tensor, prompts: Prompts) -> Tensor:
    """Undo `group_by_prompt`: (P, B, members * r, D) -> (n, B, r, D)."""
    return attended.unflatten(2, (prompts.members, -1)).transpose(1, 2).flatten(0, 1)[prompts.indices]


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention without causality, (N, B, r, D), and its log-sum-exps, (N, B, r), fp32.

    A CPU uses PyTorch's flash attention; other devices two products, which read keys and values once each.
    """
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
        return attended, lse
    scores = (query @ key.transpose(2, 3)).float() * scale  # (N, B, r, L)
    if bias is not None:
        scores = scores + bias
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse
