"""Log-probabilities of given tokens, straight from hidden states, without ever holding (M, V) logits.

A vocabulary of 150k words and 16k scored tokens make 10 GB of fp32 logits, and as much again for their
gradient. Here the language-model head runs over blocks of the vocabulary: forward keeps three numbers per
token, backward computes each block again and is done with that block's part of the weight's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.head import (
    Head,
    HeadTiles,
    LogitScale,
    OnlineSoftmax,
    PullBack,
    add_in_block_,
    block_size,
    choose_kernel,
    full_precision,
    impossible_as_inf,
    in_autocast_dtype,
    slots_in_block,
)


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature) over the last dimension, in fp32 (float64 stays float64)."""
    check_temperature(temperature)
    return (logits.to(full_precision(logits.dtype)) / temperature).log_softmax(dim=-1)


def linear_log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    logits_mib: int | None = None,
    compiled: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the targets and entropies under the softmax of a head's logits.

    Equal to those of the full logits, of which at most `logits_mib` exist at a time. Log-probs have gradients
    to hidden states, weight and bias. Logits, sums and gradients are fp32
    whatever the weights are (float64 stays float64): on a GPU products of half-precision numbers are added up
    in fp32, on a CPU each block of a half-precision weight is first made fp32.

    Args:
        hidden: Final hidden states, each one the predictor of its target, (M, H). M may be 0.
        head: The language-model head, with the temperature in its scale.
        targets: The tokens to be scored, (M,), int64.
        logits_mib: Memory for logits, MiB; None: 8 on a CPU, whose allocator hands blocks of that size out
            again without touching fresh pages, else 512.
        compiled: Fuse the arithmetic on a block with torch.compile; the results agree to rounding.
        with_entropy: Compute entropies too.

    Returns:
        Log-probabilities, (M,), nats; and entropies, (M,), nats, without gradient, or None.

    Raises:
        ValueError: If the temperature or `logits_mib` is not positive.
    """
    check_temperature(head.scale.temperature)
    options = BlockOptions(head.scale, block_size(logits_mib, hidden), compiled, with_entropy)
    inputs = in_autocast_dtype(hidden), head.weight, head.bias
    log_probs, entropy = LinearLogProbs.apply(options, *inputs, targets)
    return log_probs, entropy if with_entropy else None


class BlockOptions(NamedTuple):
    """What `LinearLogProbs` needs besides tensors; see `linear_log_probs`."""

    scale: LogitScale
    logits_mib: int
    compiled: bool
    with_entropy: bool


class LinearLogProbs(torch.autograd.Function):
    """See `linear_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any, options: BlockOptions, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add up over the vocabulary, tile by tile."""
        logits_of = HeadTiles([(hidden, Head(weight, bias, options.scale))], options.logits_mib)
        add = choose_kernel(add_block, options.compiled)

        def add_to_sums(sums: LogProbSums, logits: Tensor, row: slice, block: slice) -> LogProbSums:
            return add(sums, logits, targets[row] - block.start, options.with_entropy)

        sums = logits_of.add_up(add_to_sums, lambda row: LogProbSums.start(logits_of.zeros(row)))  # (M,) each
        log_normaliser = sums.softmax.log_normaliser()
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser)
        ctx.options = options
        entropy = log_normaliser - sums.weighted / sums.softmax.normaliser
        ctx.mark_non_differentiable(entropy)
        return impossible_as_inf(sums.target_logits) - log_normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        """Compute each tile again, and finish each block's part of the gradient of the weight."""
        hidden, weight, bias, targets, log_normaliser = ctx.saved_tensors
        gradient_of = choose_kernel(log_prob_gradient, ctx.options.compiled)

        def differentiate_tile(pull_back: PullBack, logits: Tensor, row: slice, block: slice) -> Any:
            return gradient_of(pull_back, logits, targets[row] - block.start, log_normaliser[row], grad[row])

        logits_of = HeadTiles([(hidden, Head(weight, bias, ctx.options.scale))], ctx.options.logits_mib)
        return (None, *logits_of.differentiate(ctx.needs_input_grad[1:4], differentiate_tile), None)


class LogProbSums(NamedTuple):
    """Running sums over the vocabulary for each of m tokens."""

    softmax: OnlineSoftmax
    weighted: Tensor  # sum of e * z, (m,), if entropies are wanted
    target_logits: Tensor  # the target's z, once its block has come, (m,)

    @classmethod
    def start(cls, zeros: Tensor) -> LogProbSums:
        """Return the sums before the first block, from a zero for each token."""
        return cls(OnlineSoftmax.start(zeros), zeros, zeros)


def add_block(sums: LogProbSums, logits: Tensor, slots: Tensor, with_entropy: bool) -> LogProbSums:
    """Return the sums with one more block of the vocabulary.

    Args:
        sums: The sums over the blocks before.
        logits: The block's logits, (m, w).
        slots: The targets' positions counted from the block's first word, (m,); a target that belongs to
            another block has a position outside 0..w-1.
        with_entropy: Whether `weighted` is needed.
    """
    softmax, shrink, e = sums.softmax.add(logits)
    found, slots = slots_in_block(slots, logits)
    weighted = sums.weighted
    if with_entropy:
        weighted = weighted * shrink + torch.linalg.vecdot(e, logits)
    target_logits = logits.gather(1, slots.unsqueeze(1)).squeeze(1)
    return LogProbSums(softmax, weighted, torch.where(found, target_logits, sums.target_logits))


def log_prob_gradient(
    pull_back: PullBack, logits: Tensor, slots: Tensor, log_normaliser: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return `pull_back` of the gradient of a block's logits, (m, w): g (1[v = target] - p_v)."""
    p = (logits - log_normaliser.unsqueeze(1)).exp_()
    return pull_back(add_in_block_(p.mul_(-grad.unsqueeze(1)), slots, grad), logits)


def check_temperature(temperature: float) -> None:
    """Raise a ValueError unless log-probs can be taken at this temperature."""
    if not temperature > 0:
        raise ValueError(
            f"The temperature of log-probs must be positive, but it is {temperature}. "
            "Use 1.0 for the model's own distribution."
        )
