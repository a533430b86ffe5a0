"""Log-probs by hand, and block by block against all at once."""

import math

import pytest
import torch
from cases import needs_compiler
from slow_logits import LargestTensor, slow_logits, token_entropy, token_log_probs
from torch import Tensor

from rlt_lightning.numerics import Divergence
from rlt_lightning.numerics.divergence import divergence
from rlt_lightning.numerics.head import Head, LogitScale, choose_tiles
from rlt_lightning.numerics.log_probs import linear_log_probs

VOCABULARY = 1100  # a block of 1024 words and a narrower one, in a MiB


def example(
    num_tokens: int = 300, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, in two rows and two blocks if logits_mib is 1."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 5).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 5).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (num_tokens,))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=(pytest.mark.full, needs_compiler))])
@pytest.mark.parametrize("scale", [LogitScale(0.7), LogitScale(0.7, 1.3, cap=3.0)])
def test_blocks_equal_all_at_once(scale, compiled):
    hidden, weight, bias, targets = example()
    logits = slow_logits(hidden, weight, bias, scale)
    expected = token_log_probs(logits, targets, 0.7)
    log_softmax = (logits / 0.7).log_softmax(dim=1)
    expected_entropy = -(log_softmax.exp() * log_softmax).sum(dim=1)
    log_probs, entropy = linear_log_probs(hidden, Head(weight, bias, scale), targets, 1, compiled, True)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    assert not entropy.requires_grad
    inputs, weights = (hidden, weight, bias), torch.randn(len(hidden), dtype=torch.float64)
    gradients = torch.autograd.grad(log_probs @ weights, inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected @ weights, inputs))


def test_frozen_weights_and_states_get_no_gradient():
    hidden, weight, _, targets = example(3)
    for states, head, trained in ((hidden.detach(), weight, weight), (hidden, weight.detach(), hidden)):
        log_probs, _ = linear_log_probs(states, Head(head), targets)
        assert torch.autograd.grad(log_probs.sum(), trained)[0].any()
    assert not linear_log_probs(hidden.detach(), Head(weight.detach()), targets)[0].requires_grad


def test_a_tied_head_adds_to_the_gradient_of_the_embedding():
    _, weight, _, targets = example(9)
    hidden = weight[targets.roll(1)]
    expected = torch.autograd.grad(token_log_probs(hidden @ weight.t(), targets).sum(), weight)
    hidden = weight[targets.roll(1)]
    ours = torch.autograd.grad(linear_log_probs(hidden, Head(weight), targets)[0].sum(), weight)
    torch.testing.assert_close(ours, expected)


def test_no_tensor_of_tokens_times_words_is_kept_or_made():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1024, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    with LargestTensor() as largest:
        linear_log_probs(hidden, Head(weight), torch.arange(1024), logits_mib=1)[0].sum().backward()
    assert largest.numel == 2**18  # a MiB of fp32, of the 5 million logits


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_full_precision(weight_dtype):
    hidden, weight, bias, targets = example(7, torch.bfloat16)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, entropy = linear_log_probs(hidden, Head(weight, bias), targets, with_entropy=True)
    expected = token_log_probs(hidden.float() @ weight.float().t() + bias.float(), targets)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected)
    gradients = torch.autograd.grad(log_probs.sum(), (hidden, weight, bias))
    expected_gradients = torch.autograd.grad(expected.sum(), (hidden, weight, bias))
    assert [g.dtype for g in gradients] == [torch.bfloat16, weight_dtype, torch.bfloat16]
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-2, atol=1e-2)
    assert token_log_probs(torch.randn(2, 3, dtype=torch.float64), targets[:2] % 3).dtype == torch.float64


def test_impossible_words_change_nothing():
    hidden, weight, _, targets = example(6)
    mask = torch.zeros(VOCABULARY, dtype=torch.float64)
    mask[targets.max() + 1 :] = -torch.inf
    log_probs, entropy = linear_log_probs(hidden, Head(weight, mask), targets, with_entropy=True)
    logits = (hidden @ weight.t())[:, : targets.max() + 1]
    torch.testing.assert_close(log_probs, token_log_probs(logits, targets))
    torch.testing.assert_close(entropy, token_entropy(logits))
    half = Head(weight.to(torch.float16), mask.to(torch.float16))
    ours, _ = linear_log_probs(hidden.to(torch.float16), half, targets)
    torch.testing.assert_close(ours, log_probs.float(), atol=0.01, rtol=0.01)


def test_few_tokens_do_not_make_wide_blocks():
    rows, blocks = choose_tiles(1, 64, 100_000, logits_mib=1)
    assert rows == [slice(0, 1)]
    assert max(block.stop - block.start for block in blocks) * 64 <= 2**18  # weights of a block: 1 MiB
    assert sum(block.stop - block.start for block in blocks) == 100_000


@pytest.mark.parametrize(("hidden_size", "num_words"), [(896, 152_064), (3584, 151_999), (64, 1100)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100, 1000, 16_384, 100_003])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_rows_of_tiles_begin_at_multiples_of_16_bytes(num_tokens, hidden_size, num_words, num_heads):
    rows, blocks = choose_tiles(num_tokens, hidden_size, num_words, 512, num_heads)
    widths = [block.stop - block.start for block in blocks]
    assert not any(width % 128 for width in widths[:-1])
    assert sum(widths) == num_words
    assert sum(row.stop - row.start for row in rows) == num_tokens
    assert max(row.stop - row.start for row in rows) * max(widths) * num_heads <= 512 * 2**18


def test_no_tokens_give_no_log_probs_but_a_graph():
    hidden, weight, _, targets = example(num_tokens=0)
    log_probs, entropy = linear_log_probs(hidden, Head(weight), targets, with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert hidden.grad.shape == (0, 5)
    assert not weight.grad.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature):
    hidden, weight, bias, targets = example(3)
    logits = slow_logits(hidden, weight, bias, LogitScale())
    for compute in (
        lambda: token_entropy(logits, temperature),
        lambda: linear_log_probs(hidden, Head(weight, bias, LogitScale(temperature)), targets),
        lambda: divergence(logits, logits, Divergence(), temperature),
    ):
        with pytest.raises(ValueError, match="temperature of log-probs must be positive"):
            compute()
