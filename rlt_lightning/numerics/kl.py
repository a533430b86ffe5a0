"""How far one model's next-token distribution lies from another's: two sampled estimators and the sum."""

import torch
from torch import Tensor

from rlt_lightning.numerics.log_probs import Head, run_in_chunks, scaled_log_softmax


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


def head_exact_kl(
    teacher_hidden: Tensor,
    teacher_head: Head,
    student_hidden: Tensor,
    student_head: Head,
    teacher_temperature: float = 1.0,
    student_temperature: float = 1.0,
    chunk_size: int = 1024,
) -> Tensor:
    """Return `exact_kl` of two heads, keeping logits of `chunk_size` tokens at a time.

    Args:
        teacher_hidden: The teacher's hidden states, (M, H_T). M may be 0.
        teacher_head: The teacher's language-model head, (m, H_T) -> (m, V_T).
        student_hidden: The student's hidden states before the same M tokens, (M, H_S).
        student_head: The student's language-model head, (m, H_S) -> (m, V_S).
        teacher_temperature: Divides the teacher's logits.
        student_temperature: Divides the student's logits.
        chunk_size: Tokens per call of the heads.

    Returns:
        (M,), nats, with gradient to hidden states and heads where they ask for it.

    Raises:
        ValueError: If a temperature or the chunk size is not positive.
    """

    def compare(teacher_hidden: Tensor, student_hidden: Tensor) -> Tensor:
        teacher_logits, student_logits = teacher_head(teacher_hidden), student_head(student_hidden)
        return exact_kl(teacher_logits, student_logits, teacher_temperature, student_temperature)

    return torch.cat(run_in_chunks(compare, teacher_hidden, student_hidden, chunk_size=chunk_size))
