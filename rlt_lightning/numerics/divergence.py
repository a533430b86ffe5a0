"""How far two models' next-token distributions are from each other: r_KL, and the losses of distillation.

    from sampled tokens       log_ratio_kl (k1), schulman_kl (k3); sampled_advantages
    over all words            divergence, of full logits (M, V): short, for tests and for reading
                              linear_divergence, of hidden states: tile by tile, never holding (M, V)

In tiles a divergence is a sum over words, sum_v f(log S_v, log T_v), and needs one more sum for its gradient:

    kind      f                                              f' = df / d log S
    reverse   S (log S - log T)                              S (log S - log T + 1)
    forward   T (log T - log S)                              -T
    jsd       (1 - beta) S (log S - log M) + beta T (...)    (1 - beta) S (log S - log M)

    d sum f / d z_S = f' - S sum f',  z_S the student's logits

                        forward                                          backward
    reverse, forward    one pass: f is linear in the normalisers         one pass, both heads
    jsd                 two passes: both normalisers, then the sums      one pass, both heads
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_lightning.numerics.head import (
    IMPOSSIBLE,
    Head,
    HeadTiles,
    LogitScale,
    OnlineSoftmax,
    PullBack,
    block_size,
    choose_kernel,
    in_autocast_dtype,
)
from rlt_lightning.numerics.log_probs import check_temperature, scaled_log_softmax
from rlt_lightning.numerics.spans import Span, span_sums


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


@dataclass(frozen=True)
class Divergence:
    """Which divergence of two next-token distributions, S of the student and T of the teacher.

    reverse   KL(S || T) = sum_v S_v (log S_v - log T_v)
    forward   KL(T || S)
    jsd       beta KL(T || M) + (1 - beta) KL(S || M),  M = beta T + (1 - beta) S

    The third is the generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649, Eq. 1), in nats at most
    log 2 and never infinite. Divided by beta it tends to `forward` as beta tends to 0; divided by 1 - beta to
    `reverse` as beta tends to 1.

    Example:
        `Divergence("jsd", beta=0.1)`.

    Args:
        kind: reverse makes the student avoid what the teacher would not say; forward makes it say all that
            the teacher might; jsd is between the two.
        beta: Weight of the teacher in the mixture M of jsd, in (0, 1).

    Raises:
        ValueError: If beta is out of range or set for another kind than jsd, or the kind is unknown.
    """

    kind: Literal["reverse", "forward", "jsd"] = "reverse"
    beta: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("reverse", "forward", "jsd"):
            raise ValueError(f"kind must be reverse, forward or jsd, but it is '{self.kind}'. Choose one.")
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta must be above 0 and below 1, but it is {self.beta}. "
                "For KL(teacher || student) set kind to forward, for KL(student || teacher) to reverse."
            )
        if self.kind != "jsd" and self.beta != 0.5:
            raise ValueError(
                f"beta is the weight of jsd and does nothing with kind {self.kind}, but it is {self.beta}. "
                "Leave it out, or set kind to jsd."
            )

    def of_log_probs(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence, (M,), nats, of the log-probs of the same words, (M, K) each."""
        if self.kind == "reverse":
            return log_prob_kl(student, teacher)
        if self.kind == "forward":
            return log_prob_kl(teacher, student)
        mixture = log_mixture(student, teacher, self.beta)
        return self.beta * log_prob_kl(teacher, mixture) + (1 - self.beta) * log_prob_kl(student, mixture)


def log_prob_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_v p_v (log p_v - log q_v), (M,), nats, of log-probs (M, V); inf if only q lacks a word."""
    # A word that p cannot say adds nothing, though its log-ratio is -inf or NaN.
    log_ratio = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)
    return (log_p.exp() * log_ratio).sum(dim=-1)


def log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return log(beta T + (1 - beta) S) of log-probs of one shape, nats."""
    # logaddexp has no gradient where both are -inf.
    student, teacher = student.clamp(min=IMPOSSIBLE), teacher.clamp(min=IMPOSSIBLE)
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    options: Divergence = Divergence(),
    student_temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """Return how far each of the student's next-token distributions is from the teacher's.

    Each side is normalised over its V columns. Where V_S and V_T differ the sums run over the first
    min(V_S, V_T) columns: models of one tokenizer pad their embeddings to different sizes, and those rows
    are no tokens.

    Args:
        student_logits: (M, V_S), any floating type.
        teacher_logits: (M, V_T), any floating type.
        options: Which divergence.
        student_temperature: Divides the student's logits.
        teacher_temperature: Divides the teacher's logits.

    Returns:
        (M,), nats, fp32 (float64 for float64 logits), with gradient to both. Infinite if one side gives a
        word no probability (logit -inf) and the other, by which `reverse` or `forward` weighs, gives it some;
        training must stop there, since no gradient can mend it.

    Raises:
        ValueError: If a temperature is not positive.
    """
    num_words = min(student_logits.shape[-1], teacher_logits.shape[-1])
    student = scaled_log_softmax(student_logits, student_temperature)[:, :num_words]  # (M, V)
    teacher = scaled_log_softmax(teacher_logits, teacher_temperature)[:, :num_words]  # (M, V)
    return options.of_log_probs(student, teacher)


