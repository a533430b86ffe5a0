"""Draw tokens from logits by inverting the cumulative distribution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlt_lightning.engines.base import Sampling

# Words whose probabilities are added up in fp32 before float64 takes over.
BLOCK = 128
# A number this near to a boundary, as a fraction of the sum of all weights, is drawn again in float64. It is
# several times the error of fp32: exp(l - max) is off by 2^-24 (|l - max| + 2), on average at most 8e-7 with
# 150,000 words; a sum of 128 words by about 10 roundings, 6e-7.
DOUBT = 1e-5


def row_uniforms(seed: int, num_completions: int, num_tokens: int) -> Tensor:
    """Draw a group's random numbers, (num_completions, num_tokens), from its prompt's seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_completions, num_tokens, generator=generator, dtype=torch.float64)


def draw(logits: Tensor, history: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverse transform sampling.

    Args:
        logits: Model output in fp32, (n, V).
        history: Tokens present in each row, prompt included, (n, L); read for the repetition penalty only.
        uniforms: One number in [0, 1) per row, (n,).
        sampling: Temperature and truncation.

    Returns:
        Token ids (n,) and their log-probs (n,) under softmax(logits / temperature) of the full vocabulary,
        nats. Greedy sampling reports log-probs at temperature 1.
    """
    scaled = logits if sampling.temperature in (0, 1) else logits / sampling.temperature
    filtered = truncate(logits, history, sampling) if sampling.truncates else scaled
    tokens = filtered.argmax(dim=-1) if sampling.temperature == 0 else invert(filtered, uniforms)
    return tokens, scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(dim=-1)


def invert(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token of each row at which the cumulative softmax exceeds the uniform number, (n,).

    Blocks of words are added up in fp32, the words of one block in float64. If a row's number lies so near
    to a boundary that rounding could decide, `inverted_exactly` computes the row.
    """
    spare = -logits.shape[1] % BLOCK
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()  # (n, V)
    blocks = pad(weights, (0, spare)).unflatten(1, (-1, BLOCK))  # (n, V / BLOCK, BLOCK)
    sums = blocks.sum(dim=-1).double().cumsum(dim=-1)
    targets = uniforms[:, None] * sums[:, -1:]  # (n, 1)
    chosen = torch.searchsorted(sums, targets, right=True).clamp(max=sums.shape[1] - 1)  # (n, 1)
    before = pad(sums, (1, 0)).gather(1, chosen)
    words = blocks[torch.arange(len(logits), device=logits.device), chosen[:, 0]]
    edges = torch.cat([before, before + words.double().cumsum(dim=-1)], dim=1)  # (n, BLOCK + 1)
    places = torch.searchsorted(edges, targets, right=True).squeeze(1) - 1
    tokens = chosen[:, 0] * BLOCK + places
    clear = (edges - targets).abs().amin(dim=-1) > DOUBT * sums[:, -1]
    doubtful = (~clear).nonzero().squeeze(1)
    if len(doubtful):
        tokens[doubtful] = inverted_exactly(logits[doubtful], uniforms[doubtful])
    return tokens


def inverted_exactly(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Do what `invert` does in float64, slowly and plainly."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (n, V)
    targets = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)  # (n,)
    return tokens.clamp(max=logits.shape[-1] - 1)


def truncate(logits: Tensor, history: Tensor, sampling: Sampling) -> Tensor:
    """Apply repetition penalty, temperature, top-k, top-p and min-p, in that order, by transformers' code."""
    from transformers.generation import logits_process as processors

    if sampling.repetition_penalty != 1:
        logits = processors.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(history, logits)
    if sampling.temperature not in (0, 1):
        logits = processors.TemperatureLogitsWarper(sampling.temperature)(history, logits)
    if sampling.top_k:
        logits = processors.TopKLogitsWarper(sampling.top_k)(history, logits)
    if sampling.top_p < 1:
        logits = processors.TopPLogitsWarper(sampling.top_p)(history, logits)
    if sampling.min_p:
        logits = processors.MinPLogitsWarper(sampling.min_p)(history, logits)  # type: ignore[arg-type]
    return logits
