"""The generalised Jensen-Shannon divergence of two heads' distributions, block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.head import (
    IMPOSSIBLE,
    Head,
    HeadBlock,
    HeadGradients,
    VocabularySums,
    add_block,
    full_precision_on_cpu,
    kernel,
    without_autocast,
)
from rlt_lightning.numerics.kl import PairOptions, hidden_and_heads, pair_inputs, pair_tiles


def log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return log(beta T + (1 - beta) S) of log-probs of one shape, nats."""
    # logaddexp has no gradient where both are -inf.
    student, teacher = student.clamp(min=IMPOSSIBLE), teacher.clamp(min=IMPOSSIBLE)
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def linear_jsd(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    beta: float,
    logits_mib: int,
    compiled: bool = False,
) -> Tensor:
    """Return beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S, over the whole vocabulary.

    Args:
        student_hidden: The student's hidden states, (M, H_S). M may be 0.
        student: The student's language-model head, V_S words, with its temperature.
        teacher_hidden: The teacher's hidden states before the same M tokens, (M, H_T).
        teacher: The teacher's language-model head, V_T words, with its temperature.
        beta: Weight of the teacher in the mixture, in (0, 1).
        logits_mib: Memory for logits, MiB.
        compiled: Fuse the arithmetic on a tile with torch.compile.

    Returns:
        (M,), nats, with gradient to the student's hidden states, weight and bias only.
    """
    options = PairOptions(student.scale, teacher.scale, logits_mib, compiled)
    return LinearJSD.apply(beta, options, *pair_inputs(student_hidden, student, teacher_hidden, teacher))


class LinearJSD(torch.autograd.Function):
    """See `linear_jsd`. In the code p is the student and q the teacher."""

    @staticmethod
    def forward(ctx: Any, beta: float, options: PairOptions, *inputs: Any) -> Tensor:
        """Add up over the vocabulary tile by tile, once both sides' normalisers are known."""
        p_hidden, p_head, q_hidden, q_head = hidden_and_heads(options, inputs)
        parts_of = kernel(jsd_parts, options.compiled)
        with without_autocast(p_hidden):
            p_states, q_states = full_precision_on_cpu(p_hidden), full_precision_on_cpu(q_hidden)
            rows, blocks = pair_tiles(options, inputs)
            p_normaliser = log_normaliser(p_states, p_head, rows, blocks, options.compiled)  # (M,)
            q_normaliser = log_normaliser(q_states, q_head, rows, blocks, options.compiled)  # (M,)
            p_part, q_part = torch.zeros_like(p_normaliser), torch.zeros_like(q_normaliser)  # (M,)
            for block in blocks:
                p_block = HeadBlock(p_head, block, p_states.dtype)
                q_block = HeadBlock(q_head, block, q_states.dtype)
                for row in rows:
                    logits = p_block.logits(p_states[row]), q_block.logits(q_states[row])
                    normalisers = p_normaliser[row].unsqueeze(1), q_normaliser[row].unsqueeze(1)
                    p_tile, q_tile = parts_of(*logits, *normalisers, beta)
                    p_part[row] += p_tile
                    q_part[row] += q_tile
        ctx.save_for_backward(*inputs, p_normaliser, q_normaliser, p_part)
        ctx.beta, ctx.options = beta, options
        return p_part + q_part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute each tile again."""
        inputs, sums = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        p_hidden, p_head, q_hidden, q_head = hidden_and_heads(ctx.options, inputs)
        gradient_of = kernel(jsd_gradient, ctx.options.compiled)
        with without_autocast(p_hidden):
            gradients = HeadGradients(p_hidden, p_head, ctx.needs_input_grad[2:5])
            p_states, q_states = gradients.states, full_precision_on_cpu(q_hidden)
            rows, blocks = pair_tiles(ctx.options, inputs)
            for block in blocks:
                p_block = HeadBlock(p_head, block, p_states.dtype)
                q_block = HeadBlock(q_head, block, q_states.dtype)
                for row in rows:
                    p_logits, q_logits = p_block.logits(p_states[row]), q_block.logits(q_states[row])
                    row_sums = (values[row].unsqueeze(1) for values in (*sums, grad))  # (m, 1) each
                    p_grad = gradient_of(p_logits, q_logits, *row_sums, ctx.beta)
                    gradients.add(p_block, p_grad, p_logits, row)
                gradients.finish(block)
        return (None, None, *gradients.of_inputs(), None, None, None)


def log_normaliser(
    states: Tensor, head: Head, rows: list[slice], blocks: list[slice], compiled: bool
) -> Tensor:
    """Return log sum_v exp(z_v) of a head's logits, (M,); blocks beyond the head's words are empty."""
    add = kernel(add_block, compiled)
    sums = [VocabularySums.of_nothing(states[row]) for row in rows]
    for block in blocks:
        head_block = HeadBlock(head, block, states.dtype)
        if len(head_block.weight):
            for i, row in enumerate(rows):
                no_targets = torch.full_like(sums[i].normaliser, -1, dtype=torch.long)
                sums[i] = add(sums[i], head_block.logits(states[row]), no_targets, False)
    return torch.cat([row_sums.log_normaliser() for row_sums in sums])


def jsd_parts(
    p_logits: Tensor, q_logits: Tensor, p_normaliser: Tensor, q_normaliser: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Return a tile's part of (1 - beta) KL(p || M) and of beta KL(q || M), (m,) each."""
    width = min(p_logits.shape[1], q_logits.shape[1])
    log_p, log_q = p_logits[:, :width] - p_normaliser, q_logits[:, :width] - q_normaliser
    log_m = log_mixture(log_p, log_q, beta)
    p_part = torch.linalg.vecdot(log_p.exp(), log_p - log_m)
    return (1 - beta) * p_part, beta * torch.linalg.vecdot(log_q.exp(), log_q - log_m)


def jsd_gradient(
    p_logits: Tensor,
    q_logits: Tensor,
    p_normaliser: Tensor,
    q_normaliser: Tensor,
    p_part: Tensor,
    grad: Tensor,
    beta: float,
) -> Tensor:
    """Return the gradient of a tile's logits of p, (m, w_S); all but the logits are (m, 1).

    d JSD / d z_p = p (1[both] h - sum_v p_v h_v),  h = (1 - beta) (log p - log M)

    The sum is `p_part`, (1 - beta) KL(p || M).
    """
    width = min(p_logits.shape[1], q_logits.shape[1])
    log_p = p_logits - p_normaliser
    log_m = log_mixture(log_p[:, :width], q_logits[:, :width] - q_normaliser, beta)
    gradient = -p_part.expand_as(log_p)
    gradient[:, :width] += (1 - beta) * (log_p[:, :width] - log_m)
    return gradient.mul_(log_p.exp_()).mul_(grad)
