"""How far one model's next-token distribution lies from another's: two sampled estimators and the sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.head import (
    HeadBlock,
    HeadGradients,
    LogitScale,
    add_block,
    as_autocast,
    block_size,
    new_sums,
    tiles,
    wide,
    without_autocast,
)
from rlt_lightning.numerics.log_probs import check_temperature, scaled_log_softmax


def log_ratio_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimate KL(p || q) per token by the plain log-ratio of tokens sampled from p.

    k1 = log p - log q          (J. Schulman, "Approximating KL Divergence", 2020)

    Unbiased, and noisy: single tokens may be negative.

    Args:
        log_p: Log-probabilities under p, which sampled the tokens, any shape, nats.
        log_q: Log-probabilities of the same tokens under q, same shape, nats.

    Returns:
        One estimate per token, same shape, nats.
    """
    return log_p - log_q


def schulman_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Estimate KL(p || q) per token, never negative, from tokens sampled from p.

    k3 = log(p / q) - 1 + q / p          (J. Schulman, "Approximating KL Divergence", 2020)

    Unbiased, with less variance than `log_ratio_kl` while p and q are close. It exponentiates: where padding
    may hold inf or NaN and gradients are wanted, mask the arguments first.

    Args:
        log_p: Log-probabilities under p, which sampled the tokens, any shape, nats.
        log_q: Log-probabilities of the same tokens under q, same shape, nats.

    Returns:
        One estimate per token, same shape, nats, at least 0.
    """
    log_ratio = log_q - log_p
    return torch.expm1(log_ratio) - log_ratio  # expm1: exact where p and q nearly agree


def exact_kl(
    teacher_logits: Tensor, student_logits: Tensor, teacher_temperature: float, student_temperature: float
) -> Tensor:
    """Return KL(teacher || student) of each next-token distribution, summed over the whole vocabulary.

    KL_m = sum_v p_m(v) (log p_m(v) - log q_m(v))

    Each side is normalised over its own V columns. Where V_T and V_S differ the sum runs over the first
    min(V_T, V_S) columns: models of one tokenizer pad their embeddings to different sizes, and those rows are
    no tokens.

    Args:
        teacher_logits: (M, V_T), any floating type.
        student_logits: (M, V_S), any floating type.
        teacher_temperature: Divides the teacher's logits.
        student_temperature: Divides the student's logits.

    Returns:
        (M,), nats, fp32 (float64 for float64 logits).

    Raises:
        ValueError: If a temperature is not positive.
    """
    num_words = min(teacher_logits.shape[-1], student_logits.shape[-1])
    log_p = scaled_log_softmax(teacher_logits, teacher_temperature)[:, :num_words]  # (M, V)
    log_q = scaled_log_softmax(student_logits, student_temperature)[:, :num_words]  # (M, V)
    # A word that the teacher cannot say adds nothing, though its log-ratio is -inf or NaN.
    log_ratio = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
    return (log_p.exp() * log_ratio).sum(dim=-1)


def linear_exact_kl(
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_scale: LogitScale = LogitScale(),
    student_scale: LogitScale = LogitScale(),
    logits_mib: int | None = None,
) -> Tensor:
    """Return `exact_kl` of two heads' logits, of which at most `logits_mib` exist at a time.

    Args:
        teacher_hidden: The teacher's hidden states, (M, H_T). M may be 0.
        teacher_weight: Of the teacher's language-model head, (V_T, H_T).
        teacher_bias: (V_T,) or None.
        student_hidden: The student's hidden states before the same M tokens, (M, H_S).
        student_weight: Of the student's language-model head, (V_S, H_S).
        student_bias: (V_S,) or None.
        teacher_scale: The teacher's temperature, and what its architecture does to its logits.
        student_scale: The student's.
        logits_mib: Memory for logits, MiB, as in `linear_log_probs`.

    Returns:
        (M,), nats, fp32 or float64, with gradient to hidden states, weights and biases.

    Raises:
        ValueError: If a temperature or `logits_mib` is not positive.
    """
    check_temperature(teacher_scale.temperature)
    check_temperature(student_scale.temperature)
    logits_mib = block_size(logits_mib, teacher_hidden)
    teacher = as_autocast(teacher_hidden), teacher_weight, teacher_bias
    student = as_autocast(student_hidden), student_weight, student_bias
    return LinearExactKL.apply(*teacher, *student, teacher_scale, student_scale, logits_mib)


class LinearExactKL(torch.autograd.Function):
    """See `linear_exact_kl`."""

    @staticmethod
    def forward(
        ctx: Any,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_scale: LogitScale,
        student_scale: LogitScale,
        logits_mib: int,
    ) -> Tensor:
        """Add up over the vocabulary, tile by tile."""
        p_words, q_words = len(teacher_weight), len(student_weight)
        with without_autocast(teacher_hidden):
            p_states, q_states = wide(teacher_hidden), wide(student_hidden)
            sizes = max(p_states.shape[1], q_states.shape[1]), max(p_words, q_words)
            rows, blocks = tiles(len(p_states), *sizes, logits_mib, num_heads=2)
            sums = [KLSums.new(p_states[row]) for row in rows]
            for block in blocks:
                p_head = HeadBlock(teacher_weight, teacher_bias, block, teacher_scale, p_states.dtype)
                q_head = HeadBlock(student_weight, student_bias, block, student_scale, q_states.dtype)
                for i, row in enumerate(rows):
                    sums[i] = sums[i].plus(p_head.logits(p_states[row]), q_head.logits(q_states[row]))
            results = map(torch.cat, zip(*(row_sums.results() for row_sums in sums), strict=True))
            p_normaliser, q_normaliser, kl, common = results
        inputs = teacher_hidden, teacher_weight, teacher_bias, student_hidden, student_weight, student_bias
        ctx.save_for_backward(*inputs, p_normaliser, q_normaliser, kl, common)
        ctx.options = teacher_scale, student_scale, logits_mib
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute each tile again."""
        *inputs, p_normaliser, q_normaliser, kl, common = ctx.saved_tensors
        teacher_scale, student_scale, logits_mib = ctx.options
        teacher, student = tuple(inputs[:3]), tuple(inputs[3:])
        with without_autocast(teacher[0]):
            p_grads = HeadGradients(teacher, ctx.needs_input_grad[:3])
            q_grads = HeadGradients(student, ctx.needs_input_grad[3:6])
            p_states, q_states = p_grads.states, q_grads.states
            sizes = max(p_states.shape[1], q_states.shape[1]), max(len(teacher[1]), len(student[1]))
            rows, blocks = tiles(len(grad), *sizes, logits_mib, num_heads=2)
            for block in blocks:
                p_head = HeadBlock(teacher[1], teacher[2], block, teacher_scale, p_states.dtype)
                q_head = HeadBlock(student[1], student[2], block, student_scale, q_states.dtype)
                for row in rows:
                    p_logits, q_logits = p_head.logits(p_states[row]), q_head.logits(q_states[row])
                    per_token = (t[row].unsqueeze(1) for t in (p_normaliser, q_normaliser, kl, common, grad))
                    p_grad, q_grad = kl_gradients(p_logits, q_logits, *per_token)
                    p_grads.add(p_head, teacher_scale.pull_back_(p_grad, p_logits), row)
                    q_grads.add(q_head, student_scale.pull_back_(q_grad, q_logits), row)
                p_grads.finish(block)
                q_grads.finish(block)
        return (*p_grads.of_inputs(), *q_grads.of_inputs(), None, None, None)


