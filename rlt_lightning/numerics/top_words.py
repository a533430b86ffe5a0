"""The likeliest words of a head, and what another head gives the same words, found block by block.

    words               │ k that one side likes best │ others of both │ of this side only │
    kept of each side   │ k logits: top              │ one sum: rest  │ one sum: beyond   │

`rest` and `beyond` are log-sums of exponentials, so nothing is lost by subtracting a sum of k probabilities
from 1. The top of all words is the top of the tops of the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.head import (
    IMPOSSIBLE,
    Head,
    HeadBlock,
    HeadGradients,
    full_precision,
    full_precision_on_cpu,
    impossible_as_inf,
    kernel,
    places_in_block,
    tiles,
    without_autocast,
)
from rlt_lightning.numerics.kl import PairOptions, hidden_and_heads, pair_inputs, pair_tiles


class TopLogits(NamedTuple):
    """What one side gives the words that were chosen, and all others; nats before normalisation.

    Attributes:
        top: The logits of the k chosen words, (m, k).
        rest: log-sum of exp over the other words that both sides have, (m,).
        beyond: The same over the words that only this side has, (m,).
    """

    top: Tensor
    rest: Tensor
    beyond: Tensor


class TopOptions(NamedTuple):
    """What `LinearTopLogits` needs besides tensors; see `linear_top_logits`."""

    pair: PairOptions
    top_k: int
    of_teacher: bool


def linear_top_logits(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    top_k: int,
    of_teacher: bool,
    logits_mib: int,
    compiled: bool = False,
) -> tuple[TopLogits, TopLogits]:
    """Return the student's and the teacher's logits of the likeliest words of one of them.

    Args:
        student_hidden: (M, H_S). M may be 0.
        student: The student's language-model head, V_S words.
        teacher_hidden: The teacher's hidden states before the same M tokens, (M, H_T).
        teacher: The teacher's language-model head, V_T words.
        top_k: How many words, k; all min(V_T, V_S) that both have if there are no more.
        of_teacher: Whether the teacher chooses the words, or the student. Of equal logits any may be chosen.
        logits_mib: Memory for logits, MiB.
        compiled: Fuse the arithmetic on a tile with torch.compile.

    Returns:
        Of the student, with gradient to its hidden states, weight and bias; and of the teacher, without.
    """
    k = min(top_k, len(student.weight), len(teacher.weight))
    options = TopOptions(PairOptions(student.scale, teacher.scale, logits_mib, compiled), k, of_teacher)
    found = LinearTopLogits.apply(options, *pair_inputs(student_hidden, student, teacher_hidden, teacher))
    return TopLogits(*found[:3]), TopLogits(*found[3:])


class LinearTopLogits(torch.autograd.Function):
    """See `linear_top_logits`. In the code p is the student and q the teacher."""

    @staticmethod
    def forward(ctx: Any, options: TopOptions, *inputs: Any) -> tuple[Tensor, ...]:
        """Choose among each tile's words and those chosen before."""
        p_hidden, p_head, q_hidden, q_head = hidden_and_heads(options.pair, inputs)
        add = kernel(add_top_block, options.pair.compiled)
        with without_autocast(p_hidden):
            p_states, q_states = full_precision_on_cpu(p_hidden), full_precision_on_cpu(q_hidden)
            rows, blocks = pair_tiles(options.pair, inputs)
            sums = [TopSums.of_nothing(p_states[row], options.top_k) for row in rows]
            for block in blocks:
                p_block = HeadBlock(p_head, block, p_states.dtype)
                q_block = HeadBlock(q_head, block, q_states.dtype)
                for i, row in enumerate(rows):
                    logits = p_block.logits(p_states[row]), q_block.logits(q_states[row])
                    sums[i] = add(sums[i], *logits, block.start, options.of_teacher)
            words = torch.cat([row_sums.words for row_sums in sums])  # (M, k)
            p = TopLogits(*map(torch.cat, zip(*(row_sums.p for row_sums in sums), strict=True)))
            q = TopLogits(*map(torch.cat, zip(*(row_sums.q for row_sums in sums), strict=True)))
        ctx.save_for_backward(p_hidden, p_head.weight, p_head.bias, words, p.rest, p.beyond)
        ctx.options = options
        ctx.num_common = min(len(p_head.weight), len(q_head.weight))
        of_teacher = tuple(map(impossible_as_inf, q))
        ctx.mark_non_differentiable(*of_teacher)
        return (*map(impossible_as_inf, p), *of_teacher)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, top_grad: Tensor, rest_grad: Tensor, beyond_grad: Tensor, *_: Any
    ) -> tuple[Any, ...]:
        """Compute each of the student's tiles again."""
        hidden, weight, bias, words, rest, beyond = ctx.saved_tensors
        options: PairOptions = ctx.options.pair
        head = Head(weight, bias, options.p_scale)
        gradient_of = kernel(top_gradient, options.compiled)
        with without_autocast(hidden):
            gradients = HeadGradients(hidden, head, ctx.needs_input_grad[1:4])
            states = gradients.states
            rows, blocks = tiles(len(hidden), hidden.shape[1], len(weight), options.logits_mib)
            for block in blocks:
                head_block = HeadBlock(head, block, states.dtype)
                num_common = max(0, ctx.num_common - block.start)
                for row in rows:
                    logits = head_block.logits(states[row])  # (m, w)
                    sums = TopLogits(words[row] - block.start, rest[row], beyond[row])
                    grads = TopLogits(top_grad[row], rest_grad[row], beyond_grad[row])
                    gradients.add(head_block, gradient_of(logits, sums, grads, num_common), logits, row)
                gradients.finish(block)
        return (None, *gradients.of_inputs(), None, None, None)


