"""The language-model head in blocks: no more logits at a time than fit into a given memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_WORDS = 1024
IMPOSSIBLE = -1e30  # logit of a word that never comes: -inf would make 0 * -inf in the sums


class LogitScale(NamedTuple):
    """From a head's raw output r to the logits z of a softmax: z = cap * tanh(scale * r / cap) / temperature.

    Attributes:
        temperature: Divides the logits; the sampling temperature, so that log-probs are the sampler's.
        scale: Some architectures multiply what the head gives (Cohere), or divide it (Granite).
        cap: Soft cap of the logits (Gemma 2); None: no cap.
    """

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    def apply_(self, raw: Tensor) -> Tensor:
        """Turn the raw output into logits, in place."""
        if self.cap is None:
            return times_(raw, self.scale / self.temperature)
        return raw.mul_(self.scale / self.cap).tanh_().mul_(self.cap / self.temperature)

    def pull_back_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the logits into that of the raw output, in place."""
        times_(gradient, self.scale / self.temperature)
        if self.cap is None:
            return gradient
        return gradient.mul_(1 - (logits * (self.temperature / self.cap)).square_())  # tanh' = 1 - tanh^2


def times_(values: Tensor, factor: float) -> Tensor:
    """Multiply in place; a factor of 1 costs no pass over the values."""
    return values if factor == 1 else values.mul_(factor)


class HeadBlock:
    """The head's weights for one block of the vocabulary, in the type that it multiplies in."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, block: slice, scale: LogitScale, dtype: torch.dtype
    ) -> None:
        self.weight = weight[block].to(dtype)  # (w, H)
        self.bias = None if bias is None else bias[block].to(full(dtype)).clamp(min=IMPOSSIBLE)
        self.scale = scale

    def logits(self, states: Tensor) -> Tensor:
        """Logits of hidden states (m, H), (m, w), fp32 or float64."""
        raw = matmul(states, self.weight.t())
        if self.bias is not None:
            raw += self.bias
        return self.scale.apply_(raw)


class HeadGradients:
    """Collects the gradients of hidden states (M, H), weight (V, H) and bias (V,), tile by tile."""

    def __init__(self, inputs: tuple[Any, ...], needed: Sequence[bool]) -> None:
        hidden, weight, bias = self.inputs = inputs
        self.states = wide(hidden)  # (M, H), what the head's weight is multiplied with
        wants_hidden, wants_weight, wants_bias = needed
        self.hidden_grad = torch.zeros_like(hidden, dtype=full(hidden.dtype)) if wants_hidden else None
        self.weight_grad = torch.empty_like(weight) if wants_weight else None
        self.bias_grad = torch.empty_like(bias) if wants_bias else None
        self.block_grads: list[Tensor] = []  # of the block's weight and bias, over the rows so far

    def add(self, head: HeadBlock, raw_grad: Tensor, row: slice) -> None:
        """Add what the gradient of a tile of raw outputs, (m, w), is worth."""
        operand = raw_grad.to(self.states.dtype)
        if self.hidden_grad is not None:
            add_product_(self.hidden_grad[row], operand, head.weight)
        if not self.block_grads:
            rows = head.weight if self.weight_grad is not None else head.weight[:, :0]
            block_weight_grad = torch.zeros_like(rows, dtype=full(head.weight.dtype))
            self.block_grads = [block_weight_grad, block_weight_grad.new_zeros(len(head.weight))]
        if self.weight_grad is not None:
            add_product_(self.block_grads[0], operand.t(), self.states[row])
        if self.bias_grad is not None:
            self.block_grads[1] += raw_grad.sum(dim=0)

    def finish(self, block: slice) -> None:
        """Write the block's gradients, which all rows have now been added to."""
        for total, gradient in zip((self.weight_grad, self.bias_grad), self.block_grads, strict=True):
            if total is not None:
                total[block] = gradient
        self.block_grads = []

    def of_inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states, weight and bias; None where none was needed."""
        hidden_grad = None if self.hidden_grad is None else self.hidden_grad.to(self.inputs[0].dtype)
        return hidden_grad, self.weight_grad, self.bias_grad


def block_size(logits_mib: int | None, hidden: Tensor) -> int:
    """Return the given memory for logits, MiB, or the device's default."""
    if logits_mib is None:
        return 8 if hidden.device.type == "cpu" else 512
    if logits_mib < 1:
        raise ValueError(f"logits_mib must be at least 1 MiB, but it is {logits_mib}.")
    return logits_mib


