"""Run a model over prompts and token by token, with a key-value cache of our own or of transformers.

Both decoders keep prompts and rows in slots 0, 1, 2 and so on. Dropping one moves the last into its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
from torch import Tensor

from rlt_lightning.models.attention import PackedRow
from rlt_lightning.models.layouts import FORWARD_ERRORS, known_fault
from rlt_lightning.models.slots import SlotCache
from rlt_lightning.numerics.attention import Segments

# Runs the model with these keyword arguments.
Call = Callable[..., Any]


class Decoder(Protocol):
    """Runs prompts, then one token at a time of every row."""

    # Whether prompts can be added only while there are no rows.
    in_turns: bool

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
            input_ids=torch.tensor([list(chain.from_iterable(prompts))], device=device),
            position_ids=torch.tensor([[i for prompt in prompts for i in range(len(prompt))]], device=device),
            packed_row=PackedRow(Segments(boundaries)),
            logits_to_keep=torch.tensor(boundaries[1:], device=device) - 1,
        )
        return output.logits[0]

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        positions = self.cache.begin_step()
        output = self._run(input_ids=tokens[:, None], position_ids=positions[:, None], slots=self.cache)
        return output.logits[:, -1]

    def _run(self, **inputs: Any) -> Any:
        return self.call(**inputs, attention_mask=self.no_mask, past_key_values=self.cache, use_cache=True)


class OwnCacheDecoder:
    """Uses transformers' cache, for any architecture; a prompt's states are copied for each of its rows."""

    in_turns = True

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call = call
        self.device = device
        self.cache: Any = None
        self.mask = torch.empty(0)  # (rows in the cache, tokens)
        self.order: list[int] = []  # which row of the cache each row is

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """See `Decoder`: the prompts are padded on the left."""
        length = max(map(len, prompts))
        rows = [[prompt[0]] * (length - len(prompt)) + prompt for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.mask = (torch.arange(length, device=self.device) >= length - lengths[:, None]).long()  # (P, L)
        output = self.call(
            input_ids=torch.tensor(rows, device=self.device),
            attention_mask=self.mask,
            position_ids=(self.mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1]

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
        if self.order != list(range(len(self.mask))):
            order = torch.tensor(self.order, device=self.device)
            self.cache.reorder_cache(order)
            self.mask = self.mask[order]
            self.order = list(range(len(order)))
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return self.call(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(dim=1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]


def architecture_fault(model: Any) -> str | None:
    """Return why a model's configuration rules out our cache, or None."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if fault := known_fault(model, "shared_prefix"):
        return fault
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer}
    if kinds:
        return f"it needs layers of another kind ({', '.join(sorted(kind.__name__ for kind in kinds))})"
    return None


@torch.no_grad()
def slot_fault(model: Any, call: Call) -> str | None:
    """Compare our cache with the model's own forward on random tokens; return the fault, or None."""
    if fault := architecture_fault(model):
        return fault
    device = device_of(model)
    generator = torch.Generator().manual_seed(0)
    num_words = min(1000, model.config.get_text_config().vocab_size)
    first, second, *rests = (
        torch.randint(num_words, (n,), generator=generator).tolist() for n in (5, 8, 3, 3, 3)
    )
    prompts = [first, first, second]
    own = torch.stack(
        [
            call(input_ids=torch.tensor([prompt + rest], device=device), use_cache=False).logits[0, -4:]
            for prompt, rest in zip(prompts, rests, strict=True)
        ]
    ).float()  # (3, 4, V)
    try:
        decoder = SlotDecoder(call, device, 3, 3)
        logits = [decoder.prefill([first, second])[[0, 0, 1]]]
        for slot in (0, 0, 1):
            decoder.add_row(slot)
        logits += [decoder.step(torch.tensor(tokens, device=device)) for tokens in zip(*rests, strict=True)]
    except FORWARD_ERRORS as error:
        return f"its forward fails with it ({str(error).splitlines()[0][:120]})"
    difference = (torch.stack(logits, dim=1).float().log_softmax(-1) - own.log_softmax(-1)).abs()
    exact = own_is_exact(model, device)
    size, bound = (difference.max().item(), 1e-3) if exact else (difference.mean().item(), 0.05)
    return None if size <= bound else f"log-probs differ by {size:.2g} nats with it"  # NaN is a fault too


def own_is_exact(model: Any, device: torch.device) -> bool:
    """Return whether the model computes in fp32 or float64."""
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    return exact and not torch.is_autocast_enabled(device.type)


def device_of(model: Any) -> torch.device:
    """Return the device of the model's weights."""
    device: torch.device = next(model.parameters()).device
    return device
