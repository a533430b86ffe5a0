"""Attention of one new token per row: to the row's own tokens, and to a prompt that several rows share.

A prompt's keys and values are stored once. The queries of all rows that continue it read them together, as
rows of one product; the result is merged with the attention to each row's own tokens by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_lightning.numerics.attention import merge_


@dataclass(frozen=True)
class Prompts:
    """The prompts that the rows continue.

    Args:
        places: (n,): prompt * members + member of each row; None: rows are in this order without gaps.
        members: Rows of the prompt that has most.
        bias: (P, 1, 1, L): 0 on a prompt's tokens, -inf behind its end; None: all have L tokens.
    """

    places: Tensor | None
    members: int
    bias: Tensor | None


def decode_attention(
    query: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Prompts],
    scale: float,
) -> Tensor:
    """Return the attention of every row's new token.

    Args:
        query: (n, A, D): A heads of each row.
        own: Keys and values of each row, (n, B, T, D), where A is a multiple of B, its new token included,
            and their bias, (n, 1, 1, T): 0 on tokens, -inf behind the last.
        shared: Keys and values of each prompt, (P, B, L, D), and which rows continue it.
        scale: Multiplies the products of queries and keys.

    Returns:
        (n, A, D of the values).
    """
    keys, values, bias = own
    rows, heads = keys.shape[:2]
    query = query.reshape(rows, heads, -1, query.shape[-1])  # (n, B, A / B, D)
    output, lse = attend(query, keys, values, bias, scale)
    keys, values, prompts = shared
    asked = by_prompt(query, prompts, len(keys))  # (P, B, members * A / B, D)
    found, found_lse = attend(asked, keys, values, prompts.bias, scale)
    merge_(output, lse, by_row(found, prompts, rows), by_row(found_lse.unsqueeze(-1), prompts, rows)[..., 0])
    return output.reshape(rows, -1, output.shape[-1])


def by_prompt(query: Tensor, prompts: Prompts, num_prompts: int) -> Tensor:
    """Gather the queries of each prompt's rows: (n, B, r, D) -> (P, B, members * r, D)."""
    if prompts.places is not None:
        room = query.new_zeros(num_prompts * prompts.members, *query.shape[1:])
        query = room.index_copy_(0, prompts.places, query)
    grouped = query.unflatten(0, (num_prompts, prompts.members))
    return grouped.transpose(1, 2).flatten(2, 3)


def by_row(found: Tensor, prompts: Prompts, num_rows: int) -> Tensor:
    """Undo `by_prompt`: (P, B, members * r, D) -> (n, B, r, D)."""
    rows = found.unflatten(2, (prompts.members, -1)).transpose(1, 2).flatten(0, 1)
    return rows if prompts.places is None else rows[prompts.places]


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention without causality, (N, B, r, D), and its log-sum-exps, (N, B, r), fp32.

    A CPU uses PyTorch's flash attention; other devices two products, which read keys and values once each.
    """
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
        return found, lse
    scores = (query @ key.transpose(2, 3)).float() * scale  # (N, B, r, L)
    if bias is not None:
        scores = scores + bias
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse
