"""How far one model's next-token distribution lies from another's: two sampled estimators and the sum."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.log_probs import (
    HeadGradients,
    LogitScale,
    add_block,
    block_logits,
    block_size,
    blocks,
    check_temperature,
    new_sums,
    scaled_log_softmax,
    wide,
    without_autocast,
)


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
    teacher = teacher_hidden, teacher_weight, teacher_bias
    student = student_hidden, student_weight, student_bias
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
        """Add up over the vocabulary, block by block."""
        num_words = len(teacher_weight), len(student_weight)
        nowhere = torch.full_like(teacher_hidden[:, 0], -1, dtype=torch.long)  # no target
        with without_autocast(teacher_hidden):
            states = wide(teacher_hidden), wide(student_hidden)
            p_sums, q_sums = new_sums(states[0]), new_sums(states[1])
            ratio = common = torch.zeros_like(p_sums[0])  # sums over the columns that both have
            for block in blocks(2 * len(teacher_hidden), max(num_words), logits_mib):
                p_block, q_block = (slice(block.start, min(block.stop, number)) for number in num_words)
                largest = p_sums[0]
                if block.start < num_words[0]:
                    p_logits = block_logits(states[0], teacher_weight, teacher_bias, p_block, teacher_scale)
                    p_sums = add_block(*p_sums, p_logits, nowhere)
                if block.start < num_words[1]:
                    q_logits = block_logits(states[1], student_weight, student_bias, q_block, student_scale)
                    q_sums = add_block(*q_sums, q_logits, nowhere)
                shrink = (largest - p_sums[0]).exp()
                ratio, common = ratio * shrink, common * shrink
                if block.start < min(num_words):
                    width = min(p_logits.shape[1], q_logits.shape[1])
                    e = (p_logits[:, :width] - p_sums[0].unsqueeze(1)).exp()
                    ratio += torch.linalg.vecdot(e, p_logits[:, :width] - q_logits[:, :width])
                    common += e.sum(dim=1)
            p_normaliser, q_normaliser = (sums[0] + sums[1].log() for sums in (p_sums, q_sums))
            ratio, common = ratio / p_sums[1], common / p_sums[1]
            kl = ratio - common * (p_normaliser - q_normaliser)
        inputs = teacher_hidden, teacher_weight, teacher_bias, student_hidden, student_weight, student_bias
        ctx.save_for_backward(*inputs, p_normaliser, q_normaliser, kl, common)
        ctx.options = teacher_scale, student_scale, logits_mib
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute each block again."""
        *inputs, p_normaliser, q_normaliser, kl, common = ctx.saved_tensors
        teacher_scale, student_scale, logits_mib = ctx.options
        teacher, student = tuple(inputs[:3]), tuple(inputs[3:])
        num_words = len(teacher[1]), len(student[1])
        grad, kl, common = grad.unsqueeze(1), kl.unsqueeze(1), common.unsqueeze(1)  # (M, 1)
        with without_autocast(teacher[0]):
            p_grads = HeadGradients(teacher, ctx.needs_input_grad[:3])
            q_grads = HeadGradients(student, ctx.needs_input_grad[3:6])
            for block in blocks(2 * len(grad), max(num_words), logits_mib):
                p_block, q_block = (slice(block.start, min(block.stop, number)) for number in num_words)
                width = max(0, min(block.stop, *num_words) - block.start)  # of the columns that both have
                p_logits = block_logits(p_grads.states, teacher[1], teacher[2], p_block, teacher_scale)
                q_logits = block_logits(q_grads.states, student[1], student[2], q_block, student_scale)
                log_p, log_q = p_logits - p_normaliser.unsqueeze(1), q_logits - q_normaliser.unsqueeze(1)
                p, q = log_p.exp(), log_q.exp()
                both = p[:, :width]  # p of the columns that both have
                # d KL / d z_T = p (1[both] (log p - log q + 1) - KL - sum of p over both)
                p_grad = -p * (kl + common)
                log_ratio = (log_p[:, :width] - log_q[:, :width]).masked_fill(both == 0, 0.0)
                p_grad[:, :width] += both * (log_ratio + 1)
                # d KL / d z_S = q * sum of p over both - 1[both] p
                q_grad = q * common
                q_grad[:, :width] -= both
                for grads, scale, gradient, logits, own in (
                    (p_grads, teacher_scale, p_grad, p_logits, p_block),
                    (q_grads, student_scale, q_grad, q_logits, q_block),
                ):
                    if logits.shape[1]:
                        grads.add(scale.pull_back_(gradient.mul_(grad), logits), own)
        return (*p_grads.of_inputs(), *q_grads.of_inputs(), None, None, None)
