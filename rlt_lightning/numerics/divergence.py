"""How far a student's next-token distributions are from a teacher's: the losses of on-policy distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlt_lightning.numerics.head import IMPOSSIBLE, Head, block_size, impossible_as_inf
from rlt_lightning.numerics.jsd import linear_jsd, log_mixture
from rlt_lightning.numerics.kl import linear_exact_kl, log_prob_kl, log_ratio_kl
from rlt_lightning.numerics.log_probs import check_temperature, scaled_log_softmax
from rlt_lightning.numerics.spans import Span, span_sums
from rlt_lightning.numerics.top_words import TopLogits, linear_top_logits

# Two words that change places in the teacher's distribution.
Exchanged = tuple[int, int] | None


@dataclass(frozen=True)
class Divergence:
    """Which divergence of two next-token distributions, S of the student and T of the teacher.

    reverse   KL(S || T) = sum_v S_v (log S_v - log T_v)
    forward   KL(T || S)
    jsd       beta KL(T || M) + (1 - beta) KL(S || M),  M = beta T + (1 - beta) S

    The third is the generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649, Eq. 1), in nats at most
    log 2 and never infinite. Divided by beta it tends to `forward` as beta tends to 0; divided by 1 - beta to
    `reverse` as beta tends to 1.

    With `top_k` the sums run over k words instead of all, as if a vocabulary had these words and one further
    word, the tail, that stands for all others (SDPO, arXiv:2601.20802; TA-OPD, arXiv:2608.14728). This is
    never more than the divergence over all words, and equal to it if the others have the same ratio S / T.
    Without the tail both sides are normalised over the k words: probability that the student moves to other
    words then costs nothing.

    Example:
        `Divergence("jsd", beta=0.1)`; `Divergence(top_k=100)` is reverse KL over 100 words and the tail.

    Args:
        kind: reverse makes the student avoid what the teacher would not say; forward makes it say all that
            the teacher might; jsd is between the two.
        beta: Weight of the teacher in the mixture M of jsd, in (0, 1).
        top_k: How many words; None: all.
        top_k_of: Whose likeliest words. SDPO takes the student's: they have nearly all of the weights S_v of
            reverse KL, and they are what the student samples.
        tail: Whether all further words count as one.

    Raises:
        ValueError: If beta or `top_k` is out of range, or a name is unknown.
    """

    kind: Literal["reverse", "forward", "jsd"] = "reverse"
    beta: float = 0.5
    top_k: int | None = None
    top_k_of: Literal["student", "teacher"] = "student"
    tail: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("reverse", "forward", "jsd"):
            raise ValueError(f"kind must be reverse, forward or jsd, but it is '{self.kind}'. Choose one.")
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta must be above 0 and below 1, but it is {self.beta}. "
                "For KL(teacher || student) set kind to forward, for KL(student || teacher) to reverse."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, but it is {self.top_k}. Leave it out for all words.")
        if self.top_k_of not in ("student", "teacher"):
            raise ValueError(f"top_k_of must be student or teacher, but it is '{self.top_k_of}'. Choose one.")

    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence, (M,), nats, of the log-probs of the same words, (M, K) each."""
        if self.kind == "reverse":
            return log_prob_kl(student, teacher)
        if self.kind == "forward":
            return log_prob_kl(teacher, student)
        mixture = log_mixture(student, teacher, self.beta)
        return self.beta * log_prob_kl(teacher, mixture) + (1 - self.beta) * log_prob_kl(student, mixture)


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    options: Divergence = Divergence(),
    student_temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    exchanged: Exchanged = None,
) -> Tensor:
    """Return how far each of the student's next-token distributions is from the teacher's.

    Each side is normalised over its own V columns. Where V_S and V_T differ the sums run over the first
    min(V_S, V_T) columns, as in `exact_kl`: the others are no tokens.

    Args:
        student_logits: (M, V_S), any floating type.
        teacher_logits: (M, V_T), any floating type.
        options: Which divergence.
        student_temperature: Divides the student's logits.
        teacher_temperature: Divides the teacher's logits.
        exchanged: Two columns of the teacher's logits that change places; None: all keep their own.

    Returns:
        (M,), nats, fp32 (float64 for float64 logits), with gradient to both. Infinite if one side gives a
        word no probability (logit -inf) and the other, by which `reverse` or `forward` weighs, gives it some;
        training must stop there, since no gradient can mend it.

    Raises:
        ValueError: If a temperature is not positive, or an exchanged word is none of the teacher's.
    """
    check_exchanged(exchanged, teacher_logits.shape[-1])
    if exchanged is not None:
        columns = torch.arange(teacher_logits.shape[-1], device=teacher_logits.device)
        columns[list(exchanged)] = columns[list(exchanged[::-1])]
        teacher_logits = teacher_logits[:, columns]
    num_words = min(student_logits.shape[-1], teacher_logits.shape[-1])
    student = scaled_log_softmax(student_logits, student_temperature)[:, :num_words]  # (M, V)
    teacher = scaled_log_softmax(teacher_logits, teacher_temperature)[:, :num_words]  # (M, V)
    if options.top_k is not None:
        chooser = student if options.top_k_of == "student" else teacher
        words = chooser.topk(min(options.top_k, num_words), dim=1).indices  # (M, k)
        student, teacher = (chosen_log_probs(side, words, options.tail) for side in (student, teacher))
    return options.of_log_probs(student, teacher)


def chosen_log_probs(log_probs: Tensor, words: Tensor, tail: bool) -> Tensor:
    """Return the log-probs of k words, (M, k), from all, (M, V): with the tail, or normalised over the k."""
    chosen = log_probs.gather(1, words)
    if not tail:
        return chosen.log_softmax(dim=1)
    # logsumexp has no gradient where all are -inf.
    others = log_probs.scatter(1, words, -torch.inf).clamp(min=IMPOSSIBLE)
    return torch.cat([chosen, impossible_as_inf(others.logsumexp(dim=1, keepdim=True))], dim=1)