class TopSums(NamedTuple):
    """The words chosen so far, (m, k), and what both sides give them and all others so far.

    Before k words have come, there are places without a word: their logits are -inf.
    """

    words: Tensor
    p: TopLogits
    q: TopLogits

    @classmethod
    def of_nothing(cls, states: Tensor, top_k: int) -> TopSums:
        """Return the sums before the first block, for hidden states (m, H)."""
        top = states.new_full((len(states), top_k), -torch.inf, dtype=full_precision(states.dtype))
        side = TopLogits(top, top[:, 0], top[:, 0])
        return cls(torch.zeros_like(top, dtype=torch.long), side, side)


def add_top_block(sums: TopSums, p_logits: Tensor, q_logits: Tensor, start: int, of_q: bool) -> TopSums:
    """Return the sums with one more tile, whose first word is `start`; q chooses, or p."""
    top_k = sums.words.shape[1]
    width = min(p_logits.shape[1], q_logits.shape[1])
    logits, side = (q_logits, sums.q) if of_q else (p_logits, sums.p)
    places = torch.cat([side.top, logits[:, :width]], dim=1).topk(top_k, dim=1).indices  # (m, k)
    known = sums.words.gather(1, places.clamp(max=top_k - 1))
    words = torch.where(places < top_k, known, places - top_k + start)
    return TopSums(
        words, with_block(sums.p, p_logits, width, places), with_block(sums.q, q_logits, width, places)
    )


def with_block(side: TopLogits, logits: Tensor, width: int, places: Tensor) -> TopLogits:
    """Return one side with one more tile, whose first `width` words both sides have.

    `places`, (m, k), are those of the chosen words among the words chosen before and the tile's.
    """
    seen = torch.cat([side.top, logits[:, :width]], dim=1)
    top = seen.gather(1, places)
    rest = seen.scatter_(1, places, -torch.inf).logsumexp(dim=1)
    beyond = logits[:, width:].logsumexp(dim=1)
    return TopLogits(top, torch.logaddexp(side.rest, rest), torch.logaddexp(side.beyond, beyond))


def top_gradient(logits: Tensor, sums: TopLogits, grads: TopLogits, num_common: int) -> Tensor:
    """Return the gradient of a tile's logits, (m, w).

    g_top at a chosen word, g_rest exp(z - rest) at the others, g_beyond exp(z - beyond) where only this side
    has the word.

    Args:
        logits: The tile's, (m, w).
        sums: The places of the chosen words counted from the tile's first, (m, k), and both sums.
        grads: The gradients of the three.
        num_common: How many of the tile's words both sides have; the tile's width or more: all.
    """
    places = sums.top
    found, places = places_in_block(places, logits)
    others = logits.scatter_add(1, places, torch.where(found, -torch.inf, 0.0).to(logits.dtype))
    # Without a rest -inf - -inf would be NaN.
    rest, beyond = (values.clamp(min=IMPOSSIBLE).unsqueeze(1) for values in (sums.rest, sums.beyond))
    gradient = (others - rest).exp_() * grads.rest.unsqueeze(1)
    gradient[:, num_common:] = (others[:, num_common:] - beyond).exp() * grads.beyond.unsqueeze(1)
    return gradient.scatter_add_(1, places, torch.where(found, grads.top, 0.0))
