"""Log-probabilities of given tokens, straight from hidden states, without ever keeping (M, V) logits.

A vocabulary of 150k words and 16k scored tokens make 10 GB of fp32 logits, and as much again for their
gradient. So the language-model head runs chunk by chunk, and each chunk is recomputed in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # hidden states (M, H) -> logits (M, V)


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


def head_log_probs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return `token_log_probs(head(hidden), targets)`, keeping logits of `chunk_size` tokens at a time.

    The head is called max(1, ceil(M / chunk_size)) times, and as often again in the backward pass. Where each
    call gathers sharded weights (ZeRO-3), every rank must make the same number of calls.

    Args:
        hidden: Final hidden states, each one the predictor of its target, (M, H). M may be 0.
        head: The language-model head, (m, H) -> (m, V).
        targets: The tokens to be scored, (M,), int64.
        temperature: Divides the logits.
        chunk_size: Tokens per call of the head.
        with_entropy: Return the entropies too.

    Returns:
        Log-probabilities (M,), nats, with gradient to `hidden` and to the head's weights; and the entropies
        (M,), nats, without gradient, or None.

    Raises:
        ValueError: If the temperature or the chunk size is not positive.
    """

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(hidden)  # (m, V)
        entropy = token_entropy(logits.detach(), temperature) if with_entropy else None
        return token_log_probs(logits, targets, temperature), entropy

    log_probs, entropies = zip(*run_in_chunks(score, hidden, targets, chunk_size=chunk_size), strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def run_in_chunks(function: Callable[..., Any], *tensors: Tensor, chunk_size: int) -> list[Any]:
    """Call `function` on chunks of the tensors' first dimension, each recomputed in the backward pass.

    Empty tensors make one call with an empty chunk, so that the result keeps its graph.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, but it is {chunk_size}.")
    chunks = zip(*(tensor.split(chunk_size) for tensor in tensors), strict=True)
    return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]


def in_full_precision(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in fp32, or in float64 where that is what came."""
    if not temperature > 0:
        raise ValueError(
            f"The temperature of log-probs must be positive, but it is {temperature}. "
            "Use 1.0 for the model's own distribution."
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
