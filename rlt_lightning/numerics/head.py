"""The language-model head in tiles: no more logits at a time than fit into a given memory.

A function of (M, V) logits is a sum over tiles, rows of tokens by blocks of words:

               blocks of words →
    rows       ┌────┬────┬────┐
    of tokens  │    │ ●  │    │ → sums of these tokens
       ↓       ├────┼────┼────┤
               │    │ ●  │    │ → sums of these
               └────┴────┴────┘
                      ↓ gradient of the weights of these words

    forward    HeadTiles.add_up: each tile is added to the sums of its tokens
    backward   HeadTiles.differentiate: each tile is computed again, and added to its part of the gradients

Log-probs sum the tiles of one head (`log_probs`), divergences those of two (`divergence`).

Chunks of rows over all words, by a plain function that is computed again in the backward, are shorter,
but were slower and larger: each makes a weight gradient of the whole head, a tile only that of its words.
Log-probs with entropies and their backward, 1,024 tokens, 49,152 words, hidden size 576, on an idle AMD EPYC:

                                             one thread      two threads     peak of the process
    tiles                                    2.95 s          1.47 s          588 MiB
    row chunks, one autograd.Function        3.2 to 4.5 s    1.9 to 2.5 s    925 to 1,290 MiB
    row chunks, torch.utils.checkpoint       3.6 to 5.0 s                    750 to 1,430 MiB

On an H100 Liger's row chunks took 75 ms, tiles 44.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

BLOCK_WORDS = 1024
# Rows of a tile then begin at multiples of 16 bytes, which a GPU's fast matrix products need.
WIDTH_MULTIPLE = 128
# The logit of a word that never comes: -inf would make 0 * -inf in the sums.
IMPOSSIBLE = -1e30
# No logit of a word that may come is as low as this, whatever the temperature.
LOWEST_LOGIT = -1e10


class LogitScale(NamedTuple):
    """Turns a head's raw output r into logits z for a softmax: z = cap * tanh(scale * r / cap) / temperature.

    Attributes:
        temperature: Divides the logits; the sampling temperature, so that log-probs are the sampler's.
        scale: Some architectures multiply what the head gives (Cohere), or divide it (Granite).
        cap: Soft cap of the logits (Gemma 2); None: no cap.
        exchanged: Two words whose logits change places, of a head that gets no gradient; its weight is not
            copied.
    """

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None
    exchanged: tuple[int, int] | None = None

    def product_factor(self) -> float:
        """Return the factor of the raw output in the matrix product, without a further pass over it."""
        return self.scale / (self.temperature if self.cap is None else self.cap)

    def cap_(self, product: Tensor) -> Tensor:
        """Turn the product into logits, in place."""
        return product if self.cap is None else product.tanh_().mul_(self.cap / self.temperature)

    def gradient_factor(self) -> float:
        """Return the factor that the backward products apply, likewise."""
        return self.scale / self.temperature

    def pull_back_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the logits, but for that factor, into that of the raw output, in place."""
        if self.cap is None:
            return gradient
        return gradient.mul_(1 - (logits * (self.temperature / self.cap)).square_())  # tanh' = 1 - tanh^2


class Head(NamedTuple):
    """A language-model head: its logits are scale(hidden @ weight.T + bias).

    Example:
        `Head(model.lm_head.weight)` is the head of a Llama at temperature 1.

    Attributes:
        weight: (V, H); sharded weights must have been gathered.
        bias: (V,) or None.
        scale: The temperature, and what the architecture does to its logits.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: LogitScale = LogitScale()


class HeadBlock:
    """The head's weights for one block of the vocabulary, in the type in which they are multiplied."""

    def __init__(self, head: Head, block: slice, dtype: torch.dtype) -> None:
        self.weight = select_rows(head.weight, block, head.scale.exchanged).to(dtype)  # (w, H)
        self.scale, self.factor = head.scale, head.scale.product_factor()
        self.bias = None
        if head.bias is not None:
            rows = select_rows(head.bias, block, head.scale.exchanged).to(full_precision(dtype))
            self.bias = rows.clamp(min=IMPOSSIBLE) * self.factor

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of hidden states (m, H), (m, w), in fp32 or float64."""
        return self.scale.cap_(add_product(self.bias, states, self.weight.t(), self.factor))


def select_rows(values: Tensor, block: slice, exchanged: tuple[int, int] | None) -> Tensor:
    """Return the rows of a head's weight or bias for one block of words, two of them exchanged."""
    rows = values[block]
    for word, other in () if exchanged is None else (exchanged, exchanged[::-1]):
        if block.start <= word < block.stop:
            rows = rows.clone()
            rows[word - block.start] = values[other]
    return rows


