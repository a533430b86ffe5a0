"""Find a language model's numbers of weights and bytes of activations from its configuration.

Nothing is loaded and nothing is computed. The model's own forward and backward run on fake tensors, which
have shapes but no memory, and the bytes of the real tensors are added up.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.models.packed import disable_dropout, scored_hidden_states
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.strategies.sharding import blocks


@dataclass(frozen=True)
class Shape:
    """Numbers of a model's weights, and of its keys and values per token."""

    weights: int  # in all; tied weights count once
    trained: int  # in the optimizer
    block: int  # in the largest transformer block
    num_blocks: int
    outside: int  # outside the blocks: embedding, last norm, head
    largest: int  # in the largest tensor
    largest_trained: int  # in the largest tensor of the optimizer
    hidden_size: int
    num_words: int  # of the head
    head_trained: int  # in the head's gradient; 0 if the head is frozen
    kv_per_token: int  # keys and values of all layers

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Count the weights of a model, which may be on the meta device."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        per_block = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
        sizes = [p.numel() for p in model.parameters()]
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        num_heads = getattr(config, "num_attention_heads", None) or 0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
        kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        return cls(
            weights=sum(sizes),
            trained=sum(trained),
            block=max(per_block),
            num_blocks=len(per_block),
            outside=sum(sizes) - sum(per_block),
            largest=max(sizes),
            largest_trained=max(trained),
            hidden_size=config.hidden_size,
            num_words=head.out_features,
            head_trained=head.weight.numel() if head.weight.requires_grad else 0,
            kv_per_token=2 * config.num_hidden_layers * kv_heads * head_dim,
        )


@dataclass(frozen=True)
class Activations:
    """Bytes of one row of tokens in the transformer, without embedding and head."""

    kept: int  # from the forward to the backward pass
    copies: int  # weights in half precision, which autocast keeps for a whole step
    backward: int  # added by one block's backward at its peak, recomputed activations included
    forward: int  # peak of a forward without gradient


def activations(
    model: Any, num_tokens: int, prefix: int = 0, checkpointing: bool = False, autocast: bool = False
) -> Activations:
    """Trace a row of tokens through one block and through two; further blocks need what the second needs.

    The trace uses the CPU's kernels, whose flash attention keeps what a GPU's keeps. Gradients of weights
    exist from the start, as they do from the second row of a step on.

    Args:
        model: The model, on the meta device; it is not changed.
        num_tokens: Tokens of the row.
        prefix: Tokens of the row that all sequences share; 0: two sequences that share nothing.
        checkpointing: Whether blocks are computed again in the backward pass.
        autocast: Whether products are in bfloat16.
    """
    sequences = [
        ScoredSequence([0] * prefix, rest, last_scored(prefix + len(rest)))
        for rest in halves(num_tokens - prefix)
    ]
    family = tuple(range(len(sequences)))
    families = (family,) if prefix else tuple((i,) for i in family)
    packed = PackedSequences.from_sequences(sequences, families)
    kept: list[int] = []
    for number in (1, 2):
        small = first_blocks(model, number)
        if checkpointing:
            small.gradient_checkpointing_enable({"use_reentrant": False})
        precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with FakeTensorMode(allow_non_fake_inputs=True), precision:
            small.to_empty(device="cpu")
            # The gradient of the embedding is counted elsewhere.
            small.get_input_embeddings().weight.requires_grad_(False)
            for parameter in small.parameters():
                parameter.grad = torch.empty_like(parameter)
            with LiveBytes(small) as live, torch.no_grad():
                scored_hidden_states(small, packed)
            forward = live.peak
            torch.clear_autocast_cache()
            with LiveBytes(small) as live:
                hidden = scored_hidden_states(small, packed)
                kept.append(live.now)
                live.peak = live.now
                hidden.backward(torch.empty_like(hidden))
            backward = live.peak - kept[-1]
    cast = [p for p in blocks(model)[0].parameters() if p.dim() > 1 and p.dtype == torch.float32]
    copied = 2 * sum(p.numel() for p in cast if p.requires_grad) if autocast else 0
    num_blocks = len(blocks(model))
    return Activations(
        kept=kept[0] - copied + (num_blocks - 1) * (kept[1] - kept[0] - copied),
        copies=num_blocks * copied,
        backward=backward,
        forward=forward,
    )


class LiveBytes(TorchDispatchMode):
    """Adds up the memory of live tensors, without the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in tensors if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its results."""
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return results

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count new memory until it is freed."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        """Take off memory that was freed."""
        self.now -= self.sizes.pop(key)


def first_blocks(model: Any, number: int) -> Any:
    """Return a copy of a model with only its first blocks, in training mode and without dropout."""
    first = blocks(model)[0]
    parent, name, all_blocks = next(
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and child[0] is first
    )
    setattr(parent, name, all_blocks[:number])
    try:
        small = copy.deepcopy(model).train()
    finally:
        setattr(parent, name, all_blocks)
    disable_dropout(small)
    return small


def halves(num_tokens: int) -> list[list[int]]:
    """Split tokens into two sequences, or into one if they are few."""
    sizes = (num_tokens // 2, num_tokens - num_tokens // 2) if num_tokens > 3 else (num_tokens,)
    return [[0] * size for size in sizes]


def last_scored(num_tokens: int) -> list[bool]:
    """Return a mask that scores only the last token: the head's part is counted elsewhere."""
    return [False] * (num_tokens - 1) + [True]
