"""The losses of on-policy distillation by hand, block by block against full logits, and against TRL."""

import itertools
import math
from typing import Any

import pytest
import torch
from cases import full, needs_compiler
from slow_logits import LargestTensor, slow_logits, token_log_probs
from torch import Tensor

from rlt_lightning.numerics import Divergence
from rlt_lightning.numerics.divergence import divergence, linear_divergence, sampled_advantages
from rlt_lightning.numerics.head import Head, LogitScale
from rlt_lightning.numerics.log_probs import linear_log_probs

LN2 = math.log(2)
WORDS = 1100  # a block of 1024 words and a narrower one, in a MiB
FULL = [Divergence("reverse"), Divergence("forward"), Divergence("jsd", beta=0.3)]


def name_of(options: Any) -> str | None:
    return options.kind if isinstance(options, Divergence) else None


def sides(
    num_teacher_words: int = WORDS, dtype: torch.dtype = torch.float64, num_tokens: int = 150
) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states, weight and bias of the student and of the teacher: two rows, two blocks if in a MiB."""
    torch.manual_seed(0)

    def one(num_words: int, size: int) -> list[Tensor]:
        shapes = (num_tokens, size), (num_words, size), (num_words,)
        return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]

    return one(WORDS, 5), one(num_teacher_words, 3)


def in_blocks(
    student: list[Tensor], teacher: list[Tensor], options: Divergence, scales: Any, **kwargs: Any
) -> Tensor:
    s_head, t_head = Head(student[1], student[2], scales[0]), Head(teacher[1], teacher[2], scales[1])
    return linear_divergence(student[0], s_head, teacher[0], t_head, options, logits_mib=1, **kwargs)


def at_once(student: list[Tensor], teacher: list[Tensor], options: Divergence, scales: Any) -> Tensor:
    logits = slow_logits(*student, scales[0]), slow_logits(*teacher, scales[1])
    return divergence(*logits, options, scales[0].temperature, scales[1].temperature)


def same_value_and_gradient(
    ours: Tensor, expected: Tensor, inputs: list[Tensor], rtol: float = 1e-10, atol: float = 1e-10
) -> None:
    """For a random weighting of the tokens."""
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)
    weights = torch.randn(len(expected), dtype=torch.float64).to(expected)
    gradients = torch.autograd.grad(ours @ weights, inputs, retain_graph=True)
    expected_gradients = torch.autograd.grad(expected @ weights, inputs, retain_graph=True)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    # Sums over 150 tokens.
    torch.testing.assert_close(gradients, expected_gradients, rtol=rtol, atol=10 * atol)


# By hand

# S = (4, 2, 1, 1)/8 and T = (1, 2, 4, 1)/8
STUDENT = torch.tensor([[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64).log()
TEACHER = torch.tensor([[1.0, 2.0, 4.0, 1.0]], dtype=torch.float64).log()


def by_hand(options: Divergence, expected: float, **more: Any) -> None:
    found = divergence(STUDENT, TEACHER, options, **more)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_kl_of_four_words():
    # 4/8 log 4 + 2/8 log 1 + 1/8 log 1/4 + 1/8 log 1 = (1 - 1/4) ln 2, in both directions.
    by_hand(Divergence("reverse"), 0.75 * LN2)
    by_hand(Divergence("forward"), 0.75 * LN2)


def test_temperatures_of_both_sides():
    # At temperature 1/2: S = (16, 4, 1, 1)/22, T = (1, 4, 16, 1)/22.
    by_hand(Divergence(), 15 / 22 * 4 * LN2, student_temperature=0.5, teacher_temperature=0.5)
    # Student only, T stays (1, 2, 4, 1)/8.
    expected = sum(s / 22 * math.log(8 * s / 22 / t) for s, t in ((16, 1), (4, 2), (1, 4), (1, 1)))
    by_hand(Divergence(), expected, student_temperature=0.5)


def test_jensen_shannon_of_four_words():
    # beta 1/4: M = (3 S + T)/4 = (13, 8, 7, 4)/32, while S = (16, 8, 4, 4)/32, T = (4, 8, 16, 4)/32.
    kl_student = 16 / 32 * math.log(16 / 13) + 4 / 32 * math.log(4 / 7)
    kl_teacher = 4 / 32 * math.log(4 / 13) + 16 / 32 * math.log(16 / 7)
    by_hand(Divergence("jsd", beta=0.25), 0.25 * kl_teacher + 0.75 * kl_student)


def test_jensen_shannon_tends_to_both_kls():
    student, teacher = torch.randn(2, 50, 30, dtype=torch.float64).unbind()
    for kind, beta in (("forward", 1e-7), ("reverse", 1 - 1e-7)):
        found = divergence(student, teacher, Divergence("jsd", beta=beta)) / 1e-7
        kl = divergence(student, teacher, Divergence(kind))
        torch.testing.assert_close(found, kl, rtol=1e-5, atol=1e-5)


# In blocks


# A vocabulary of another size changes the same lines for every divergence.
@pytest.mark.parametrize(
    ("options", "num_teacher_words"),
    [
        *((options, WORDS) for options in FULL),
        *((options, WORDS + more) for options in FULL[:1] for more in (-100, 100)),
        *(full(options, WORDS + more) for options in FULL[1:] for more in (-100, 100)),
    ],
    ids=name_of,
)
def test_blocks_equal_full_logits(options: Divergence, num_teacher_words: int):
    student, teacher = sides(num_teacher_words)
    # Two words of one block, of two blocks, and none; with and without bias.
    for exchanged, bias in itertools.product([(3, 990), (1050, 17), None], [True, False]):
        if exchanged and num_teacher_words < max(exchanged):
            exchanged = (exchanged[1], 0)
        scales = LogitScale(0.7, 1.3, cap=3.0), LogitScale(0.9, 0.8, exchanged=exchanged)
        ours = [*student[:2], student[2] if bias else None], [*teacher[:2], teacher[2] if bias else None]
        inputs = student if bias else student[:2]
        same_value_and_gradient(in_blocks(*ours, options, scales), at_once(*ours, options, scales), inputs)
    arguments = student, teacher, options, scales[::-1]
    same_value_and_gradient(in_blocks(*arguments), at_once(*arguments), student)


@pytest.mark.parametrize("options", FULL, ids=name_of)
def test_single_precision_is_as_good_as_full_logits(options: Divergence):
    student, teacher = sides()
    exact = at_once(student, teacher, options, (LogitScale(), LogitScale()))
    student32, teacher32 = sides(dtype=torch.float32)
    found = in_blocks(student32, teacher32, options, (LogitScale(), LogitScale()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(found.mean(), student32)
    for ours, theirs in zip(gradients, torch.autograd.grad(exact.mean(), student), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-6)


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("options", FULL, ids=name_of)
def test_compiled_equals_plain(options: Divergence):
    student, teacher = sides(WORDS - 100)
    arguments = student, teacher, options, (LogitScale(0.7), LogitScale(0.9, exchanged=(5, 900)))
    same_value_and_gradient(in_blocks(*arguments, compiled=True), at_once(*arguments), student)


@pytest.mark.parametrize("options", FULL, ids=name_of)
def test_no_tensor_of_tokens_times_words_is_made(options: Divergence):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 1024, 8), torch.randn(2, 5000, 8)
    student = [hidden[0].requires_grad_(), weight[0].requires_grad_(), None]
    teacher = [hidden[1].requires_grad_(), weight[1].requires_grad_(), None]
    scales = LogitScale(), LogitScale(exchanged=(3, 4000))
    with LargestTensor() as largest:
        in_blocks(student, teacher, options, scales).sum().backward()
    assert largest.numel < 2**18 + 2**10  # a tile of one side, of 5 million logits
    assert student[0].grad.any()
    assert teacher[0].grad is teacher[1].grad is None


@pytest.mark.parametrize("options", FULL, ids=name_of)
def test_half_precision_is_summed_in_full_precision(options: Divergence):
    student, teacher = sides(dtype=torch.bfloat16)
    scales = LogitScale(), LogitScale()
    with torch.autocast("cpu", torch.bfloat16):
        found = in_blocks(student, teacher, options, scales)
    rounded = [[tensor.detach().double().requires_grad_() for tensor in side] for side in (student, teacher)]
    expected = at_once(*rounded, options, scales)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found.sum(), student)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sum(), rounded[0]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("options", FULL, ids=name_of)
def test_no_tokens_give_no_divergence_but_a_graph(options: Divergence):
    student, teacher = sides(num_tokens=0)
    found = in_blocks(student, teacher, options, (LogitScale(), LogitScale()))
    assert found.shape == at_once(student, teacher, options, (LogitScale(), LogitScale())).shape == (0,)
    found.sum().backward()
    assert student[0].grad.shape == (0, 5)
    assert not student[1].grad.any()


@pytest.mark.parametrize("options", FULL, ids=name_of)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_impossible_words(options: Divergence, temperature: float):
    student, teacher = sides()
    scales = LogitScale(temperature), LogitScale(temperature)
    # Impossible for both: the last 30 words, and 3 of the first block. No NaN, and as if there were none.
    with torch.no_grad():
        for side in (student, teacher):
            side[2][-30:] = side[2][:3] = -torch.inf
    expected = at_once(student, teacher, options, scales)
    same_value_and_gradient(in_blocks(student, teacher, options, scales), expected, student)
    few = [[side[0], *(tensor[3:-30] for tensor in side[1:])] for side in (student, teacher)]
    torch.testing.assert_close(expected, at_once(*few, options, scales))
    # The teacher lacks a word that the student may say, and the student one that the teacher may.
    best = [slow_logits(*side, LogitScale())[0].argmax().item() for side in (student, teacher)]
    for side, word, infinite in ((teacher, best[0], "reverse"), (student, best[1], "forward")):
        with torch.no_grad():
            was, side[2][word] = side[2][word].clone(), -torch.inf
        found = in_blocks(student, teacher, options, scales)[0]
        torch.testing.assert_close(found, at_once(student, teacher, options, scales)[0])
        assert found.isinf() if options.kind == infinite else found.isfinite()
        with torch.no_grad():
            side[2][word] = was


def test_an_impossible_target_is_told_at_any_temperature():
    student, _ = sides()
    mask = torch.zeros(WORDS, dtype=torch.float64)
    mask[5] = -torch.inf
    for temperature in (0.1, 2.0, 7.0):
        head = Head(student[1], mask, LogitScale(temperature))
        assert linear_log_probs(student[0], head, torch.full((150,), 5))[0].isneginf().all()


# TRL


def alpha_of(options: Divergence) -> float:
    """The number by which TRL names the kind."""
    return {"forward": 0.0, "reverse": 1.0, "jsd": options.beta}[options.kind]


@pytest.mark.parametrize("options", FULL, ids=name_of)
def test_full_vocabulary_equals_trl(options: Divergence):
    # SDPO, SDFT, GKD, GOLD and the stable DistillationTrainer share the three formulas.
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.gold.gold_trainer import GOLDTrainer
    from trl.experimental.sdft import loss_utils as sdft
    from trl.experimental.sdpo import loss_utils as sdpo
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    alpha, student, teacher = alpha_of(options), *sides()
    logits = slow_logits(*student, LogitScale()), slow_logits(*teacher, LogitScale())
    ours = in_blocks(student, teacher, options, (LogitScale(), LogitScale()))
    for module in (sdpo, sdft):
        theirs = module.compute_full_logit_self_distillation_loss(*logits, distillation_alpha=alpha)
        same_value_and_gradient(ours, theirs, student)
    scale = LogitScale(0.7, 1.3, cap=3.0)
    capped = slow_logits(*student, scale), slow_logits(*teacher, scale)
    ours = in_blocks(student, teacher, options, (scale, scale))
    for trainer in (GKDTrainer, GOLDTrainer):
        theirs = trainer.generalized_jsd_loss(*capped, beta=alpha, temperature=0.7, reduction="none").sum(1)
        same_value_and_gradient(ours, theirs, student)
    # From hidden states, in single precision: TRL's tiles are no finer.
    singles = [[tensor.detach().float().requires_grad_() for tensor in side] for side in (student, teacher)]
    (s_hidden, s_weight, s_bias), (t_hidden, t_weight, t_bias) = singles
    theirs, *_ = _chunked_divergence_loss(
        *(s_hidden[None], t_hidden[None].detach(), s_weight, t_weight.detach(), torch.ones(1, 150), alpha),
        **{"student_lm_head_bias": s_bias, "teacher_lm_head_bias": t_bias.detach(), "temperature": 0.7},
        **{"student_logit_scale": 1.3, "teacher_logit_scale": 1.3},
        **{"student_final_logit_softcapping": 3.0, "teacher_final_logit_softcapping": 3.0},
    )
    ours = in_blocks(*singles, options, (scale, scale)).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(ours, singles[0]), torch.autograd.grad(theirs, singles[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_sampled_advantages_equal_trl():
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    student, teacher = sides()
    logits = slow_logits(*student, LogitScale()), slow_logits(*teacher, LogitScale())
    tokens = torch.randint(WORDS, (150,))
    log_probs, teacher_log_probs = (token_log_probs(side, tokens) for side in logits)
    ours = -sampled_advantages(log_probs, teacher_log_probs) * log_probs
    theirs = compute_sampled_token_self_distillation_loss(*logits, tokens, distillation_alpha=1.0)
    same_value_and_gradient(ours, theirs, student)


# Sampled tokens


def test_sampled_advantages_by_hand():
    # p_S = 1/2, 1/8, 1/4 and p_T = 1/4, 1/2, 1/4.
    student = torch.tensor([1 / 2, 1 / 8, 1 / 4]).log().requires_grad_()
    teacher = torch.tensor([1 / 4, 1 / 2, 1 / 4]).log().requires_grad_()
    found = sampled_advantages(student, teacher)
    torch.testing.assert_close(found, torch.tensor([-LN2, 2 * LN2, 0.0]))
    assert not found.requires_grad


def test_every_token_of_a_span_gets_its_log_ratio():
    # Spans: one token of both; two of the teacher's are three of the student's; two are one.
    # p_S: 1/2 | 1/2 1/4 1/2 -> 1/16 | 1/8.  p_T: 1/4 | 1/2 1/2 -> 1/4 | 1/8 1/2 -> 1/16.
    student = torch.tensor([1 / 2, 1 / 2, 1 / 4, 1 / 2, 1 / 8]).log()
    teacher = torch.tensor([1 / 4, 1 / 2, 1 / 2, 1 / 8, 1 / 2]).log()
    found = sampled_advantages(student, teacher, [(1, 1), (2, 3), (2, 1)])
    torch.testing.assert_close(found, torch.tensor([-1.0, 2.0, 2.0, 2.0, -1.0]) * LN2)
    assert sampled_advantages(student[:0], teacher[:0], []).shape == (0,)
    with pytest.raises(ValueError, match="must be 3 log-probs of the teacher and 5 of the student"):
        sampled_advantages(student, teacher, [(1, 1), (1, 3), (1, 1)])
    with pytest.raises(ValueError, match="must be 5 log-probs of the teacher and 5 of the student"):
        sampled_advantages(student, teacher[:4])


def test_mean_sampled_gradient_of_a_span_is_that_of_its_reverse_kl():
    # The student writes a span as one of 3 x 3 pairs of tokens; the teacher as one of 9 tokens of its own.
    torch.manual_seed(0)
    first = torch.randn(3, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(9, dtype=torch.float64).log_softmax(0)
    log_p, log_p_second = first.log_softmax(0), second.log_softmax(1)
    spans = (log_p.unsqueeze(1) + log_p_second).flatten()  # of all 9 pairs
    reverse_kl = (spans.exp() * (spans - teacher)).sum()
    expected = torch.autograd.grad(reverse_kl, (first, second), retain_graph=True)
    pairs = torch.stack([log_p.repeat_interleave(3), log_p_second.flatten()], dim=1)  # (9, 2)
    advantages = sampled_advantages(pairs.flatten(), teacher, [(1, 2)] * 9).view(9, 2)
    losses = -(advantages * pairs).sum(dim=1)
    found = torch.autograd.grad(losses @ spans.detach().exp(), (first, second))
    torch.testing.assert_close(found, expected)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "jsd", "beta": 0.0}, "beta must be above 0 and below 1, but it is 0.0.*kind to forward"),
        ({"kind": "jsd", "beta": 1.0}, "beta must be above 0 and below 1, but it is 1.0"),
        ({"kind": "kl"}, "kind must be reverse, forward or jsd, but it is 'kl'"),
        ({"kind": "forward", "beta": 0.1}, "beta is the weight of jsd and does nothing with kind forward"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Divergence(**options)


def test_arguments_out_of_range():
    student, teacher = sides(WORDS - 100, num_tokens=2)
    for wrong in ((LogitScale(0.0), LogitScale()), (LogitScale(), LogitScale(-1.0))):
        with pytest.raises(ValueError, match="temperature of log-probs must be positive"):
            in_blocks(student, teacher, Divergence(), wrong)
    heads = Head(*student[1:]), Head(*teacher[1:])
    with pytest.raises(ValueError, match="logits_mib must be at least 1"):
        linear_divergence(student[0], heads[0], teacher[0], heads[1], Divergence("jsd"), logits_mib=0)
