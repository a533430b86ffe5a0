"""Log-probs by hand, and chunk by chunk against all at once."""

import math

import pytest
import torch
from torch import Tensor, nn

from rlt_lightning.numerics import (
    exact_kl,
    head_exact_kl,
    head_log_probs,
    token_entropy,
    token_log_probs,
)


def example(num_tokens: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 5).to(dtype).requires_grad_()
    return hidden, nn.Linear(5, 11, bias=False).to(dtype), torch.randint(0, 11, (num_tokens,))


def test_log_probs_of_a_three_word_vocabulary():
    # p = (1, 2, 5)/8. At temperature 1/2: (1, 4, 25)/30.
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]).log()
    targets = torch.tensor([2, 0])
    torch.testing.assert_close(token_log_probs(logits, targets, 1.0), torch.tensor([5 / 8, 1 / 8]).log())
    torch.testing.assert_close(token_log_probs(logits, targets, 0.5), torch.tensor([25 / 30, 1 / 30]).log())


def test_entropy_by_hand():
    # Uniform over 2 of 3 words: ln 2. (1, 2, 1)/4: 2 (1/4 ln 4) + 1/2 ln 2 = 1.5 ln 2.
    logits = torch.tensor([[0.5, 0.5, 0.0], [1.0, 2.0, 1.0]]).log()
    torch.testing.assert_close(token_entropy(logits), torch.tensor([math.log(2), 1.5 * math.log(2)]))


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 1024])
def test_chunked_equals_all_at_once(chunk_size):
    hidden, head, targets = example()
    expected = token_log_probs(head(hidden), targets, 0.7)
    weights = torch.randn(7)
    expected_grads = torch.autograd.grad(expected @ weights, (hidden, head.weight))
    log_probs, entropy = head_log_probs(hidden, head, targets, 0.7, chunk_size, with_entropy=True)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(
        torch.autograd.grad(log_probs @ weights, (hidden, head.weight)), expected_grads
    )
    torch.testing.assert_close(entropy, token_entropy(head(hidden), 0.7))
    assert not entropy.requires_grad


def test_no_logits_are_kept_for_the_backward_pass():
    hidden, head, targets = example()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        head_log_probs(hidden, head, targets, chunk_size=2)
    assert not [shape for shape in kept if 11 in shape]


def test_half_precision_head_gives_full_precision_log_probs():
    hidden, head, targets = example(dtype=torch.bfloat16)
    log_probs, _ = head_log_probs(hidden, head, targets, chunk_size=3)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, head(hidden).float().log_softmax(dim=1)[torch.arange(7), targets])
    assert token_log_probs(torch.randn(2, 3, dtype=torch.float64), targets[:2] % 3).dtype == torch.float64


def test_no_tokens_give_no_log_probs_but_a_graph():
    hidden, head, targets = example(num_tokens=0)
    log_probs, entropy = head_log_probs(hidden, head, targets, with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad.shape == (0, 5)
    assert not head.weight.grad.any()


def test_chunked_exact_kl_equals_all_at_once():
    teacher_hidden, teacher_head, _ = example()
    student_hidden, student_head = torch.randn(7, 3), nn.Linear(3, 13)
    expected = exact_kl(teacher_head(teacher_hidden), student_head(student_hidden), 0.7, 0.9)
    kl = head_exact_kl(teacher_hidden, teacher_head, student_hidden, student_head, 0.7, 0.9, chunk_size=3)
    torch.testing.assert_close(kl, expected)
    leaves = (teacher_hidden, student_head.weight)
    torch.testing.assert_close(
        torch.autograd.grad(kl.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
    )
    none = head_exact_kl(teacher_hidden[:0], teacher_head, student_hidden[:0], student_head)
    assert none.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature):
    hidden, head, targets = example()
    for compute in (
        lambda: token_entropy(head(hidden), temperature),
        lambda: head_log_probs(hidden, head, targets, temperature),
        lambda: exact_kl(head(hidden), head(hidden), 1.0, temperature),
    ):
        with pytest.raises(ValueError, match="temperature of log-probs must be positive"):
            compute()


def test_chunk_size_must_be_positive():
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        head_log_probs(*example(), chunk_size=0)