class PullBack(NamedTuple):
    """Turns the gradient of a tile's logits into the input of the backward products.

    A function that computes a gradient ends with it, so that one compiled kernel reads the logits and writes
    half precision.

    Attributes:
        dtype: The type in which the products read the gradient.
        scale: The head's; here its cap is differentiated, and the products multiply by its factor.
        needs_bias: Whether the head's bias needs a gradient.
    """

    dtype: torch.dtype
    scale: LogitScale
    needs_bias: bool

    def __call__(self, gradient: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the products' operand, (m, w), and its sums over the tokens in full precision, (w,)."""
        gradient = self.scale.pull_back_(gradient, logits)
        return gradient.to(self.dtype), gradient.sum(dim=0) if self.needs_bias else None


class HeadGradients:
    """Collects the gradients of hidden states (M, H), weight (V, H) and bias (V,), tile by tile.

    Args:
        hidden: The hidden states.
        head: The head that they went through.
        needed: Whether hidden states, weight and bias need a gradient.
    """

    def __init__(self, hidden: Tensor, head: Head, needed: Sequence[bool]) -> None:
        self.hidden_dtype = hidden.dtype
        self.states = full_precision_on_cpu(hidden)  # (M, H)
        needs_hidden, needs_weight, needs_bias = needed
        self.hidden_grad: Tensor | None = None
        if needs_hidden:
            self.hidden_grad = torch.zeros_like(hidden, dtype=full_precision(hidden.dtype))
        self.weight_grad = torch.empty_like(head.weight) if needs_weight else None
        self.bias_grad = torch.empty_like(head.bias) if needs_bias and head.bias is not None else None
        # Gradients of the current block's weight and bias, summed over the rows so far.
        self.block_grads: list[Tensor] = []

    def add(self, head: HeadBlock, operand: Tensor, bias_grad: Tensor | None, row: slice) -> None:
        """Add the part that comes from one tile, given what its `PullBack` returned."""
        factor = head.scale.gradient_factor()
        if self.hidden_grad is not None:
            add_product_(self.hidden_grad[row], operand, head.weight, factor)
        if not self.block_grads:
            rows = head.weight if self.weight_grad is not None else head.weight[:, :0]
            block_weight_grad = torch.zeros_like(rows, dtype=full_precision(head.weight.dtype))
            self.block_grads = [block_weight_grad, block_weight_grad.new_zeros(len(head.weight))]
        if self.weight_grad is not None:
            add_product_(self.block_grads[0], operand.t(), self.states[row], factor)
        if bias_grad is not None:
            self.block_grads[1].add_(bias_grad, alpha=factor)

    def finish(self, block: slice) -> None:
        """Write the block's gradients, once every row has been added."""
        for total, gradient in zip((self.weight_grad, self.bias_grad), self.block_grads, strict=True):
            if total is not None:
                total[block] = gradient
        self.block_grads = []

    def of_inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias; None where none was needed."""
        hidden_grad = None if self.hidden_grad is None else self.hidden_grad.to(self.hidden_dtype)
        return hidden_grad, self.weight_grad, self.bias_grad


class HeadTiles:
    """The logits of one or two heads for the same M tokens, tile by tile.

    Args:
        sides: Hidden states (M, H) and the head that they go through, of each model.
        logits_mib: Memory for the logits of all sides at a time, MiB.
    """

    def __init__(self, sides: Sequence[tuple[Tensor, Head]], logits_mib: int) -> None:
        self.sides = sides
        self.states = [full_precision_on_cpu(hidden) for hidden, _ in sides]
        hidden_size = max(hidden.shape[1] for hidden, _ in sides)
        num_words = max(len(head.weight) for _, head in sides)
        self.rows, self.blocks = choose_tiles(
            len(self.states[0]), hidden_size, num_words, logits_mib, len(sides)
        )

    def heads(self, block: slice) -> list[HeadBlock]:
        """Return each side's weights for a block; fewer where a vocabulary ends."""
        sides = zip(self.sides, self.states, strict=True)
        return [HeadBlock(head, block, states.dtype) for (_, head), states in sides]

    def zeros(self, row: slice) -> Tensor:
        """Return a zero for each token of a row of tiles, (m,), in the type of sums."""
        states = self.states[0][row]
        return torch.zeros(len(states), dtype=full_precision(states.dtype), device=states.device)

    def add_up(self, add: Callable[..., Any], start: Callable[[slice], Any]) -> Any:
        """Return sums over the vocabulary, a tuple of tensors with one row per token.

        Args:
            add: add(sums, *logits of each side, row, block) returns a row's sums with one more tile.
            start: start(row) returns the sums before the first tile.
        """
        with without_autocast(self.states[0]):
            sums = [start(row) for row in self.rows]
            for block in self.blocks:
                heads = self.heads(block)
                for i, row in enumerate(self.rows):
                    # Logits that had a name here would stay in memory beside the next tile's.
                    sums[i] = add(sums[i], *self.logits(heads, row), row, block)
            return tree_map(lambda *values: torch.cat(values), *sums)

    def logits(self, heads: list[HeadBlock], row: slice) -> list[Tensor]:
        """Return a tile's logits of each side, (m, w) each."""
        return [head.logits(states[row]) for head, states in zip(heads, self.states, strict=True)]

    def differentiate(
        self, needed: Sequence[bool], differentiate_tile: Callable[..., tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the first side's hidden states, weight and bias; None where none is needed.

        Args:
            needed: Which of the three are.
            differentiate_tile: differentiate_tile(pull_back, *logits of each side, row, block) returns
                `pull_back(gradient, logits)` of those of the first side, (m, w).
        """
        hidden, head = self.sides[0]
        with without_autocast(hidden):
            gradients = HeadGradients(hidden, head, needed)
            pull_back = PullBack(self.states[0].dtype, head.scale, gradients.bias_grad is not None)
            for block in self.blocks:
                heads = self.heads(block)
                for row in self.rows:
                    gradients.add(
                        heads[0], *differentiate_tile(pull_back, *self.logits(heads, row), row, block), row
                    )
                gradients.finish(block)
            return gradients.of_inputs()


def block_size(logits_mib: int | None, hidden: Tensor) -> int:
    """Return the memory for logits, in MiB: the one given, or the device's default."""
    if logits_mib is None:
        return 8 if hidden.device.type == "cpu" else 512
    if logits_mib < 1:
        raise ValueError(f"logits_mib must be at least 1 MiB, but it is {logits_mib}.")
    return logits_mib


def choose_tiles(
    num_tokens: int, hidden_size: int, num_words: int, logits_mib: int, num_heads: int = 1
) -> tuple[list[slice], list[slice]]:
    """Cut tokens and vocabulary so that the fp32 logits of `num_heads` tiles fit: rows and blocks.

    Blocks are as wide as a matrix product needs to be fast, or wider where there are few tokens, as long as
    fp32 copies of a block's weights fit too. All widths but the last block's are
    multiples of `WIDTH_MULTIPLE`.
    """
    room = logits_mib * 2**18 // num_heads  # logits
    height = max(1, min(num_tokens, room // BLOCK_WORDS))
    width = min(room // height, max(BLOCK_WORDS, room // hidden_size))
    width -= width % WIDTH_MULTIPLE
    rows = [slice(start, min(start + height, num_tokens)) for start in range(0, max(1, num_tokens), height)]
    return rows, [slice(start, min(start + width, num_words)) for start in range(0, num_words, width)]


class OnlineSoftmax(NamedTuple):
    """The normaliser of a softmax whose logits come in blocks, for each of m tokens; both (m,).

    Attributes:
        largest: The largest logit z so far.
        normaliser: Sum of e = exp(z - largest) so far.
    """

    largest: Tensor
    normaliser: Tensor

    @classmethod
    def start(cls, zeros: Tensor) -> OnlineSoftmax:
        """Return the sums before the first block, from a zero for each token."""
        return cls(torch.full_like(zeros, -torch.inf), zeros)

    def add(self, logits: Tensor) -> tuple[OnlineSoftmax, Tensor, Tensor]:
        """Return the sums with one more block of logits, (m, w), which may be empty.

        Returns:
            The sums; the factor by which sums of e so far shrink, (m,); and the block's e, (m, w).
        """
        if not logits.shape[1]:
            return self, torch.ones_like(self.largest), logits
        largest = torch.maximum(self.largest, logits.amax(dim=1))
        shrink = (self.largest - largest).exp()
        e = (logits - largest.unsqueeze(1)).exp_()
        return OnlineSoftmax(largest, self.normaliser * shrink + e.sum(dim=1)), shrink, e

    def log_normaliser(self) -> Tensor:
        """Return log sum_v exp(z_v), (m,)."""
        return self.largest + self.normaliser.log()


def impossible_as_inf(logits: Tensor) -> Tensor:
    """Return logits, or sums of them, with -inf for a word that never comes."""
    return logits.masked_fill(logits < LOWEST_LOGIT, -torch.inf)


def slots_in_block(slots: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return which targets lie in this block, and positions that are safe to read, (m,) each."""
    found = (slots >= 0) & (slots < logits.shape[1])
    return found, slots.clamp(0, logits.shape[1] - 1)


def add_in_block_(values: Tensor, slots: Tensor, added: Tensor) -> Tensor:
    """Add a number, (m,), to each row of values, (m, w), at the slot of its target, (m,), if it has one."""
    added = added.to(values.dtype).unsqueeze(1)
    if torch.compiler.is_compiling():
        # A scatter would be a kernel of its own, between one that writes the values and one that reads them.
        columns = torch.arange(values.shape[1], device=values.device)
        return values + torch.where(columns == slots.unsqueeze(1), added, 0.0)
    found, slots = slots_in_block(slots, values)
    return values.scatter_add_(1, slots.unsqueeze(1), torch.where(found.unsqueeze(1), added, 0.0))


@functools.cache
def choose_kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return the function, compiled if asked for; each function is compiled once."""
    return torch.compile(function, dynamic=True) if compiled else function


def add_product(
    added: Tensor | None, a: Tensor, b: Tensor, factor: float, out: Tensor | None = None
) -> Tensor:
    """Return added + factor * a @ b in fp32, or in float64 for float64: half precision is summed in fp32.

    The factor multiplies the sums while the product still holds them, so it rounds neither a nor b.
    """
    # Only a GPU multiplies in half precision: full_precision_on_cpu() turns it into fp32 elsewhere.
    options: dict[str, Any] = {} if a.dtype == full_precision(a.dtype) else {"out_dtype": torch.float32}
    beta, added = (0, a.new_empty(1)) if added is None else (1, added)
    return torch.addmm(added, a, b, **options, beta=beta, alpha=factor, out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Do total += factor * a @ b, with products as in `add_product`."""
    add_product(total, a, b, factor, out=total)


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def full_precision_on_cpu(hidden: Tensor) -> Tensor:
    """Return hidden states as the head multiplies them: a GPU keeps half precision, and sums it in fp32."""
    return hidden if hidden.is_cuda else hidden.to(full_precision(hidden.dtype))


def in_autocast_dtype(hidden: Tensor) -> Tensor:
    """Return hidden states in half precision under a GPU's autocast, as any linear layer takes them there."""
    device = hidden.device.type
    if device == "cpu" or not torch.is_autocast_enabled(device):
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


def without_autocast(tensor: Tensor) -> Any:
    """Return a context without autocast, which would turn fp32 products back into half precision."""
    return torch.autocast(tensor.device.type, enabled=False)
