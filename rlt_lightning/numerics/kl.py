"""How far one model's next-token distribution lies from another's: two sampled estimators and the sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.head import (
    Head,
    HeadBlock,
    HeadGradients,
    LogitScale,
    VocabularySums,
    add_block,
    block_size,
    full_precision_on_cpu,
    in_autocast_dtype,
    kernel,
    tiles,
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
    return log_prob_kl(log_p, log_q)


def log_prob_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_v p_v (log p_v - log q_v), (M,), nats, of log-probs (M, V); inf if only q lacks a word."""
    # A word that p cannot say adds nothing, though its log-ratio is -inf or NaN.
    log_ratio = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
    return (log_p.exp() * log_ratio).sum(dim=-1)


def linear_exact_kl(
    teacher_hidden: Tensor,
    teacher: Head,
    student_hidden: Tensor,
    student: Head,
    logits_mib: int | None = None,
    compiled: bool = False,
    learning: tuple[bool, bool] = (True, True),
) -> Tensor:
    """Return `exact_kl` of two heads' logits, of which at most `logits_mib` exist at a time.

    Args:
        teacher_hidden: The teacher's hidden states, (M, H_T). M may be 0.
        teacher: The teacher's language-model head, V_T words, with its temperature.
        student_hidden: The student's hidden states before the same M tokens, (M, H_S).
        student: The student's language-model head, V_S words, with its temperature.
        logits_mib: Memory for logits, MiB, as in `linear_log_probs`.
        compiled: Fuse the arithmetic on a tile with torch.compile.
        learning: Whether the teacher's tensors get gradients, and the student's.

    Returns:
        (M,), nats, fp32 or float64, with gradient to hidden states, weights and biases.

    Raises:
        ValueError: If a temperature or `logits_mib` is not positive.
    """
    check_temperature(teacher.scale.temperature)
    check_temperature(student.scale.temperature)
    logits_mib = block_size(logits_mib, teacher_hidden)
    options = PairOptions(teacher.scale, student.scale, logits_mib, compiled, learning)
    return LinearExactKL.apply(options, *pair_inputs(teacher_hidden, teacher, student_hidden, student))


class PairOptions(NamedTuple):
    """What the sums over two heads' logits need besides tensors; see `linear_exact_kl`."""

    p_scale: LogitScale
    q_scale: LogitScale
    logits_mib: int
    compiled: bool
    # Whether p's tensors get gradients, and q's.
    learning: tuple[bool, bool] = (True, True)


def pair_inputs(p_hidden: Tensor, p: Head, q_hidden: Tensor, q: Head) -> tuple[Tensor | None, ...]:
    """Return the tensors that a function of two heads is applied to; `hidden_and_heads` reads them."""
    return in_autocast_dtype(p_hidden), p.weight, p.bias, in_autocast_dtype(q_hidden), q.weight, q.bias


class LinearExactKL(torch.autograd.Function):
    """See `linear_exact_kl`. In the code p is the teacher and q the student.

    The inputs are the teacher's hidden states, weight and bias, then the student's.
    """

    @staticmethod
    def forward(ctx: Any, options: PairOptions, *inputs: Any) -> Tensor:
        """Add up over the vocabulary, tile by tile."""
        p_hidden, p_head, q_hidden, q_head = hidden_and_heads(options, inputs)
        plus = kernel(add_kl_block, options.compiled)
        with without_autocast(p_hidden):
            p_states, q_states = full_precision_on_cpu(p_hidden), full_precision_on_cpu(q_hidden)
            rows, blocks = pair_tiles(options, inputs)
            sums = [KLSums.of_nothing(p_states[row]) for row in rows]
            for block in blocks:
                p_block = HeadBlock(p_head, block, p_states.dtype)
                q_block = HeadBlock(q_head, block, q_states.dtype)
                for i, row in enumerate(rows):
                    sums[i] = plus(sums[i], p_block.logits(p_states[row]), q_block.logits(q_states[row]))
            results = (row_sums.results() for row_sums in sums)
            totals = KLTotals(*map(torch.cat, zip(*results, strict=True)))  # (M,) each
        ctx.save_for_backward(*inputs, *totals)
        ctx.options = options
        return totals.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute each tile again."""
        inputs, totals = ctx.saved_tensors[:6], KLTotals(*ctx.saved_tensors[6:])
        p_hidden, p_head, q_hidden, q_head = hidden_and_heads(ctx.options, inputs)
        gradients_of = kernel(kl_gradients, ctx.options.compiled)
        with without_autocast(p_hidden):
            p_learns, q_learns = ctx.options.learning
            p_grads = HeadGradients(p_hidden, p_head, [p_learns and n for n in ctx.needs_input_grad[1:4]])
            q_grads = HeadGradients(q_hidden, q_head, [q_learns and n for n in ctx.needs_input_grad[4:7]])
            p_states, q_states = p_grads.states, q_grads.states
            rows, blocks = pair_tiles(ctx.options, inputs)
            for block in blocks:
                p_block = HeadBlock(p_head, block, p_states.dtype)
                q_block = HeadBlock(q_head, block, q_states.dtype)
                for row in rows:
                    p_logits, q_logits = p_block.logits(p_states[row]), q_block.logits(q_states[row])
                    row_totals = KLTotals(*(values[row].unsqueeze(1) for values in totals))  # (m, 1)
                    p_grad, q_grad = gradients_of(
                        *(p_logits, q_logits, row_totals, grad[row].unsqueeze(1)),
                        *(p_grads.any_needed, q_grads.any_needed),
                    )
                    p_grads.add(p_block, p_grad, p_logits, row)
                    q_grads.add(q_block, q_grad, q_logits, row)
                p_grads.finish(block)
                q_grads.finish(block)
        return (None, *p_grads.of_inputs(), *q_grads.of_inputs())


def hidden_and_heads(options: PairOptions, inputs: tuple[Any, ...]) -> tuple[Tensor, Head, Tensor, Head]:
    """Return the hidden states and the head of p, and those of q, from `pair_inputs`."""
    p_hidden, p_weight, p_bias, q_hidden, q_weight, q_bias = inputs
    p_head = Head(p_weight, p_bias, options.p_scale)
    return p_hidden, p_head, q_hidden, Head(q_weight, q_bias, options.q_scale)


def pair_tiles(options: PairOptions, inputs: tuple[Any, ...]) -> tuple[list[slice], list[slice]]:
    """Cut tokens and vocabulary so that a tile of each side's logits fits."""
    p_hidden, p_head, q_hidden, q_head = hidden_and_heads(options, inputs)
    hidden_size = max(p_hidden.shape[1], q_hidden.shape[1])
    num_words = max(len(p_head.weight), len(q_head.weight))
    return tiles(len(p_hidden), hidden_size, num_words, options.logits_mib, num_heads=2)