def linear_divergence(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    options: Divergence = Divergence(),
    logits_mib: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return `divergence` of two heads' logits, of which at most `logits_mib` exist at a time.

    Args:
        student_hidden: The student's hidden states, (M, H_S). M may be 0.
        student: The student's language-model head, V_S words, with its temperature.
        teacher_hidden: The teacher's hidden states before the same M tokens, (M, H_T).
        teacher: The teacher's language-model head, V_T words, with its temperature.
        options: Which divergence.
        logits_mib: Memory for logits, MiB, as in `linear_log_probs`.
        compiled: Fuse the arithmetic on a tile with torch.compile.

    Returns:
        (M,), nats, fp32 or float64, with gradient to the student's hidden states, weight and bias only.

    Raises:
        ValueError: If a temperature or `logits_mib` is not positive.
    """
    check_temperature(student.scale.temperature)
    check_temperature(teacher.scale.temperature)
    logits_mib = block_size(logits_mib, student_hidden)
    pair = PairOptions(options, student.scale, teacher.scale, logits_mib, compiled)
    of_student = in_autocast_dtype(student_hidden), student.weight, student.bias
    of_teacher = in_autocast_dtype(teacher_hidden), teacher.weight, teacher.bias
    return LinearDivergence.apply(pair, *of_student, *of_teacher)


class PairOptions(NamedTuple):
    """What the sums over two heads' logits need besides tensors; see `linear_divergence`."""

    divergence: Divergence
    student_scale: LogitScale
    teacher_scale: LogitScale
    logits_mib: int
    compiled: bool

    def tiles(self, inputs: Sequence[Any]) -> HeadTiles:
        """Return the tiles of both heads.

        Args:
            inputs: Hidden states, weight and bias of the student, then those of the teacher.
        """
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = inputs
        student = Head(weight, bias, self.student_scale)
        teacher = Head(teacher_weight, teacher_bias, self.teacher_scale)
        return HeadTiles([(hidden, student), (teacher_hidden, teacher)], self.logits_mib)


class Totals(NamedTuple):
    """What is known of each token once the whole vocabulary has been seen; (M,) each."""

    student: Tensor  # log-normaliser of the student's logits
    teacher: Tensor
    slopes: Tensor  # sum_v f'_v


class LinearDivergence(torch.autograd.Function):
    """See `linear_divergence`. The inputs are those of `PairOptions.tiles`."""

    @staticmethod
    def forward(ctx: Any, options: PairOptions, *inputs: Any) -> Tensor:
        """Add up over the vocabulary, tile by tile."""
        compute = sums_and_totals if options.divergence.kind == "jsd" else kl_and_totals
        values, totals = compute(options.tiles(inputs), options.divergence, options.compiled)
        ctx.save_for_backward(*inputs, *totals)
        ctx.options = options
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute each tile again."""
        options: PairOptions = ctx.options
        inputs, totals = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
        gradient_of = choose_kernel(divergence_gradient, options.compiled)
        chosen = options.divergence.kind, options.divergence.beta

        def differentiate_tile(
            pull_back: PullBack, student_logits: Tensor, teacher_logits: Tensor, row: slice, block: slice
        ) -> Any:
            row_totals = Totals(*(values[row].unsqueeze(1) for values in totals))  # (m, 1) each
            row_grad = grad[row].unsqueeze(1)
            return gradient_of(pull_back, student_logits, teacher_logits, row_totals, row_grad, *chosen)

        of_student = options.tiles(inputs).differentiate(ctx.needs_input_grad[1:4], differentiate_tile)
        return (None, *of_student, None, None, None)


def divergence_gradient(
    pull_back: PullBack,
    student_logits: Tensor,
    teacher_logits: Tensor,
    totals: Totals,
    grad: Tensor,
    kind: str,
    beta: float,
) -> tuple[Tensor, Tensor | None]:
    """Return `pull_back` of the gradient of a tile's logits of the student, f' - S sum f', (m, w_S).

    Totals and the gradient of the divergence, `grad`, are (m, 1).
    """
    width = min(student_logits.shape[1], teacher_logits.shape[1])  # of the words that both have
    log_s, log_t = student_logits - totals.student, teacher_logits[:, :width] - totals.teacher
    if kind == "reverse":
        slopes = (log_s[:, :width] - log_t).add_(1)
    elif kind == "forward":
        slopes = -log_t.exp_()
    else:
        slopes = (log_s[:, :width] - log_mixture(log_s[:, :width], log_t, beta)).mul_(1 - beta)
    s = log_s.exp_()
    if kind != "forward":
        slopes.mul_(s[:, :width])
    gradient = s.mul_(-totals.slopes)
    gradient[:, :width] += slopes
    return pull_back(gradient.mul_(grad), student_logits)


class KLSums(NamedTuple):
    """Running sums of KL(p || q) for each of m tokens, e = exp(z_p - largest z_p)."""

    p: OnlineSoftmax
    q: OnlineSoftmax
    ratio: Tensor  # sum of e (z_p - z_q) over the words that both sides have, (m,)
    common: Tensor  # sum of e over these, (m,)


def kl_and_totals(tiles: HeadTiles, options: Divergence, compiled: bool) -> tuple[Tensor, Totals]:
    """Return reverse or forward KL, (M,), in one pass: its terms are linear in both log-normalisers."""
    add = choose_kernel(add_kl_block, compiled)
    reverse = options.kind == "reverse"

    def start(row: slice) -> KLSums:
        zeros = tiles.zeros(row)
        return KLSums(OnlineSoftmax.start(zeros), OnlineSoftmax.start(zeros), zeros, zeros)

    def add_to_sums(sums: KLSums, student: Tensor, teacher: Tensor, row: slice, block: slice) -> KLSums:
        return add(sums, *((student, teacher) if reverse else (teacher, student)))

    sums: KLSums = tiles.add_up(add_to_sums, start)
    p, q = sums.p.log_normaliser(), sums.q.log_normaliser()
    ratio, common = sums.ratio / sums.p.normaliser, sums.common / sums.p.normaliser
    kl = ratio - common * (p - q)
    kl = kl.masked_fill(kl > 1e10, torch.inf)  # a word that q can never say
    return kl, Totals(p, q, kl + common) if reverse else Totals(q, p, -common)


def add_kl_block(sums: KLSums, p_logits: Tensor, q_logits: Tensor) -> KLSums:
    """Return the sums with one more tile; the smaller vocabulary may have fewer columns there, or none."""
    q = sums.q.add(q_logits)[0]  # frees its e
    p, shrink, e = sums.p.add(p_logits)
    width = min(p_logits.shape[1], q_logits.shape[1])
    e = e[:, :width]
    difference = torch.linalg.vecdot(e, p_logits[:, :width] - q_logits[:, :width])
    return KLSums(p, q, sums.ratio * shrink + difference, sums.common * shrink + e.sum(dim=1))


def sums_and_totals(tiles: HeadTiles, options: Divergence, compiled: bool) -> tuple[Tensor, Totals]:
    """Return a jsd, (M,), in two passes: the mixture needs both normalisers."""
    normalise, add = choose_kernel(add_normalisers, compiled), choose_kernel(tile_sums, compiled)

    def start(row: slice) -> tuple[OnlineSoftmax, OnlineSoftmax]:
        return OnlineSoftmax.start(tiles.zeros(row)), OnlineSoftmax.start(tiles.zeros(row))

    def add_to_normalisers(sums: Any, student: Tensor, teacher: Tensor, row: slice, block: slice) -> Any:
        return normalise(sums, student, teacher)

    sides = tiles.add_up(add_to_normalisers, start)
    student_normaliser, teacher_normaliser = (side.log_normaliser() for side in sides)  # (M,)

    def add_to_sums(sums: Any, student: Tensor, teacher: Tensor, row: slice, block: slice) -> Any:
        normalisers = student_normaliser[row].unsqueeze(1), teacher_normaliser[row].unsqueeze(1)
        values, slopes = add(student, teacher, *normalisers, options.beta)
        return sums[0] + values, sums[1] + slopes

    values, slopes = tiles.add_up(add_to_sums, lambda row: (tiles.zeros(row), tiles.zeros(row)))  # (M,)
    return values, Totals(student_normaliser, teacher_normaliser, slopes)


def add_normalisers(
    sums: tuple[OnlineSoftmax, OnlineSoftmax], student_logits: Tensor, teacher_logits: Tensor
) -> tuple[OnlineSoftmax, OnlineSoftmax]:
    """Return both sides' sums with one more tile."""
    return sums[0].add(student_logits)[0], sums[1].add(teacher_logits)[0]


def tile_sums(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student: Tensor,
    teacher: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums of a jsd's f and f' in a tile, (m,) each, given both log-normalisers, (m, 1)."""
    width = min(student_logits.shape[1], teacher_logits.shape[1])
    log_s, log_t = student_logits[:, :width] - student, teacher_logits[:, :width] - teacher
    log_m = log_mixture(log_s, log_t, beta)
    of_student = (1 - beta) * torch.linalg.vecdot(log_s.exp(), log_s - log_m)
    return of_student + beta * torch.linalg.vecdot(log_t.exp(), log_t - log_m), of_student


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
