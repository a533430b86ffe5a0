"""Log-probabilities of given tokens, straight from hidden states, without ever holding (M, V) logits.

A vocabulary of 150k words and 16k scored tokens make 10 GB of fp32 logits, and as much again for their
gradient. Here the language-model head runs over blocks of the vocabulary: forward keeps three numbers per
token, backward computes each block again and is done with that block's part of the weight's gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log softmax(logits / temperature) over the last dimension, in fp32 (float64 stays float64)."""
    return in_full_precision(logits, temperature).log_softmax(dim=-1)


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return how likely each target token is under its row of logits.

    log p_m = z_m[target_m] - log sum_v exp z_m[v],  z = logits / temperature

    Args:
        logits: One row per scored token, (M, V), any floating type.
        targets: The tokens to be scored, (M,), int64.
        temperature: Divides the logits; the sampling temperature, so that these are the sampler's log-probs.

    Returns:
        Log-probabilities, (M,), nats, fp32 (float64 for float64 logits).

    Raises:
        ValueError: If the temperature is not positive.
    """
    scaled = in_full_precision(logits, temperature)  # (M, V)
    return scaled.gather(1, targets.unsqueeze(1)).squeeze(1) - scaled.logsumexp(dim=1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of each row's next-token distribution, -sum_v p_v log p_v.

    Args:
        logits: (M, V), any floating type. Words with logit -inf count as impossible.
        temperature: Divides the logits.

    Returns:
        Entropy, (M,), nats, between 0 and log V.

    Raises:
        ValueError: If the temperature is not positive.
    """
    return torch.special.entr(scaled_log_softmax(logits, temperature).exp()).sum(dim=-1)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: LogitScale = LogitScale(),
    logits_mib: int | None = None,
    compiled: bool = False,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the targets and entropies under softmax(scale(hidden @ weight.T + bias)).

    Equal to `token_log_probs` and `token_entropy` of the full logits, of which at most `logits_mib` exist at
    a time. Both results have gradients, to hidden states, weight and bias. Logits, sums and gradients are
    fp32 whatever the weights are (float64 stays float64): on a GPU products of half-precision numbers are
    added up in fp32, on a CPU each block of a half-precision weight is first made fp32.

    Args:
        hidden: Final hidden states, each one the predictor of its target, (M, H). M may be 0.
        weight: Of the language-model head, (V, H); sharded weights must have been gathered.
        bias: (V,) or None.
        targets: The tokens to be scored, (M,), int64.
        scale: Temperature, and what the architecture does to its logits.
        logits_mib: Memory for logits, MiB; None: 8 on a CPU, whose allocator hands blocks of that size out
            again without touching fresh pages, else 512.
        compiled: Fuse the arithmetic on a block with torch.compile; the results agree to rounding.
        with_entropy: Compute entropies too.

    Returns:
        Log-probabilities, (M,), nats; and entropies, (M,), nats, or None.

    Raises:
        ValueError: If the temperature or `logits_mib` is not positive.
    """
    check_temperature(scale.temperature)
    logits_mib = block_size(logits_mib, hidden)
    options = scale, logits_mib, compiled, with_entropy
    log_probs, entropy = LinearLogProbs.apply(as_autocast(hidden), weight, bias, targets, *options)
    return log_probs, entropy if with_entropy else None


class LinearLogProbs(torch.autograd.Function):
    """See `linear_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: LogitScale,
        logits_mib: int,
        compiled: bool,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Add up over the vocabulary, tile by tile."""
        with without_autocast(hidden):
            states = wide(hidden)  # (M, H)
            rows, blocks = tiles(len(hidden), hidden.shape[1], len(weight), logits_mib)
            sums = [new_sums(states[row]) for row in rows]
            for block in blocks:
                head = HeadBlock(weight, bias, block, scale, states.dtype)
                for i, row in enumerate(rows):
                    places = targets[row] - block.start
                    logits = head.logits(states[row])  # (m, w)
                    sums[i] = kernel(add_block, compiled)(*sums[i], logits, places, with_entropy)
            largest, normaliser, weighted, target_logits = map(torch.cat, zip(*sums, strict=True))
            log_normaliser = largest + normaliser.log()
            entropy = log_normaliser - weighted / normaliser
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.options = scale, logits_mib, compiled
        ctx.set_materialize_grads(False)
        target_logits = target_logits.masked_fill(target_logits < IMPOSSIBLE / 2, -torch.inf)
        return target_logits - log_normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        """Compute each tile again, and finish each block's part of the gradient of the weight."""
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        scale, logits_mib, compiled = ctx.options
        if log_prob_grad is None:
            log_prob_grad = torch.zeros_like(log_normaliser)
        with without_autocast(hidden):
            gradients = HeadGradients((hidden, weight, bias), ctx.needs_input_grad[:3])
            states = gradients.states
            rows, blocks = tiles(len(hidden), hidden.shape[1], len(weight), logits_mib)
            for block in blocks:
                head = HeadBlock(weight, bias, block, scale, states.dtype)
                for row in rows:
                    logits = head.logits(states[row])  # (m, w)
                    logit_grad = kernel(log_prob_gradient, compiled)(
                        logits,
                        targets[row] - block.start,
                        log_normaliser[row],
                        entropy[row],
                        log_prob_grad[row],
                        None if entropy_grad is None else entropy_grad[row],
                    )
                    gradients.add(head, scale.pull_back_(logit_grad, logits), row)
                gradients.finish(block)
        return (*gradients.of_inputs(), None, None, None, None, None)


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


def log_prob_gradient(
    logits: Tensor,
    places: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    log_prob_grad: Tensor,
    entropy_grad: Tensor | None,
) -> Tensor:
    """Gradient of a block's logits, (M, w): g (1[v = target] - p_v) - g_H p_v (log p_v + H)."""
    if entropy_grad is None:
        p = (logits - log_normaliser.unsqueeze(1)).exp_()
        gradient = p.mul_(-log_prob_grad.unsqueeze(1))
    else:
        log_p = logits - log_normaliser.unsqueeze(1)
        surprise = log_p + entropy.unsqueeze(1)
        gradient = -log_p.exp() * (log_prob_grad.unsqueeze(1) + entropy_grad.unsqueeze(1) * surprise)
    found, places = own_places(places, logits)
    at_target = torch.where(found, log_prob_grad, 0.0).to(gradient.dtype)
    return gradient.scatter_add_(1, places.unsqueeze(1), at_target.unsqueeze(1))


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


def in_full_precision(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in fp32, or in float64 where that is what came."""
    check_temperature(temperature)
    return logits.to(full(logits.dtype)) / temperature


def check_temperature(temperature: float) -> None:
    """Raise a ValueError unless log-probs can be taken at this temperature."""
    if not temperature > 0:
        raise ValueError(
            f"The temperature of log-probs must be positive, but it is {temperature}. "
            "Use 1.0 for the model's own distribution."
        )