class KLTotals(NamedTuple):
    """What is known of each token once the whole vocabulary has been seen; all (m,)."""

    p_normaliser: Tensor  # log-normaliser of the teacher's logits
    q_normaliser: Tensor
    kl: Tensor  # nats
    common: Tensor  # the teacher's probability of the columns that both sides have


class KLSums(NamedTuple):
    """Running sums over the vocabulary; `ratio` and `common` are over the columns that both sides have."""

    p: VocabularySums
    q: VocabularySums
    ratio: Tensor  # sum of e (z_T - z_S), e = exp(z_T - largest z_T), (m,)
    common: Tensor  # sum of e, (m,)

    @classmethod
    def of_nothing(cls, states: Tensor) -> KLSums:
        """Return the sums before the first block, for hidden states (m, H)."""
        sums = VocabularySums.of_nothing(states)
        return cls(sums, sums, sums.normaliser, sums.normaliser)

    def results(self) -> KLTotals:
        """Return what the finished sums say of each token."""
        p_normaliser, q_normaliser = self.p.log_normaliser(), self.q.log_normaliser()
        ratio, common = self.ratio / self.p.normaliser, self.common / self.p.normaliser
        kl = ratio - common * (p_normaliser - q_normaliser)
        kl = kl.masked_fill(kl > 1e10, torch.inf)  # a word that the student can never say
        return KLTotals(p_normaliser, q_normaliser, kl, common)


def add_kl_block(sums: KLSums, p_logits: Tensor, q_logits: Tensor) -> KLSums:
    """Return the sums with one more tile; the smaller vocabulary may have fewer columns there."""
    nowhere = torch.full_like(sums.common, -1, dtype=torch.long)  # no target
    p = add_block(sums.p, p_logits, nowhere, False) if p_logits.shape[1] else sums.p
    q = add_block(sums.q, q_logits, nowhere, False) if q_logits.shape[1] else sums.q
    shrink = (sums.p.largest - p.largest).exp()
    width = min(p_logits.shape[1], q_logits.shape[1])
    e = (p_logits[:, :width] - p.largest.unsqueeze(1)).exp()
    difference = torch.linalg.vecdot(e, p_logits[:, :width] - q_logits[:, :width])
    return KLSums(p, q, sums.ratio * shrink + difference, sums.common * shrink + e.sum(dim=1))


def kl_gradients(
    p_logits: Tensor, q_logits: Tensor, totals: KLTotals, grad: Tensor, of_p: bool, of_q: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a tile's logits, (m, w_T) and (m, w_S); totals and grad are (m, 1).

    d KL / d z_T = p (1[both] (log p - log q + 1) - KL - C),  C = sum of p over the columns that both have
    d KL / d z_S = q C - 1[both] p

    `of_p` and `of_q` say which are needed; the other is None.
    """
    log_p, log_q = p_logits - totals.p_normaliser, q_logits - totals.q_normaliser
    width = min(p_logits.shape[1], q_logits.shape[1])
    p, both = log_p.exp(), log_p[:, :width].exp()
    p_grad, q_grad = None, None
    if of_p:
        p_grad = -p * (totals.kl + totals.common)
        p_grad[:, :width] += both * (log_p[:, :width] - log_q[:, :width] + 1)
        p_grad.mul_(grad)
    if of_q:
        q_grad = log_q.exp() * totals.common
        q_grad[:, :width] -= both
        q_grad.mul_(grad)
    return p_grad, q_grad