class KLSums(NamedTuple):
    """Running sums over the vocabulary; `ratio` and `common` are over the columns that both sides have."""

    p: tuple[Tensor, Tensor, Tensor, Tensor]  # as in `add_block`
    q: tuple[Tensor, Tensor, Tensor, Tensor]
    ratio: Tensor  # sum of e (z_T - z_S), e = exp(z_T - largest z_T), (m,)
    common: Tensor  # sum of e, (m,)

    @classmethod
    def new(cls, states: Tensor) -> KLSums:
        """The sums over nothing."""
        sums = new_sums(states)
        return cls(sums, sums, sums[1], sums[1])

    def plus(self, p_logits: Tensor, q_logits: Tensor) -> KLSums:
        """Add a tile; the side with the smaller vocabulary may have fewer columns, or none."""
        nowhere = torch.full_like(self.common, -1, dtype=torch.long)  # no target
        p = add_block(*self.p, p_logits, nowhere, False) if p_logits.shape[1] else self.p
        q = add_block(*self.q, q_logits, nowhere, False) if q_logits.shape[1] else self.q
        shrink = (self.p[0] - p[0]).exp()
        width = min(p_logits.shape[1], q_logits.shape[1])
        e = (p_logits[:, :width] - p[0].unsqueeze(1)).exp()
        difference = torch.linalg.vecdot(e, p_logits[:, :width] - q_logits[:, :width])
        return KLSums(p, q, self.ratio * shrink + difference, self.common * shrink + e.sum(dim=1))

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-normalisers of both sides, KL, and the teacher's probability of the common columns, (m,)."""
        p_normaliser, q_normaliser = (sums[0] + sums[1].log() for sums in (self.p, self.q))
        ratio, common = self.ratio / self.p[1], self.common / self.p[1]
        kl = ratio - common * (p_normaliser - q_normaliser)
        kl = kl.masked_fill(kl > 1e10, torch.inf)  # a word that the student can never say
        return p_normaliser, q_normaliser, kl, common


def kl_gradients(
    p_logits: Tensor,
    q_logits: Tensor,
    p_normaliser: Tensor,
    q_normaliser: Tensor,
    kl: Tensor,
    common: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of a tile's logits, (m, w_T) and (m, w_S); what belongs to tokens is (m, 1).

    d KL / d z_T = p (1[both] (log p - log q + 1) - KL - C),  C = sum of p over the columns that both have
    d KL / d z_S = q C - 1[both] p
    """
    log_p, log_q = p_logits - p_normaliser, q_logits - q_normaliser
    width = min(p_logits.shape[1], q_logits.shape[1])
    p, both = log_p.exp(), log_p[:, :width].exp()
    p_grad, q_grad = -p * (kl + common), log_q.exp() * common
    p_grad[:, :width] += both * (log_p[:, :width] - log_q[:, :width] + 1)
    q_grad[:, :width] -= both
    return p_grad.mul_(grad), q_grad.mul_(grad)
