"""Fused attention: our use of its interfaces, against a loop; how a kernel is chosen, checked and refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from slow_kernels import (
    CPU,
    SEGMENTS,
    AnyType,
    SlowFlashAttn,
    SlowOwnKernels,
    install,
    random_heads,
    tiny_qwen,
)
from tiny import StrictEntry
from torch import Tensor

from rlt_lightning.models import kernels
from rlt_lightning.models.kernels import LOOP, choose_attention
from rlt_lightning.models.packed import verify_layout
from rlt_lightning.numerics.attention import (
    KERNELS,
    MergedAttention,
    Segments,
    looped_attention,
    segment_attention,
)
from rlt_lightning.numerics.varlen import FlashAttnKernel, TorchKernel
from rlt_lightning.types import InputError


def require_the_loops(ours: Tensor, inputs: Any, segments: Segments) -> None:
    """Compare value and gradient with those of a loop over segments."""
    expected = looped_attention(*inputs, segments, 0.3)
    torch.testing.assert_close(ours, expected)
    gradient = torch.randn_like(expected)
    gradients, theirs = (torch.autograd.grad(output, inputs, gradient) for output in (ours, expected))
    torch.testing.assert_close(gradients, theirs)


def test_varlen_kernels_equal_a_loop_over_segments():
    inputs = random_heads()
    kernel = FlashAttnKernel(SlowFlashAttn(), "slow")
    for segments in (SEGMENTS, Segments((0, 5, 12, 40))):
        require_the_loops(MergedAttention.apply(*inputs, segments, 0.3, kernel), inputs, segments)


def test_heads_of_any_size_are_padded_for_the_kernel(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    class Watched(SlowFlashAttn):
        def _wrapped_flash_attn_varlen_forward(self, q: Tensor, *args: Any, **options: Any) -> Any:
            sizes.append(q.shape[-1])
            return super()._wrapped_flash_attn_varlen_forward(q, *args, **options)

    monkeypatch.setitem(KERNELS, "cpu", AnyType(Watched(), "slow"))
    inputs = random_heads(size=10)
    require_the_loops(segment_attention(*inputs, SEGMENTS, 0.3), inputs, SEGMENTS)
    assert set(sizes) == {16}


# Choosing and refusing

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process in which nothing has been chosen yet."""
    monkeypatch.setattr(kernels, "WRONG", set())
    for device_type in ("cpu", "cuda"):
        monkeypatch.setitem(KERNELS, device_type, KERNELS[device_type])


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> SlowFlashAttn:
    slow = SlowFlashAttn()
    install(monkeypatch, "flash_attn")
    install(monkeypatch, "flash_attn.flash_attn_interface", slow)
    return slow


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """PyTorch's own kernels run on the CPU too."""
    own = SlowOwnKernels()
    yield
    own.remove()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are checked on the CPU, where PyTorch's own does not run."""
    plain_check = kernels.attention_fault

    def check_on_cpu(heads: kernels.Heads, device: torch.device) -> str | None:
        KERNELS["cpu"] = KERNELS["cuda"]
        return plain_check(heads, CPU)

    monkeypatch.setattr(kernels, "attention_fault", check_on_cpu)


def half_precision(**sizes: int) -> Any:
    return tiny_qwen(1, **sizes).to(torch.bfloat16)


def test_flash_attn_is_used_where_it_is_asked_for_and_right(flash_attn: SlowFlashAttn):
    model = tiny_qwen().to(torch.bfloat16)
    assert choose_attention(model, "flash_attn", CPU) == "flash-attn"
    assert isinstance(KERNELS["cpu"], FlashAttnKernel)
    assert verify_layout(StrictEntry(model), "tiny", "shared_prefix") == "shared_prefix"


@pytest.mark.parametrize("error", [0.3, torch.nan])
def test_a_kernel_that_is_wrong_is_refused(error: float, flash_attn: SlowFlashAttn, gpu: None):
    flash_attn.error = error
    with pytest.raises(InputError, match=r"model\.kernels\.attention flash_attn must .* Set another"):
        choose_attention(half_precision(), "flash_attn", GPU)


@pytest.mark.parametrize("fault", ["is off by", "fails with ModuleNotFoundError"])
def test_a_default_flash_attn_that_fails_falls_back(
    fault: str, flash_attn: SlowFlashAttn, own_kernels: None, gpu: None, monkeypatch: pytest.MonkeyPatch
):
    flash_attn.error = 0.3
    if "fails" in fault:  # installed, but cannot be imported
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    with pytest.warns(UserWarning, match=f"flash_attn must .* {fault}.* attention is by torch") as caught:
        assert choose_attention(half_precision(), None, GPU) == TorchKernel.name
    assert len(caught) == 1
    assert isinstance(KERNELS["cuda"], TorchKernel)
    # The models of a process share the kernel: the next one does not take what was wrong for the first.
    flash_attn.error = 0.0
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn)
    assert choose_attention(half_precision(), None, GPU) == TorchKernel.name


def test_a_gpu_has_pytorchs_kernel_without_flash_attn(own_kernels: None, gpu: None):
    assert choose_attention(half_precision(), None, GPU) == TorchKernel.name


def test_a_loop_computes_what_no_kernel_takes(gpu: None):
    assert choose_attention(tiny_qwen(), None, GPU).startswith(LOOP)
    with pytest.raises(InputError, match="it needs half precision"):
        choose_attention(tiny_qwen(), "torch", GPU)


def test_a_kernel_that_fails_is_refused(gpu: None):
    with pytest.raises(InputError, match=r"attention torch must be .* it fails with NotImplementedError"):
        choose_attention(half_precision(), "torch", GPU)


def test_the_loop_takes_the_place_of_the_last_kernel(gpu: None):
    with pytest.warns(UserWarning, match=f"torch must .* attention is by {LOOP}"):
        assert choose_attention(half_precision(), None, GPU) == LOOP
    assert "cuda" not in KERNELS
    assert choose_attention(half_precision(), None, GPU) == LOOP