def tiles(
    num_tokens: int, hidden_size: int, num_words: int, logits_mib: int, num_heads: int = 1
) -> tuple[list[slice], list[slice]]:
    """Cut tokens and vocabulary so that the fp32 logits of `num_heads` tiles fit: rows and blocks.

    Blocks are as wide as a matrix product needs to be fast, or wider where there are few tokens, as long as
    fp32 copies of a block's weights fit too.
    """
    room = logits_mib * 2**18 // num_heads  # logits
    height = max(1, min(num_tokens, room // BLOCK_WORDS))
    width = min(room // height, max(BLOCK_WORDS, room // hidden_size))
    rows = [slice(start, min(start + height, num_tokens)) for start in range(0, max(1, num_tokens), height)]
    return rows, [slice(start, min(start + width, num_words)) for start in range(0, num_words, width)]


def new_sums(states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `add_block` starts from, (M,) each: largest logit, sum of e, sum of e * z, target's logit."""
    zeros = torch.zeros(len(states), dtype=full(states.dtype), device=states.device)
    return torch.full_like(zeros, -torch.inf), zeros, zeros, zeros


def add_block(
    largest: Tensor,
    normaliser: Tensor,
    weighted: Tensor,
    target_logits: Tensor,
    logits: Tensor,
    places: Tensor,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a block of logits z to the running sums over the vocabulary, e = exp(z - largest).

    Args:
        largest: Largest logit so far, (M,).
        normaliser: sum of e so far, (M,).
        weighted: sum of e * z so far, (M,).
        target_logits: The target's logit, once its block has come, (M,).
        logits: (M, w).
        places: Of the targets, counted from the block's first word, (M,); those of other blocks lie outside.
        with_entropy: Whether `weighted` is wanted.
    """
    new_largest = torch.maximum(largest, logits.amax(dim=1))
    shrink = (largest - new_largest).exp()
    e = (logits - new_largest.unsqueeze(1)).exp_()
    found, places = own_places(places, logits)
    return (
        new_largest,
        normaliser * shrink + e.sum(dim=1),
        weighted * shrink + torch.linalg.vecdot(e, logits) if with_entropy else weighted,
        torch.where(found, logits.gather(1, places.unsqueeze(1)).squeeze(1), target_logits),
    )


def own_places(places: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets lie in this block, and places that may be read, (M,) each."""
    found = (places >= 0) & (places < logits.shape[1])
    return found, places.clamp(0, logits.shape[1] - 1)


@functools.cache
def compiled_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile once per function."""
    return torch.compile(function, dynamic=True)


def kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Choose the compiled version where it was asked for."""
    return compiled_kernel(function) if compiled else function


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, or in float64 for float64: half precision is summed in fp32."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)  # wide() leaves half precision to GPUs alone


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Do total += a @ b, with products as in `matmul`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += matmul(a, b)


def wide(hidden: Tensor) -> Tensor:
    """The type in which the head multiplies: half precision only on a GPU, which sums it in fp32."""
    return hidden if hidden.is_cuda else hidden.to(full(hidden.dtype))


def full(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, fp32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def as_autocast(hidden: Tensor) -> Tensor:
    """On a GPU under autocast the head multiplies in half precision, as any linear layer does there."""
    device = hidden.device.type
    if device == "cpu" or not torch.is_autocast_enabled(device):
        return hidden
    return hidden.to(torch.get_autocast_dtype(device))


def without_autocast(tensor: Tensor) -> Any:
    """Autocast would turn fp32 products back into half precision."""
    return torch.autocast(tensor.device.type, enabled=False)