def linear_divergence(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    options: Divergence = Divergence(),
    exchanged: Exchanged = None,
    logits_mib: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return `divergence` of two heads' logits, of which at most `logits_mib` exist at a time.

    Each head's logits are computed this often, forward and backward: reverse and forward KL 1 + 1, jsd
    2 + 1 (the mixture needs both normalisers first), with `top_k` 1 + 1 and the teacher's 1 + 0.

    Args:
        student_hidden: The student's hidden states, (M, H_S). M may be 0.
        student: The student's language-model head, V_S words, with its temperature.
        teacher_hidden: The teacher's hidden states before the same M tokens, (M, H_T).
        teacher: The teacher's language-model head, V_T words, with its temperature.
        options: Which divergence.
        exchanged: Two of the teacher's words that change places; the head's weight is not copied.
        logits_mib: Memory for logits, MiB, as in `linear_log_probs`.
        compiled: Fuse the arithmetic on a tile with torch.compile.

    Returns:
        (M,), nats, fp32 or float64, with gradient to the student's hidden states, weight and bias only.

    Raises:
        ValueError: If a temperature or `logits_mib` is not positive, or an exchanged word is none of the
            teacher's.
    """
    check_temperature(student.scale.temperature)
    check_temperature(teacher.scale.temperature)
    check_exchanged(exchanged, len(teacher.weight))
    teacher = teacher._replace(scale=teacher.scale._replace(exchanged=exchanged))
    sides = student_hidden, student, teacher_hidden, teacher
    logits_mib = block_size(logits_mib, student_hidden)
    if options.top_k is not None:
        of_teacher = options.top_k_of == "teacher"
        found = linear_top_logits(*sides, options.top_k, of_teacher, logits_mib, compiled)
        return options.of_log_probs(*(top_log_probs(side, options.tail) for side in found))
    if options.kind == "reverse":
        return linear_exact_kl(*sides, logits_mib, compiled, learning=(True, False))
    if options.kind == "forward":
        return linear_exact_kl(*sides[2:], *sides[:2], logits_mib, compiled, learning=(False, True))
    return linear_jsd(*sides, options.beta, logits_mib, compiled)


def check_exchanged(exchanged: Exchanged, num_words: int) -> None:
    """Raise a ValueError unless both words are the teacher's."""
    if exchanged is not None and not all(0 <= word < num_words for word in exchanged):
        raise ValueError(
            f"Words to be exchanged must be at least 0 and below {num_words}, the teacher's vocabulary, but "
            f"they are {exchanged}. Take them from its tokenizer."
        )


def top_log_probs(logits: TopLogits, tail: bool) -> Tensor:
    """Return what `chosen_log_probs` does, from sums over the vocabulary."""
    if not tail:
        return logits.top.log_softmax(dim=1)
    every = torch.cat([logits.top, logits.rest.unsqueeze(1), logits.beyond.unsqueeze(1)], dim=1)
    return every.log_softmax(dim=1)[:, :-1]


def sampled_advantages(
    student_log_probs: Tensor, teacher_log_probs: Tensor, spans: Sequence[Span] | None = None
) -> Tensor:
    """Return how much likelier each token that the student sampled is to the teacher, as an advantage.

    A_t = log p_T(token t) - log p_S(token t)

    With this advantage the policy gradient is that of reverse KL, one token at a time. With what was sampled
    before a token held fixed,

    grad KL(S || T) = sum_v S_v grad(log S_v) (log S_v - log T_v) + sum_v grad S_v = E_S[-A grad log S_v]

    The second sum is 0, since probabilities sum to 1. The right side is the mean gradient of the policy loss
    -A log p_S over tokens sampled from S. What a token does to later ones is left out: a discount of 0
    (Thinking Machines, "On-Policy Distillation", 2025; over all words: GKD, arXiv:2306.13649). Normalising
    these advantages by group would change the loss, of which they are the gradient's scale.

    For a teacher with another tokenizer the unit is a span, the shortest piece of text that is whole tokens
    of both models. The student's choice of a span has the log-prob sum_t log p_S(t), so each of its tokens
    gets the log-ratio of the whole span:

    A_t = log p_T(span) - log p_S(span)   for each of the student's tokens t in the span

    Args:
        student_log_probs: Of the tokens that the student sampled, at the sampling temperature, (K,), nats.
        teacher_log_probs: Of the same tokens under the teacher, (K,), nats; with `spans`, of the teacher's
            tokens of the same text, (L,).
        spans: Tokens of the teacher and of the student in each span, in order, covering all tokens of both;
            None: both models have the same tokens.

    Returns:
        (K,), nats, without gradient.

    Raises:
        ValueError: If the numbers of tokens do not agree.
    """
    student, teacher = student_log_probs.detach(), teacher_log_probs.detach()
    counts = [len(teacher), len(student)]
    expected = counts[1:] * 2 if spans is None else [sum(span[side] for span in spans) for side in (0, 1)]
    if counts != expected:
        raise ValueError(
            f"There must be {expected[0]} log-probs of the teacher and {expected[1]} of the student, but "
            f"there are {counts[0]} and {counts[1]}. Leave out tokens that are in no span."
        )
    if spans is None:
        return log_ratio_kl(teacher, student)
    num_teacher, num_student = ([span[side] for span in spans] for side in (0, 1))
    advantages = log_ratio_kl(span_sums(teacher, num_teacher), span_sums(student, num_student))  # (J,)
    return advantages.repeat_interleave(torch.tensor(num_student, dtype=torch.long, device=student.device))
